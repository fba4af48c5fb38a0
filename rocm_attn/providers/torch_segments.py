"""The torch provider's deterministic kernels. On CPUs only: a GPU's BLAS may depend on the batch in unknown ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.refs import metadata, segments
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import NO_SCHEDULE, PoolSize, Schedule, StepBounds
from rocm_attn.providers.scores import scores_of, visible_keys


@dataclass(frozen=True, slots=True)
class TorchSegments:
    """Any number of new tokens in each sequence, one included. segment_len: keys in a segment."""

    problem: Problem
    segment_len: int = segments.SEGMENT_LEN
    schedule: ClassVar[Schedule] = NO_SCHEDULE

    def describe(self) -> str:
        return f"torch.segments({self.problem}, {self.segment_len})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        segments.segment_extend(args, scores=scores_of(self.problem), segment_len=self.segment_len)


@dataclass(frozen=True, slots=True)
class TorchMaskedSegments:
    """Like `TorchSegments`, but for steps with a mask."""

    problem: Problem
    segment_len: int = segments.SEGMENT_LEN
    schedule: ClassVar[Schedule] = NO_SCHEDULE

    def describe(self) -> str:
        return f"torch.masked_segments({self.problem}, {self.segment_len})"

    def workspace_words(self, shape: PaddedShape) -> int:
        return 0

    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        scores = scores_of(self.problem)
        mask = visible_keys(step, scores.visibility, *metadata.visible_ranges(step, scores.visibility))
        segments.segment_extend(args, scores=scores, segment_len=self.segment_len, mask=mask)


def bind_masked(problem: Problem, target: Target, pool: PoolSize) -> TorchMaskedSegments:
    """Binds deterministic attention of a step with a mask."""
    return TorchMaskedSegments(problem)


def bind(problem: Problem, target: Target, pool: PoolSize) -> TorchSegments:
    """Binds deterministic attention of any step."""
    return TorchSegments(problem)
