"""UnusedMemory: gives memory back to the system after long bodies were read."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

# A body of this many bytes leaves several times as many behind, in pieces that C's allocator keeps for later.
_LONG_BODY = 2**20
# Seconds between the first long body and the moment at which memory is given back, for it and all that came meanwhile.
SECONDS = 10.0


def trim_of_libc() -> Callable[[], None]:
    """Returns glibc's malloc_trim(0), which gives all free pages back; nothing is done where libc has none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return lambda: None
    return lambda: trim(0)


class UnusedMemory:
    """Gives memory back once in SECONDS at most, in a thread: it takes milliseconds, without Python's lock."""

    def __init__(self) -> None:
        self._trim, self._is_due = trim_of_libc(), False

    def note(self, num_bytes: int) -> None:
        """Notes that the memory of a body of this length has been freed. Call it in the event loop."""
        if num_bytes >= _LONG_BODY and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(SECONDS, self._begin)

    def _begin(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, self._trim)
