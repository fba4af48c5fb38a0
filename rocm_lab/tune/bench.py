"""Runs candidates: the kernel that select() binds with their tiles, over random pages, on this machine's device.

A candidate is judged on steps whose lengths lie around the edges of pages and tiles, with and without cached tokens,
for every kind of step that its row would serve, and on the shapes that are timed. Then it is timed on those, over sets
of pages that no cache holds at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.launch import note_launches
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles
from rocm_attn.kernels.tuning.measured import Provenance, Tiles
from rocm_attn.kernels.tuning.tiles import ANY_ROWS, ExtendTiles
from rocm_attn.machine.devices import wait_for_device
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.by_tokens import KernelByTokens
from rocm_attn.providers.contract import BoundKernel
from rocm_attn.providers.select import select
from rocm_lab.bench.clocks import Clock, Timed
from rocm_lab.bench.machine import INFINITY_CACHE_BYTES
from rocm_lab.tune.data import StepLengths, TuneData
from rocm_lab.tune.jobs import TuneJob
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

    lengths: StepLengths
    sets: int
    is_edge: bool
    other: bool

    def random(self, problem: Problem, device: torch.device) -> TuneData:
        """The step with random data."""
        return TuneData.random(problem, self.lengths, sets=self.sets, device=device, lse=self.other)

    def empty(self, problem: Problem) -> TuneData:
        """The step without data, on the CPU."""
        return TuneData.empty(problem, self.lengths, sets=self.sets, device=torch.device("cpu"), lse=self.other)


@dataclass(frozen=True, slots=True)
class JobSteps:
    """The steps of a job.

    edges: steps that every candidate is judged on, for any timed shapes
    apart: bytes of K and V that lie between two uses of a page of a timed step
    """

    edges: Callable[[TuneJob], list[StepLengths]]
    apart: int = _PAST_CACHES

    def of(self, job: TuneJob) -> list[StepSizes]:
        """The timed steps, then the edges: first those of kinds that are timed."""
        timed = [StepLengths.of(shape) for shape in job.shapes]
        kinds = {each.kind for each in timed}
        sizes = [StepSizes(each, sets_of(job, sum(each.kv_len), self.apart), False, False) for each in timed]
        edges = [StepSizes(each, 1, True, each.kind not in kinds) for each in self.edges(job)]
        return sizes + sorted(edges, key=lambda step: step.other)


class LayerBench:
    """Judges and times candidates on a device. clock: of the device; steps: makes the steps of a job"""

    def __init__(self, device: torch.device, target: Target, clock: Clock, steps: JobSteps) -> None:
        self._device, self._target, self._clock, self._steps = device, target, clock, steps
        self._job: TuneJob | None = None
        self._edges: list[TuneData] = []
        self._others: list[TuneData] = []
        self._timed: list[TuneData] = []
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

    def _judged(self, job: TuneJob, tiles: Tiles, steps: Sequence[TuneData]) -> Judged:
        spilled = 0
        for data in steps:
            every = range(len(data.lengths.q_len))
            # Timed steps have the most keys: their first and last sequences are compared.
            wrong, spills = self._run(job, tiles, data, sorted({0, every[-1]} if data in self._timed else every))
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

    def _run(self, job: TuneJob, tiles: Tiles, data: TuneData, seqs: Sequence[int]) -> tuple[str, int]:
        """Runs a candidate on a step. Returns what is wrong with it, and the number of registers that it spills."""
        kernel = kernel_of(job, tiles, data, self._target)
        if not any(str(bound) in kernel.describe() for bound in _as_bound(tiles)):
            name = kernel.describe().partition("(")[0]
            return f"{name} serves these steps, and its tiles are not searched", 0
        try:
            with note_launches() as notes:
                layer = data.runs(kernel)[0]
                data.out.fill_(float("nan"))
                layer.attend()
                self._wait()
        except Exception as failure:
            self._check_device(failure)
            text = (str(failure).strip() or type(failure).__name__).splitlines()[0]
            return f"does not compile or run: {text}", 0
        spilled = max((getattr(launch.compiled, "n_spills", 0) or 0 for launch in notes.launches), default=0)
        return data.wrong(seqs), spilled

    def _samples(self, job: TuneJob, tiles: Tiles) -> Iterator[Timed]:
        for data in self._timed:
            runs = data.runs(kernel_of(job, tiles, data, self._target))
            yield self._clock.timed([layer.attend for layer in runs])

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


def kernel_of(job: TuneJob, tiles: Tiles, data: TuneData, target: Target) -> BoundKernel:
    """The kernel that would serve a step of the layer if these tiles were measured."""
    problem = replace(job.problem, wants_lse=data.lse is not None)
    selection = select(problem, replace(target, measured=(job.choice(tiles, _ON_TRIAL),)), "triton")
    bound = selection.kernel(data.lengths.kind).bound
    return bound.of_shape(data.bounds.shape) if isinstance(bound, KernelByTokens) else bound


def edges_of(job: TuneJob) -> list[StepLengths]:
    """Steps whose sequences end around the edges of pages and key blocks, of every kind that the row serves."""
    page = job.problem.page_size
    kv_len = (1, 2, page, page + 1, 63, 64, 65, 129, 300, 777)
    decode = StepLengths(kv_len, (1,) * len(kv_len))
    # Enough new tokens that no step is one of those with fewer, which have rows of their own.
    # Mixed steps count: a chunk in them is as long as any.
    most_short = _MOST_SHORT // job.problem.gqa_ratio + 1
    least = 2 * min(most_short, *(max(StepLengths.of(shape).q_len) for shape in job.shapes))
    longest = max(48, least) if job.max_rows == ANY_ROWS else max(2, job.max_rows // job.problem.gqa_ratio)
    new = tuple(max(2, longest - seq % 3) if seq % 4 else 2 for seq in range(len(kv_len)))
    extend = StepLengths(tuple(kv + n for kv, n in zip(kv_len, new, strict=True)), new)
    only_new = StepLengths((longest, 2, longest), (longest, 2, longest))
    mixed = StepLengths((*kv_len[2:6], *extend.kv_len[6:]), (*(1,) * 4, *new[6:]))
    return [decode, mixed] if job.kind is StepKind.DECODE else [extend, only_new, mixed]


def sets_of(job: TuneJob, num_tokens: int, apart: int) -> int:
    """Number of page sets of a step, so that a set has left the caches before it is read again."""
    problem = job.problem
    dims = problem.head_dim + (0 if "latent" in job.table.value else problem.v_head_dim)
    num_bytes = num_tokens * problem.num_kv_heads * dims * problem.page_format.encoding.dtype.itemsize
    return max(1, min(_MOST_SETS, -(-apart // num_bytes)))
