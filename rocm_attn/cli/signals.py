"""Signals that commands take, so that they keep what they have found so far."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType


def sigterm_interrupts() -> AbstractContextManager[None]:
    """A context in which SIGTERM raises KeyboardInterrupt: `timeout` and schedulers of jobs send it."""
    return signals_to(signal.default_int_handler, signal.SIGTERM)


@contextmanager
def signals_to(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """A context in which a handler takes these signals.

    A signal that is ignored stays so, and in other threads than the main one the context changes nothing.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
