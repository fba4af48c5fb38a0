"""Files that appear when they are whole."""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rocm_attn.errors import BadSetting

_NO_FILE = "something that is no file is there"


def require_place(place: Path, what: str) -> None:
    """Raises BadSetting where whole_file could not put a file, so that this is not found out when it is needed."""
    folder = place.parent
    if not folder.is_dir():
        why = f"{folder} is not a folder; create it"
    elif _is_taken(place):
        why = f"{_NO_FILE}; name a file in a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"this user may not write in {folder}; allow it, or name another folder"
    else:
        return
    raise BadSetting(f"{what} {place} cannot be written: {why}")


@contextmanager
def whole_file(place: Path) -> Iterator[Path]:
    """Yields the place to write a file to, from where it then goes to its own, over an older one.

    After an error the older file is what it was, and nothing is left of the new one. Raises OSError, also for a device
    or a folder: a file would take its place.
    """
    if _is_taken(place):
        raise FileExistsError(errno.EEXIST, _NO_FILE, str(place))
    # Processes of two containers that share a folder may have one number.
    part = place.with_name(f"{place.name}.{secrets.token_hex(8)}.part")
    try:
        yield part
        os.replace(part, place)
    finally:
        with suppress(OSError):  # it went to its place, or was never made
            part.unlink()


def _is_taken(place: Path) -> bool:
    """True if something that is no file has this name."""
    return place.exists() and not place.is_file()
