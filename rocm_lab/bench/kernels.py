"""Times kernels in turns. Each is checked first, and only correct ones are timed."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rocm_attn.machine.devices import wait_for_device
from rocm_lab.bench import layers
from rocm_lab.bench.ceilings import Ceilings
from rocm_lab.bench.clocks import Sampled, Timed, clock_of, in_turn
from rocm_lab.bench.contestant import Contestant, LayerLaunch, NotServed
from rocm_lab.bench.contestants import OwnProvider
from rocm_lab.bench.energy import EnergyMeter
from rocm_lab.bench.judge import Comparison, ExpectedOutput, failed
from rocm_lab.bench.machine import cache_bytes
from rocm_lab.bench.step_data import StepData, random_steps
from rocm_lab.bench.suites import SuiteCase
from rocm_lab.bench.work import LayerWork, work_of

# KV bytes between two uses of a page, as a multiple of the cache; and the most sets of pages, to bound the preparation.
_PAST_CACHE, _MOST_SETS = 4, 24
# If a kernel is faster than the lower bound by more than this, its launches have not done their work.
_MOST_SHARE = 1.1
_NO_SAMPLES = Sampled((), ())

OK, WRONG, FAILED, NOT_SERVED = "ok", "wrong", "failed", "not served"


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The settings of timing kernels.

    rounds:   samples of each
    round_us: microseconds of launches that a sample is the mean of
    seed:     of data and head weights
    energy_s: seconds of launches for each reading of the energy counter; 0: none
    """

    rounds: int = 15
    round_us: float = 3000.0
    seed: int = 0
    energy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ContestantResult:
    """A contestant on a case.

    status:          OK, WRONG, FAILED (it raised) or NOT_SERVED
    reason:          in a clause, if it is not OK
    samples:         of one layer; none if it is not OK
    joules_a_token:  of one layer and one new token; NaN if it was not measured
    """

    case: SuiteCase
    provider: str
    status: str
    work: LayerWork
    lower_bound_us: float
    kernel: str = ""
    reason: str = ""
    verdict: Comparison | None = None
    samples: Sampled = _NO_SAMPLES
    joules_a_token: float = float("nan")

    @property
    def us(self) -> float:
        """The median time in microseconds."""
        return statistics.median(self.samples.us)

    @property
    def share(self) -> float:
        """The lower bound over the median: 1 is as fast as the device's memory or its products allow."""
        return self.lower_bound_us / self.us

    @property
    def is_bad(self) -> bool:
        """True if it gave a wrong result, or none."""
        return self.status in (WRONG, FAILED)

    def judged(self, verdict: Comparison) -> ContestantResult:
        """Returns the row with a verdict."""
        status = OK if verdict.is_right else WRONG if verdict.compared else FAILED
        return replace(self, status=status, reason=verdict.wrong, verdict=verdict)

    def as_json(self) -> dict[str, Any]:
        """Returns the row for a result file."""
        found: dict[str, Any] = {
            "suite": self.case.suite,
            "case": self.case.name,
            "batch": str(self.case.batch),
            "layer": layers.as_json(self.case.problem),
            "provider": self.provider,
            "status": self.status,
            **asdict(self.work),
            "lower_bound_us": self.lower_bound_us,
        }
        if self.reason:
            found["reason"] = self.reason
        if self.kernel:
            found["kernel"] = self.kernel
        if self.verdict is not None and self.verdict.compared:
            found["error"] = self.verdict.error
            found["max_error"] = self.verdict.max_error
            found["part_of_bound"] = self.verdict.part
            found["compared_tokens"] = self.verdict.compared
        if self.samples.us:
            found |= {"us": self.us, "share": self.share, "samples_us": list(self.samples.us)}
        clocks = [mhz for mhz in self.samples.mhz if mhz == mhz]
        if clocks:
            found |= {"mhz": statistics.median(clocks), "lowest_mhz": min(clocks)}
        if self.joules_a_token == self.joules_a_token:
            found["joules_a_token"] = self.joules_a_token
        return found


@dataclass(frozen=True, slots=True)
class Race:
    """Contestants on a device.

    ceilings: of the device
    meter:    of its energy
    """

    contestants: Mapping[str, Contestant]
    device: torch.device
    ceilings: Ceilings
    options: KernelOptions
    meter: EnergyMeter

    def rows(self, cases: Iterable[SuiteCase]) -> Iterator[list[ContestantResult]]:
        """Yields, for each case, a row per contestant. It holds the memory of one case at a time."""
        for case in cases:
            yield self._of_case(case)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _of_case(self, case: SuiteCase) -> list[ContestantResult]:
        work = work_of(case.problem, case.batch)
        data = random_steps(case.problem, case.batch, self._sets(work), self.device, self.options.seed)
        truths: dict[bool, ExpectedOutput] = {}
        lower_bound_us = work.lower_bound_us(
            bytes_per_s=self.ceilings.bytes_per_s, flops_per_s=self.ceilings.flops_per_s
        )
        prepared = [
            self._prepared(ContestantResult(case, name, OK, work, lower_bound_us), contestant, data, truths)
            for name, contestant in self.contestants.items()
        ]
        samples = in_turn([run.timed for _, run in prepared if run is not None], self.options.rounds, self.meter.mhz)
        of_run = iter(samples)
        return [
            row if run is None else self._timed(replace(row, samples=next(of_run)), run, data, truths)
            for row, run in prepared
        ]

    def _timed(
        self, row: ContestantResult, run: _Run, data: Sequence[StepData], truths: Mapping[bool, ExpectedOutput]
    ) -> ContestantResult:
        """Returns the row, without times if the output is wrong after timing, or was faster than the device can be."""
        verdict = self._judged(truths[run.launch.rounds_queries], run.launch, data, run.timed.microseconds)
        wrong = "" if verdict.is_right else f"after it was timed, {verdict.wrong}"
        if not wrong and self._is_past_cache(row.work, len(data)) and row.share > _MOST_SHARE:
            wrong = (
                f"it ran at {row.share:.2f} times the speed that memory and products allow, so it did not do the work"
            )
        if wrong:
            return replace(row, status=WRONG, reason=wrong, samples=_NO_SAMPLES)
        if not self.options.energy_s or self.meter.why_not:
            return row
        before = self.meter.joules()
        launches = run.timed.run(self.options.energy_s)
        joules = self.meter.joules() - before
        return replace(row, joules_a_token=joules / (launches * row.case.batch.num_tokens))

    def _sets(self, work: LayerWork) -> int:
        """Returns the number of steps, each over pages of its own."""
        if self.device.type != "cuda":
            return 1
        return max(1, min(_MOST_SETS, -(-_PAST_CACHE * cache_bytes(self.device) // work.kv_bytes)))

    def _is_past_cache(self, work: LayerWork, sets: int) -> bool:
        """True if this many steps read from a GPU's memory each time. It is unknown, so False, for a CPU."""
        return self.device.type == "cuda" and work.kv_bytes * sets >= 2 * cache_bytes(self.device)

    def _prepared(
        self,
        row: ContestantResult,
        contestant: Contestant,
        data: Sequence[StepData],
        truths: dict[bool, ExpectedOutput],
    ) -> tuple[ContestantResult, _Run | None]:
        """Checks an eager run. If that is right, captures it, and checks the output of the launches to be timed."""
        try:
            launches = [contestant.prepare(each) for each in data]
        except NotServed as refusal:
            return replace(row, status=NOT_SERVED, reason=str(refusal)), None
        except Exception as error:
            return row.judged(failed(error)), None
        first = launches[0]
        row = replace(row, kernel=first.kernel)
        if first.rounds_queries not in truths:
            truths[first.rounds_queries] = ExpectedOutput.of(data[0], rounds_queries=first.rounds_queries)
        truth = truths[first.rounds_queries]
        verdict = self._judged(truth, first, data, first.run)
        if not verdict.is_right:
            return row.judged(verdict), None
        timed: list[Timed] = []

        def timed_run() -> None:
            timed.append(clock_of(self.device, self.options.round_us).timed([each.run for each in launches]))
            for each in data:
                each.out.fill_(float("nan"))
            timed[0].microseconds()

        row = row.judged(self._judged(truth, first, data, timed_run))
        return row, _Run(first, timed[0]) if row.status == OK else None

    def _judged(
        self, truth: ExpectedOutput, launch: LayerLaunch, data: Sequence[StepData], run: Callable[[], object]
    ) -> Comparison:
        data[0].out.fill_(float("nan"))
        try:
            run()
            wait_for_device(self.device)
            out = launch.out()
        except Exception as error:
            return failed(error)
        return truth.judge(out, rounds_products=launch.rounds_products)


@dataclass(frozen=True, slots=True)
class _Run:
    """The launches of a contestant that is right. launch: the first of them"""

    launch: LayerLaunch
    timed: Timed


def compile_ahead(
    cases: Sequence[SuiteCase], contestants: Mapping[str, Contestant], device: torch.device, processes: int
) -> None:
    """Runs each case once, in parallel processes, so that its kernels are in the compiler's cache on disk.

    Failures here are ignored: they occur again, and are reported, when the case is checked.
    """
    own = [contestant for contestant in contestants.values() if isinstance(contestant, OwnProvider)]
    tasks = [(case, contestant, device) for case in dict.fromkeys(cases) for contestant in own]
    if processes < 2 or not tasks:
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for _ in pool.imap_unordered(_compiled, tasks):
            pass


def _compiled(task: tuple[SuiteCase, OwnProvider, torch.device]) -> None:
    case, contestant, device = task
    try:
        (data,) = random_steps(case.problem, case.batch, 1, device, 0)
        contestant.prepare(data).run()
        torch.cuda.synchronize(device)
    except Exception:
        return
    finally:
        torch.cuda.empty_cache()
