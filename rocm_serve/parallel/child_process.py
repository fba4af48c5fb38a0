"""The end of processes that another one has started, and how processes serve without pauses. Imports no torch."""

import gc
import multiprocessing
import os
import shutil
import sys
from pathlib import Path


def end_with_parent(*folders: Path) -> None:
    """Waits for the end of the process that has started this one, removes its folders, and ends this one at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


# Seconds after which a thread that runs Python gives way to one that waits: Python's own 5 ms are several steps.
SWITCH_SECONDS = 5e-4


def ready_to_serve() -> None:
    """Prevents pauses of a process that has made what it needs to serve: no token comes in a pause.

    Its objects are taken out of garbage collection: a full one looks at each, hundreds of thousands after torch and a
    model were loaded, tens of thousands in a server's front. Threads give way sooner.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
