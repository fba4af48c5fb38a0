"""HostRing: pinned host memory from which kernels read the host's decisions for a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from operator import methodcaller
from time import sleep
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.slot_layout import ECHO, HEADER_WORDS, TAKEN_BY_GRAPH
from rocm_attn.kernels.tuning.tiles import next_power_of_2


class Fence(Protocol):
    """A place in a device's queue of work. A fence that was never recorded counts as reached."""

    def record(self) -> None:
        """Puts the fence after everything that was launched on the current stream."""

    def synchronize(self) -> None:
        """Waits until the device has reached the fence."""

    def query(self) -> bool:
        """True if the device has reached the fence."""


class NoFence:
    """The fence of a CPU, on which kernels have run when their launch returns."""

    def record(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""

    def query(self) -> bool:
        """True: nothing is left to wait for."""
        return True


# Delay between two reads of a slot that a graph has yet to take. The device has work: another step comes after it.
_LOOK_SECONDS = 20e-6


class GraphFence:
    """The fence of a slot that the kernel at the head of a graph reads; the kernel marks the slot when it has.

    words:     of the slot
    new_fence: makes a fence of the device
    """

    def __init__(self, words: memoryview, new_fence: Callable[[], Fence]) -> None:
        self._words, self._new_fence = words, new_fence

    def record(self) -> None:
        """Does nothing: the host that writes the slot marks it."""

    def query(self) -> bool:
        """True if the graph has taken the slot."""
        return self._words[ECHO] != TAKEN_BY_GRAPH

    def synchronize(self) -> None:
        """Waits until the graph has taken the slot, or everything that was launched is done and no graph has."""
        if self._words[ECHO] == TAKEN_BY_GRAPH:
            launched = self._new_fence()
            launched.record()
            while self._words[ECHO] == TAKEN_BY_GRAPH and not launched.query():
                sleep(_LOOK_SECONDS)


# (fence): waits until the device has reached the fence. Not a function of its own, because each step calls it.
wait_for: Callable[[Fence], None] = methodcaller("synchronize")


def wait_for_all(fences: Sequence[Fence], slots: Sequence[RingSlot]) -> None:
    """Waits until no kernel reads these slots any more, and holds them until then."""
    for fence in fences:
        fence.synchronize()


class RingSlot(NamedTuple):
    """A slot, for kernels and for the host: as int32 words, and as bytes. An array takes twice as long for a word."""

    tensor: Tensor
    words: memoryview
    raw: memoryview

    @classmethod
    def of(cls, tensor: Tensor) -> RingSlot:
        """Makes a slot of a tensor of the host."""
        words = tensor.numpy().data
        return cls(tensor, words, words.cast("B"))


class HostRing:
    """A ring of int32 slots. A slot is handed out again only after the kernels that read it are done.

    The same holds for its memory. Torch does not track kernels that read pinned memory, and would reuse a dropped
    ring's memory while a step still waits to read it. A ring that is dropped therefore waits for its readers.

    wait:      called with the fence after a slot's readers before the slot is handed out again
    new_fence: makes a fence of the device; if not given, an event on a GPU, nothing on a CPU
    words:     length of the slots, at first

    slots:     int32 [depth, words], the slots, valid while is_fixed: until a longer one is requested
    """

    def __init__(
        self,
        device: torch.device,
        *,
        depth: int = 2,
        wait: Callable[[Fence], None] = wait_for,
        new_fence: Callable[[], Fence] | None = None,
        words: int = HEADER_WORDS,
    ) -> None:
        self._pinned = device.type == "cuda"
        if new_fence is None:
            new_fence = partial(torch.Event, device) if self._pinned else NoFence
        self._wait, self._new_fence, self._depth = wait, new_fence, depth
        self.slots = self._zeros(depth, words)
        self.is_fixed = True
        self._slots = [RingSlot.of(slot) for slot in self.slots]
        self._launched = [new_fence() for _ in range(depth)]
        self._taken = [GraphFence(slot.words, new_fence) for slot in self._slots]
        self._done: list[Fence] = list(self._launched)
        self._next = 0
        # Not at exit, when the device may be gone before the ring.
        weakref.finalize(self, wait_for_all, self._done, self._slots).atexit = False

    def acquire(self, words: int) -> RingSlot:
        """Returns the next slot, at least `words` int32 long.

        It waits if the device is `depth` steps late. The slot keeps its old content; an unwritten word is 0.
        """
        at = self._next
        slot, done = self._slots[at], self._done[at]
        # A graph mostly takes its slot before it comes again, and marks it, so that there is nothing to wait for.
        if done is self._launched[at] or slot.words[ECHO]:
            self._wait(done)
        if len(slot.words) < words:
            # A power of two; otherwise batches that grow slowly would pin memory again each time.
            larger = self._zeros(next_power_of_2(words))
            larger[: len(slot.words)] = slot.tensor
            self.is_fixed = False  # first, so that no interrupt leaves a graph a slot that the host does not use
            slot = self._slots[at] = RingSlot.of(larger)
        return slot

    def _zeros(self, *shape: int) -> Tensor:
        with torch.inference_mode(False):  # memory that is made in that mode cannot be written outside of it
            return torch.zeros(shape, dtype=torch.int32, pin_memory=self._pinned)

    def written(self) -> list[memoryview]:
        """Waits for the readers, and returns the slots that were used, oldest first."""
        order = (*range(self._next, self._depth), *range(self._next))
        for at in order:
            self._wait(self._done[at])
        return [self._slots[at].words for at in order if len(self._slots[at].words)]

    def drain(self) -> None:
        """Waits for everything that was launched on the current stream so far, whether or not a slot was released."""
        fence = self._new_fence()
        fence.record()
        fence.synchronize()

    def release(self) -> None:
        """Declares that all readers of the acquired slot were launched on the current stream."""
        at = self._next
        done = self._done[at] = self._launched[at]
        done.record()
        self._next = (at + 1) % self._depth

    def send(self, words: Sequence[int] | Tensor, to: Tensor) -> None:
        """Launches a copy of int32 words to memory of the device that is contiguous and as long. Waits like acquire."""
        slot = self.acquire(to.numel()).tensor[: to.numel()]
        slot.copy_(torch.as_tensor(words, dtype=torch.int32).view(-1))
        to.view(-1).copy_(slot, non_blocking=True)
        self.release()

    def release_to_graph(self) -> None:
        """Declares that a graph takes the acquired slot, which is marked TAKEN_BY_GRAPH. The ring is_fixed."""
        at = self._next
        self._done[at] = self._taken[at]
        self._next = (at + 1) % self._depth
