"""Runs candidates: the kernel that select() binds with their tiles, over random pages, on this machine's device.

A candidate is judged on steps whose lengths lie around the edges of pages and tiles, with and without cached tokens,
for every kind of step that its row would serve, and on the shapes that are timed. Then it is timed on those, over sets
of pages that no cache holds at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.launch import note_launches
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles
from rocm_attn.kernels.tuning.measured import Provenance, Tiles
from rocm_attn.kernels.tuning.tiles import ANY_ROWS, ExtendTiles
from rocm_attn.machine.devices import wait_for_device
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.by_tokens import serving
from rocm_attn.providers.contract import BoundKernel
from rocm_attn.providers.select import select
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.clocks import Clock, Timed
from rocm_lab.bench.judge import ExpectedOutput
from rocm_lab.bench.machine import INFINITY_CACHE_BYTES
from rocm_lab.bench.step_data import StepData, empty_step, random_steps
from rocm_lab.tune.jobs import TuneJob, kind_of
from rocm_lab.tune.search import Judged, SearchEnded, Task, Times

# Twice the largest cache that a GPU of today has apart from its memory.
_PAST_CACHES = 2 * INFINITY_CACHE_BYTES
_MOST_SETS = 32
# The most rows of a sequence for which steps of few new tokens have tiles of their own: heads of 320.
_MOST_SHORT = 512
_ON_TRIAL = Provenance("on trial", "", 0, "", "", "", "", "", "", (), 0, 0.0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """A step that candidates run.

    sets:    number of page sets
    is_edge: True if it is only judged
    other:   True if it is of no kind that is timed, and so of other compiled kernels: then it has log-sum-exp
    """

    batch: BatchSpec
    sets: int
    is_edge: bool
    other: bool

    def random(self, problem: Problem, device: torch.device) -> JudgedSteps:
        """The step with random data; pages hold NaN after the end of their sequence."""
        steps = random_steps(problem, self.batch, self.sets, device, 0)
        for each in steps:
            _end_in_nan(each)
        return JudgedSteps([each.with_lse() if self.other else each for each in steps])

    def empty(self, problem: Problem) -> StepData:
        """The step without data, on the CPU."""
        step = empty_step(problem, self.batch, self.sets)
        return step.with_lse() if self.other else step


@dataclass
class JudgedSteps:
    """A step over sets of pages. Candidates are compared on the first set, whose reference is computed once."""

    steps: Sequence[StepData]

    @cached_property
    def truth(self) -> ExpectedOutput:
        """The reference of the first set."""
        return ExpectedOutput.of(self.steps[0])


def _end_in_nan(data: StepData) -> None:
    """Writes NaN after each sequence's last token, in its last page: a kernel must not let it through."""
    pages, page_size = data.pages, data.problem.page_size
    if pages.format.encoding.is_fp8:
        return
    for ids, kv_len in zip(data.pages_of_seq, data.batch.kv_len, strict=True):
        if kv_len % page_size:
            pages.k[ids[-1], kv_len % page_size :] = float("nan")
            pages.v[ids[-1], kv_len % page_size :] = float("nan")


@dataclass(frozen=True, slots=True)
class JobSteps:
    """The steps of a job.

    edges: steps that every candidate is judged on, for any timed shapes
    apart: bytes of K and V that lie between two uses of a page of a timed step
    """

    edges: Callable[[TuneJob], list[BatchSpec]]
    apart: int = _PAST_CACHES

    def of(self, job: TuneJob) -> list[StepSizes]:
        """The timed steps, then the edges: first those of kinds that are timed."""
        kinds = set(map(kind_of, job.shapes))
        sizes = [StepSizes(each, sets_of(job, sum(each.kv_len), self.apart), False, False) for each in job.shapes]
        edges = [StepSizes(each, 1, True, kind_of(each) not in kinds) for each in self.edges(job)]
        return sizes + sorted(edges, key=lambda step: step.other)


class LayerBench:
    """Judges and times candidates on a device. clock: of the device; steps: makes the steps of a job"""

    def __init__(self, device: torch.device, target: Target, clock: Clock, steps: JobSteps) -> None:
        self._device, self._target, self._clock, self._steps = device, target, clock, steps
        self._job: TuneJob | None = None
        self._edges: list[JudgedSteps] = []
        self._others: list[JudgedSteps] = []
        self._timed: list[JudgedSteps] = []
        self._in_use: tuple[Tiles, list[Timed]] | None = None

    def expect(self, tasks: Sequence[Task]) -> None:
        """See `Bench.expect`. Does nothing ahead."""

    def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
        """See `Bench.judge`."""
        self._take(job)
        return self._judged(job, tiles, [*self._edges, *self._timed])

    def judge_others(self, job: TuneJob, tiles: Tiles) -> Judged:
        """See `Bench.judge_others`."""
        self._take(job)
        return self._judged(job, tiles, self._others)

    def _judged(self, job: TuneJob, tiles: Tiles, steps: Sequence[JudgedSteps]) -> Judged:
        spilled = 0
        for each in steps:
            wrong, spills = self._run(job, tiles, each)
            spilled = max(spilled, spills)
            if wrong:
                return Judged(wrong, spilled)
        return Judged("", spilled)

    def times(self, job: TuneJob, both: tuple[Tiles, Tiles], rounds: int) -> tuple[Times, Times]:
        """See `Bench.times`."""
        self._take(job)
        in_use, tiles = both
        if self._in_use is None or self._in_use[0] != in_use:
            self._in_use = in_use, list(self._samples(job, in_use))
        of_both = self._in_use[1], list(self._samples(job, tiles))
        taken = [[[sample.microseconds() for sample in samples] for samples in of_both] for _ in range(rounds)]
        return [of_round[0] for of_round in taken], [of_round[1] for of_round in taken]

    def _take(self, job: TuneJob) -> None:
        """Makes the steps of a job, which replace those of another job."""
        if self._job == job:
            return
        self._edges, self._others, self._timed, self._in_use = [], [], [], None
        self._job = job
        for step in self._steps.of(job):
            of_kind = self._others if step.other else self._edges if step.is_edge else self._timed
            of_kind.append(step.random(job.problem, self._device))

    def _run(self, job: TuneJob, tiles: Tiles, judged: JudgedSteps) -> tuple[str, int]:
        """Runs a candidate on a step. Returns what is wrong with it, and the number of registers that it spills."""
        data = judged.steps[0]
        kernel = kernel_of(job, tiles, data, self._target)
        if not any(str(bound) in kernel.describe() for bound in _as_bound(tiles)):
            name = kernel.describe().partition("(")[0]
            return f"{name} serves these steps, and its tiles are not searched", 0
        try:
            with note_launches() as notes:
                attend = data.layer(kernel)
                for rows in (data.out, data.lse):
                    if rows is not None:
                        rows.fill_(float("nan"))
                attend()
                self._wait()
        except Exception as failure:
            self._check_device(failure)
            text = (str(failure).strip() or type(failure).__name__).splitlines()[0]
            return f"does not compile or run: {text}", 0
        spilled = max((getattr(launch.compiled, "n_spills", 0) or 0 for launch in notes.launches), default=0)
        verdict = judged.truth.judge(data.out)
        return "" if verdict.is_right else f"wrong: {verdict.wrong}", spilled

    def _samples(self, job: TuneJob, tiles: Tiles) -> Iterator[Timed]:
        for each in self._timed:
            kernel = kernel_of(job, tiles, each.steps[0], self._target)
            yield self._clock.timed([data.layer(kernel) for data in each.steps])

    def _wait(self) -> None:
        wait_for_device(self._device)

    def _check_device(self, failure: Exception) -> None:
        """Raises SearchEnded if the device has stopped working."""
        try:
            torch.ones(8, device=self._device).sum().item()
        except RuntimeError:
            raise SearchEnded(
                f"the GPU stopped working after {str(failure).strip().splitlines()[:1]}; the results so far are "
                "kept. Run the same command again: it skips that candidate"
            ) from failure


def _as_bound(tiles: Tiles) -> Iterator[Tiles]:
    """Tiles in the forms in which they are bound: steps decide some fields of extend (triton.py, triton_hopper.py)."""
    yield tiles
    if isinstance(tiles, ExtendTiles):
        # With a short window no rows are shared.
        yield replace(tiles, programs_per_cu=0, one_launch=False)
    if isinstance(tiles, HopperTiles):
        for early, fills in itertools.product((False, True), repeat=2):
            yield replace(tiles, extend=replace(tiles.extend, early=early, fills=fills))


def kernel_of(job: TuneJob, tiles: Tiles, data: StepData, target: Target) -> BoundKernel:
    """The kernel that would serve a step of the layer if these tiles were measured."""
    problem = replace(job.problem, wants_lse=data.lse is not None)
    selection = select(problem, replace(target, measured=(job.choice(tiles, _ON_TRIAL),)), "triton")
    return serving(selection.kernel(data.kind).bound, data.bounds.shape)


def edges_of(job: TuneJob) -> list[BatchSpec]:
    """Steps whose sequences end around the edges of pages and key blocks, of every kind that the row serves."""
    page = job.problem.page_size
    kv_len = (1, 2, page, page + 1, 63, 64, 65, 129, 300, 777)
    decode = BatchSpec.of_lengths((1, each - 1) for each in kv_len)
    # Enough new tokens that no step is one of those with fewer, which have rows of their own.
    # Mixed steps count: a chunk in them is as long as any.
    most_short = _MOST_SHORT // job.problem.gqa_ratio + 1
    least = 2 * min(most_short, *(max(shape.q_len) for shape in job.shapes))
    longest = max(48, least) if job.max_rows == ANY_ROWS else max(2, job.max_rows // job.problem.gqa_ratio)
    new = tuple(max(2, longest - seq % 3) if seq % 4 else 2 for seq in range(len(kv_len)))
    lengths = list(zip(new, kv_len, strict=True))
    extend = BatchSpec.of_lengths(lengths)
    # One cached token: a step without any is of a kind that may have a kernel of its own.
    only_new = BatchSpec.of_lengths(((longest, 0), (2, 1), (longest, 0)))
    mixed = BatchSpec.of_lengths([*((1, each - 1) for each in kv_len[2:6]), *lengths[6:]])
    return [decode, mixed] if job.kind is StepKind.DECODE else [extend, only_new, mixed]


def sets_of(job: TuneJob, num_tokens: int, apart: int) -> int:
    """Number of page sets of a step, so that a set has left the caches before it is read again."""
    problem = job.problem
    dims = problem.head_dim + (0 if "latent" in job.table.value else problem.v_head_dim)
    num_bytes = num_tokens * problem.num_kv_heads * dims * problem.page_format.encoding.dtype.itemsize
    return max(1, min(_MOST_SETS, -(-apart // num_bytes)))
