"""SIGTERM as an interrupt, for commands that keep what they have found so far."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """A context in which SIGTERM raises KeyboardInterrupt: `timeout` and schedulers of jobs send it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
