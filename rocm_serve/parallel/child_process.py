"""The end of processes that another one has started, and their garbage. Imports no torch."""

from __future__ import annotations

import gc
import multiprocessing
import os


def end_with_parent() -> None:
    """Waits for the end of the process that has started this one, and ends this one at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def keep_for_good() -> None:
    """Takes all objects of this process out of garbage collection, once it has made what it needs to serve.

    A full collection looks at each of them, hundreds of thousands after torch and a model were loaded, and no token
    comes meanwhile.
    """
    gc.collect()
    gc.freeze()
