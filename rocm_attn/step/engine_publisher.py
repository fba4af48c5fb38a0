"""EnginePublisher: begins steps whose lengths are an engine's tensors, and hears how those before them went."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX, Int32Array
from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.metadata.engine_tensors import EngineLengths, LengthBounds, PublishedLengths
from rocm_attn.kernels.metadata.slot_layout import ECHO, HEADER_WORDS, NO_ECHO, STEP, STEP_BEFORE
from rocm_attn.providers.contract import StepOps
from rocm_attn.step.host_ring import HostRing, RingSlot
from rocm_attn.step.publisher import Found, Line, PublishingGuards


class EnginePublisher:
    """Writes the header of a ring slot and launches the kernel that reads it, one launch a step.

    on_fault: called with what went wrong in earlier steps, once; it may raise
    """

    def __init__(
        self, ops: StepOps, device: torch.device, guards: PublishingGuards, on_fault: Callable[[DeviceFault], None]
    ) -> None:
        self.line = Line(HostRing(device, wait=guards.ring_wait), guards.new_echo_check(), device)
        self._launch, self._on_fault, self._of_last_step = ops.publish_engine, on_fault, guards.of_last_step
        # The words of a slot, counts and number of a publication that was begun and has not ended.
        self._launching: tuple[Int32Array, Tensor, int] | None = None
        self._found: Found = []

    def hear(self) -> RingSlot:
        """The next slot, when its readers are done and the faults that it echoes were reported."""
        if self._launching is not None:
            self._settle()
        slot = self.line.ring.acquire(HEADER_WORDS)
        if slot.words[ECHO]:
            self.line.look(slot.words, self._found)
        if self._found:
            self._report()
        return slot

    def publish(
        self, slot: RingSlot, num_seqs: int, given: EngineLengths, bounds: LengthBounds, to: PublishedLengths
    ) -> None:
        """Launch what writes a step's counts, rows and lengths. slot: of hear(), which comes before"""
        line, words, counts = self.line, slot.words, to.counts
        number = (line.number + 1) & INT32_MAX
        words[0], words[STEP], words[STEP_BEFORE] = num_seqs, number, line.number
        # One statement: an interrupt comes before all of it or after.
        words[ECHO], self._launching = NO_ECHO, (words, counts, number)
        try:
            self._launch(slot.tensor, counts if line.counts is None else line.counts, given, bounds, to)
        finally:
            line.ring.release()
        line.counts, line.number, self._launching = counts, number, None

    def find_faults(self) -> None:
        """Report everything that went wrong in steps and was not reported yet. The device has nothing left to do."""
        if self._launching is not None:
            self._settle()
        self.line.find_all(self._found, self._of_last_step)
        if self._found:
            self._report()

    def _report(self) -> None:
        fault = DeviceFault.of_all(self._found)
        self._found.clear()
        self._on_fault(fault)

    def _settle(self) -> None:
        """Finish a publication that an exception has ended."""
        assert self._launching is not None
        words, counts, number = self._launching
        if self.line.settle(words, counts, number, by_graph=False):
            self.line.counts, self.line.number = counts, number
        self._launching = None
