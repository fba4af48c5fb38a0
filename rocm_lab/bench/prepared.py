"""A layer of a step, launched by itself, for benchmarks to time and check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.contract import BoundKernel, StepBounds
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS, HeadWeights


@dataclass(frozen=True, slots=True)
class PreparedLayer:
    """A layer's kernel and its arguments."""

    kernel: BoundKernel
    args: AttendArgs
    step: StepTensors
    bounds: StepBounds

    @classmethod
    def of(
        cls,
        kernel: BoundKernel,
        step: StepTensors,
        bounds: StepBounds,
        rows: tuple[Tensor, Tensor],
        pages: LayerPages,
        weights: HeadWeights = NO_HEAD_WEIGHTS,
        lse: Tensor | None = None,
    ) -> PreparedLayer:
        """Prepares a kernel with memory of its own, and builds the schedule. rows: q and out. lse: float32 if wanted"""
        device = rows[0].device
        args = AttendArgs(
            q=rows[0],
            pages=pages,
            table=step.table,
            queries=bounds.queries(step),
            out=rows[1],
            lse=lse,
            sinks=weights.sinks,
            slopes=weights.alibi_slopes,
            schedule=torch.empty(kernel.schedule.words(bounds.shape), dtype=torch.int32, device=device),
            workspace=torch.empty(kernel.workspace_words(bounds.shape), dtype=torch.float32, device=device),
        )
        prepared = cls(kernel, args, step, bounds)
        prepared.build_schedule()
        return prepared

    def build_schedule(self) -> None:
        """Launches the part that a step does once."""
        self.kernel.schedule.build(self.args.queries, self.step, self.bounds, self.args.schedule)

    def attend(self) -> None:
        """Launches one layer."""
        self.kernel.attend(self.args, self.step, self.bounds)


def step_kind(q_len: Sequence[int], kv_len: Sequence[int]) -> StepKind:
    """Returns the kind of an eager step with these new tokens and these tokens with them.

    PREFILL if the cache is empty. Selection.kernel() finds its kernel: one of its own, or that of EXTEND.
    """
    if max(q_len) == 1:
        return StepKind.DECODE
    if min(q_len) == 1:
        return StepKind.MIXED
    return StepKind.PREFILL if list(q_len) == list(kv_len) else StepKind.EXTEND


def step_of(kv_len: Sequence[int], q_len: Sequence[int], table: Tensor, **more: Tensor) -> StepTensors:
    """Returns a step of sequences with these lengths, on the table's device. more: tensors that some kernels read"""
    device = table.device
    return StepTensors.of(
        ints([], device),
        counts=ints([len(kv_len), sum(q_len), 1, 0], device),
        kv_len=ints(kv_len, device),
        q_len=ints(q_len, device),
        q_indptr=ints(accumulate(q_len, initial=0), device),
        table=table,
        row_of_seq=ints(range(len(kv_len)), device),
        **more,
    )


def bounds_of_step(kv_len: Sequence[int], q_len: Sequence[int], kind: StepKind | None = None) -> StepBounds:
    """Returns the bounds of such a step. kind: if not the one of step_kind()"""
    shape = PaddedShape(kind or step_kind(q_len, kv_len), len(kv_len), sum(q_len))
    return StepBounds(shape, max(q_len), max(kv_len))


def ints(values: Iterable[int], device: torch.device) -> Tensor:
    """Returns int32 on the device."""
    return torch.tensor(list(values), dtype=torch.int32, device=device)
