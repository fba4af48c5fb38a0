"""A device that does nothing until somebody waits for it, for machines without a GPU."""

from __future__ import annotations

from collections.abc import Callable


class LateDevice:
    """A device that does nothing until somebody waits for it."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], object]] = []

    def launch(self, work: Callable[[], object]) -> None:
        """Queue work."""
        self._queue.append(work)

    def fence(self) -> LateFence:
        """A fence that was not recorded."""
        return LateFence(self)

    def drain(self, end: int | None = None) -> None:
        """Do what was queued up to here, once."""
        for at, work in enumerate(self._queue[:end]):
            work()
            self._queue[at] = _nothing

    def is_done(self, end: int) -> bool:
        """Whether all that was queued up to here is done."""
        return all(work is _nothing for work in self._queue[:end])

    @property
    def length(self) -> int:
        """Launches so far."""
        return len(self._queue)


def _nothing() -> None:
    pass


class LateFence:
    """A place in a late device's queue."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._end = 0

    def record(self) -> None:
        """After what was launched so far."""
        self._end = self._device.length

    def synchronize(self) -> None:
        """Let the device come here."""
        self._device.drain(self._end)

    def query(self) -> bool:
        """Whether the device was let come here."""
        return self._device.is_done(self._end)
