"""Graphs of a StepRunner: fresh ones on trial, and those that run again on what the device has made of their inputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple

from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import Verdict
from rocm_attn.hip_graphs.errors import RecordingRefused
from rocm_attn.hip_graphs.graph_cache import Entry
from rocm_attn.hip_graphs.recorder import CountedRecording, Recorder, Recording
from rocm_attn.kernels.launch import does_only_launch
from rocm_attn.kernels.metadata.slot_layout import MOST_TAKEN
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.gate import Effects, RanStep
from rocm_attn.step.outputs import Outputs, real_rows
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.step import Step


class RunsAgain(NamedTuple, Generic[Outputs]):
    """A graph that runs on what the buffers of its steps hold.

    require_good: raises StaleRecording if what it reads has moved
    outputs:      what it gives, rows of pads too
    """

    plan: StepPlan
    require_good: Callable[[], None]
    recording: Recording
    outputs: Outputs


def takes_inputs(runtime: AttentionRuntime, step: Step) -> bool:
    """Whether the graph of a step takes its inputs: twins cannot in a device's graph, for they ask the host."""
    if (
        len(step.parts) > 1
        or step.plan.shape.drafts is not NO_DRAFTS
        or max(step.plan.shape.num_seqs, step.plan.shape.num_tokens) > MOST_TAKEN
    ):
        return False
    return runtime.device.type == "cpu" or does_only_launch(runtime.core.ops.take_inputs)


class Once:
    """What ranks agree on once in each trial, wherever a rank leaves it: that all of them have recorded."""

    def __init__(self, runtime: AttentionRuntime) -> None:
        self._runtime = runtime
        self._is_said = False

    def say(self, refusal: str) -> None:
        """Does nothing if it was said before. Raises RecordingRefused if a rank has refused."""
        if not self._is_said:
            self._is_said = True
            with self._runtime.faults.meetings.waiting(refusal):
                found = self._runtime.agree({"failure": refusal} if refusal else {})
            if found:
                raise RecordingRefused(found["failure"])


@dataclass(frozen=True, slots=True)
class Again(Generic[Outputs]):
    """A step whose graph has run again, and does so by one call.

    of:      the step, as the runtime has it
    graph:   which is all of it
    outputs: without what they hold for pads
    """

    of: RanStep
    graph: Entry[Outputs]
    outputs: Outputs
    num_seqs: int
    num_pads: int


class TakingGraph(Generic[Outputs]):
    """What a graph gives that takes the inputs of its steps, and so is all of such a step."""

    __slots__ = ("_of_all", "_real")

    def __init__(self, outputs: Outputs) -> None:
        self._of_all = outputs
        # Sequences of the last step, and its outputs.
        self._real: tuple[int, Outputs] | None = None

    def outputs(self, batch: StepBatch) -> Outputs:
        """Its outputs, without what they hold for pads."""
        real = self._real
        if real is not None and real[0] == batch.num_seqs:
            return real[1]
        outputs = real_rows(self._of_all, batch.num_seqs, batch.num_fed)
        # A tree is the caller's, and so another one each time; and where drafts are verified, tokens tell steps apart.
        if isinstance(outputs, Tensor):
            self._real = batch.num_seqs, outputs
        return outputs


@dataclass(frozen=True, slots=True)
class FreshGraph(Generic[Outputs]):
    """A graph that was not checked yet.

    seconds:       of warm-up and recording
    effects:       of each step that it replays
    takes_inputs:  whether its head takes those of its steps; then its runs are counted
    """

    recording: Recording
    outputs: Outputs
    seconds: float
    effects: Effects
    takes_inputs: bool

    @classmethod
    def of(
        cls, recorder: Recorder, fn: Callable[[], Outputs], runtime: AttentionRuntime, *, takes_inputs: bool
    ) -> FreshGraph[Outputs]:
        started = time.perf_counter()
        recording, outputs = recorder.record(fn)
        kept = CountedRecording(recording, runtime.graph_runs.run) if takes_inputs else recording
        return cls(kept, outputs, time.perf_counter() - started, runtime.gate.effects, takes_inputs)

    def replay(self) -> Outputs:
        self.recording.replay()
        return self.outputs


@dataclass(frozen=True, slots=True)
class Trial(Generic[Outputs]):
    """A graph, or none where there was no room to compare it, and what came of it.

    is_final: whether no other way to make the graph is tried
    """

    graph: FreshGraph[Outputs] | None
    verdict: Verdict
    is_final: bool = False

    @classmethod
    def refused(cls, reason: str, *, is_final: bool = False) -> Trial[Outputs]:
        """No graph, for this reason."""
        return cls(None, Verdict(reason, "", 0.0, bitwise=False), is_final)

    @property
    def refusal(self) -> str:
        """Why the graph may not serve, or nothing."""
        return self.verdict.failure

    @property
    def is_bitwise(self) -> bool:
        """Whether the graph gave bitwise what the eager run gave."""
        return not self.refusal and self.verdict.bitwise
