"""Times work on a GPU, replayed as a graph between two events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from rocm_lab.bench.clocks import GraphClock

# Target duration of a sample in microseconds, which decides how often a graph is replayed.
_SAMPLE_US = 2000.0


@dataclass(frozen=True, slots=True)
class LayerLaunches:
    """Launches of one layer over several sets of pages. what: the kernel's description; times: of the layer"""

    what: str
    launch: Callable[[], None]
    times: int


# Microseconds of one layer.
Sample = Callable[[], float]


class Timer(Protocol):
    """Prepares work for timing."""

    def ready(self, work: LayerLaunches) -> Sample:
        """Returns the function that takes a sample. The work has run once."""
        ...


@dataclass(frozen=True, slots=True)
class GraphTimer:
    """Times graphs on a GPU."""

    device: torch.device

    def ready(self, work: LayerLaunches) -> Sample:
        """See `Timer.ready`."""
        timed = GraphClock(self.device, _SAMPLE_US).timed((work.launch,))
        return lambda: timed.microseconds() / work.times
