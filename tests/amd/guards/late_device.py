"""A device that does nothing until the host waits for it, for machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial


class LateDevice:
    """A device that does nothing until the host waits for it."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []

    def launch(self, work: Callable[[], object]) -> None:
        """Queues work."""
        self._queue.append(work)

    def later(self, launch: Callable[..., None]) -> Callable[..., None]:
        """Returns a launcher whose work is queued."""
        return lambda *args, **kwargs: self.launch(partial(launch, *args, **kwargs))

    def fence(self) -> LateFence:
        """Returns a fence that was not recorded."""
        return LateFence(self)

    def drain(self, end: int | None = None) -> None:
        """Runs the work queued up to `end`, once."""
        for at, work in enumerate(self._queue[:end]):
            work()
            self._queue[at] = _nothing

    def is_done(self, end: int) -> bool:
        """True if all work queued up to `end` is done."""
        return all(work is _nothing for work in self._queue[:end])

    @property
    def length(self) -> int:
        """Number of launches so far."""
        return len(self._queue)


def _nothing() -> None:
    pass


class LateFence:
    """A place in a late device's queue."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._end = 0

    def record(self) -> None:
        """Moves the fence after the launches so far."""
        self._end = self._device.length

    def synchronize(self) -> None:
        """Lets the device run up to this fence."""
        self._device.drain(self._end)

    def query(self) -> bool:
        """True if the device has reached this fence."""
        return self._device.is_done(self._end)
