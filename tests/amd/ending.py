"""The end of a process whose tests have passed: what is left in its memory is not freed object by object.

Python takes one to three seconds for that after each stage. Import this module before torch: Python calls functions at
its exit in the opposite order, and those that torch and others have registered are to be called before this one's.
"""

import atexit
import gc
import os
import sys

import pytest

_ended: list[pytest.Session] = []


def note_end(session: pytest.Session) -> None:
    _ended.append(session)


@atexit.register
def _end_at_once() -> None:
    # An error after the session is in last_value, and the process then has another exit code.
    if _ended and _ended[-1].exitstatus == pytest.ExitCode.OK and not hasattr(sys, "last_value"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    # Objects of C++ modules must be freed before those modules look for leaks.
    gc.unfreeze()
