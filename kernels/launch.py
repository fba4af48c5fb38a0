"""The one place where a Triton kernel is launched, so that a recorder can see every launch.

A launch that is observed is handed over as a thunk whose grid, scalars and tensors are fixed, and is not run here:
the observer decides. A recorder for machines without a GPU runs it and keeps it for replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

Thunk = Callable[[], object]
LaunchObserver = Callable[[Thunk], None]

_observers: list[LaunchObserver] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """kernel[grid](*args, **options); an empty grid launches nothing."""
    if 0 in grid:
        return
    if _observers:
        _observers[-1](partial(kernel[grid], *args, **options))
    else:
        kernel[grid](*args, **options)


@contextmanager
def observe_launches(observer: LaunchObserver) -> Iterator[None]:
    """While active, launches of this thread go to observer instead of the device."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()
