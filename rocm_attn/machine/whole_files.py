"""Files that appear when they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(place: Path) -> Iterator[Path]:
    """Yields the place to write a file to, from where it then goes to its own, over an older one.

    After an error the older file is what it was, and nothing is left of the new one. Raises OSError.
    """
    part = place.with_name(f"{place.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, place)
    finally:
        with suppress(OSError):  # it went to its place, or was never made
            part.unlink()
