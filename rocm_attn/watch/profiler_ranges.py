"""Named ranges in a profiler's timeline: roctx on ROCm, NVTX on NVIDIA, both through torch.cuda.nvtx.

A profiler sees a layer's range when Python runs the layer: in eager steps and while a graph is made. A replayed step is
one range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol

import torch
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadSetting
from rocm_attn.kernels.cache.row_work import QkvWork, RopeTable
from rocm_attn.step.outputs import Outputs
from rocm_attn.step.protocols import LayerCalls, RunsSteps


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


class RangedLayers(LayerCalls):
    """A step's layer calls, each in a range. A model gets it in place of the step's layers."""

    def __init__(self, layers: LayerCalls, ranges: Ranges) -> None:
        self._layers = layers
        self._ranges = ranges

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See `LayerCalls.store`."""
        with self._range(f"layer {layer}: store"):
            self._layers.store(layer, k, v)

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """See `LayerCalls.attend`."""
        with self._range(f"layer {layer}: attend"):
            self._layers.attend(layer, q, out, lse)

    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """See `LayerCalls.rope_and_store`."""
        with self._range(f"layer {layer}: rope and store"):
            self._layers.rope_and_store(layer, q, k, v, q_out, work)

    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """See `LayerCalls.rope_queries`."""
        with self._range(f"layer {layer}: rope"):
            self._layers.rope_queries(layer, q, q_out, work)

    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        """See `LayerCalls.finish`."""
        with self._range(f"layer {layer}: finish"):
            self._layers.finish(layer, out, gate=gate, undo=undo)

    def fold(self, layer: int, values: Tensor, gates: Tensor, rows: Tensor) -> None:
        """See `LayerCalls.fold`."""
        with self._range(f"layer {layer}: fold"):
            self._layers.fold(layer, values, gates, rows)

    def store_index(self, layer: int, k: Tensor) -> None:
        """See `LayerCalls.store_index`."""
        with self._range(f"layer {layer}: store_index"):
            self._layers.store_index(layer, k)

    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """See `LayerCalls.select`."""
        with self._range(f"layer {layer}: select"):
            self._layers.select(layer, q, weights)

    def give_selection(self, layer: int, units: Tensor, counts: Tensor) -> None:
        """See `LayerCalls.give_selection`."""
        self._ranges.push(f"layer {layer}: give_selection")
        try:
            self._layers.give_selection(layer, units, counts)
        finally:
            self._ranges.pop()

    def attend_selected(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """See `LayerCalls.attend_selected`."""
        with self._range(f"layer {layer}: attend_selected"):
            self._layers.attend_selected(layer, q, out, lse)

    @contextmanager
    def _range(self, name: str) -> Iterator[None]:
        self._ranges.push(name)
        try:
            yield
        finally:
            self._ranges.pop()
