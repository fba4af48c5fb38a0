"""stdin, stdout and stderr as a shell may leave them: closed, full, or of an encoding that lacks characters."""

from __future__ import annotations

import codecs
import io
import os
import sys
from typing import Any, TextIO, cast


def say(*lines: str) -> None:
    """Lines on stderr. Where it is full or gone they are dropped: no job fails for want of its progress report."""
    try:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    except OSError:
        _point_at_nothing(sys.stderr)


def open_what_is_closed() -> None:
    """Give a closed stdin, stdout or stderr a place that holds nothing, or the next file takes its number.

    Python's sys.stderr is set then too: print(file=None) would write to stdout. sys.stdin and sys.stdout stay None.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open until the end)


class StdoutFailed(Exception):
    """stdout takes nothing any more."""

    def __init__(self, reason: OSError) -> None:
        self.reader_is_gone = isinstance(reason, BrokenPipeError)
        super().__init__(reason.strerror)


class Stdout:
    """A context in which sys.stdout loses no text in silence: use it as any other stream.

    Characters that its encoding lacks come out as escapes. A failed write raises StdoutFailed, which no other file's
    write does; what is held then is dropped, or Python would try once more at exit.

    escaped: whether a character came out as an escape
    """

    def __init__(self, stream: TextIO) -> None:
        self.escaped = False
        self._stream = stream

    def __enter__(self) -> Stdout:
        codecs.register_error("rocm_attn.escape", self._escape)
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="rocm_attn.escape")
        sys.stdout = cast(TextIO, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.stdout = self._stream

    def write(self, text: str) -> int:
        """Raises StdoutFailed."""
        try:
            return self._stream.write(text)
        except OSError as reason:
            raise self._failed(reason) from reason

    def flush(self) -> None:
        """Raises StdoutFailed."""
        try:
            self._stream.flush()
        except OSError as reason:
            raise self._failed(reason) from reason

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, reason: OSError) -> StdoutFailed:
        _point_at_nothing(self._stream)
        return StdoutFailed(reason)

    def _escape(self, error: UnicodeError) -> tuple[str | bytes, int]:
        self.escaped = True
        return codecs.backslashreplace_errors(error)


def _point_at_nothing(stream: TextIO) -> None:
    """Python flushes its streams once more at exit; give this one a place where that works."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
