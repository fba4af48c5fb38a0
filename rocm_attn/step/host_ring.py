"""HostRing: pinned host memory from which kernels read what the host decided for a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.kernels.driver_functions import DriverCalls, driver_calls, driver_of
from rocm_attn.kernels.tuning.tiles import next_power_of_2
from rocm_attn.machine.devices import with_index


class Fence(Protocol):
    """A place in a device's queue of work. One that was never recorded has been reached."""

    def record(self) -> None:
        """Put the fence after everything that was launched on the current stream."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has reached the fence."""
        ...

    def query(self) -> bool:
        """Whether the device has reached the fence."""
        ...


class NoFence:
    """The fence of a CPU, where kernels run before their launch returns."""

    def record(self) -> None:
        """Nothing is left to be done."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""

    def query(self) -> bool:
        """Nothing is left to wait for."""
        return True


class DriverFence:
    """An event of a GPU, which the driver is asked for without torch."""

    def __init__(self, device: torch.device, calls: DriverCalls, driver: bytes) -> None:
        self._event = torch.Event(device)
        self._index = with_index(device).index
        self._calls, self._driver = calls, driver
        self._handle = 0  # torch makes an event when it is recorded for the first time

    def record(self) -> None:
        """Put the fence after everything that was launched on the current stream."""
        if self._handle:
            # torch._C: see on_device.
            self._calls.record(self._driver, self._handle, torch._C._cuda_getCurrentRawStream(self._index))
        else:
            self._event.record()
            self._handle = self._event.event_id

    def synchronize(self) -> None:
        """Wait until the device has reached the fence."""
        if self._handle:
            self._calls.wait_for(self._driver, self._handle)

    def query(self) -> bool:
        """Whether the device has reached the fence."""
        return not self._handle or self._calls.reached(self._driver, self._handle)


def fence_of(device: torch.device) -> Fence:
    """A fence of a device: an event of a GPU; nothing on a CPU."""
    if device.type != "cuda":
        return NoFence()
    driver = driver_of("hip" if torch.version.hip else "cuda", with_index(device).index)
    calls = driver_calls() if driver is not None else None
    return torch.Event(device) if driver is None or calls is None else DriverFence(device, calls, driver)


def wait_for(fence: Fence) -> None:
    """Wait until the device has reached the fence."""
    fence.synchronize()


def wait_for_all(fences: Sequence[Fence], slots: Sequence[RingSlot]) -> None:
    """Wait until no kernel reads these slots any more, and hold them until then."""
    for fence in fences:
        fence.synchronize()


class RingSlot(NamedTuple):
    """A slot, for kernels and for the host: as int32 words, and as bytes."""

    tensor: Tensor
    words: Int32Array
    raw: memoryview

    @classmethod
    def of(cls, tensor: Tensor) -> RingSlot:
        """The slot that lies in a tensor of the host."""
        words: Int32Array = tensor.numpy()
        return cls(tensor, words, words.data.cast("B"))


# A word's number, and its value.
Mark = tuple[int, int]
NO_MARK: Mark = (-1, 0)


class HostRing:
    """A ring of int32 slots. A slot is handed out again only after the kernels that read it are done.

    So is its memory: torch knows of no kernel that reads pinned memory, and would give a dropped ring's to the next who
    asks while a step still waits to read it. A ring that is dropped therefore waits for its readers.

    mark:      a word of each slot, and what it holds until the slot's first reader has written to it; for slots whose
               readers follow those of the slot before, as a runtime's steps do on whatever streams they come
    wait:      called with the fence after a slot's readers before the slot is handed out again, where marks do not say
               that they are done
    new_fence: makes a fence of the device; not given: an event on a GPU, nothing on a CPU
    """

    def __init__(
        self,
        device: torch.device,
        *,
        depth: int = 2,
        mark: Mark = NO_MARK,
        wait: Callable[[Fence], None] = wait_for,
        new_fence: Callable[[], Fence] | None = None,
    ) -> None:
        self._pinned = device.type == "cuda"
        self._wait = wait
        self._new_fence = make_fence = partial(fence_of, device) if new_fence is None else new_fence
        self._depth = depth
        self._mark, self._unread = mark
        # With room for a mark, which says that nothing reads a slot that was never handed out.
        self._slots = [RingSlot.of(torch.zeros(1 + mark[0], dtype=torch.int32)) for _ in range(depth)]
        self._done = [make_fence() for _ in range(depth)]
        self._next = 0
        # Not at exit, where the device may be gone before the ring is.
        weakref.finalize(self, wait_for_all, self._done, self._slots).atexit = False

    def acquire(self, words: int) -> RingSlot:
        """The next slot, at least `words` int32 long.

        Waits when the device is `depth` steps late. It holds what it held before; a word that was never written is 0.
        """
        at = self._next
        slot = self._slots[at]
        mark, unread = self._mark, self._unread
        # Where the first reader of the slot after this one has begun, all readers of this one are done: it follows
        # them. That costs less than to ask for a fence, and where the device is behind, the host has the time. This
        # slot's own mark is looked at too, as the caller will: what the device wrote may come late.
        following = self._slots[(at + 1) % self._depth].words
        if mark < 0 or slot.words[mark] == unread or following[mark] == unread:
            self._wait(self._done[at])
        if len(slot.words) < words:
            # A power of two: batches that grow slowly would otherwise pin memory again each time.
            with torch.inference_mode(False):  # what is made in that mode cannot be written outside of it
                larger = torch.zeros(next_power_of_2(words), dtype=torch.int32, pin_memory=self._pinned)
                larger[: len(slot.words)] = slot.tensor
            slot = self._slots[at] = RingSlot.of(larger)
        return slot

    def written(self) -> list[Int32Array]:
        """The slots that were used, oldest first, when their readers are done."""
        order = (*range(self._next, self._depth), *range(self._next))
        for at in order:
            self._wait(self._done[at])
        return [self._slots[at].words for at in order if len(self._slots[at].words)]

    def drain(self) -> None:
        """Wait for everything that was launched on the current stream so far, whether or not a slot was released."""
        fence = self._new_fence()
        fence.record()
        fence.synchronize()

    def release(self) -> None:
        """Say that everything that reads the acquired slot was launched on the current stream."""
        self._done[self._next].record()
        self._next = (self._next + 1) % self._depth
