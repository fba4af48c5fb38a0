"""StepRunner: runs a model's steps over a runtime, as captured graphs where possible, else eagerly.

A graph captures fill and forward as one function; an eager step calls the same function.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, NoReturn, cast

import numpy as np
import torch

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.padding import PaddedShape, PadTo
from rocm_attn.batch.step_batch import FORGOTTEN_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_NUMBERS, CaptureCheck, CapturedGraph, Wrong
from rocm_attn.capture.graphs import (
    CapturedBucket,
    CaptureReport,
    Graph,
    Progress,
    capture_shapes,
    draft_shapes,
    shape_name,
    takes_inputs,
)
from rocm_attn.capture.probe_requests import GraphCandidate, is_uniform, typical_new_tokens
from rocm_attn.capture.split_forward import DraftForward, Forward, SplitForward, in_batch_order
from rocm_attn.errors import BadBatch, BadSetting, DeviceFault, GraphStale, NotCopied, Unsupported
from rocm_attn.hip_graphs.errors import RecordingRefused, StaleRecording
from rocm_attn.hip_graphs.recorder import CountedRecording, Recorder
from rocm_attn.hip_graphs.tensor_trees import tensors_in
from rocm_attn.machine.agreement import alone
from rocm_attn.machine.settings import require_kind, whole_number
from rocm_attn.machine.watchdog import Watchdog
from rocm_attn.paging.index_spaces import Space
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.gate import AGAIN, AnyPlan, RanStep
from rocm_attn.step.metrics import NO_REASON, Metrics, Reason
from rocm_attn.step.outputs import Outputs, real_rows, require_rows
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.protocols import NO_FLIGHT_RECORDER, Flight
from rocm_attn.step.step import Series, Step

_LOG = logging.getLogger(__name__)
# A first capture may compile every kernel; one that takes longer has never been seen to end.
CAPTURE_SECONDS = 300.0
_WATCHDOG = Watchdog(CAPTURE_SECONDS)

# Eager steps of a plan before its graph is tried again, after forward raised in a trial or a rank had no room for it.
_STEPS_BEFORE_ANOTHER_TRY = 64
_TOO_FEW_PAGES = "too few free pages to check it"
_RAISED = "its forward raised, or stored NaN, while it was tried"
# Errors after which a graph does not serve, and is not made again.
_REFUSALS = (RecordingRefused, StaleRecording, torch.OutOfMemoryError, DeviceFault)

# Makes a step's plan, after the step before it has ended, and again after a capture. None: by the runtime's ladders.
PlanOf = Callable[[StepBatch], AnyPlan] | None


class StepRunner(Generic[Outputs]):
    """Runs the steps and the draft rounds of one model, as captured graphs or eagerly.

    Several runners may share a runtime, each with its own forwards and graphs. Like the runtime, a runner is used by
    one thread at a time and cannot be copied or pickled.

    forward:  Part -> tensor [S, ...], one row per sequence; or PerToken of a tensor [T, ...], None, or a tree of these
              (step/outputs.py). It must not synchronise, must not branch on lengths, and must do the same work and
              return the same tree each time it is called with the same metadata. For a split step it is called once
              per half
    recorder: captures steps at the runtime's capture sizes as graphs; None: every step runs eagerly
    draft:    the parts of a draft round, or of half of one, in order -> outputs like forward's; PerToken is for the
              tokens of one draft step. Not given: draft rounds are refused. One graph holds all draft steps of a round
              of RuntimeOptions.drafts
    split_forward: used in graphs of split steps and rounds, if its outputs are bitwise those of one half after the
                   other; if not given, the halves run one after the other
    check:    compares each new graph with the eager run; graphs are switched off if they differ
    flight:   the flight recorder, which remembers the last steps
    capture_after: how many steps of a plan run eagerly before it is captured; see graphs.eager_steps_before_capture.
                   Raises BadSetting for no whole number of at least 0, and for a forward or a recorder that is none

    watchdog: reports a capture that takes longer than CAPTURE_SECONDS; may be replaced
    metrics:  counters of this runner, which the engine above it shares
    graph_of_last: the graph that ran the last step; None: the step ran without one, or the graph was dropped
    """

    def __init__(
        self,
        runtime: AttentionRuntime,
        forward: Forward[Outputs],
        recorder: Recorder | None,
        *,
        draft: DraftForward[Outputs] | None = None,
        split_forward: SplitForward[Outputs] | None = None,
        check: CaptureCheck | None = None,
        flight: Flight = NO_FLIGHT_RECORDER,
        capture_after: int = 0,
    ) -> None:
        if not callable(forward):
            raise BadSetting(f"forward is {forward!r}; give the model's function of a Part")
        if not (recorder is None or hasattr(recorder, "record")):
            raise BadSetting(f"recorder is {recorder!r}; give recorder_for(device), or None to run every step eagerly")
        self._runtime, self._gate = runtime, runtime.gate
        self._forward, self._draft, self._split_forward = forward, draft, split_forward
        self._recorder = self._given_recorder = recorder  # the first is None while graphs are switched off
        self._check = check if check is not None else CaptureCheck()
        self.watchdog: Watchdog = _WATCHDOG
        self._flight, self._capture_after = flight, whole_number("capture_after", capture_after, least=0)
        self._eager_steps: Counter[StepPlan] = Counter()
        self._has_raised = False  # True if a forward raised in the last trial of a graph
        self._pinned = runtime.guards.capture.new_pins()
        self._graph_of_plan: dict[StepPlan, Graph[Outputs]] = {}
        self._input_plans: set[StepPlan] = set()  # plans whose graphs take inputs
        self.graph_of_last: Graph[Outputs] | None = None
        self._buckets: list[CapturedBucket] = []
        self.metrics = Metrics()
        self._graphs_off = NO_REASON
        self._may_capture = runtime.guards.capture.may_capture
        self._seal_number = 0
        if recorder is not None:
            runtime.seals.seal()
            runtime.seals.users.add(self)
            self._pinned.pin_all(runtime.seals.tensors)
            self._seal_number = runtime.seals.number

    @property
    def counters(self) -> Metrics:
        """A snapshot of the counters, with the pages in use now."""
        held = {table.space: table.num_usable_pages - table.num_free_pages for table in self._runtime.table.spaces}
        return self.metrics.snapshot(
            usable_pages=self._runtime.table.full.num_usable_pages,
            pages_in_use=held[Space.FULL],
            swa_pages_in_use=held.get(Space.SWA, 0),
            graphs_off=self._why_no_graphs(),
        )

    def run(self, batch: StepBatch, pad_to: PadTo | PaddedShape | None = None, *, halves: int = 1) -> Outputs:
        """Runs a step. Returns forward's outputs without padding: [num_seqs, ...], or [num_tokens, ...] for PerToken.

        They are valid until the next step. A later step may return the same tensor, so do not change its shape or
        strides in place. num_tokens is the batch's, which may be an upper bound.

        pad_to, halves: see AttentionRuntime.plan
        Raises what AttentionRuntime.step and forward raise; the runtime is ready for another step then.
        """
        try:
            if batch.token_ids is FORGOTTEN_TOKEN_IDS or not batch.is_plain:
                self._require_forward(batch)
        except AttributeError:  # a look at its kind before would cost each step
            require_kind("the batch", batch, StepBatch, BadBatch)
            raise
        if pad_to is None and halves == 1:
            return self._run(batch, None)
        return self._run(batch, partial(self._runtime.plan, pad_to=pad_to, halves=halves))

    @property
    def may_run_again(self) -> bool:
        """True if run_again() can run the last staged step once more, by its graph, or eagerly if it has none."""
        last = self._gate.may_go_again
        if last is None or self._seal_number != self._runtime.seals.number:
            return False
        return last.plan in self._graph_of_plan or self._recorder is None or not last.plan.replayable

    @property
    def graph_again(self) -> Graph[Outputs] | None:
        """The graph that run_again() would replay. None: it runs eagerly, or must inform ranks or a flight recorder."""
        return self._graph_again(self._gate.may_go_again)

    def run_again(self, batch: StepBatch) -> Outputs:
        """Runs the last step once more, on inputs that the device has written in place of the old ones.

        batch: that step's batch; the step was not split

        Returns and raises what run() does; WrongState if no such step was staged last, or one of its rows has changed.
        """
        gate = self._gate
        last = gate.last  # the gate refuses it if one of its rows has changed
        graph = self._graph_again(last)
        if graph is None or last is None or last.batch is not batch:
            return self._run(batch, lambda batch: AGAIN)
        try:
            if graph.epoch != self._pinned.epoch:
                raise self._stale(graph)
            gate.replay_again(graph.recording.replay)
        except StaleRecording as stale:
            raise GraphStale(str(stale)) from stale
        return self._replayed(graph, batch)

    def _replayed(self, graph: Graph[Outputs], batch: StepBatch) -> Outputs:
        """Counts a step that was replayed. Returns its outputs for real sequences."""
        metrics, num_seqs = self.metrics, batch.num_seqs
        metrics.steps += 1
        metrics.replays += 1
        metrics.real_seqs += num_seqs
        metrics.padded_seqs += graph.num_seqs - num_seqs
        return graph.real if graph.num_real == num_seqs else graph.real_of(batch)

    def _graph_again(self, last: RanStep | None) -> Graph[Outputs] | None:
        """The graph that runs a step again by one call; None if a flight recorder or a rank must be informed of it."""
        graph = self.graph_of_last
        if last is None or graph is None or self._seal_number != self._runtime.seals.number:
            return None
        if graph.ran is not last:
            if self._flight is not NO_FLIGHT_RECORDER or self._agrees or graph.plan is not last.plan:
                return None
            graph.ran = last
        return graph

    def _run(self, batch: StepBatch, plan_of: PlanOf) -> Outputs:
        runtime, gate = self._runtime, self._gate
        is_noted = False
        gate.holder.require_free("a step cannot begin")  # from here on this call has to end the step
        try:
            if self._seal_number != runtime.seals.number:
                self._follow_seal()
            if runtime.agree is not alone:
                runtime.faults.meet()
            step = gate.stage(batch, None if plan_of is None else plan_of(batch), self._input_plans)
            graph = self._graph_of_plan.get(step.plan)
            if self._flight is not NO_FLIGHT_RECORDER:
                self._flight.note(batch, step.plan, graph is not None, self._pinned.epoch)
                is_noted = True
            if graph is not None:
                return self._replay(graph, batch)
            outputs = self._first_run(step, plan_of, batch)
            gate.end()
            return outputs
        except BaseException as error:
            runtime.end_step()  # an interrupt may have skipped gate.end()
            # A fault of the device in this step or in one before it, or any failure of a step that was noted.
            if is_noted or isinstance(error, RuntimeError):
                self._flight.failed(error)
            if isinstance(error, DeviceFault):
                self.metrics.faults += len(error.each)
            raise

    def run_eagerly(self, batch: StepBatch, pad_to: PadTo | PaddedShape | None = None) -> Outputs:
        """Does run() without a graph, and does not count it: to repeat a step and compare."""
        self._require_forward(batch)
        self._gate.holder.require_free("a step cannot begin")
        try:
            with self._runtime.stage(batch, None if pad_to is None else self._runtime.plan(batch, pad_to)) as step:
                return real_rows(self._body(step), batch.num_seqs, batch.num_fed)
        except DeviceFault as fault:  # a fault of an earlier step
            self.metrics.faults += len(fault.each)
            raise

    def capture_all(self, progress: Progress = lambda done, total, name: None) -> CaptureReport:
        """Captures a graph of every capture size, largest first. Call it before the first request arrives.

        Kernels that bake in a KV length are captured at their smallest length bucket; others need one graph per size.
        progress: called before each bucket and at the end. Raises DeviceFault of earlier steps
        """
        padding = self._runtime.padding
        shapes = capture_shapes(padding) + (draft_shapes(padding) if self._draft is not None else ())
        return self.capture(shapes, progress)

    def capture(
        self, shapes: Sequence[PaddedShape], progress: Progress = lambda done, total, name: None
    ) -> CaptureReport:
        """capture_all() for some of its shapes, in the given order."""
        self._follow_seal()
        skipped = dict[PaddedShape, str]()
        for done, shape in enumerate(shapes):
            if self._recorder is None:
                break
            progress(done, len(shapes), shape_name(shape))
            reason = self._capture_shape(shape)
            if reason:
                skipped[shape] = reason
        progress(len(shapes), len(shapes), "")
        return replace(self.capture_report(), skipped=skipped)

    def capture_report(self) -> CaptureReport:
        """The graphs that exist now, including those that were captured on demand."""
        return CaptureReport(tuple(self._buckets), {}, self._why_no_graphs())

    def check_device(self) -> None:
        """Like `AttentionRuntime.check_device`, but also notes faults in the flight recorder. Call it when idle."""
        try:
            self._runtime.check_device()
        except DeviceFault as fault:
            self.metrics.faults += len(fault.each)
            self._flight.failed(fault)
            raise

    def reopen(self, capture_sizes: Sequence[int], capture_tokens: Sequence[int] = (1,)) -> None:
        """Changes the capture sizes: waits for the device, and drops every graph of the runtime, with its memory.

        Graphs are captured again on demand, or by capture_all(); also those of other runners. If graphs were switched
        off, they are on again. Requests and pages stay. Under tensor parallelism all ranks must call it between the
        same two steps.
        Raises what Seals.reseal raises: nothing has changed then. Call it again after an interrupt.
        """
        seals = self._runtime.seals
        if self._given_recorder is None:
            seals.unseal(capture_sizes, capture_tokens)
        else:
            seals.reseal(capture_sizes, capture_tokens)
            seals.users.add(self)
            self._recorder, self._graphs_off = self._given_recorder, NO_REASON
            self._follow_seal()

    def check_addresses(self) -> None:
        """Compares the address, shape, stride and dtype of everything that graphs read. Raises GraphStale."""
        self._follow_seal()
        try:
            self._pinned.check()
        except StaleRecording as stale:
            raise GraphStale(str(stale)) from stale

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopied(
            "a StepRunner cannot be copied or pickled, because its graphs hold device addresses; build another one "
            "over a runtime of its own"
        )

    def _follow_seal(self) -> None:
        """Drops the graphs if addresses were sealed again or given up, and pins what new graphs will read."""
        number = self._runtime.seals.number
        if self._seal_number != number and self._recorder is not None:
            self._drop_graphs(self._recorder)
            if number:
                self._pinned.pin_all(self._runtime.seals.tensors)
            # Set last, so that the next step repeats the work after an interrupt.
            self._seal_number = number

    def _why_no_graphs(self) -> Reason:
        if self._graphs_off or self._recorder is None or self._runtime.seals.number:
            return self._graphs_off
        return Reason(
            "the addresses that graphs read are not sealed, after unseal() or an interrupted reopen(); call "
            "reopen() to make graphs possible again",
            "unsealed",
        )

    def _drop_graphs(self, recorder: Recorder) -> None:
        self.graph_of_last = None
        self._input_plans.clear()
        self._graph_of_plan.clear()
        self._eager_steps.clear()
        self._buckets.clear()
        self._pinned.release()
        recorder.release_memory()

    def _require_forward(self, batch: StepBatch) -> None:
        """Raises BadBatch for a batch without token ids, and for a round where there is no forward of rounds."""
        require_kind("the batch", batch, StepBatch, BadBatch)
        if batch.token_ids is FORGOTTEN_TOKEN_IDS and batch.inputs.token_ids_on_host and batch.num_fed:
            raise BadBatch(
                f"the batch has {batch.num_fed} new tokens and no token ids; pass token_ids, or NO_TOKEN_IDS if "
                "forward does not read step.token_ids"
            )
        if batch.drafts is not NO_DRAFTS and self._draft is None:
            raise BadBatch(
                "the batch is a round of drafts and the StepRunner has no forward for drafts; build it with draft=..."
            )

    def _run_half(self, half: Series) -> Outputs:
        """A forward's outputs of a whole step or round, or of a half of one."""
        draft = self._draft
        return draft(half) if draft is not None and half[0].branches else self._forward(half[0])

    def _in_turn(self, step: Step) -> tuple[Outputs, Outputs]:
        """Runs the first half, then the second, on the stream of the step."""
        first, second = step.halves
        return self._run_half(first), self._run_half(second)

    @torch.no_grad()
    def _body(self, step: Step, split_forward: SplitForward[Outputs] | None = None) -> Outputs:
        """A step's outputs, rows of pads included. split_forward: if not given, one half runs after the other"""
        step.fill()
        child = step.plan.shape.child
        if step.plan.num_halves == 1:
            outputs = self._run_half(step.parts)
            require_rows(outputs, child.num_seqs, child.num_tokens)
            return outputs
        of_halves = (split_forward or self._in_turn)(step)
        for half in of_halves:
            require_rows(half, child.num_seqs, child.num_tokens)
        return in_batch_order(step, of_halves)

    def _first_run(self, step: Step, plan_of: PlanOf, batch: StepBatch) -> Outputs:
        """Runs a staged step that has no graph: eagerly, or as a graph that is made now."""
        gate, plan = self._gate, step.plan
        reason = self._why_not_now(plan, batch)
        if reason:
            return self._without_graph(step, batch, reason)
        q_len = batch.q_len
        if batch.num_tokens == 0 or is_uniform(plan.shape):
            typical = typical_new_tokens(self._runtime, plan.shape)
            if typical is not None:
                # Kernels may have baked in that a sequence has at most one.
                q_len = typical if is_uniform(plan.shape) else np.minimum(typical, plan.bounds.max_q_len)
        candidate = GraphCandidate(self._runtime, plan, q_len, None if gate.stores.refusal else batch)
        # The graph is made of other steps; this step is staged again once the graph has passed.
        gate.abandon()
        reason = self._capture(candidate, "")
        if reason and (self._agrees or reason != _TOO_FEW_PAGES):
            self._eager_steps[plan] = self._capture_after - _STEPS_BEFORE_ANOTHER_TRY
        step = gate.stage(batch, None if plan_of is None else plan_of(batch), self._input_plans)
        graph = self._graph_of_plan.get(step.plan)
        if graph is not None:
            return self._replay(graph, batch)
        kind = next((each for each in (_TOO_FEW_PAGES, NO_NUMBERS) if reason.endswith(each)), _RAISED)
        return self._without_graph(step, batch, kind if reason else "graphs are off")

    def _why_not_now(self, plan: StepPlan, batch: StepBatch) -> str:
        """Why no graph is made of a step now; empty if one is made.

        Ranks that agree make one at the same step, whatever their sequences are, because their collectives must meet.
        """
        if self._recorder is None:
            return "graphs are off"
        if not plan.replayable:
            return "no graph is made for steps of this kind or size"
        if batch.num_seqs == 0 and not self._agrees:  # no input may be there to compare; capture_all() makes it
            return "it has no sequences"
        if not self._may_capture(self._runtime.seals.number):
            return "the addresses are not sealed"
        # The comparison writes to the pages of new tokens.
        if self._gate.stores.refusal and not self._agrees:
            return "it may not store KV"
        if self._eager_steps[plan] < self._capture_after:
            self._eager_steps[plan] += 1
            return "eager steps come first"
        del self._eager_steps[plan]  # each attempt waits for as many eager steps again
        return ""

    def _without_graph(self, step: Step, batch: StepBatch, reason: str) -> Outputs:
        metrics, num_seqs = self.metrics, batch.num_seqs
        if step.plan.replayable and self._given_recorder is not None:
            metrics.fallbacks[reason] = metrics.fallbacks.get(reason, 0) + 1
        self.graph_of_last = None
        outputs = real_rows(self._body(step), num_seqs, batch.num_fed)
        metrics.steps += 1
        metrics.real_seqs += num_seqs
        metrics.padded_seqs += step.plan.shape.num_seqs - num_seqs
        return outputs

    def _replay(self, graph: Graph[Outputs], batch: StepBatch) -> Outputs:
        try:
            if graph.epoch != self._pinned.epoch:
                raise self._stale(graph)
            self._gate.replay(graph.recording.replay, graph.effects)
        except StaleRecording as stale:
            raise GraphStale(str(stale)) from stale
        self.graph_of_last = graph
        return self._replayed(graph, batch)

    def _stale(self, graph: Graph[Outputs]) -> StaleRecording:
        return StaleRecording(
            f"the graph of {shape_name(graph.plan.shape)} is of epoch {graph.epoch} and its tensors are of epoch "
            f"{self._pinned.epoch}, so they have moved; call reopen() to make the graphs again"
        )

    def _capture_shape(self, shape: PaddedShape) -> str:
        """Makes the graph of a shape, unless there is one. Returns why none could be made; empty if there is one."""
        runtime = self._runtime
        q_len = typical_new_tokens(runtime, shape)
        if q_len is None:
            short = runtime.table.num_free_rows == 0
            return self._capture(
                None, "no request row is free" if short else "no free rows can hold a step of this shape"
            )
        try:
            candidate = GraphCandidate.of(runtime, shape, q_len)
        except Unsupported as refusal:
            return self._capture(None, "; ".join((refusal.summary, *refusal.reasons)))
        reason = "" if self._may_capture(runtime.seals.number) else self._why_no_graphs()
        if not candidate.plan.replayable:
            reason = f"{', '.join(k.entry.name for k in candidate.plan.kernels)}: not every kernel can be captured"
        return self._capture(candidate, reason)

    @property
    def _agrees(self) -> bool:
        """True if other ranks make the same graphs at the same steps."""
        return self._runtime.agree is not alone

    def _capture(self, candidate: GraphCandidate | None, reason: str) -> str:
        """Makes a graph, unless there is one. Returns why there is none, or "". A refused graph switches graphs off.

        reason: why it is not tried on this rank, which may have no candidate
        Raises DeviceFault of the steps before, if nothing was tried yet.
        """
        self._runtime.faults.report()
        if candidate is not None and not reason and not self._check.has_steps(candidate):
            reason = _TOO_FEW_PAGES
        # Every rank asks this, whatever its reason: ranks must run forward equally often for a graph, or a collective
        # in it would wait for ever, and the free rows and pages differ between the replicas of a model.
        reason = self._runtime.agree({"not tried": reason} if reason else {}).get("not tried", "")
        if candidate is None or reason or candidate.plan in self._graph_of_plan:
            return reason
        started = time.perf_counter()
        try:
            verdict = self._tried(candidate)
        finally:
            self.metrics.capture_seconds += time.perf_counter() - started
        raised, had_raised = verdict.wrong.get("raised", ""), self._has_raised
        self._has_raised = bool(raised)
        if raised and not had_raised:
            return raised
        failure = raised or verdict.wrong.get("failure", "")
        if failure:
            self._switch_off(Reason(failure, _word_of(verdict.wrong)))
        elif verdict.graph is not None:
            self._keep(verdict.graph, verdict)
        return ""

    def _tried(self, candidate: GraphCandidate) -> CapturedGraph[Outputs]:
        """Makes a graph, by split_forward if its results are bitwise those of one half after the other."""
        verdict = self._try(self._split_forward, candidate)
        wrong, is_given = verdict.wrong, self._split_forward is not None and candidate.plan.num_halves > 1
        if not is_given or not wrong or "over" in wrong:
            return verdict
        reason = wrong.get("failure") or wrong.get("raised") or "the given split_forward is not bitwise equal to it"
        verdict = self._try(None, candidate)
        return replace(verdict, summary=f"{verdict.summary}; one half after the other, because {reason}")

    def _try(self, split_forward: SplitForward[Outputs] | None, candidate: GraphCandidate) -> CapturedGraph[Outputs]:
        """Makes a graph and compares it with the eager run.

        Ranks agree twice: when the graph is recorded, so that all compare it or none does, and on the verdict.
        """
        name = f"the capture of {shape_name(candidate.plan.shape)}"
        refused, num_left = cast(Wrong, {}), 2

        def record(step: Step) -> Graph[Outputs]:
            nonlocal refused, num_left
            graph, num_left = None, 1
            try:
                graph = self._recorded(name, split_forward, step)
            except Exception as error:
                refused = _wrong_by(error)
            refused = self._agreed(refused)
            if graph is None or refused:
                raise RecordingRefused("it was not recorded")
            return graph

        try:
            with self.watchdog.watch(f"{name} and its check"):
                verdict = self._check.record(candidate, record, self._body)
            self._pinned.check()
            self._runtime.faults.report_own()
        except _REFUSALS as refusal:
            self._runtime.faults.forget()  # faults of the trial steps, which belong to no caller
            verdict = CapturedGraph(None, "", 0.0, refused or _wrong_by(refusal))
        except BaseException as error:
            if self._agrees:  # other ranks wait for the verdict; they make no more graphs either
                reason = f"the check stopped with {type(error).__name__}: {error}"
                self._agreed({"failure": reason, "over": reason}, num_left)
                self._switch_off(Reason(reason, "check"))
            raise
        return replace(verdict, wrong=self._agreed(verdict.wrong, num_left))

    def _agreed(self, wrong: Wrong, times: int = 1) -> Wrong:
        """Faults of the graph on any rank: it serves on all or on none. times: agreements that others wait for"""
        with self._runtime.faults.meetings.waiting(wrong.get("failure", wrong.get("raised", ""))):
            for _ in range(times):
                wrong = self._runtime.agree(wrong)
        return wrong

    def _recorded(self, name: str, split_forward: SplitForward[Outputs] | None, step: Step) -> Graph[Outputs]:
        """Records the graph of a staged step, without checking it."""
        assert self._recorder is not None
        takes, started = takes_inputs(self._runtime, step), time.perf_counter()

        def body() -> Outputs:
            with self.watchdog.watch(f"forward, run for {name},"):
                if takes:
                    self._gate.take_inputs(step)
                return self._body(step, split_forward)

        recording, outputs = self._recorder.record(body)
        if takes:
            recording = CountedRecording(recording, self._runtime.graph_runs.run)
        seconds = time.perf_counter() - started
        effects, epoch = self._gate.effects, self._pinned.epoch
        return Graph(step.plan, recording, outputs, seconds, effects, takes, epoch)

    def _keep(self, graph: Graph[Outputs], verdict: CapturedGraph[Outputs]) -> None:
        plan = graph.plan
        assert all(kept.key != plan.key for kept in self._graph_of_plan), "plans with equal keys must be one plan"
        self._graph_of_plan[plan] = graph
        if graph.takes_inputs:
            self._input_plans.add(plan)
        self.metrics.captures += 1
        num_bytes, output_bytes = graph.recording.bytes, sum(tensor.nbytes for tensor in tensors_in(graph.outputs))
        self._buckets.append(
            CapturedBucket(plan.key, graph.seconds, verdict.seconds, num_bytes, output_bytes, verdict.summary)
        )

    def _switch_off(self, reason: Reason) -> None:
        """Drops all graphs, and the sealed addresses too unless graphs of another runner read them."""
        assert self._recorder is not None
        _LOG.warning("graphs are switched off until reopen(): %s", reason)
        recorder, self._recorder, self._graphs_off = self._recorder, None, reason
        self._drop_graphs(recorder)
        self._runtime.seals.users.discard(self)
        if not self._runtime.seals.users:
            self._runtime.seals.give_up()


def _wrong_by(error: Exception) -> Wrong:
    """Returns what an exception in a trial says of its graph. NaN in K or V may be a request's fault: others may do."""
    is_of_requests = isinstance(error, DeviceFault) and error.is_contained
    words = str(error) if isinstance(error, (RecordingRefused, StaleRecording)) else f"{type(error).__name__}: {error}"
    return {"failure" if isinstance(error, _REFUSALS) and not is_of_requests else "raised": words}


def _word_of(wrong: Wrong) -> str:
    """Returns the word of Metrics.graphs_off for the faults of a graph that may not serve."""
    if "raised" in wrong:
        return "forward"
    return "differs" if "inexact" in wrong else "refused"
