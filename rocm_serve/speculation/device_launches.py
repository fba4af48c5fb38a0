"""The launches after each verify step that device_steps.py runs, and the memory from which the host reads the results.

The results of a round (one verify step) are contiguous on the device, and are copied to that round's host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.kernels.speculative.arguments import EMITTED_WORDS, SpeculativeStep
from rocm_attn.providers.launches import MakeNextStep
from rocm_attn.step.host_ring import Fence, NoFence, wait_for_all
from rocm_attn.step.prepared import RepeatedLauncher
from rocm_serve.sampling.sampling import PickedRows, TokenPicker

# Each part of the results begins at a multiple of this number of words: kernels take addresses of 16 bytes.
_PART = 4


class StepResults(NamedTuple):
    """The results of a round, for n sequences with W places each: parts of one piece of memory.

    words:   int32 [any], all of it
    found:   int32 [n * W, 2], see launch_pick_rows
    emitted: int32 [n, EMITTED_WORDS], see SpeculativeStep
    """

    words: Tensor
    found: Tensor
    emitted: Tensor

    @classmethod
    def of(cls, words: Tensor, num_seqs: int, width: int) -> StepResults:
        """The parts of memory for num_seqs sequences, or more."""
        num_found, num_emitted = num_seqs * width * 2, num_seqs * EMITTED_WORDS
        begin = _next_part(num_found)
        end = begin + num_emitted
        return cls(words[:end], words[:num_found].view(-1, 2), words[begin:end].view(num_seqs, EMITTED_WORDS))


def _next_part(end: int) -> int:
    return -(-end // _PART) * _PART


def result_words(most_seqs: int, width: int, device: torch.device, *, pinned: bool = False) -> Tensor:
    """Memory for the results of rounds of at most most_seqs sequences."""
    num_words = _next_part(most_seqs * width * 2) + most_seqs * EMITTED_WORDS
    return torch.zeros(num_words, dtype=torch.int32, device=device, pin_memory=pinned)


class SpeculativeMemory:
    """Host memory for the results of a round, and the fence after they are copied. words: see StepResults"""

    def __init__(self, most_seqs: int, width: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.words = result_words(most_seqs, width, torch.device("cpu"), pinned=pinned)
        self.done: Fence = torch.Event(device) if pinned else NoFence()
        # torch knows of no kernel that writes pinned memory, and gives freed pinned memory to the next caller.
        held: list[Any] = [self.words]
        weakref.finalize(self, wait_for_all, [self.done], held).atexit = False


class StepResultsOnHost:
    """The results of rounds in one host memory. n, W, emitted: see StepResults"""

    def __init__(self, memory: SpeculativeMemory, num_seqs: int, width: int) -> None:
        to = StepResults.of(memory.words, num_seqs, width)
        self.words = to.words
        self.emitted: Int32Array = to.emitted.numpy()
        self.found = PickedRows.of(to.found.numpy())


class SpeculativeLaunches:
    """The launches of each round of a step after the step itself.

    next_step: of the runtime's launches
    stream:    see RepeatedLauncher
    given:     the inputs of the round after it
    to:        its results on the device
    """

    def __init__(
        self,
        picker: TokenPicker,
        next_step: MakeNextStep,
        stream: Callable[[], int] | None,
        given: SpeculativeStep,
        to: StepResults,
    ) -> None:
        num_tokens, self._picker, self._stream, self._to = len(to.found), picker, stream, to
        width = num_tokens // len(to.emitted)
        # Logits in a graph's own memory. Others are not kept: the size of the pool leaves no room for them.
        self.logits: Tensor | None = None
        self._pick: Callable[[], None] = _nothing
        self.make_next = RepeatedLauncher(stream, next_step, picker.tokens[:num_tokens], given, width)

    def pick(self, logits: Tensor, *, stay: bool) -> None:
        """Picks the round's tokens.

        logits: [num_seqs, W, vocab]
        stay:   whether a graph writes the logits to the same place each time
        """
        if logits is not self.logits:
            pick = self._picker.picking(logits.flatten(0, 1), self._to.found, self._stream)
            if not stay:
                pick()
                return
            self.logits, self._pick = logits, pick
        self._pick()

    def tell(self, on_host: StepResultsOnHost) -> None:
        """Copies the results of the last round to the host."""
        on_host.words.copy_(self._to.words, non_blocking=True)


def _nothing() -> None:
    """The pick before pick() has launchers."""
