"""stdout and stderr as a shell may leave them: closed, full, or of an encoding that lacks characters."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast


def say(*lines: str) -> None:
    """Prints lines on stderr. If it is closed or full they are dropped, so that no progress report fails a job."""
    if sys.stderr is None:  # print() would write to stdout
        return
    try:
        print(*lines, sep="\n", file=sys.stderr, flush=True)
    except OSError:
        _point_at_nothing(sys.stderr)


def json_text(value: object) -> str:
    """A value as JSON. It has no NaN and infinities, so they become null."""
    return json.dumps(_finite(value), indent=1, allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


class StdoutFailed(Exception):
    """stdout takes no more text."""

    def __init__(self, reason: OSError) -> None:
        self.reader_is_gone = isinstance(reason, BrokenPipeError)
        super().__init__(reason.strerror)


class Stdout:
    """A context in which sys.stdout never loses text silently; use it like any other stream.

    Characters that its encoding lacks are written as escapes. A failed write raises StdoutFailed, which no other file's
    write does. Buffered text is dropped then; otherwise Python would try to write it again at exit.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> Stdout:
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")
        sys.stdout = cast(TextIO, self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.stdout = self._stream

    def write(self, text: str) -> int:
        """Writes text to the stream. Raises StdoutFailed."""
        try:
            return self._stream.write(text)
        except OSError as reason:
            raise self._failed(reason) from reason

    def flush(self) -> None:
        """Flushes the stream. Raises StdoutFailed."""
        try:
            self._stream.flush()
        except OSError as reason:
            raise self._failed(reason) from reason

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, reason: OSError) -> StdoutFailed:
        _point_at_nothing(self._stream)
        return StdoutFailed(reason)


def _point_at_nothing(stream: TextIO) -> None:
    """Points a stream at the null device, so that Python's flush at exit works."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
