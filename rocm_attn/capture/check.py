"""CaptureCheck: a fresh graph serves no step before it has given what the eager run gives.

A graph is recorded and compared on probe requests: rows and pages that are free at the moment, filled with random K
and V, given back at the end. Nothing that a wrong graph has frozen then belongs to a request: what it bakes, and what
it finds left over in its buffers, aims at probe pages. Each replay is of another draw of lengths than the step before
it, and comes before the eager run of its own draw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.inputs import HOST_INPUTS
from rocm_attn.batch.mask import StepMask, TreeMask
from rocm_attn.batch.padding import PaddedShape, fits
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.capture.graphs import shape_name
from rocm_attn.capture.probe_requests import (
    ProbeLimits,
    ProbeRequests,
    forget_new_tokens,
    has_room,
    kept_new_tokens,
    probe_limits,
    stored_new_tokens,
)
from rocm_attn.oracle.numerics import BOUNDS, error_parts
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.outputs import Outputs, PerToken, leaves_of, real_rows, structure_of
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.step import Step

Record = Callable[[Step], Callable[[], Outputs]]
Eager = Callable[[Step], Outputs]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of recording and checking one graph.

    failure: how it differs from the eager run; empty when it does not
    summary: what it was compared on
    seconds: spent on the comparison, recording not counted
    bitwise: whether it gave bitwise what the eager run gave; a graph that is not refused may lie within bounds of it
    """

    failure: str
    summary: str
    seconds: float
    bitwise: bool


class Check(Protocol):
    """Records a graph, and says whether it may serve."""

    def has_steps(self, runtime: AttentionRuntime, plan: StepPlan, q_len: Int32Array, live: StepBatch | None) -> bool:
        """Whether there is a step to record now. Arguments as in record()"""
        ...

    def record(
        self,
        runtime: AttentionRuntime,
        plan: StepPlan,
        q_len: Int32Array,
        live: StepBatch | None,
        record: Record[Outputs],
        eager: Eager[Outputs],
    ) -> Verdict:
        """Stage steps of the plan, record the first one and judge the graph by the others.

        runtime: idle, and idle again afterwards; its table holds the same requests and as many free pages
        q_len:   int32 [num_seqs], new tokens of the sequences of some step with this plan
        live:    a step that waits to be run, whose requests may be used when there is no room for others; one without
                 sequences where other ranks make their graphs too
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
        record: Record[Outputs],
        eager: Eager[Outputs],
    ) -> Verdict:
        """As Check.record: on probe requests, or on permutations of the live step where none can be admitted.

        The largest lengths are recorded, two ragged draws are compared, then the largest lengths. Whatever is drawn and
        whatever comes of it, as many steps run: on other ranks too, whose requests are others.
        """
        started, recording_seconds = time.perf_counter(), 0.0
        trial = _Trial(runtime, plan, eager)
        inputs = HOST_INPUTS if live is None else live.inputs
        with ProbeRequests(runtime, vocabulary=self._vocabulary, seed=self._seed, inputs=inputs) as probes:
            if has_room(runtime, plan, q_len, self._limits_on(runtime)):
                recording_seconds += trial.of_draws(probes.draws(plan, q_len, self._limits_on(runtime)), record)
            elif live is not None and _can_be_drawn(live):
                trial.of = " of the step itself"
                with kept_new_tokens(runtime, live):
                    recording_seconds += trial.of_draws(_own_draws(live, plan.shape), record)
        return trial.verdict(time.perf_counter() - started - recording_seconds)

    def has_steps(self, runtime: AttentionRuntime, plan: StepPlan, q_len: Int32Array, live: StepBatch | None) -> bool:
        """As Check.has_steps."""
        has_own = live is not None and _can_be_drawn(live)
        return has_own or has_room(runtime, plan, q_len, self._limits_on(runtime))

    def _limits_on(self, runtime: AttentionRuntime) -> ProbeLimits:
        return self._limits if self._limits is not None else probe_limits(runtime.target)


_SHORTEST = ProbeLimits(1, 1)


class NoCheck:
    """Trusts every graph. For tests of what a wrong graph does, and where each step is compared anyway."""

    def record(
        self,
        runtime: AttentionRuntime,
        plan: StepPlan,
        q_len: Int32Array,
        live: StepBatch | None,
        record: Record[Outputs],
        eager: Eager[Outputs],
    ) -> Verdict:
        """As Check.record, without any comparison."""
        trial = _Trial(runtime, plan, eager)
        inputs = HOST_INPUTS if live is None else live.inputs
        with ProbeRequests(runtime, vocabulary=2, seed=0, inputs=inputs) as probes:
            batch = live if live is not None else next(probes.draws(plan, q_len, _SHORTEST), None)
            if batch is not None:
                trial.record(batch, record)
        return Verdict("", "not checked", 0.0, bitwise=True)

    def has_steps(self, runtime: AttentionRuntime, plan: StepPlan, q_len: Int32Array, live: StepBatch | None) -> bool:
        """As Check.has_steps."""
        return live is not None or has_room(runtime, plan, q_len, _SHORTEST)


NO_CHECK = NoCheck()


class _Trial(Generic[Outputs]):
    """One graph under test. of: whose requests it is tried on, in words; empty for probe requests."""

    def __init__(self, runtime: AttentionRuntime, plan: StepPlan, eager: Eager[Outputs]) -> None:
        self.replay: Callable[[], Outputs] | None = None
        self.failure = self.of = ""
        self.num_compared = 0
        self._runtime = runtime
        self._plan = plan
        self._eager = eager
        self._most_seqs = self._longest = 0
        self._bitwise = True
        self._had_sequences = False

    def of_draws(self, batches: Iterable[StepBatch], record: Record[Outputs]) -> float:
        """Record the first step, and compare the others; the seconds that recording took."""
        seconds = 0.0
        for batch in batches:  # all of them: ranks run the same steps, also where only one has found a difference
            if self.replay is None:
                seconds += self.record(batch, record)
            else:
                self.compare(batch)
        return seconds

    def record(self, batch: StepBatch, record: Record[Outputs]) -> float:
        """Record a step; the seconds that took."""
        step = self._runtime.stage(batch, self._plan)
        started = time.perf_counter()
        try:
            self.replay = record(step)
        finally:
            self._runtime.end_step()
        return time.perf_counter() - started

    def compare(self, batch: StepBatch) -> None:
        """Replay a step and run it eagerly. The first difference counts."""
        assert self.replay is not None
        step = self._runtime.stage(batch, self._plan)
        try:
            # First the graph: the buffers still hold the step before, so what the graph forgets to fill shows.
            forget_new_tokens(self._runtime, batch)
            replayed = self._result(batch, self.replay())
            wanted = self._result(batch, self._eager(step))
        finally:
            self._runtime.end_step()
        self._had_sequences |= batch.num_seqs > 0
        if not wanted.has_number and not replayed.has_number:
            return  # NaN equals NaN here: as with pads, nothing is proved by it
        self.num_compared += 1
        self._most_seqs = max(self._most_seqs, batch.num_seqs)
        self._longest = max(self._longest, batch.max_kv_len)
        if not replayed.is_bitwise(wanted):
            self._bitwise = False
            self.failure = self.failure or self._difference(batch, replayed, wanted)

    def _result(self, batch: StepBatch, outputs: Outputs) -> _Result:
        """What a run of a step gave, without pads; of a forward that returns no tensor, the K and V that it stored."""
        tensors = tensors_of(real_rows(outputs, batch.num_seqs, batch.num_fed))
        if not tensors:
            tensors = stored_new_tokens(self._runtime, batch)
        return _Result(structure_of(outputs), {path: tensor.clone() for path, tensor in tensors.items()})

    def verdict(self, seconds: float) -> Verdict:
        """What came of it."""
        failure = self.failure
        if self.replay is not None and not self.num_compared and self._had_sequences:
            failure = (
                f"the graph of {shape_name(self._plan.shape)} could not be compared with the eager run: "
                "forward gives no finite number"
            )
        how = "bitwise" if self._bitwise else "within bounds"
        summary = (
            f"equal to eager {how} in {self.num_compared} draws of up to {self._most_seqs} sequences "
            f"and {self._longest} tokens{self.of}"
        )
        if not self._had_sequences:
            summary = "not compared: the step has no sequences here, and no others could be admitted"
        return Verdict(failure, summary, seconds, self._bitwise)

    def _difference(self, batch: StepBatch, replayed: _Result, wanted: _Result) -> str:
        if replayed.structure != wanted.structure:
            return (
                f"forward returned {replayed.structure} when the graph of {shape_name(self._plan.shape)} was made, and "
                f"{wanted.structure} when it ran eagerly; it must return one tree in all steps of a padded shape"
            )
        for path, wanted_rows in wanted.tensors.items():
            wrong = rows_beyond_bounds(replayed.tensors[path], wanted_rows)
            if wrong:
                lengths = f"{int(batch.kv_len.min())} to {batch.max_kv_len}"
                return (
                    f"the graph of {shape_name(self._plan.shape)} differs from the eager run in rows "
                    f"{', '.join(map(str, wrong[:8]))}{' ...' if len(wrong) > 8 else ''} of {len(wanted_rows)}"
                    f"{f' of {path}' if path else ''} (KV lengths {lengths}); "
                    "look for a host value, an address or a missing refill that the graph has frozen"
                )
        return ""


@dataclass(frozen=True, slots=True)
class _Result:
    """What a run of a step gave.

    structure: of forward's outputs, in words
    tensors:   what is compared, by where it is in the outputs
    """

    structure: str
    tensors: dict[str, Tensor]

    @property
    def has_number(self) -> bool:
        """Whether a finite number is among them. Ids that were picked from NaN are none, so integers count alone."""
        floats = [tensor for tensor in self.tensors.values() if tensor.is_floating_point()]
        return any(bool(tensor.isfinite().any()) for tensor in floats or self.tensors.values())

    def is_bitwise(self, other: _Result) -> bool:
        """Whether the other is the same, bit for bit."""
        return self.structure == other.structure and all(
            bitwise_equal(tensor, other.tensors[path]) for path, tensor in self.tensors.items()
        )


def tensors_of(outputs: object) -> dict[str, Tensor]:
    """The tensors of a forward's outputs, each by where it is in them."""
    return {
        path: leaf.tensor if isinstance(leaf, PerToken) else leaf
        for path, leaf in leaves_of(outputs)
        if leaf is not None
    }


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
    flat = len(one), math.prod(one.shape[1:])
    a, b = one.double().reshape(flat), other.double().reshape(flat)
    finite = b.isfinite()
    size = b[finite].square().mean().sqrt() if bool(finite.any()) else 0.0
    far = (error_parts(a, b, BOUNDS[one.dtype].out, size=size) > 1) & ~(a.isnan() & b.isnan())
    wrong: list[int] = far.any(1).nonzero().flatten().tolist()
    return wrong


def _can_be_drawn(live: StepBatch) -> bool:
    """Of a step that gives bounds in place of its new tokens, the host does not know which they are; a mask is packed
    for its own step alone, but for one of trees. A step without sequences is like any other one."""
    return live.num_seqs == 0 or (live.inputs.q_len_on_host and not isinstance(live.mask, StepMask))


def _own_draws(live: StepBatch, shape: PaddedShape) -> Iterator[StepBatch]:
    """The live step, half of it, the whole in another order, and itself again; as many as probe requests draw.

    All write K and V of its own new tokens only. In halves another order may need more room than there is: then the
    step itself comes in its place.
    """
    order = np.arange(live.num_seqs)
    yield live
    for other in (order[: (live.num_seqs + 1) // 2][::-1].copy(), np.roll(order[::-1], 1)):
        drawn = _select(live, other) if live.num_seqs > 1 else live
        yield drawn if fits(drawn, shape) else live
    yield live


def _select(batch: StepBatch, order: npt.NDArray[np.int_]) -> StepBatch:
    """The sequences of a batch at these places, in this order."""
    fed = batch.q_len // batch.drafts.steps
    ends = np.cumsum(fed)
    places = np.concatenate([np.arange(ends[seq] - fed[seq], ends[seq]) for seq in order])
    token_ids = batch.token_ids[places] if len(batch.token_ids) else batch.token_ids
    mask = batch.mask
    if isinstance(mask, TreeMask):
        mask = TreeMask(mask.parents[torch.from_numpy(order).to(mask.device)])
    return StepBatch(
        batch.rows[order],
        batch.kv_len[order],
        batch.q_len[order],
        token_ids,
        inputs=batch.inputs.select(order, places),
        mask=mask,
        prefixes=batch.prefixes.select(order),
        drafts=batch.drafts,
    )
