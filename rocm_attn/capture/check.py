"""CaptureCheck: compares each new graph with the eager run before it may serve a step.

A graph is captured and compared on probe requests, which have pages of their own. So values that a wrong graph has
baked in, or finds left over in its buffers, never refer to a real request. Each replay has other lengths than the step
before it, and runs before the eager run that it is compared with, so stale results cannot pass.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.mask import StepMask, TokenSpans, TreeMask
from rocm_attn.batch.padding import PaddedShape, fits
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import Graph, shape_name
from rocm_attn.capture.probe_requests import (
    GraphCandidate,
    ProbeLengths,
    ProbeLimits,
    ProbeRequests,
    forget_new_tokens,
    has_sound_inputs,
    kept_new_tokens,
    room_for,
    stored_new_tokens,
)
from rocm_attn.machine.settings import whole_number
from rocm_attn.oracle.numerics import BOUNDS, error_parts
from rocm_attn.step.outputs import Outputs, PerToken, leaves_of, real_rows, structure_of
from rocm_attn.step.step import Step

# Why steps without any finite result prove nothing.
NO_NUMBERS = "forward returns only NaN or infinity"
# Faults of a graph, by name; see CapturedGraph.
Wrong = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CapturedGraph(Generic[Outputs]):
    """The result of recording and checking one graph.

    graph:   the recorded graph; None if recording was refused
    summary: the steps that it was compared on
    seconds: spent on the comparison, recording not counted
    wrong:   the faults found, by name; empty if the results were bitwise those of the eager run. failure: it may not
             serve; raised: forward has raised while it was recorded, or has stored NaN, or NO_NUMBERS of a live step;
             inexact: it lies within the bounds of the eager run; over: the check was broken off, and nothing more is
             tried
    """

    graph: Graph[Outputs] | None
    summary: str
    seconds: float
    wrong: Wrong


# Records a staged step once.
Record = Callable[[Step], Graph[Outputs]]
Eager = Callable[[Step], Outputs]


class CaptureCheck:
    """Compares a new graph with the eager run of the same steps.

    vocabulary: probe tokens have ids from 1 to vocabulary - 1; padding has 0
    limits:     bounds of the difference; default: those of the target

    Raises BadSetting.
    """

    def __init__(self, *, vocabulary: int = 3, limits: ProbeLimits | None = None, seed: int = 0) -> None:
        self._vocabulary = whole_number("vocabulary", vocabulary, least=1)
        self._limits = limits
        self._seed = whole_number("seed", seed, least=0)

    def has_steps(self, candidate: GraphCandidate) -> bool:
        """True if there is a step to capture now. A live step with faulty inputs is not used."""
        live, has_room = candidate.live, self._room(candidate) is not None
        # Without new tokens there may be no output to compare.
        return (has_room and bool(candidate.q_len.any())) or (
            live is not None and _can_be_drawn(live) and has_sound_inputs(candidate)
        )

    def record(
        self, candidate: GraphCandidate, record: Record[Outputs], eager: Eager[Outputs]
    ) -> CapturedGraph[Outputs]:
        """Captures a step of a candidate that has_steps(), and checks the graph on others. eager: runs a staged step.

        The steps are probe requests, or permutations of the live step if no probe can be admitted. The capture has the
        largest lengths; two steps of random lengths are compared, then the largest lengths. The number of steps does
        not depend on the result, because the other ranks run as many.
        """
        trial, room, live = _Trial(candidate, record, eager), self._room(candidate), candidate.live
        if room is not None:
            with self._requests(candidate) as probes:
                return trial.run(probes.draws(candidate, room), "")
        assert live is not None, "a check has steps before it runs"
        with kept_new_tokens(candidate.runtime, live):
            return trial.run(_own_draws(live, candidate.plan.shape), " of the step itself")

    def _room(self, candidate: GraphCandidate) -> ProbeLengths | None:
        return room_for(candidate, self._limits or ProbeLimits.of(candidate.runtime.target))

    def _requests(self, candidate: GraphCandidate) -> ProbeRequests:
        return ProbeRequests(candidate.runtime, vocabulary=self._vocabulary, seed=self._seed, live=candidate.live)


class NoCheck(CaptureCheck):
    """Trusts every graph without a comparison. For tests of wrong graphs, and for callers that compare each step."""

    def __init__(self) -> None:
        super().__init__(limits=ProbeLimits(1, 1))

    def has_steps(self, candidate: GraphCandidate) -> bool:
        return candidate.live is not None or self._room(candidate) is not None

    def record(
        self, candidate: GraphCandidate, record: Record[Outputs], eager: Eager[Outputs]
    ) -> CapturedGraph[Outputs]:
        trial, live, room = _Trial(candidate, record, eager), candidate.live, self._room(candidate)
        with self._requests(candidate) as probes:
            batch = next(probes.draws(candidate, room)) if live is None and room is not None else live
            assert batch is not None, "a check has steps before it runs"
            return CapturedGraph(trial.record(batch), "not checked", 0.0, {})


NO_CHECK = NoCheck()


class _Trial(Generic[Outputs]):
    """One graph under test."""

    def __init__(self, candidate: GraphCandidate, record: Record[Outputs], eager: Eager[Outputs]) -> None:
        self._runtime = candidate.runtime
        self._plan = candidate.plan
        self._record = record
        self._eager = eager
        self._num_compared = self._most_seqs = self._longest = 0
        self._wrong: dict[str, str] = {}
        self._had_sequences = False

    def run(self, batches: Iterator[StepBatch], of: str) -> CapturedGraph[Outputs]:
        """Records the first step and compares the others. of: whose requests they are, in words"""
        started = time.perf_counter()
        graph = self.record(next(batches))
        for batch in batches:  # all of them: ranks run the same steps, even if only one has found a difference
            self._compare(graph, batch)
        return self._verdict(graph, time.perf_counter() - started - graph.seconds, of)

    def record(self, batch: StepBatch) -> Graph[Outputs]:
        """Records the graph of a step."""
        with self._runtime.stage(batch, self._plan) as step:
            return self._record(step)

    def _compare(self, graph: Graph[Outputs], batch: StepBatch) -> None:
        """Replays a step and runs it eagerly. The first difference is kept."""
        with self._runtime.stage(batch, self._plan) as step:
            # The graph runs first: the buffers still hold the step before, so values that it does not fill show.
            forget_new_tokens(self._runtime, batch)
            graph.recording.replay()
            replayed, made = self._tensors(batch, graph.outputs), structure_of(graph.outputs)
            outputs = self._eager(step)
            wanted, now = self._tensors(batch, outputs), structure_of(outputs)
        self._had_sequences |= batch.num_seqs > 0
        if not _has_number(wanted) and not _has_number(replayed):
            return  # NaN equals NaN here, so this proves nothing, like a comparison of pads
        self._num_compared += 1
        self._most_seqs = max(self._most_seqs, batch.num_seqs)
        self._longest = max(self._longest, batch.max_kv_len)
        if made != now:
            difference = (
                f"forward returned {made} when the graph of {shape_name(self._plan.shape)} was made, and {now} when "
                "it ran eagerly; it must return the same structure in all steps of a padded shape"
            )
        elif all(bitwise_equal(replayed[path], rows) for path, rows in wanted.items()):
            return
        else:
            difference = self._difference(batch, replayed, wanted)
        self._wrong["inexact"] = "it differs"
        if difference:
            self._wrong.setdefault("failure", difference)

    def _tensors(self, batch: StepBatch, outputs: Outputs) -> dict[str, Tensor]:
        """Copies of a run's outputs, without pads; if forward returns no tensor, the K and V that it stored."""
        tensors = tensors_of(real_rows(outputs, batch.num_seqs, batch.num_fed))
        return {path: rows.clone() for path, rows in (tensors or stored_new_tokens(self._runtime, batch)).items()}

    def _difference(self, batch: StepBatch, replayed: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
        """The first tensor that is beyond its bounds, in words."""
        for path, wanted_rows in wanted.items():
            wrong = rows_beyond_bounds(replayed[path], wanted_rows)
            if wrong:
                return (
                    f"the graph of {shape_name(self._plan.shape)} differs from the eager run in rows "
                    f"{', '.join(map(str, wrong[:8]))}{' ...' if len(wrong) > 8 else ''} of "
                    f"{len(wanted_rows)}{f' of {path}' if path else ''} (KV lengths {int(batch.kv_len.min())} to "
                    f"{batch.max_kv_len}); look for a host value, an address or a buffer that is not refilled, "
                    "frozen in the graph"
                )
        return ""

    def _verdict(self, graph: Graph[Outputs], seconds: float, of: str) -> CapturedGraph[Outputs]:
        how = "within bounds" if self._wrong else "bitwise"
        summary = (
            f"equal to the eager run {how} in {self._num_compared} random batches of up to {self._most_seqs} "
            f"sequences and {self._longest} tokens{of}"
        )
        if not self._had_sequences:
            summary = "not compared: the step has no sequences here, and no others could be admitted"
        elif not self._num_compared:
            why = f"cannot be compared with the eager run: {NO_NUMBERS}"
            # In a live step it may be a request's fault. So another step may show more, as after a forward that raised.
            self._wrong["raised" if of else "failure"] = f"the graph of {shape_name(self._plan.shape)} {why}"
        return CapturedGraph(graph, summary, seconds, self._wrong)


def _has_number(tensors: Mapping[str, Tensor]) -> bool:
    """True if a finite number is among them. Ids may be picked from NaN, so integers count only without floats."""
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return any(bool(tensor.isfinite().any()) for tensor in floats or tensors.values())


def tensors_of(outputs: object) -> dict[str, Tensor]:
    """The tensors of a forward's outputs, each by its path in them."""
    return {
        path: leaf.tensor if isinstance(leaf, PerToken) else leaf
        for path, leaf in leaves_of(outputs)
        if leaf is not None
    }


def bitwise_equal(one: Tensor, other: Tensor) -> bool:
    """True if two tensors hold the same values, NaN in the same places."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def rows_beyond_bounds(one: Tensor, other: Tensor) -> list[int]:
    """Rows in which two tensors [rows, ...] lie further apart than two computations of the same result may.

    NaN and infinite values must agree exactly; the bounds are scaled by the root mean square of the others.
    """
    if one.shape != other.shape or one.dtype not in BOUNDS or one.dtype != other.dtype:
        return list(range(len(other))) if not bitwise_equal(one, other) else []
    flat = len(one), math.prod(one.shape[1:])
    a, b = one.double().reshape(flat), other.double().reshape(flat)
    size = b[b.isfinite()].square().mean().sqrt()  # NaN without such values, and then only equal ones are close
    far = (error_parts(a, b, BOUNDS[one.dtype].out, size=size) > 1) & ~(a.isnan() & b.isnan())
    wrong: list[int] = far.any(1).nonzero().flatten().tolist()
    return wrong


def _can_be_drawn(live: StepBatch) -> bool:
    """True if the host knows the new tokens, of which there are some, and any mask has no bits.

    Those are packed for their own step alone.
    """
    is_known = live.inputs.q_len_on_host and not isinstance(live.mask, StepMask)
    return live.num_seqs == 0 or (is_known and live.num_tokens > 0)


def _own_draws(live: StepBatch, shape: PaddedShape) -> Iterator[StepBatch]:
    """The live step, half of it, the whole in another order, and itself again: as many steps as for probe requests.

    In halves another order may need more room than there is; the live step itself takes its place then.
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
    elif isinstance(mask, TokenSpans):
        mask = mask.select(order)
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
