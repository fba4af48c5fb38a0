"""Times of one launch: kernels take turns, on a GPU as graphs over pages past its L2."""

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
        """What runs one round of some launches. runs: of the same work over different data; each is called"""
        ...


class Timed(Protocol):
    """Launches that can be timed again and again."""

    def microseconds(self) -> float:
        """Of one launch, over a round of all."""
        ...

    def run(self, seconds: float) -> int:
        """Launch for about so long, at least once, and wait; how many launches it were."""
        ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """Of one launch, a sample a round.

    us:  microseconds
    mhz: of the device's clock at the end of each sample; NaN where nothing tells
    """

    us: tuple[float, ...]
    mhz: tuple[float, ...]


def in_turn(timed: Sequence[Timed], rounds: int, mhz: Callable[[], float]) -> list[Sampled]:
    """Samples of each, taking turns: a change of the machine's speed hits all of them. mhz: reads the clock"""
    samples: list[list[tuple[float, float]]] = [[] for _ in timed]
    for _ in range(rounds):
        for one, mine in zip(timed, samples, strict=True):
            mine.append((one.microseconds(), mhz()))
    return [Sampled(tuple(us for us, _ in mine), tuple(clock for _, clock in mine)) for mine in samples]


@dataclass(frozen=True, slots=True)
class GraphClock:
    """A GPU's: launches are captured, and a sample is the mean over replays that take about round_us together."""

    device: torch.device
    round_us: float

    def timed(self, runs: Sequence[Run]) -> Timed:
        """As Clock.timed. Raises what a capture raises."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                for run in runs:
                    run()
                torch.cuda.synchronize()
                # Not torch.cuda.graph(), which collects garbage and gives memory back each time.
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
    """runs: kept, as the graph reads and writes the memory that they hold"""

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
    """Of one of so many runs in a row, on the current GPU's stream, between two events."""
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
    """A CPU's: a sample is the mean over calls that take about round_us together."""

    round_us: float

    def timed(self, runs: Sequence[Run]) -> Timed:
        """As Clock.timed."""
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
    """The clock of a device. round_us: microseconds of a sample"""
    return GraphClock(device, round_us) if device.type == "cuda" else HostClock(round_us)


def median_us(clock: Clock, run: Run, rounds: int = 7) -> float:
    """Of one launch."""
    return median_of(clock.timed([run]), rounds)


def median_of(timed: Timed, rounds: int) -> float:
    """Microseconds of one launch, over so many rounds."""
    return statistics.median(timed.microseconds() for _ in range(rounds))
