"""Graph: the graph of a plan's steps, on trial or in service; and what ranks agree on while one is made."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic

from torch import Tensor

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.hip_graphs.errors import RecordingRefused
from rocm_attn.hip_graphs.graph_cache import Entry
from rocm_attn.hip_graphs.recorder import Recording
from rocm_attn.kernels.launch import does_only_launch
from rocm_attn.kernels.metadata.slot_layout import MOST_TAKEN
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.gate import Effects, RanStep
from rocm_attn.step.outputs import Outputs, real_rows
from rocm_attn.step.plan import StepPlan
from rocm_attn.step.step import Step


@dataclass(slots=True, eq=False)
class Graph(Generic[Outputs]):
    """A graph that is all of the steps of a plan.

    recording:    replays it; its runs are counted where it takes inputs
    outputs:      what it gives, rows of pads too
    seconds:      of warm-up and recording
    effects:      of each step that it replays
    takes_inputs: whether its head takes those of its steps
    num_seqs:     padded sequences of a step
    entry:        as the runner keeps it once it serves
    """

    plan: StepPlan
    recording: Recording
    outputs: Outputs
    seconds: float
    effects: Effects
    takes_inputs: bool
    num_seqs: int = field(init=False)
    entry: Entry[Outputs] = field(init=False)
    # Sequences of the last step, and its outputs without what they hold for pads.
    num_real: int = field(init=False, default=-1)
    real: Outputs = field(init=False)
    # The step that is known to run again by it.
    ran: RanStep | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.num_seqs = self.plan.shape.num_seqs

    def replay(self) -> Outputs:
        """Its outputs for the staged step, rows of pads too."""
        self.recording.replay()
        return self.outputs

    def real_of(self, batch: StepBatch) -> Outputs:
        """Its outputs, without what they hold for pads."""
        outputs = real_rows(self.outputs, batch.num_seqs, batch.num_fed)
        # A tree is the caller's, and so another one each time.
        if isinstance(outputs, Tensor):
            self.num_real, self.real = batch.num_seqs, outputs
        return outputs


def takes_inputs(runtime: AttentionRuntime, step: Step) -> bool:
    """Whether the graph of a step takes its inputs: twins cannot in a device's graph, for they ask the host."""
    if (
        len(step.parts) > 1
        or step.plan.shape.drafts is not NO_DRAFTS
        or max(step.plan.shape.num_seqs, step.plan.shape.num_tokens) > MOST_TAKEN
    ):
        return False
    return runtime.device.type == "cpu" or does_only_launch(runtime.core.ops.take_inputs)


class Raised(RecordingRefused):
    """Forward has raised while it was recorded. The eager step may do without what recording lacks."""


class AgreedTrial:
    """What ranks agree on in one trial of a graph, equally often wherever a rank leaves it: that all of them have
    recorded, and what came of it.
    """

    def __init__(self, runtime: AttentionRuntime) -> None:
        self._runtime = runtime
        self._has_recorded = False

    def recorded(self, wrong: Mapping[str, str]) -> None:
        """Raises Raised or RecordingRefused where a rank has not recorded. wrong: as Verdict.wrong"""
        self._has_recorded = True
        found = self._agreed(wrong)
        if "failure" in found:
            raise RecordingRefused(found["failure"])
        if "raised" in found:
            raise Raised(found["raised"])

    def ended(self, wrong: Mapping[str, str]) -> Mapping[str, str]:
        """What is wrong with the graph of any rank: a graph serves on all of them or on none."""
        if not self._has_recorded:
            with suppress(RecordingRefused):  # which all of them say again
                self.recorded(wrong)
        return self._agreed(wrong)

    def _agreed(self, wrong: Mapping[str, str]) -> Mapping[str, str]:
        with self._runtime.faults.meetings.waiting(wrong.get("failure", wrong.get("raised", ""))):
            return self._runtime.agree(wrong)
