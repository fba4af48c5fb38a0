"""The search: candidates in order, each judged before it is timed, and the best one kept as soon as it is sure.

Times are taken in turn with those of the row in use, and compared round by round, so that what slows the GPU for a
while slows both. A candidate that looks faster is measured again over more rounds. It is kept where three of four of
those rounds, and the median by more than noise, are faster than what was best.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from rocm_attn.cli.tune.candidates import Candidate, candidates
from rocm_attn.cli.tune.jobs import Job
from rocm_attn.cli.tune.journal import BEGUN, INTERRUPTED, Journal, Trial
from rocm_attn.errors import RocmAttnError
from rocm_attn.kernels.tuning.measured import MeasuredRow, Tiles
from rocm_attn.machine.target import Target

# Rounds of a first look, and of a candidate that is to be kept.
LOOK, CONFIRM = 3, 15
# A row is kept for no less than this.
LEAST_GAIN = 0.01
# Changes that cost so much alone are in no pair.
TOO_SLOW = 1.15

# Microseconds of one layer: round, shape.
Times = list[list[float]]


@dataclass(frozen=True, slots=True)
class Judged:
    """What a candidate's results are worth. wrong: why it is not timed; empty where it is right"""

    wrong: str
    spilled: int = 0


class SearchEnded(RocmAttnError):
    """The device failed with a candidate; what was found is kept."""


class Bench(Protocol):
    """Where candidates run."""

    def judge(self, job: Job, tiles: Tiles) -> Judged:
        """Compare with the oracle. Raises SearchEnded where the device is no use any more."""
        ...

    def times(self, job: Job, both: tuple[Tiles, Tiles], rounds: int) -> tuple[Times, Times]:
        """Of two tiles, in turn."""
        ...


@dataclass(frozen=True, slots=True)
class Gain:
    """A candidate's time over that of the row in use: median and quartiles of rounds, and medians of each shape."""

    rounds: int
    ratio: float
    low: float
    high: float
    in_use_us: tuple[float, ...]
    us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Tiles that are faster than the row in use."""

    candidate: Candidate
    gain: Gain
    spilled: int


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate, what became of it, and whether that was known before."""

    job: Job
    number: int
    of: int
    candidate: Candidate
    trial: Trial
    was_known: bool


@dataclass
class Search:
    """Searches jobs until they are done or time is up.

    has_time: whether another candidate may be begun
    keep:     called with each row that is faster than what was kept before
    kept:     what an earlier search kept for a job, if it did
    """

    bench: Bench
    target: Target
    journal: Journal
    has_time: Callable[[], bool]
    keep: Callable[[Job, Found], None]
    kept: Callable[[Job], MeasuredRow | None]

    def run(self, jobs: Sequence[Job]) -> Iterator[Tried]:
        """Every candidate as it is tried. Ends early when time is up. Raises SearchEnded."""
        for job in jobs:
            if not self.has_time():
                return
            yield from self._job(job)

    def _job(self, job: Job) -> Iterator[Tried]:
        in_use = Candidate(job.in_use, ())
        tried = candidates(job, self.target)
        row = self.kept(job)
        best = 1.0 if row is None else 1 - row.measured.gain
        base = self._judged(job, in_use)
        if base.outcome != "timed":
            yield Tried(job, 0, len(tried), in_use, base, was_known=False)
            return
        bad: set[tuple[str, object]] = set()
        for number, candidate in enumerate(tried, 1):
            if bad.intersection(candidate.changes):
                continue
            trial = self.journal.of(job, candidate.tiles)
            was_known = trial is not None
            if trial is None:
                if not self.has_time():
                    return
                trial, best = self._try(job, candidate, best)
            if trial.ratio > TOO_SLOW and len(candidate.changes) == 1:
                bad.update(candidate.changes)
            yield Tried(job, number, len(tried), candidate, trial, was_known)

    def _judged(self, job: Job, candidate: Candidate) -> Trial:
        judged = self.bench.judge(job, candidate.tiles)
        return Trial(judged.wrong or "timed", spilled=judged.spilled)

    def _try(self, job: Job, candidate: Candidate, best: float) -> tuple[Trial, float]:
        """What became of a candidate, and what is best now."""
        self.journal.begin(job, candidate)
        try:
            trial, best = self._timed(job, candidate, best)
        except KeyboardInterrupt:
            self.journal.end(job, candidate, Trial(INTERRUPTED))
            raise
        self.journal.end(job, candidate, trial)
        return trial, best

    def _timed(self, job: Job, candidate: Candidate, best: float) -> tuple[Trial, float]:
        trial = self._judged(job, candidate)
        if trial.outcome == "timed":
            gain = gain_of(self.bench.times(job, (job.in_use, candidate.tiles), LOOK))
            if gain.ratio < best * (1 - LEAST_GAIN):
                gain = gain_of(self.bench.times(job, (job.in_use, candidate.tiles), CONFIRM))
                if gain.ratio < best * (1 - LEAST_GAIN) and gain.high < best:
                    self.keep(job, Found(candidate, gain, trial.spilled))
                    best = gain.ratio
            trial = Trial("timed", gain.ratio, trial.spilled)
        return trial, best


def gain_of(times: tuple[Times, Times]) -> Gain:
    """Of two in turn, the row in use first; shapes count alike."""
    ratios = sorted(
        math.exp(statistics.fmean(math.log(new / old) for old, new in zip(*of_round, strict=True)))
        for of_round in zip(*times, strict=True)
    )
    in_use_us, us = (tuple(statistics.median(of_shape) for of_shape in zip(*each, strict=True)) for each in times)
    quarter = len(ratios) // 4
    return Gain(len(ratios), statistics.median(ratios), ratios[quarter], ratios[-1 - quarter], in_use_us, us)


def what_became(trial: Trial) -> str:
    """A trial in words."""
    spills = f", {trial.spilled} registers spilled" if trial.spilled else ""
    if trial.outcome == "timed":
        return f"{trial.ratio:.3f} of the row in use{spills}"
    if trial.outcome == BEGUN:
        return "passed over: an earlier search did not come back from it"
    return f"{trial.outcome}{spills}"
