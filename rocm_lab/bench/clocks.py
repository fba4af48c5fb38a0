"""Times of one launch. Kernels take turns. On a GPU they run as graphs over more pages than fit its L2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Run = Callable[[], object]


class Clock(Protocol):
    """Times launches on a device."""

    def timed(self, runs: Sequence[Run]) -> Timed:
        """Returns a timer for one round of launches. runs: the same work over different data; each is called"""


class Timed(Protocol):
    """Launches that can be timed repeatedly."""

    def microseconds(self) -> float:
        """Returns the time per launch, over a round of all."""

    def run(self, seconds: float) -> int:
        """Launches for about this long, at least once, and waits. Returns the number of launches."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples of one launch, one per round.

    us:  microseconds
    mhz: the device's clock at the end of each sample; NaN if it is unknown
    """

    us: tuple[float, ...]
    mhz: tuple[float, ...]


def in_turn(timed: Sequence[Timed], rounds: int, mhz: Callable[[], float]) -> list[Sampled]:
    """Returns samples of each, taking turns, so that changes of the machine's speed affect all. mhz: reads the clock"""
    samples: list[list[tuple[float, float]]] = [[] for _ in timed]
    for _ in range(rounds):
        for one, mine in zip(timed, samples, strict=True):
            mine.append((one.microseconds(), mhz()))
    return [Sampled(tuple(us for us, _ in mine), tuple(clock for _, clock in mine)) for mine in samples]


@dataclass(frozen=True, slots=True)
class GraphClock:
    """A GPU's clock. Launches are captured. A sample is the mean over replays that take about round_us in total."""

    device: torch.device
    round_us: float

    def timed(self, runs: Sequence[Run]) -> Timed:
        """Does the same as Clock.timed. Raises the errors of a capture."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                for run in runs:
                    run()
                torch.cuda.synchronize()
                # torch.cuda.graph() is not used, because it collects garbage and frees memory each time.
                graph.capture_begin()
                try:
                    for run in runs:
                        run()
                finally:
                    graph.capture_end()
            graph.replay()
            torch.cuda.synchronize()
            once = microseconds_of(graph.replay, 2)
            return _Graph(graph, tuple(runs), max(1, min(200, round(self.round_us / once))))


@dataclass(frozen=True, slots=True)
class _Graph:
    """runs: kept, because the graph reads and writes the memory that they hold"""

    graph: torch.cuda.CUDAGraph
    runs: tuple[Run, ...]
    replays: int

    def microseconds(self) -> float:
        return microseconds_of(self.graph.replay, self.replays) / len(self.runs)

    def run(self, seconds: float) -> int:
        begin, launches = time.perf_counter(), 0
        while not launches or time.perf_counter() - begin < seconds:
            for _ in range(self.replays):
                self.graph.replay()
            torch.cuda.synchronize()
            launches += self.replays * len(self.runs)
        return launches


def microseconds_of(run: Run, times: int) -> float:
    """Returns the time per run of this many runs in a row, on the current GPU's stream, between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 1e3 / times


@dataclass(frozen=True, slots=True)
class HostClock:
    """A CPU's clock. A sample is the mean over calls that take about round_us in total."""

    round_us: float

    def timed(self, runs: Sequence[Run]) -> Timed:
        """Does the same as Clock.timed."""
        calls = _Calls(tuple(runs), 1)
        once = calls.microseconds() * len(runs)
        return _Calls(tuple(runs), max(1, min(200, round(self.round_us / max(once, 1e-3)))))


@dataclass(frozen=True, slots=True)
class _Calls:
    runs: tuple[Run, ...]
    repeats: int

    def microseconds(self) -> float:
        begin = time.perf_counter()
        for _ in range(self.repeats):
            for run in self.runs:
                run()
        return (time.perf_counter() - begin) * 1e6 / (self.repeats * len(self.runs))

    def run(self, seconds: float) -> int:
        begin, launches = time.perf_counter(), 0
        while not launches or time.perf_counter() - begin < seconds:
            self.microseconds()
            launches += self.repeats * len(self.runs)
        return launches


def clock_of(device: torch.device, round_us: float) -> Clock:
    """Returns the clock of a device. round_us: microseconds of a sample"""
    return GraphClock(device, round_us) if device.type == "cuda" else HostClock(round_us)


def median_us(clock: Clock, run: Run, rounds: int = 7) -> float:
    """Returns the median time of one launch, over this many rounds."""
    timed = clock.timed([run])
    return statistics.median(timed.microseconds() for _ in range(rounds))
