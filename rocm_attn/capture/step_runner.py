"""StepRunner: runs a model's forward over the runtime, eagerly or as a graph, on one path.

What is captured is fill and forward, as one function; an eager step calls the same function.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Generic, NoReturn

import numpy as np
import torch

from rocm_attn.batch.drafts import NO_DRAFTS, Drafts
from rocm_attn.batch.padding import PaddedShape, PadTo
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.capture.check import CaptureCheck, Check, Verdict
from rocm_attn.capture.graphs import CapturedBucket, CaptureReport, Progress, SkippedBucket, capture_shapes, shape_name
from rocm_attn.capture.made_graphs import Again, FreshGraph, Once, RunsAgain, TakingGraph, Trial, takes_inputs
from rocm_attn.capture.probe_requests import plan_of, typical_q_len
from rocm_attn.capture.split_forward import Forward, SplitForward, halves_in_turn, in_batch_order
from rocm_attn.errors import BadBatch, DeviceFault, GraphStale, NotCopied, Unsupported
from rocm_attn.hip_graphs.errors import RecordingRefused, StaleRecording
from rocm_attn.hip_graphs.graph_cache import Entry, GraphCache
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.machine.agreement import alone
from rocm_attn.machine.watchdog import Watchdog
from rocm_attn.paging.index_spaces import Space
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.gate import AGAIN, AnyPlan, Effects, RanStep
from rocm_attn.step.metrics import Metrics
from rocm_attn.step.outputs import Outputs, real_rows, require_rows
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.protocols import NO_FLIGHT_RECORDER, Flight
from rocm_attn.step.step import Series, Step

_LOG = logging.getLogger(__name__)
# A first capture may compile every kernel; one that takes longer than this has never been seen to end.
CAPTURE_SECONDS = 300.0
CAPTURE_WATCHDOG = Watchdog(CAPTURE_SECONDS)

# Eager steps of a plan after which ranks ask each other again, where one of them had no room for the check of a graph.
_STEPS_BEFORE_ANOTHER_TRY = 64
_TOO_FEW_PAGES = "too few pages are free to check it on"

# The plan of a step, made when the step before it is over. It is made anew where a graph was made in between.
# None: by the runtime's ladders.
PlanOf = Callable[[StepBatch], AnyPlan] | None


def _again(batch: StepBatch) -> AnyPlan:
    return AGAIN


class StepRunner(Generic[Outputs]):
    """Runs steps of one forward function.

    Several runners may share a runtime, each with its forward and its graphs. As the runtime, a runner is used by one
    thread at a time and cannot be copied or pickled.

    forward:  Step -> tensor [S, ...], one row for each sequence; or PerToken of a tensor [T, ...], a tree of these,
              or None: step/outputs.py. It must not synchronise, must not branch on lengths, and must do the same work
              and return the same tree each time it is called with the same metadata. It runs the halves of a split
              step one by one.
    split_forward: what graphs of split steps are made of; not given: forward, one half after the other. Such a graph
              serves if it gives bitwise what forward gives, one half after the other; else that is captured
    recorder: makes graphs of steps at the runtime's capture sizes; None runs every step eagerly
    check:    compares each fresh graph with the eager run; graphs are switched off where they differ
    watchdog: looks on while a graph is made; names a capture that takes CAPTURE_SECONDS, unless another is given
    flight:   remembers the last steps
    capture_after: steps of a plan that run eagerly before a graph is made of it; capture_all() makes them at once.
              See graphs.eager_steps_before_capture
    """

    _takes_plain = True

    def __init__(
        self,
        runtime: AttentionRuntime,
        forward: Forward[Outputs],
        recorder: Recorder | None,
        *,
        split_forward: SplitForward[Outputs] | None = None,
        check: Check | None = None,
        watchdog: Watchdog = CAPTURE_WATCHDOG,
        flight: Flight = NO_FLIGHT_RECORDER,
        capture_after: int = 0,
    ) -> None:
        self._runtime = runtime
        self._forward = forward
        self._half_by_half = halves_in_turn(self._run_half)
        self._split_forward = split_forward if split_forward is not None else self._half_by_half
        self._recorder = self._given_recorder = recorder  # the first is None while graphs are switched off
        self._check = check if check is not None else CaptureCheck()
        self._watchdog = watchdog
        self._flight = flight
        self._capture_after = capture_after
        self._eager_steps: Counter[StepPlan] = Counter()
        self._pinned = runtime.guards.capture.new_pins()
        self._graphs = GraphCache(self._pinned)
        self._entry_of_plan: dict[StepPlan, Entry[Outputs]] = {}
        self._effects: dict[StepPlan, Effects] = {}  # of a plan's graph
        self._takers: dict[StepPlan, TakingGraph[Outputs]] = {}
        self._again: Again[Outputs] | None = None
        self._last_plan: StepPlan | None = None
        self._graph_of_last: RunsAgain[Outputs] | None = None  # as long as that graph is kept
        self._buckets: list[CapturedBucket] = []
        self.metrics = Metrics()  # what serves through this runner counts here too
        self._graphs_off = ""
        self._may_capture = runtime.guards.capture.may_capture
        self._seal_number = 0
        if recorder is not None:
            runtime.seals.seal()
            runtime.seals.users.add(self)
            self._pin()

    @property
    def counters(self) -> Metrics:
        """A snapshot of what was done so far, and of the pages that are held now."""
        held = {table.space: table.num_usable_pages - table.num_free_pages for table in self._runtime.table.spaces}
        return self.metrics.snapshot(
            usable_pages=self._runtime.table.full.num_usable_pages,
            pages_in_use=held[Space.FULL],
            swa_pages_in_use=held.get(Space.SWA, 0),
            graphs_off=self._why_no_graphs(),
        )

    def run(self, batch: StepBatch, pad_to: PadTo | PaddedShape | None = None, *, halves: int = 1) -> Outputs:
        """One step. Returns forward's outputs for real sequences, [num_seqs, ...], and of PerToken for real tokens.

        Valid until the next step, and not the caller's own: a later step may return the same tensor, so its shape and
        strides are not to be changed in place. Tokens are as many as the batch says, which may be an upper bound.

        pad_to, halves: as AttentionRuntime.plan has them
        Raises what AttentionRuntime.step and forward raise; the runtime is ready for another step then.
        """
        if not (batch.is_plain and self._takes_plain):
            self._require_kind(batch)
        if pad_to is None and halves == 1:
            return self._run(batch, None)
        return self._run(batch, partial(self._runtime.plan, pad_to=pad_to, halves=halves))

    @property
    def may_run_again(self) -> bool:
        """Whether run_again() may follow the step that was staged last: by its graph, or eagerly if it has none."""
        last = self._runtime.gate.may_go_again
        if last is None or self._seal_number != self._runtime.seals.number:
            return False
        if self._again is not None and self._again.of is last:
            return True
        return last.plan in self._entry_of_plan or self._recorder is None or not last.plan.replayable

    @property
    def replays_again(self) -> bool:
        """Whether what run_again() has returned last lies in the memory of a graph, as that of the next one will."""
        return self._again is not None and self._again.of is self._runtime.gate.last

    def run_again(self, batch: StepBatch) -> Outputs:
        """The last step once more, on the inputs that the device has put in the place of its own.

        batch: of that step, which was whole. Returns and raises what run() does; WrongState where no such step was
               staged last, or one of its rows has changed
        """
        again = self._again_now
        if again is None:
            return self._run(batch, _again)
        self._run_graph_again(again, again.graph.recording)
        return again.outputs

    @property
    def graph_again(self) -> Entry[Outputs] | None:
        """The graph that run_again() replays; None: it runs the step by its launches, or tells others of it."""
        again = self._again_now
        return again.graph if again is not None else None

    def run_joined(self, joined: Recording) -> None:
        """run_again() and what comes after it, by one recording. joined: begins with graph_again's"""
        again = self._again_now
        assert again is not None, "what is joined is the graph of the step that runs again"
        self._run_graph_again(again, joined)

    @property
    def _again_now(self) -> Again[Outputs] | None:
        """What runs the step that may run again, where one call does so: no log and no rank waits for word of it."""
        again, last = self._again, self._runtime.gate.may_go_again
        if last is None or self._seal_number != self._runtime.seals.number:
            return None
        if again is None or again.of is not last:
            again = self._again = self._again_of(last)
        return again

    def _again_of(self, last: RanStep) -> Again[Outputs] | None:
        if self._flight is not NO_FLIGHT_RECORDER or self._agrees or self._last_plan is not last.plan:
            return None
        entry, batch = self._entry_of_plan.get(last.plan), last.batch
        if entry is None:
            return None
        outputs = real_rows(entry.outputs, batch.num_seqs, batch.num_fed)
        return Again(last, entry, outputs, batch.num_seqs, last.plan.shape.num_seqs - batch.num_seqs)

    def _run_graph_again(self, again: Again[Outputs], recording: Recording) -> None:
        """recording: that of again.graph, or one that begins with it"""
        try:
            self._graphs.require_good(again.graph)
            self._runtime.gate.replay_again(recording.replay)
        except StaleRecording as stale:
            raise GraphStale(str(stale)) from stale
        metrics = self.metrics
        metrics.steps += 1
        metrics.replays += 1
        metrics.real_seqs += again.num_seqs
        metrics.padded_seqs += again.num_pads

    def _run(self, batch: StepBatch, plan_of: PlanOf) -> Outputs:
        gate = self._runtime.gate
        gate.holder.require_free("a step cannot begin")  # from here on it is this call that has to end the step
        try:
            if self._seal_number != self._runtime.seals.number:
                self._follow_seal()
            try:
                if self._runtime.agree is not alone:
                    self._runtime.faults.meet()
                step = gate.stage(batch, None if plan_of is None else plan_of(batch), self._takers)
            except RuntimeError as fault:  # the device's: of this step, or of one before it
                self._flight.failed(fault)
                raise
            outputs = self._run_noted(batch, step, plan_of)
            gate.end()
        except BaseException as error:
            self._broken_off(error)
            raise
        plan = self._last_plan = step.plan
        metrics = self.metrics
        metrics.steps += 1
        metrics.real_seqs += batch.num_seqs
        metrics.padded_seqs += plan.shape.num_seqs - batch.num_seqs
        taker = self._takers.get(plan)
        return taker.outputs(batch) if taker is not None else real_rows(outputs, batch.num_seqs, batch.num_fed)

    def _run_noted(self, batch: StepBatch, step: Step, plan_of: PlanOf) -> Outputs:
        """Run a step that was staged; the flight recorder learns of it first."""
        plan = step.plan
        entry = self._entry_of_plan.get(plan)
        if self._flight is not NO_FLIGHT_RECORDER:
            self._flight.note(batch, plan, entry is not None, self._pinned.epoch)
        try:  # a flight recorder keeps failures of those steps alone whose beginning it keeps
            return self._replay(plan, entry) if entry is not None else self._first_run(step, plan_of, batch)
        except BaseException as error:
            self._flight.failed(error)
            raise

    def _broken_off(self, error: BaseException) -> None:
        """A step has raised."""
        self._runtime.end_step()  # an interrupt may have come in its place
        if isinstance(error, DeviceFault):
            self._count_faults(error)

    @property
    def graph_of_last(self) -> RunsAgain[Outputs] | None:
        """The graph that the last step has run by; None: it has run without one."""
        plan, found = self._last_plan, self._graph_of_last
        if plan is None or (found is not None and found.plan is plan):  # asked in each round of drafts
            return found
        entry = self._entry_of_plan.get(plan)
        if entry is None:
            return None
        require_good = partial(self._graphs.require_good, entry)
        found = self._graph_of_last = RunsAgain(plan, require_good, entry.recording, entry.outputs)
        return found

    def run_eagerly(self, batch: StepBatch, pad_to: PadTo | PaddedShape | None = None) -> Outputs:
        """run() without a graph and without a trace in the counters: a step again, to compare."""
        self._require_kind(batch)
        self._runtime.gate.holder.require_free("a step cannot begin")
        try:
            step = self._runtime.stage(batch, None if pad_to is None else self._runtime.plan(batch, pad_to))
            return real_rows(self._body(step), batch.num_seqs, batch.num_fed)
        except DeviceFault as fault:  # of a step before it
            self._count_faults(fault)
            raise
        finally:
            self._runtime.end_step()

    def capture_all(self, progress: Progress = lambda done, total, name: None) -> CaptureReport:
        """Make a graph of every capture size, largest first, best before the first request arrives.

        Kernels that bake a length are captured at their smallest length bucket; others need no second graph.
        progress: called before each bucket and at the end
        Raises DeviceFault of steps that were run before.
        """
        self._follow_seal()
        shapes = self._shapes()
        skipped = []
        for done, shape in enumerate(shapes):
            if self._recorder is None:
                break
            progress(done, len(shapes), shape_name(shape))
            reason = self._capture_shape(shape)
            if reason:
                skipped.append(SkippedBucket(shape, reason))
        progress(len(shapes), len(shapes), "")
        return CaptureReport(tuple(self._buckets), tuple(skipped), self._why_no_graphs())

    def capture_report(self) -> CaptureReport:
        """The graphs that exist, those included that were made when a step needed them."""
        return CaptureReport(tuple(self._buckets), (), self._why_no_graphs())

    def check_device(self) -> None:
        """As AttentionRuntime.check_device, for whenever serving goes idle; the flight recorder gets to know."""
        try:
            self._runtime.check_device()
        except DeviceFault as fault:
            self._count_faults(fault)
            self._flight.failed(fault)
            raise

    def reopen(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int] = (1,)) -> None:
        """Drain the device, drop every graph and its memory, and seal again for other capture sizes.

        Graphs are made anew as steps need them, or by capture_all(); also those of other runners of the runtime. Where
        they were switched off, they are on again.
        Requests, pages and their content stay. Under tensor parallelism all ranks must call it between the same two
        steps. Raises what Seals.reseal raises: nothing has changed then, and graphs go on serving. After an
        interrupt, steps may be eager until it is called again; counters.graphs_off says so.
        """
        if self._given_recorder is None:
            self._runtime.seals.unseal(capture_sizes, capture_tokens)
        else:
            self._runtime.seals.reseal(capture_sizes, capture_tokens)
            self._runtime.seals.users.add(self)
            self._recorder, self._graphs_off = self._given_recorder, ""
            self._start_over(self._given_recorder)

    def check_addresses(self) -> None:
        """Compare the address, shape, stride and dtype of everything that graphs read. Raises GraphStale."""
        self._follow_seal()
        try:
            self._pinned.check()
        except StaleRecording as stale:
            raise GraphStale(str(stale)) from stale

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopied(
            "a StepRunner cannot be copied or pickled: its graphs refer to a device's memory by address; "
            "build another one over a runtime of its own"
        )

    def _count_faults(self, error: DeviceFault) -> None:
        self.metrics.faults += len(error.each)

    def _follow_seal(self) -> None:
        """Drop the graphs if the addresses were sealed anew, or given up, since they were made."""
        if self._seal_number != self._runtime.seals.number and self._recorder is not None:
            self._start_over(self._recorder)

    def _start_over(self, recorder: Recorder) -> None:
        """Drop the graphs of an earlier seal, and pin what those of this one will read."""
        self._drop_graphs()
        recorder.release_memory()
        self._pin()

    def _pin(self) -> None:
        number = self._runtime.seals.number
        if number:
            self._pinned.pin_all(self._runtime.seals.tensors)
        # Last: what an interrupt breaks off is done again by the next step.
        self._seal_number = number

    def _why_no_graphs(self) -> str:
        if self._graphs_off or self._recorder is None or self._runtime.seals.number:
            return self._graphs_off
        return (
            "the addresses that graphs read are not sealed: unseal() gave them up, or a reopen() was interrupted; "
            "reopen() makes graphs possible again"
        )

    def _drop_graphs(self) -> None:
        self._again = self._graph_of_last = None
        self._takers.clear()
        self._entry_of_plan.clear()
        self._effects.clear()
        self._eager_steps.clear()
        self._buckets.clear()
        self._graphs.drop_all()
        self._pinned.release()

    def _shapes(self) -> tuple[PaddedShape, ...]:
        """Those that capture_all() makes graphs of."""
        return capture_shapes(self._runtime.padding)

    def _run_half(self, half: Series) -> Outputs:
        """Forward's outputs of a whole step, or of a half of one."""
        return self._forward(half[0])

    def _require_kind(self, batch: StepBatch) -> None:
        """Raise BadBatch for a batch that forward is not for."""
        if batch.drafts is not NO_DRAFTS:
            raise BadBatch("the batch is a round of drafts; run it by a DraftRunner")

    def _body(self, step: Step) -> Outputs:
        return self._body_with(self._half_by_half, step)

    @torch.no_grad()
    def _body_with(self, split_forward: SplitForward[Outputs], step: Step) -> Outputs:
        step.fill()
        child = step.plan.shape.child
        if step.plan.shape.num_halves == 1:
            outputs = self._run_half(step.parts)
            require_rows(outputs, child.num_seqs, child.num_tokens)
            return outputs
        of_halves = split_forward(step)
        for half in of_halves:
            require_rows(half, child.num_seqs, child.num_tokens)
        return in_batch_order(step, of_halves)

    def _first_run(self, step: Step, plan_of: PlanOf, batch: StepBatch) -> Outputs:
        """A staged step that has no graph: run eagerly, or as a graph that is made now."""
        gate = self._runtime.gate
        plan, may_store = step.plan, not gate.stores.refusal
        reason = self._why_not_now(plan, batch)
        if reason:
            return self._without_graph(step, reason)
        # The graph is made of other steps; this one is staged again when it has passed.
        gate.abandon()
        q_len, live = self._new_tokens_like(plan, batch), batch if may_store else None
        if self._why_not_tried(plan, q_len, live):
            self._eager_steps[plan] = self._capture_after - _STEPS_BEFORE_ANOTHER_TRY
        else:
            self._capture(plan, q_len, live)
        step = gate.stage(batch, None if plan_of is None else plan_of(batch), self._takers)
        entry = self._entry_of_plan.get(step.plan)
        if entry is None:
            return self._without_graph(
                step, "graphs are off" if self._recorder is None else "none could be checked now"
            )
        return self._replay(step.plan, entry)

    def _new_tokens_like(self, plan: StepPlan, batch: StepBatch) -> Int32Array:
        """New tokens of the sequences of a step that has the plan of a batch."""
        if isinstance(plan.shape.drafts, Drafts):
            return np.full(plan.shape.num_seqs, plan.shape.drafts.tokens, np.int32)
        if plan.shape.kind.decodes:
            return np.ones(plan.shape.num_seqs, np.int32)
        table = self._runtime.table
        if batch.num_seqs:
            return batch.q_len
        most = self._runtime.padding.most_q_len(plan.shape)
        typical = typical_q_len(plan.shape, most=most, max_seqs=table.most_new_seqs, max_kv_len=table.max_kv_len)
        return batch.q_len if typical is None else typical

    def _why_not_now(self, plan: StepPlan, batch: StepBatch) -> str:
        """Why no graph is made of a step, or nothing.

        Ranks that agree make one at the same step, whatever each of them has in it: their collectives must meet.
        """
        if self._recorder is None:
            return "graphs are off"
        if not plan.replayable:
            return "steps of its kind or size have none"
        if batch.num_seqs == 0 and not self._agrees:  # there may be no input to compare it on; capture_all() makes one
            return "it has no sequences"
        if not self._can_capture:
            return "the addresses are not sealed"
        # What compares graphs writes to the pages of new tokens.
        if self._runtime.gate.stores.refusal and not self._agrees:
            return "it may not store"
        return "" if self._is_due(plan) else "eager steps come first"

    def _without_graph(self, step: Step, reason: str) -> Outputs:
        if self._given_recorder is not None and step.plan.replayable:
            self.metrics.fallbacks[reason] = self.metrics.fallbacks.get(reason, 0) + 1
        return self._body(step)

    def _replay(self, plan: StepPlan, entry: Entry[Outputs]) -> Outputs:
        effects = self._effects[plan]
        self._runtime.gate.stores.before_replay(effects[0])
        try:
            outputs = self._graphs.replay(entry)
        except StaleRecording as stale:
            raise GraphStale(str(stale)) from stale
        self._runtime.gate.after_replay(effects)
        self.metrics.replays += 1
        return outputs

    def _is_due(self, plan: StepPlan) -> bool:
        """Whether a graph is to be made of the plan now; if not, its step is counted. Each attempt is paid anew."""
        if self._eager_steps[plan] < self._capture_after:
            self._eager_steps[plan] += 1
            return False
        del self._eager_steps[plan]
        return True

    def _capture_shape(self, shape: PaddedShape) -> str:
        """Make the graph of a shape, unless there is one; why none could be made, or nothing."""
        plan, q_len, reason = self._typical_step(shape)
        if self._agrees:
            # Asked by every rank, whatever it found: what is free differs between the replicas of a model.
            reason = self._why_not_tried(plan, q_len, None, reason)
        if plan is None or reason:
            return reason
        if plan not in self._entry_of_plan:
            self._capture(plan, q_len, None)
        made = self._why_no_graphs() or plan in self._entry_of_plan
        return "" if made else _TOO_FEW_PAGES

    def _typical_step(self, shape: PaddedShape) -> tuple[StepPlan | None, Int32Array, str]:
        """The plan and new tokens of a step of a shape, and why no graph can be made; there is a plan or a reason."""
        table, nothing = self._runtime.table, np.empty(0, np.int32)
        most = self._runtime.padding.most_q_len(shape)
        q_len = typical_q_len(shape, most=most, max_seqs=table.most_new_seqs, max_kv_len=table.max_kv_len)
        if q_len is None:
            reason = "no request row is free" if not table.num_free_rows else "no free rows hold a step of this shape"
            return None, nothing, reason
        try:
            plan = plan_of(self._runtime, shape, q_len)
        except Unsupported as refusal:
            return None, nothing, "; ".join((refusal.summary, *refusal.reasons))
        if plan is None:
            return None, nothing, _TOO_FEW_PAGES
        if not plan.replayable:
            return plan, q_len, f"{', '.join(k.row.name for k in plan.kernels)}: not every kernel can be captured"
        return plan, q_len, "" if self._can_capture else self._why_no_graphs()

    def _why_not_tried(self, plan: StepPlan | None, q_len: Int32Array, live: StepBatch | None, reason: str = "") -> str:
        """Why no graph of a plan is made now, on this rank or on another one; nothing where it can be tried.

        Ranks that agree run forward equally often for it, or a collective in it would wait for ever.
        """
        if not self._agrees:
            return reason
        if plan is not None and not reason and not self._check.has_steps(self._runtime, plan, q_len, live):
            reason = _TOO_FEW_PAGES
        return self._runtime.agree({"not tried": reason} if reason else {}).get("not tried", "")

    @property
    def _agrees(self) -> bool:
        """Whether other ranks make the same graphs at the same steps."""
        return self._runtime.agree is not alone

    @property
    def _can_capture(self) -> bool:
        """Whether graphs may be made of the memory that steps have now."""
        return self._recorder is not None and self._may_capture(self._runtime.seals.number)

    def _capture(self, plan: StepPlan, q_len: Int32Array, live: StepBatch | None) -> None:
        """Make a graph of the plan, unless there is no room to check it; switch graphs off if it is refused.

        q_len, live: see Check.record; the runtime is idle
        Raises DeviceFault of the steps before: it is reported before anything is tried out, and nothing has changed.
        """
        self._runtime.faults.report()
        started = time.perf_counter()
        try:
            refusal = self._make_and_check(plan, q_len, live)
        finally:
            self.metrics.capture_seconds += time.perf_counter() - started
        if refusal:
            self._switch_off(refusal)

    def _make_and_check(self, plan: StepPlan, q_len: Int32Array, live: StepBatch | None) -> str:
        """Why the graph is refused, or nothing; only a graph that has passed is kept."""
        note = ""
        trial = self._try(self._split_forward, plan, q_len, live)
        has_another_way = plan.shape.num_halves > 1 and self._split_forward is not self._half_by_half
        if has_another_way and not trial.is_bitwise and not trial.is_final:
            reason = trial.refusal or "the given split_forward is not bitwise the same"
            note = f"; one half after the other, because {reason}"
            trial = self._try(self._half_by_half, plan, q_len, live)
        if trial.graph is not None and not trial.refusal:
            self._keep(plan, trial.graph, trial.verdict, note)
        return trial.refusal

    def _try(
        self, split_forward: SplitForward[Outputs], plan: StepPlan, q_len: Int32Array, live: StepBatch | None
    ) -> Trial[Outputs]:
        """Make a graph and compare it with the eager run; no graph where there is no room to compare it.

        Ranks agree twice: when the graph is recorded, so that all compare it or none does, and on what came of it.
        """
        name = f"the capture of {shape_name(plan.shape)}"
        fresh: list[FreshGraph[Outputs]] = []
        recorded = Once(self._runtime)

        def record(step: Step) -> Callable[[], Outputs]:
            assert self._recorder is not None
            body = partial(self._watched_body, name, split_forward, step)
            refusal = ""
            try:
                fresh.append(
                    FreshGraph.of(self._recorder, body, self._runtime, takes_inputs=takes_inputs(self._runtime, step))
                )
            except (RecordingRefused, StaleRecording) as refused:
                refusal = str(refused)
            except Exception as error:  # the eager step may do without what recording lacks
                refusal = f"{type(error).__name__}: {error}"
            recorded.say(refusal)
            return fresh[0].replay

        try:
            with self._watchdog.watch(f"{name} and its check"):
                verdict = self._check.record(self._runtime, plan, q_len, live, record, self._body)
            recorded.say("")
            self._pinned.check()
            self._runtime.faults.report_own()
        except (RecordingRefused, StaleRecording) as refusal:
            return self._agreed(self._refused(str(refusal)), recorded)
        except (torch.OutOfMemoryError, DeviceFault) as refusal:  # of the steps that the graph was tried on
            if isinstance(refusal, DeviceFault) and live is not None and not set(live.rows).isdisjoint(refusal.rows):
                # The step itself is wrong, and says so when it runs: it says nothing of the graph.
                self._runtime.faults.forget()
                self._eager_steps[plan] = self._capture_after - _STEPS_BEFORE_ANOTHER_TRY
                return self._agreed(Trial(None, Verdict("", "", 0.0, bitwise=True)), recorded)
            return self._agreed(self._refused(f"{type(refusal).__name__}: {refusal}"), recorded)
        except BaseException as error:
            self._end_on_all_ranks(f"the check was broken off by {type(error).__name__}: {error}", recorded)
            raise
        return self._agreed(Trial(fresh[0] if fresh else None, verdict), recorded)

    def _refused(self, reason: str) -> Trial[Outputs]:
        """No graph, for this reason. Faults of the steps that it was tried on are no caller's."""
        self._runtime.faults.forget()
        return Trial.refused(reason)

    def _end_on_all_ranks(self, reason: str, recorded: Once) -> None:
        """An exception leaves a capture here: other ranks, which wait for word of it, make no more graphs either."""
        if self._agrees:
            self._agreed(Trial.refused(reason, is_final=True), recorded)
            self._switch_off(reason)

    def _agreed(self, trial: Trial[Outputs], recorded: Once) -> Trial[Outputs]:
        """The trial, with what other ranks found out about theirs: a graph serves on all of them or on none."""
        with suppress(RecordingRefused):  # which all of them say again
            recorded.say(trial.refusal)
        found = {"failure": trial.refusal}
        found["not bitwise"] = "" if trial.verdict.bitwise else "it differs"
        found["not made"] = "" if trial.graph is not None else "there was no room to compare it"
        found["final"] = "it is over" if trial.is_final else ""
        with self._runtime.faults.meetings.waiting(trial.refusal):
            agreed = self._runtime.agree({name: what for name, what in found.items() if what})
        verdict = replace(trial.verdict, failure=agreed.get("failure", ""), bitwise="not bitwise" not in agreed)
        return Trial(None if "not made" in agreed else trial.graph, verdict, "final" in agreed)

    def _keep(self, plan: StepPlan, graph: FreshGraph[Outputs], verdict: Verdict, note: str) -> None:
        if all(kept.key != plan.key for kept in self._entry_of_plan):
            # An interrupt may have come after a graph was put there, and before its plan led to it.
            self._again = self._graph_of_last = None
            self._takers.pop(plan, None)
            self._graphs.drop(plan.key)
        self._effects[plan] = graph.effects
        self._entry_of_plan[plan] = self._graphs.put(plan.key, graph.recording, graph.outputs)
        if graph.takes_inputs:
            self._takers[plan] = TakingGraph(graph.outputs)
        self.metrics.captures += 1
        check = verdict.summary + note
        self._buckets.append(CapturedBucket(plan.key, graph.seconds, verdict.seconds, graph.recording.bytes, check))

    def _watched_body(self, name: str, split_forward: SplitForward[Outputs], step: Step) -> Outputs:
        with self._watchdog.watch(f"forward, run for {name},"):
            if takes_inputs(self._runtime, step):
                self._runtime.gate.take_inputs()
            return self._body_with(split_forward, step)

    def _switch_off(self, reason: str) -> None:
        """Give up all graphs, and the sealed addresses with them unless graphs of another runner read them."""
        assert self._recorder is not None
        _LOG.warning("graphs are switched off, until reopen(): %s", reason)
        recorder, self._recorder, self._graphs_off = self._recorder, None, reason
        self._drop_graphs()
        recorder.release_memory()
        self._runtime.seals.users.discard(self)
        if not self._runtime.seals.users:
            self._runtime.seals.give_up()
