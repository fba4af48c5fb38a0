"""HostRing: a ring of pinned host memory from which kernels read a step's inputs: lengths, rows, table changes."""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from operator import methodcaller
from time import sleep
from typing import Protocol

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


def wait_for_all(fences: Iterable[Fence], held: object) -> None:
    """Waits for fences, and holds the memory that kernels before them use until then."""
    for fence in fences:
        fence.synchronize()


class RingSlot:
    """A slot, for kernels and for the host.

    words:    its int32 words, as a memoryview: an array takes twice as long to read one
    raw:      its bytes
    launched: the fence after launches that read it
    taken:    the fence of a graph that takes it
    done:     that of its last readers
    """

    __slots__ = ("done", "launched", "raw", "taken", "tensor", "words")

    def __init__(self, tensor: Tensor, new_fence: Callable[[], Fence]) -> None:
        self.use(tensor)
        self.done = self.launched = new_fence()
        self.taken = GraphFence(self.words, new_fence)

    def use(self, tensor: Tensor) -> None:
        """Takes a tensor of the host as the slot's memory."""
        words: memoryview = tensor.numpy().data
        self.tensor, self.words, self.raw = tensor, words, words.cast("B")


def _wait_for_readers(slots: Collection[RingSlot]) -> None:
    wait_for_all([slot.done for slot in slots], slots)


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
        self._wait, self._new_fence = wait, new_fence
        self.slots = self._zeros(depth, words)
        self.is_fixed = True
        self._slots = deque(RingSlot(slot, new_fence) for slot in self.slots)  # the next one first
        # Not at exit, when the device may be gone before the ring.
        weakref.finalize(self, _wait_for_readers, self._slots).atexit = False

    def acquire(self, words: int) -> RingSlot:
        """Returns the next slot, at least `words` int32 long.

        It waits if the device is `depth` steps late. The slot keeps its old content; an unwritten word is 0.
        """
        slot = self._slots[0]
        # A graph has mostly taken and marked the slot by now, so that there is nothing to wait for.
        if slot.words[ECHO] or slot.done is slot.launched:
            self._wait(slot.done)
        if len(slot.words) < words:
            # A power of two; otherwise batches that grow slowly would pin memory again each time.
            larger = self._zeros(next_power_of_2(words))
            larger[: len(slot.words)] = slot.tensor
            self.is_fixed = False  # first, so that no interrupt leaves a graph a slot that the host does not use
            slot.use(larger)
        return slot

    def _zeros(self, *shape: int) -> Tensor:
        with torch.inference_mode(False):  # memory that is made in that mode cannot be written outside of it
            return torch.zeros(shape, dtype=torch.int32, pin_memory=self._pinned)

    def written(self) -> list[memoryview]:
        """Waits for the readers, and returns the slots that were used, oldest first."""
        for slot in self._slots:
            self._wait(slot.done)
        return [slot.words for slot in self._slots if len(slot.words)]

    def drain(self) -> None:
        """Waits for everything that was launched on the current stream so far, whether or not a slot was released."""
        fence = self._new_fence()
        fence.record()
        fence.synchronize()

    def release(self) -> None:
        """Declares that all readers of the acquired slot were launched on the current stream."""
        slot = self._slots[0]
        slot.done = slot.launched
        slot.done.record()
        self._slots.rotate(-1)

    def send(self, words: Sequence[int] | Tensor, to: Tensor) -> None:
        """Launches a copy of int32 words to memory of the device that is contiguous and as long. Waits like acquire."""
        slot = self.acquire(to.numel()).tensor[: to.numel()]
        slot.copy_(torch.as_tensor(words, dtype=torch.int32).view(-1))
        to.view(-1).copy_(slot, non_blocking=True)
        self.release()

    def release_to_graph(self) -> None:
        """Declares that a graph takes the acquired slot, which is marked TAKEN_BY_GRAPH. The ring is_fixed."""
        slot = self._slots[0]
        slot.done = slot.taken
        self._slots.rotate(-1)
