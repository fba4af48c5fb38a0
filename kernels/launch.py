"""The one place where a Triton kernel is launched, so that a recorder can see every launch.

A launch that is observed is handed over as a thunk whose grid, scalars and tensors are fixed, and is not run here:
the observer decides. A recorder for machines without a GPU runs it and keeps it for replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

Thunk = Callable[[], object]
LaunchObserver = Callable[[Thunk], None]

# Said, because Triton's default changes: on up to 3.9, off from 3.10.
_OPTIONS = {"enable_fp_fusion": True}

_observers: list[LaunchObserver] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: object, **options: object) -> None:
    """kernel[grid](*args, **options); an empty grid launches nothing."""
    if 0 in grid:
        return
    options = {**_OPTIONS, **options}
    if _observers:
        _observers[-1](partial(kernel[grid], *args, **options))
    else:
        kernel[grid](*args, **options)


class RepeatedLaunch:
    """A kernel that is launched once a step with arguments of the same kind.

    Triton looks at every argument of every launch to see which compiled variant it needs. That costs more than all
    other host work of a replayed step, so here the variant is kept by device and grid: dtypes and constexpr arguments
    must always be the same, and the kernel must not be specialised on the values and alignments of the others.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._runners: dict[tuple[torch.device, tuple[int, int, int]], Callable[..., object]] = {}

    def __call__(self, device: torch.device, grid: tuple[int, int, int], *args: object, **options: object) -> None:
        """kernel[grid](*args, **options); args are all of the kernel's arguments in order, constexpr ones included."""
        options = {**_OPTIONS, **options}
        if _observers:
            _observers[-1](partial(self._kernel[grid], *args, **options))
            return
        runner = self._runners.get((device, grid))
        if runner is not None:
            # torch._C: what Triton asks for the stream in its place costs as much as the launch.
            runner(*args, stream=torch._C._cuda_getCurrentRawStream(device.index))
            return
        compiled = self._kernel[grid](*args, **options)
        if compiled is not None:  # under the interpreter there is nothing to keep
            self._runners[device, grid] = compiled[grid]


@contextmanager
def observe_launches(observer: LaunchObserver) -> Iterator[None]:
    """While active, launches of this thread go to observer instead of the device."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()
