"""The torch provider's deterministic kernels. On CPUs only: what a GPU's BLAS does to a batch is not known."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs import segments
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import AttendArgs, PoolSize, StepBounds
from rocm_attn.providers.scores import scores_of


@dataclass(frozen=True, slots=True)
class TorchSegments:
    """Any number of new tokens in each sequence, one included. segment_len: keys in a segment."""

    problem: Problem
    segment_len: int = segments.SEGMENT_LEN

    def describe(self) -> str:
        return f"torch.segments({self.problem}, {self.segment_len})"

    def schedule_words(self, shape: PaddedShape) -> int:
        return 0

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    def schedule_key(self) -> Hashable:
        return ()

    def build_schedule(self, step: StepTensors, bounds: StepBounds, schedule: Tensor) -> None:
        pass

    def attend(self, args: AttendArgs) -> None:
        step = args.step
        segments.segment_extend(
            args.q,
            args.k_pages,
            args.v_pages,
            step.table[:, : -(-args.bounds.max_kv_len // self.problem.page_size)],
            step.row_of_seq,
            step.kv_len,
            step.q_indptr,
            None,
            args.out,
            args.lse,
            args.sinks,
            args.alibi_slopes,
            scores=scores_of(self.problem),
            max_q_len=args.bounds.max_q_len,
            tiles=None,
            segment_len=self.segment_len,
        )


def bind(problem: Problem, target: Target, pool: PoolSize) -> TorchSegments:
    """Deterministic attention of any step."""
    return TorchSegments(problem)
