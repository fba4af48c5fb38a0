"""Descriptors: the process's limit of open files, which bounds its connections, and what happens at the limit."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from typing import Any

# Descriptors for what the process opens later: processes that try constraints, files, and connections that are closed
# at once because there are too many.
_OTHERS = 64
# Seconds between two lines about connections that cannot be accepted.
_LINE_SECONDS = 60.0
_AT_THE_LIMIT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_limit() -> int:
    """Sets the limit of open files to the most that the process may have without more rights, and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_within(limit: int, requested: int) -> int:
    """Returns the number of connections for which a process with this limit of open files has descriptors.

    requested: the most that are returned, if the limit allows as many
    """
    if limit == resource.RLIM_INFINITY:
        return requested
    return max(1, min(requested, limit - _num_open() - _OTHERS))


def _num_open() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not on Linux
        return _OTHERS


class QuietAtTheLimit:
    """An event loop's handler of errors: connections that cannot be accepted make one line in a while.

    The loop stops accepting for a second after each such error, and then tries again.
    """

    def __init__(self) -> None:
        self._silent_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket" not in context or not (isinstance(error, OSError) and error.errno in _AT_THE_LIMIT):
            loop.default_exception_handler(context)
        elif loop.time() >= self._silent_until:
            self._silent_until = loop.time() + _LINE_SECONDS
            logging.getLogger("uvicorn.error").warning(
                "no connection can be accepted at present (%s); those that are open are served; lower "
                "--max-connections, or raise the limit of open files (ulimit -n)",
                error.strerror,
            )
