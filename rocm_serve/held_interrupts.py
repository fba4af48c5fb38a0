"""HeldInterrupts: delays Ctrl-C to the end of a step, so that it never interrupts a step halfway."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class HeldInterrupts:
    """A context of the main thread in which Ctrl-C waits for let_through(), or for the end of the context.

    A second Ctrl-C does not wait. A handler of the application is called then, like Python's own. In other threads, and
    where Ctrl-C is ignored, the context changes nothing.
    """

    def __init__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self._handler = signal.getsignal(signal.SIGINT) if is_main else None
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> HeldInterrupts:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *error: object) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
        self.let_through()

    def let_through(self) -> None:
        """Calls the handler of a Ctrl-C that waits. Raises what it raises: KeyboardInterrupt, usually."""
        held, self._held = self._held, None
        if held is not None and callable(self._handler):
            self._handler(*held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is not None:
            self.let_through()
        self._held = number, frame
