"""Times of work on a GPU, replayed as a graph between two events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

# One sample takes about as long, in microseconds; a graph is replayed so often.
_SAMPLE_US = 2000.0
_MOST_REPLAYS = 200


@dataclass(frozen=True, slots=True)
class Work:
    """Launches of one layer over several sets of pages. what: the kernel's description; times: of the layer"""

    what: str
    launch: Callable[[], None]
    times: int


# Microseconds of one layer.
Sample = Callable[[], float]


class Timer(Protocol):
    """Makes ready what is to be timed."""

    def ready(self, work: Work) -> Sample:
        """What takes a sample. The work has run once."""
        ...


class GraphTimer:
    """Times graphs on the current GPU."""

    def ready(self, work: Work) -> Sample:
        """As Timer."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            work.launch()
            torch.cuda.synchronize()
            # Not torch.cuda.graph(), which collects garbage and gives memory back each time.
            graph.capture_begin()
            work.launch()
            graph.capture_end()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def replay(times: int) -> float:
            begin.record()
            for _ in range(times):
                graph.replay()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3 / times

        replay(2)
        replays = max(1, min(_MOST_REPLAYS, round(_SAMPLE_US / replay(2))))
        return lambda: replay(replays) / work.times
