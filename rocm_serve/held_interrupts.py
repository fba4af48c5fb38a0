"""HeldInterrupts: delays Ctrl-C and SIGTERM to the end of a step, so that they never interrupt a step halfway."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class HeldInterrupts:
    """A context of the main thread in which Ctrl-C waits for let_through(), or for the end of the context.

    So does SIGTERM if the application has a handler for it. A second signal does not wait. The application's handler is
    called then, like Python's own. In other threads, and for a signal without a handler, the context changes nothing.
    """

    def __init__(self) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main}
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {
            number: handler for number, handler in handlers.items() if callable(handler)
        }
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> HeldInterrupts:
        for number in self._handlers:
            signal.signal(number, self._hold)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self.let_through()

    def let_through(self) -> None:
        """Calls the handler of a signal that waits. Raises what it raises: KeyboardInterrupt, usually."""
        held, self._held = self._held, None
        if held is not None:
            self._handlers[held[0]](*held)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held is not None:
            self.let_through()
        self._held = number, frame
