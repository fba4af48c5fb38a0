"""The search: candidates in order, each judged before it is timed, and the best one kept as soon as it is sure.

Times are taken in turn with those of the choice in use, and compared round by round, so that anything that slows the
GPU for a while slows both. A candidate that looks faster is measured again over more rounds. It is kept if three of
four of those rounds are faster than the choice in use by LEAST_GAIN, and faster than the best so far.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rocm_attn.errors import BadSetting, RocmAttnError
from rocm_attn.kernels.tuning.measured import MeasuredTileChoice, Provenance, ShapeTimes, Tiles
from rocm_attn.machine.target import Target
from rocm_lab.tune.candidates import IN_USE, CandidateTiles, Change, candidates, keeps_block, together
from rocm_lab.tune.jobs import TuneJob
from rocm_lab.tune.journal import BEGUN, INTERRUPTED, CandidateResult, Journal

# Rounds of a first measurement, and of one that decides whether a candidate is kept.
LOOK, CONFIRM = 3, 15
# The least gain for which a row is kept: three of four rounds have it. And of the median over a row kept before.
LEAST_GAIN, LEAST_STEP = 0.03, 0.01
# Candidates of a job that are compiled before those of later jobs; of a later one, and how many jobs are ahead of the
# other candidates.
_FIRST, _FIRST_LATER, _AHEAD = 16, 12, 2
# Part of a job's time that is kept for several changes at once, if there is too little for all.
_FOR_SEVERAL = 1 / 3
# Largest ratio of a change alone that may be in a pair, and of two changes together.
TOO_SLOW, UNLIKELY = 1.15, 1.1
# Gains of a first measurement up to this are taken for noise: such changes are not tried together.
NOISE = 0.004
# A candidate that spills this many more registers than the choice in use is not timed. Rows that spill a few have won.
MORE_SPILLED = 16
TIMED = "timed"

# Microseconds of one layer, by round and shape.
Times = list[list[float]]
# A candidate's tiles, with their job.
Task = tuple[TuneJob, Tiles]


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict on a candidate's results. wrong: why it is not timed; empty if they are right"""

    wrong: str
    spilled: int = 0


class SearchEnded(RocmAttnError):
    """The device failed with a candidate; earlier findings are kept."""


class Bench(Protocol):
    """Judges and times candidates."""

    def expect(self, tasks: Sequence[Task]) -> None:
        """Announces candidates that are likely to be judged next, in order."""

    def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
        """Compares a candidate with the reference, in steps of the kinds that are timed.

        Raises SearchEnded if the device has stopped working.
        """

    def judge_others(self, job: TuneJob, tiles: Tiles) -> Judged:
        """Does the same in steps of other kinds that the row would serve. Their kernels are compiled apart."""

    def times(self, job: TuneJob, both: tuple[Tiles, Tiles], rounds: int) -> tuple[Times, Times]:
        """Times two tiles, in turn."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A candidate's time divided by that of the choice in use: median and quartiles of rounds, medians per shape."""

    rounds: int
    ratio: float
    low: float
    high: float
    in_use_us: tuple[float, ...]
    us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FasterTiles:
    """Tiles that are faster than the choice in use."""

    candidate: CandidateTiles
    gain: Gain
    spilled: int


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate with its trial. was_known: True if the trial is from an earlier search"""

    job: TuneJob
    number: int
    of: int
    candidate: CandidateTiles
    trial: CandidateResult
    was_known: bool


@dataclass
class _Best:
    """The lowest ratio that was kept, and the registers that the choice in use spills."""

    ratio: float
    spilled: int

    @property
    def enough(self) -> float:
        """The largest ratio that is kept next."""
        return min(1 - LEAST_GAIN, self.ratio * (1 - LEAST_STEP))


@dataclass
class Search:
    """Searches jobs until they are done or time is up. Each has an equal share of the time that is left.

    seconds_left: in which candidates are begun
    keep:         called with each row that is faster than the one kept before
    kept:         the row that an earlier search kept for a job, if any
    """

    bench: Bench
    target: Target
    journal: Journal
    seconds_left: Callable[[], float]
    keep: Callable[[TuneJob, FasterTiles], None]
    kept: Callable[[TuneJob], MeasuredTileChoice | None]
    # The seconds that are left when the share of the job that is searched ends, and candidates of later jobs.
    _end: float = 0.0
    _later: tuple[Task, ...] = ()

    def run(self, jobs: Sequence[TuneJob]) -> Iterator[Tried]:
        """Tries every candidate and yields it. Ends early when time is up. Raises SearchEnded."""
        for number, job in enumerate(jobs):
            later = jobs[number + 1 :]
            self._later = tuple(task for each in later for task in self._first(each))
            if self.seconds_left() > 0:
                yield from self._job(job, len(later))

    def _first(self, job: TuneJob) -> list[Task]:
        """The choice in use, and a job's first candidates."""
        first = candidates(job, self.target)[: _FIRST_LATER - 1]
        return [(job, job.in_use), *((job, each.tiles) for each in self._new(job, first))]

    def _has_time(self) -> bool:
        return self.seconds_left() > self._end

    def _expect(self, job: TuneJob, each: Sequence[CandidateTiles]) -> None:
        """Announces a job's candidates: the first ones, then those of the jobs after it, then the others."""
        tasks, ahead = [(job, candidate.tiles) for candidate in each], _AHEAD * _FIRST_LATER
        self.bench.expect([*tasks[:_FIRST], *self._later[:ahead], *tasks[_FIRST:], *self._later[ahead:]])

    def _job(self, job: TuneJob, num_later: int) -> Iterator[Tried]:
        in_use = CandidateTiles(job.in_use, (IN_USE,))
        every = candidates(job, self.target)
        singles = [each for each in every if len(each.changes) <= 1]
        self._expect(job, [in_use, *self._new(job, singles)])
        base = self._judged(job, in_use)
        if base.outcome != TIMED:
            yield Tried(job, 0, len(every), in_use, base, was_known=False)
            if job.tiles != job.in_use:
                # The probe will find the other kernel wrong, too, so the table's own choice serves then.
                yield from self._job(replace(job, in_use=job.tiles), num_later)
            return
        # Its share begins here: the wait for the first compilers is no job's own. A part of it is for several changes.
        left = self.seconds_left()
        end = left * num_later / (1 + num_later)
        self._end = end + (left - end) * _FOR_SEVERAL
        choice = self.kept(job)
        best = _Best(1.0 if choice is None else 1 - choice.measured.gain, base.spilled)
        ratios: dict[Change, float] = {}
        start = 1.0
        numbers = itertools.count(1)
        for tried in self._all(job, singles, best):
            if not tried.candidate.changes and tried.trial.outcome == TIMED:
                start = tried.trial.ratio
            ratios |= dict.fromkeys(tried.candidate.changes, tried.trial.ratio)
            yield replace(tried, number=next(numbers), of=len(every))
        self._end = end
        enough = start * (1 - NOISE)
        gains = sorted((change for change, ratio in ratios.items() if ratio < enough), key=lambda each: ratios[each])
        several = [*reversed(together(job, self.target, gains)), *_likely(every, ratios, start, job.tiles)]
        for tried in self._all(job, several, best):
            yield replace(tried, number=next(numbers), of=len(singles) + len(several))

    def _all(self, job: TuneJob, each: Sequence[CandidateTiles], best: _Best) -> Iterator[Tried]:
        """Tries candidates in order, until time is up."""
        self._expect(job, self._new(job, each))
        for candidate in each:
            trial = self.journal.of(job, candidate.tiles)
            if trial is not None and trial.outcome == TIMED and trial.ratio < best.enough:
                trial = None  # its tiles were kept, and the file with their row was removed
            was_known = trial is not None
            if trial is None:
                if not self._has_time():
                    return
                trial = self._try(job, candidate, best)
            yield Tried(job, 0, 0, candidate, trial, was_known)

    def _new(self, job: TuneJob, each: Sequence[CandidateTiles]) -> list[CandidateTiles]:
        return [candidate for candidate in each if self.journal.of(job, candidate.tiles) is None]

    def _judged(self, job: TuneJob, candidate: CandidateTiles) -> CandidateResult:
        judged = self.bench.judge(job, candidate.tiles)
        return CandidateResult(judged.wrong or TIMED, spilled=judged.spilled)

    def _try(self, job: TuneJob, candidate: CandidateTiles, best: _Best) -> CandidateResult:
        """Tries a candidate, and records it in the journal."""
        self.journal.begin(job, candidate)
        try:
            trial = self._timed(job, candidate, best)
        except (KeyboardInterrupt, BadSetting):  # the candidate is not to blame, also where its row cannot be written
            self.journal.end(job, candidate, CandidateResult(INTERRUPTED))
            raise
        self.journal.end(job, candidate, trial)
        return trial

    def _timed(self, job: TuneJob, candidate: CandidateTiles, best: _Best) -> CandidateResult:
        trial = self._judged(job, candidate)
        if trial.outcome != TIMED:
            return trial
        if trial.spilled > best.spilled + MORE_SPILLED:
            return CandidateResult(f"not timed: the choice in use spills {best.spilled}", spilled=trial.spilled)
        gain = gain_of(self.bench.times(job, (job.in_use, candidate.tiles), LOOK))
        if gain.ratio < best.enough:
            gain = gain_of(self.bench.times(job, (job.in_use, candidate.tiles), CONFIRM))
            if gain.ratio < best.enough and gain.high < min(1 - LEAST_GAIN, best.ratio):
                others = self.bench.judge_others(job, candidate.tiles)
                if others.wrong:
                    return CandidateResult(others.wrong, spilled=trial.spilled)
                self.keep(job, FasterTiles(candidate, gain, trial.spilled))
                best.ratio = gain.ratio
        return CandidateResult(TIMED, gain.ratio, trial.spilled)


def _likely(
    every: Sequence[CandidateTiles], ratios: Mapping[Change, float], start: float, tiles: Tiles
) -> list[CandidateTiles]:
    """Pairs of changes, by the product of their ratios, likely ones first. Pairs with a bad change are left out.

    Pairs that leave a key block its size come first, whatever each change does alone.
    start: the ratio of the tiles that changes are made to
    """
    infinite = float("inf")
    found = []
    for candidate in every:
        if keeps_block(candidate, tiles):
            found.append((0.0, candidate))
            continue
        alone = [ratios.get(change, infinite) / start for change in candidate.changes]
        if len(alone) == 2 and max(alone) <= TOO_SLOW and math.prod(alone) <= UNLIKELY:
            found.append((math.prod(alone), candidate))
    return [candidate for _, candidate in sorted(found, key=lambda each: each[0])]


def gain_of(times: tuple[Times, Times]) -> Gain:
    """The gain of two times taken in turn, the choice in use first; all shapes have the same weight."""
    ratios = sorted(
        math.exp(statistics.fmean(math.log(new / old) for old, new in zip(*of_round, strict=True)))
        for of_round in zip(*times, strict=True)
    )
    in_use_us, us = (tuple(statistics.median(of_shape) for of_shape in zip(*each, strict=True)) for each in times)
    quarter = len(ratios) // 4
    return Gain(len(ratios), statistics.median(ratios), ratios[quarter], ratios[-1 - quarter], in_use_us, us)


def row_of(job: TuneJob, found: FasterTiles, facts: Mapping[str, str], date: str) -> MeasuredTileChoice:
    """The row of faster tiles. facts: those of Provenance that are text, and compute_units; date: ISO 8601, UTC"""
    times = zip(job.shapes, found.gain.in_use_us, found.gain.us, strict=True)
    given: dict[str, Any] = {**facts, "compute_units": int(facts["compute_units"])}
    measured = Provenance(
        **given,
        date=date,
        shapes=tuple(ShapeTimes(str(shape), round(old, 2), round(new, 2)) for shape, old, new in times),
        samples=found.gain.rounds,
        gain=round(1 - found.gain.ratio, 4),
        gain_low=round(1 - found.gain.high, 4),
        gain_high=round(1 - found.gain.low, 4),
        spilled=found.spilled,
    )
    return job.choice(found.candidate.tiles, measured)


def what_became(trial: CandidateResult) -> str:
    """A trial in words."""
    spills = f", {trial.spilled} registers spilled" if trial.spilled else ""
    if trial.outcome == TIMED:
        return f"{trial.ratio:.3f} of the choice in use{spills}"
    if trial.outcome == BEGUN:
        return "skipped: an earlier search did not return from it"
    return f"{trial.outcome}{spills}"
