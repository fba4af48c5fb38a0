"""Watchdog: reports what hangs, with the stacks of all threads, and does not end it."""

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO

from rocm_attn.errors import BadSetting
from rocm_attn.machine.settings import real_number


class Watchdog:
    """Reports actions that take too long, with the stacks of all threads; once per watch. It ends nothing.

    Calls of torch and Triton that wait for a device or a compiler let other threads run, so a timer thread can report.

    seconds: the longest time that an action may take
    stream:  a file with a descriptor; if not given, the process' stderr
    on_hang: called with the sentence, for instance to dump a flight recorder

    Raises BadSetting for seconds that are no number of at least 0, and for a stream without a descriptor.
    """

    def __init__(
        self, seconds: float, *, stream: IO[str] | None = None, on_hang: Callable[[str], object] | None = None
    ) -> None:
        if not real_number("seconds", seconds, BadSetting) >= 0:
            raise BadSetting(f"seconds is {seconds!r}; it must be at least 0")
        self._seconds = min(seconds, threading.TIMEOUT_MAX)  # a longer wait ends its thread with an OverflowError
        try:
            _ = stream is None or stream.fileno()
        except (AttributeError, OSError) as error:  # the stacks could not be written, and on_hang would not be called
            raise BadSetting(f"stream is a {type(stream).__name__} without a descriptor; give an open file") from error
        self._stream = stream
        self._on_hang = on_hang

    def watch(self, what: str) -> AbstractContextManager[None]:
        """Returns a context that watches the code inside it. It starts a thread, which takes some 0.1 ms."""
        return self._watching(what)

    @contextmanager
    def _watching(self, what: str) -> Iterator[None]:
        timer = threading.Timer(self._seconds, self._report, (what,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _report(self, what: str) -> None:
        sentence = f"rocm-attn: {what} has not finished after {self._seconds:g} s"
        stream = self._stream if self._stream is not None else sys.__stderr__
        if stream is not None:
            with suppress(OSError):  # a full disk must not keep on_hang from its work
                print(sentence, file=stream, flush=True)
            faulthandler.dump_traceback(stream)
        if self._on_hang is not None:
            self._on_hang(sentence)
