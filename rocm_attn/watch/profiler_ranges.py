"""Named ranges in a profiler's timeline: roctx on ROCm, NVTX on NVIDIA, both through torch.cuda.nvtx.

A profiler sees a layer's range when Python runs the layer: in eager steps and while a graph is made. A replayed step is
one range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadSetting
from rocm_attn.step.outputs import Outputs
from rocm_attn.step.protocols import LayerCalls, RunsSteps, WrappedLayers


class Ranges(Protocol):
    """Opens and closes ranges; they nest."""

    def push(self, name: str) -> object:
        """Opens a range."""
        ...

    def pop(self) -> object:
        """Closes the range that was opened last."""
        ...


@dataclass(frozen=True, slots=True)
class _Markers:
    push: Callable[[str], object]
    pop: Callable[[], object]


def device_ranges() -> Ranges:
    """Returns the ranges of roctx or NVTX. Raises BadSetting if torch was built without them."""
    try:
        torch.cuda.nvtx.mark("rocm_attn")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise BadSetting(f"this torch has no profiler ranges ({error}); use a build for ROCm or CUDA") from error
    return _Markers(torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)


class RangedSteps(Generic[Outputs]):
    """Runs each step in a range that gives its size."""

    def __init__(self, steps: RunsSteps[Outputs], ranges: Ranges) -> None:
        self._steps = steps
        self._ranges = ranges

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Outputs:
        """See `StepRunner.run`."""
        self._ranges.push(f"step: {batch.num_seqs} sequences, {batch.num_tokens} tokens")
        try:
            return self._steps.run(batch, pad_to)
        finally:
            self._ranges.pop()


class RangedLayers(WrappedLayers):
    """A step's layer calls, each in a range. A model gets it in place of the step's layers."""

    def __init__(self, layers: LayerCalls, ranges: Ranges) -> None:
        self._layers = layers
        self._ranges = ranges

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        self._ranges.push(f"layer {layer}: {name.replace('_', ' ')}")
        try:
            getattr(self._layers, name)(layer, *given, **named)
        finally:
            self._ranges.pop()
