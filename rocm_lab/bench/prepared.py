"""A layer of a step, launched by itself, for benchmarks to time and check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.providers.contract import BoundKernel, StepBounds
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS, HeadWeights


@dataclass(frozen=True, slots=True)
class Prepared:
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
    ) -> Prepared:
        """Prepares a kernel with memory of its own, and builds the schedule. rows: q and out"""
        device = rows[0].device
        args = AttendArgs(
            q=rows[0],
            pages=pages,
            table=step.table,
            queries=bounds.queries(step),
            out=rows[1],
            lse=None,
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


def ints(values: Iterable[int], device: torch.device) -> Tensor:
    """Returns int32 on the device."""
    return torch.tensor(list(values), dtype=torch.int32, device=device)
