"""A progress bar, on a terminal alone."""

from typing import TextIO

_WIDTH = 24


class ProgressBar:
    """Redraws one line of a terminal; writes nothing to anything else. Call it as a graphs.Progress.

    doing: the activity, such as "capturing"
    """

    def __init__(self, stream: TextIO, doing: str = "capturing") -> None:
        self._stream = stream
        self._doing = doing
        self._shown = stream.isatty()

    def __call__(self, done: int, total: int, name: str) -> None:
        """Shows that `done` of `total` are done and the named one comes next; without a name all is done."""
        if not self._shown:
            return
        filled = _WIDTH * done // max(total, 1)
        bar = "#" * filled + "-" * (_WIDTH - filled)
        # Returns to the start of the line, and clears the rest of a longer name.
        self._stream.write(f"\r\x1b[K{self._doing} [{bar}] {done}/{total} {name}" if name else "\r\x1b[K")
        self._stream.flush()
