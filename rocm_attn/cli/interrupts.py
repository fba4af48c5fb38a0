"""Interrupts: whether Ctrl-C was pressed, even if an import has swallowed the KeyboardInterrupt."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """A context in which SIGINT raises KeyboardInterrupt, as always, and is recorded.

    An extension that is interrupted while it is imported raises ImportError instead, and some packages catch that.

    came: True if there was a SIGINT
    """

    def __init__(self) -> None:
        self.came = False
        # A job in the background ignores SIGINT, and continues to do so; only the main thread can be interrupted.
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_ours = in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def __enter__(self) -> Interrupts:
        if self._is_ours:
            signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt
