"""EnginePublisher: begins steps whose lengths are an engine's tensors, and hears how those before them went."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import INT32_MAX, Int32Array
from rocm_attn.errors import DeviceFault
from rocm_attn.kernels.metadata.engine_tensors import EngineLengths, LengthBounds, PublishedLengths
from rocm_attn.kernels.metadata.slot_layout import ECHO, HEADER_WORDS, NO_ECHO, STEP, STEP_BEFORE
from rocm_attn.providers.contract import StepOps
from rocm_attn.step.host_ring import HostRing
from rocm_attn.step.publisher import Found, Line, PublishingGuards

# A ring slot, as a tensor for the kernel and as an array for the host.
Slot = tuple[Tensor, Int32Array]


class EnginePublisher:
    """Writes the header of a ring slot and launches the kernel that reads it, one launch a step."""

    def __init__(self, ops: StepOps, device: torch.device, guards: PublishingGuards) -> None:
        self._launch = ops.publish_engine
        self._line = Line(HostRing(device, wait=guards.ring_wait), guards.new_echo_check(), device)
        self._of_last_step = guards.of_last_step
        # The words of a slot, counts and number of a publication that was begun and has not ended.
        self._launching: tuple[Int32Array, Tensor, int] | None = None
        self.found: Found = []

    @property
    def step_number(self) -> int:
        """The number of the step that was published last, from 1 on."""
        return self._line.number

    def hear(self) -> Slot:
        """The next slot, when its readers are done and what it echoes was looked at: see found."""
        if self._launching is not None:
            self._settle()
        slot, words, _ = self._line.ring.acquire(HEADER_WORDS)
        if words[ECHO]:
            self._line.look(words, self.found)
        return slot, words

    def publish(
        self, heard: Slot, num_seqs: int, given: EngineLengths, bounds: LengthBounds, to: PublishedLengths
    ) -> None:
        """Launch what writes a step's counts, rows and lengths. heard: the slot of hear(), which comes before"""
        line, (slot, words) = self._line, heard
        number, counts = (line.number + 1) & INT32_MAX, to.counts
        words[0], words[STEP], words[STEP_BEFORE] = num_seqs, number, line.number
        # One statement: an interrupt comes before all of it or after.
        words[ECHO], self._launching = NO_ECHO, (words, counts, number)
        try:
            self._launch(slot, counts if line.counts is None else line.counts, given, bounds, to)
        finally:
            line.ring.release()
        line.counts, line.number, self._launching = counts, number, None

    def find_faults(self) -> None:
        """Find everything that went wrong in steps and was not reported yet. The device has nothing left to do."""
        if self._launching is not None:
            self._settle()
        self._line.find_all(self.found, self._of_last_step)

    def take_found(self) -> DeviceFault:
        """What was found, as one fault; it is not found again."""
        fault = DeviceFault.of_all(self.found)
        self.found.clear()
        return fault

    def _settle(self) -> None:
        """Finish a publication that an exception has ended."""
        assert self._launching is not None
        words, counts, number = self._launching
        if self._line.settle(words, counts, number, by_graph=False):
            self._line.counts, self._line.number, self._launching = counts, number, None
        else:
            self._launching = None
