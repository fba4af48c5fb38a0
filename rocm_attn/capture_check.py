"""CaptureCheck: a fresh graph serves nobody before it has given what the eager run gives.

A graph is recorded and compared on probe requests: rows and pages that are free at the moment, filled with random K
and V, given back at the end. Nothing that a wrong graph has frozen then belongs to a request: what it bakes, and what
it finds left over in its buffers, aims at probe pages. Each replay is of another draw of lengths than the step before
it, and comes before the eager run of its own draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.graphs import shape_name
from rocm_attn.index_spaces import num_pages
from rocm_attn.numerics import BOUNDS
from rocm_attn.padding import PaddedShape, StepKind
from rocm_attn.plan import SMALLEST_KV_BUCKET, StepPlan
from rocm_attn.providers.contract import Baked
from rocm_attn.runtime import AttentionRuntime, Step
from rocm_attn.step_batch import Int32Array, StepBatch
from rocm_attn.target import Target

# Pages that are filled with random values at a time.
_FILL_PAGES = 512

Record = Callable[[Step], Callable[[], Tensor]]
Eager = Callable[[Step], Tensor]


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """What a check may cost.

    longest: tokens of the longest probe request; a length bucket above it is still met at its shortest length
    total:   about how many KV tokens the probe requests of one draw have together
    """

    longest: int
    total: int


def probe_limits(target: Target) -> ProbeLimits:
    """What a check may cost on a target."""
    if target.is_gpu:
        # 128k KV tokens of an 8B model are 17 GB over all layers: some 5 ms of reading a run on an MI300X or H200.
        return ProbeLimits(1 << 17, 1 << 17)
    # Triton's interpreter spends 10 ms on what a CPU does in 10 us.
    return ProbeLimits(32, 64) if target.arch == "interpreter" else ProbeLimits(256, 512)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of recording and checking one graph.

    failure: how it differs from the eager run; empty when it does not
    summary: what it was compared on
    seconds: spent on the comparison, recording not counted
    """

    failure: str
    summary: str
    seconds: float


class Check(Protocol):
    """Records a graph, and says whether it may serve."""

    def record(
        self,
        runtime: AttentionRuntime,
        plan: StepPlan,
        q_len: Int32Array,
        live: StepBatch | None,
        record: Record,
        eager: Eager,
    ) -> Verdict:
        """Stage steps of the plan, record the first one and judge the graph by the others.

        runtime: idle, and idle again afterwards; its table holds the same requests and as many free pages
        q_len:   int32 [num_seqs], new tokens of the sequences of some step with this plan
        live:    a step that waits to be run, whose requests may be used when there is no room for others
        record:  records a staged step, once; returns what replays it. Not called when there is no step to record
        eager:   runs a staged step
        """
        ...


class CaptureCheck:
    """Compares a fresh graph with the eager run of what was recorded.

    vocabulary: probe tokens have ids from 1 up to, but not including, this one; 0 is what pads have
    limits:     not given: by the target
    """

    def __init__(self, *, vocabulary: int = 3, limits: ProbeLimits | None = None, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._seed = seed

    def record(
        self,
        runtime: AttentionRuntime,
        plan: StepPlan,
        q_len: Int32Array,
        live: StepBatch | None,
        record: Record,
        eager: Eager,
    ) -> Verdict:
        """As Check.record: on probe requests, or on permutations of the live step where none can be admitted.

        The largest lengths are recorded, two ragged draws are compared, then the largest lengths.
        """
        started, recording_seconds = time.perf_counter(), 0.0
        trial = _Trial(runtime, plan, eager)
        limits = self._limits if self._limits is not None else probe_limits(runtime.target)
        with ProbeRequests(runtime, vocabulary=self._vocabulary, seed=self._seed) as probes:
            for batches in (probes.draws(plan, q_len, limits), _own_draws(live)):
                for batch in batches:
                    if trial.failure:
                        break
                    if trial.replay is None:
                        recording_seconds += trial.record(batch, record)
                    else:
                        trial.compare(batch)
                if trial.num_compared:
                    break
        return trial.verdict(time.perf_counter() - started - recording_seconds)


class NoCheck:
    """Trusts every graph. For tests of what a wrong graph does, and where each step is compared anyway."""

    def record(
        self,
        runtime: AttentionRuntime,
        plan: StepPlan,
        q_len: Int32Array,
        live: StepBatch | None,
        record: Record,
        eager: Eager,
    ) -> Verdict:
        """As Check.record, without any comparison."""
        trial = _Trial(runtime, plan, eager)
        with ProbeRequests(runtime, vocabulary=2, seed=0) as probes:
            batch = live if live is not None else next(probes.draws(plan, q_len, ProbeLimits(1, 1)), None)
            if batch is not None:
                trial.record(batch, record)
        return Verdict("", "not checked", 0.0)


NO_CHECK = NoCheck()


class _Trial:
    """One graph under test."""

    def __init__(self, runtime: AttentionRuntime, plan: StepPlan, eager: Eager) -> None:
        self.replay: Callable[[], Tensor] | None = None
        self.failure = ""
        self.num_compared = 0
        self._runtime = runtime
        self._plan = plan
        self._eager = eager
        self._most_seqs = self._longest = 0
        self._bitwise = True

    def record(self, batch: StepBatch, record: Record) -> float:
        """Record a step, if it has the plan; the seconds that took."""
        step = self._runtime.stage(batch, self._plan.shape.num_seqs)
        started = time.perf_counter()
        try:
            if step.plan is self._plan:
                self.replay = record(step)
        finally:
            self._runtime.end_step()
        return time.perf_counter() - started

    def compare(self, batch: StepBatch) -> None:
        """Replay a step and run it eagerly, if it has the plan."""
        assert self.replay is not None
        step = self._runtime.stage(batch, self._plan.shape.num_seqs)
        try:
            if step.plan is not self._plan:
                return
            # First the graph: the buffers still hold the step before, so what the graph forgets to fill shows.
            forget_new_tokens(self._runtime, batch)
            replayed = self.replay()[: batch.num_seqs].clone()
            wanted = self._eager(step)[: batch.num_seqs]
        finally:
            self._runtime.end_step()
        if not bool(wanted.isfinite().any()) and not bool(replayed.isfinite().any()):
            return  # what is no number agrees with anything that is none: that proves as little as pads would
        self.num_compared += 1
        self._most_seqs = max(self._most_seqs, batch.num_seqs)
        self._longest = max(self._longest, batch.max_kv_len)
        if not bitwise_equal(replayed, wanted):
            self._bitwise = False
            self.failure = self._difference(batch, replayed, wanted)

    def verdict(self, seconds: float) -> Verdict:
        """What came of it."""
        failure = self.failure
        if self.replay is not None and not self.num_compared:
            failure = (
                f"the graph of {shape_name(self._plan.shape)} could not be compared with the eager run: "
                "forward gives no finite number"
            )
        how = "bitwise" if self._bitwise else "within bounds"
        summary = (
            f"equal to eager {how} in {self.num_compared} draws of up to {self._most_seqs} sequences "
            f"and {self._longest} tokens"
        )
        return Verdict(failure, summary, seconds)

    def _difference(self, batch: StepBatch, replayed: Tensor, wanted: Tensor) -> str:
        wrong = rows_beyond_bounds(replayed, wanted)
        if not wrong:
            return ""
        lengths = f"{int(batch.kv_len.min())} to {batch.max_kv_len}"
        return (
            f"the graph of {shape_name(self._plan.shape)} differs from the eager run in rows "
            f"{', '.join(map(str, wrong[:8]))}{' ...' if len(wrong) > 8 else ''} of {batch.num_seqs} "
            f"(KV lengths {lengths}); look for a host value, an address or a missing refill that the graph has frozen"
        )


def forget_new_tokens(runtime: AttentionRuntime, batch: StepBatch) -> None:
    """Put K and V that show in place of those of a step's new tokens, which whoever runs the step has to store."""
    seq = np.repeat(np.arange(batch.num_seqs), batch.q_len)
    ends = np.cumsum(batch.q_len)
    kv_index = batch.kv_len[seq] - ends[seq] + np.arange(batch.num_tokens)
    page_size = runtime.table.page_size
    pages = runtime.table.entries_host[batch.rows[seq], kv_index // page_size]
    page, offset = (torch.from_numpy(x.astype(np.int64)).to(runtime.device) for x in (pages, kv_index % page_size))
    for pool, value in _kv_pages(runtime):
        pool.index_put_((page, offset), pool.new_tensor(value))


def _kv_pages(runtime: AttentionRuntime) -> list[tuple[Tensor, float]]:
    """K and V of every layer, [pages, page_size, kv_heads, head_dim | v_head_dim], with a value that shows.

    A K of 0 has a usual score whatever q is, so that a V of 10,000 is seen among 100,000 others.
    """
    shows = {"k_pages": 0.0, "v_pages": 1e4}
    named = ((name.rpartition("_")[0], pool) for name, pool in runtime.sealed_tensors().items())
    return [(pool, shows[side]) for side, pool in named if side in shows]


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same values, NaN in the same places."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def rows_beyond_bounds(one: Tensor, other: Tensor) -> list[int]:
    """Rows in which two tensors [rows, ...] lie further apart than two computations of the same result may.

    Values that are no numbers must agree exactly; the bounds are scaled by the root mean square of the others.
    """
    if one.shape != other.shape or one.dtype not in BOUNDS or one.dtype != other.dtype:
        return list(range(len(other))) if not bitwise_equal(one, other) else []
    bound, a, b = BOUNDS[one.dtype], one.double().flatten(1), other.double().flatten(1)
    finite = b.isfinite()
    scale = b[finite].square().mean().sqrt() if bool(finite.any()) else 0.0
    close = (a - b).abs() <= bound.atol * scale + bound.rtol * b.abs()
    same = (a == b) | (a.isnan() & b.isnan())
    wrong: list[int] = (~torch.where(finite, close, same)).any(1).nonzero().flatten().tolist()
    return wrong


class ProbeRequests:
    """Requests with random content on rows and pages that nobody holds; given back when the context ends."""

    def __init__(self, runtime: AttentionRuntime, *, vocabulary: int, seed: int) -> None:
        self._runtime = runtime
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)
        self._generator = torch.Generator(runtime.device).manual_seed(seed)
        self._rows: list[int] = []
        self._filled: set[int] = set()

    def __enter__(self) -> ProbeRequests:
        return self

    def __exit__(self, *exception: object) -> None:
        self.free()

    def free(self) -> None:
        """Give the rows and pages back."""
        while self._rows:
            self._runtime.table.free(self._rows.pop())

    def admit(self, kv_len: Sequence[int], q_len: Sequence[int]) -> StepBatch:
        """A step of new requests in place of the earlier ones. Raises CapacityExceeded, OutOfPages.

        All share the pages of the one with the fewest new tokens among the longest, up to their own new tokens: a
        prefix is as long as it may be and costs its pages once.
        """
        self.free()
        table, page_size = self._runtime.table, self._runtime.table.page_size
        base = max(range(len(kv_len)), key=lambda seq: (kv_len[seq] - q_len[seq], -q_len[seq]))
        rows = [0] * len(kv_len)
        rows[base] = self._keep(table.admit())
        table.reserve(rows[base], kv_len[base])
        for seq in range(len(kv_len)):
            if seq != base:
                # Whole pages only, and none that a new token goes to: two sequences would write to it.
                rows[seq] = self._keep(table.fork(rows[base], (kv_len[seq] - q_len[seq]) // page_size * page_size))
                table.reserve(rows[seq], kv_len[seq])
        self._fill({int(page) for row in rows for page in table.pages_of(row)})
        token_ids = self._random.integers(1, self._vocabulary, sum(q_len))
        return StepBatch(*(np.array(values, np.int32) for values in (rows, kv_len, q_len, token_ids)))

    def draws(self, plan: StepPlan, q_len: Int32Array, limits: ProbeLimits) -> Iterator[StepBatch]:
        """Steps that have the plan: the largest lengths, two ragged draws, the largest lengths again.

        q_len: new tokens of the sequences of such a step; a decode step may have fewer sequences
        Nothing comes when too few rows or pages are free. Each step is gone when the next one is asked for.
        """
        room = _room(self._runtime, plan, q_len, limits)
        if room is None:
            return
        new = [int(tokens) for tokens in q_len[: room.num_seqs]]
        fewer = new[: (len(new) + 1) // 2] if plan.shape.kind is StepKind.DECODE else new
        yield self.admit(room.largest(new), new)
        yield self.admit(*self._ragged(room, new))
        yield self.admit(*self._ragged(room, fewer))
        yield self.admit(room.largest(new), new)

    def _ragged(self, room: _Room, q_len: Sequence[int]) -> tuple[list[int], list[int]]:
        """Lengths of every order of magnitude, one of them in the bucket's upper part; new tokens shuffled."""
        new = [int(tokens) for tokens in self._random.permutation(q_len)]
        most = room.usual(len(new), 2)
        drawn = np.exp(self._random.uniform(0, np.log(most + 1), len(new))).astype(int)
        kv_len = [max(tokens, min(int(length), most)) for tokens, length in zip(new, drawn, strict=True)]
        at = _fewest(new)
        upper = max(room.shortest_longest, room.longest // 2, new[at])
        kv_len[at] = int(self._random.integers(upper, room.longest + 1))
        return kv_len, new

    def _keep(self, row: int) -> int:
        self._rows.append(row)
        return row

    def _fill(self, pages: set[int]) -> None:
        """Random K and V, of standard deviation 1, in the pages that have none yet."""
        fresh = sorted(pages - self._filled)
        self._filled |= pages
        ids = torch.tensor(fresh, dtype=torch.long, device=self._runtime.device)
        for pool, _ in _kv_pages(self._runtime):
            for first in range(0, len(ids), _FILL_PAGES):
                some = ids[first : first + _FILL_PAGES]
                shape = (len(some), *pool.shape[1:])
                values = torch.randn(shape, generator=self._generator, device=pool.device, dtype=pool.dtype)
                pool.index_copy_(0, some, values)


@dataclass(frozen=True, slots=True)
class _Room:
    """What probe requests may be.

    num_seqs:         sequences of a draw
    longest:          tokens of the longest
    shortest_longest: tokens that the longest must have, or the plan is another
    total:            KV tokens of a draw
    """

    num_seqs: int
    longest: int
    shortest_longest: int
    total: int

    def usual(self, num_seqs: int, times: int) -> int:
        """A length that num_seqs sequences may have on average, times over."""
        return max(1, min(self.longest, times * self.total // num_seqs))

    def largest(self, q_len: Sequence[int]) -> list[int]:
        """The largest lengths for sequences with these new tokens."""
        kv_len = [max(tokens, self.usual(len(q_len), 1)) for tokens in q_len]
        kv_len[_fewest(q_len)] = self.longest
        return kv_len


def _fewest(q_len: Sequence[int]) -> int:
    """The sequence with the fewest new tokens."""
    return min(range(len(q_len)), key=q_len.__getitem__)


def _room(runtime: AttentionRuntime, plan: StepPlan, q_len: Int32Array, limits: ProbeLimits) -> _Room | None:
    """What fits into the free rows and pages, or None when no step of the plan does."""
    table, page_size = runtime.table, runtime.table.page_size
    bakes = {b for s in runtime.selections for kernel in s.kernels.values() for b in kernel.row.bakes}
    low = _shortest_of_bucket(plan.key.max_kv_len) if Baked.MAX_KV_LEN in bakes else 0
    needed = max(low, int(q_len.max(initial=0)), 1)
    bound = min(plan.key.max_kv_len, table.max_kv_len, max(limits.longest, needed))
    num_seqs = min(len(q_len), table.num_free_rows)
    if plan.shape.kind is not StepKind.DECODE and num_seqs < len(q_len):
        return None
    while num_seqs > 0:
        own_pages = num_pages(q_len[:num_seqs], page_size) + 1
        # The longest one's pages are those that the others share.
        left = table.num_free_pages - int(own_pages.sum() - own_pages.min())
        longest = min(bound, left * page_size)
        if longest >= needed:
            return _Room(num_seqs, longest, low, limits.total)
        num_seqs = num_seqs // 2 if plan.shape.kind is StepKind.DECODE else 0
    return None


def _shortest_of_bucket(max_kv_len: int) -> int:
    """The shortest length that falls into a length bucket."""
    return 0 if max_kv_len <= SMALLEST_KV_BUCKET else (1 << (max_kv_len - 1).bit_length() - 1) + 1


def _own_draws(live: StepBatch | None) -> Iterator[StepBatch]:
    """The live step, half of it, the whole in another order, and itself again.

    All write K and V of its own new tokens only, which it writes itself afterwards.
    """
    if live is None or live.num_seqs == 0:
        return
    order = np.arange(live.num_seqs)
    yield live
    if live.num_seqs > 1:
        yield _select(live, order[: (live.num_seqs + 1) // 2][::-1])
        yield _select(live, np.roll(order[::-1], 1))
    yield live


def _select(batch: StepBatch, order: npt.NDArray[np.int_]) -> StepBatch:
    """The sequences of a batch at these places, in this order."""
    token_ids = batch.token_ids
    if len(token_ids):
        parts = np.split(token_ids, np.cumsum(batch.q_len)[:-1])
        token_ids = np.concatenate([parts[seq] for seq in order])
    return StepBatch(batch.rows[order], batch.kv_len[order], batch.q_len[order], token_ids)


def typical_q_len(shape: PaddedShape, *, max_seqs: int, max_kv_len: int) -> Int32Array | None:
    """New tokens of the sequences of a step that is padded to shape, or None where there is no such step.

    max_seqs: sequences that the step may have; they are fewer than the padded ones where requests are few
    """
    num_seqs, num_tokens = min(shape.num_seqs, max_seqs), shape.num_tokens
    if num_seqs == 0:
        return None
    if shape.kind is StepKind.DECODE:
        return np.ones(num_seqs, np.int32)
    if shape.kind is StepKind.EXTEND:
        q_len = _even(num_tokens, min(num_seqs, num_tokens // 2))
    else:
        # As in serving: every sequence decodes, but for the one that brings a prompt.
        num_seqs = min(num_seqs, num_tokens - 1)
        q_len = [1] * (num_seqs - 1) + [num_tokens - num_seqs + 1]
    if not q_len or max(q_len) > max_kv_len or (shape.kind is StepKind.MIXED and len(q_len) < 2):
        return None
    return np.array(q_len, np.int32)


def _even(num_tokens: int, num_seqs: int) -> list[int]:
    if num_seqs == 0:
        return []
    share, rest = divmod(num_tokens, num_seqs)
    return [share + 1] * rest + [share] * (num_seqs - rest)


def plan_of(runtime: AttentionRuntime, shape: PaddedShape, q_len: Int32Array) -> StepPlan | None:
    """The plan of a step with these new tokens and nothing before them, or None when rows or pages are short."""
    wanted = int(num_pages(q_len, runtime.table.page_size).sum())
    if len(q_len) > runtime.table.num_free_rows or wanted > runtime.table.num_free_pages:
        return None
    rows = [runtime.table.admit() for _ in q_len]
    try:
        for row, tokens in zip(rows, q_len.tolist(), strict=True):
            runtime.table.reserve(row, tokens)
        step = runtime.stage(StepBatch(np.array(rows, np.int32), q_len, q_len), shape.num_seqs)
        runtime.end_step()
        return step.plan
    finally:
        _free_all(runtime, rows)


def _free_all(runtime: AttentionRuntime, rows: Iterable[int]) -> None:
    for row in reversed(list(rows)):
        runtime.table.free(row)
