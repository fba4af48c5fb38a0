"""Descriptors: the process's limit of open files, which bounds its connections."""

import os
import resource

# Descriptors for what the process opens later: processes that try constraints, files, and connections that are closed
# at once because there are too many.
_OTHERS = 64


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
