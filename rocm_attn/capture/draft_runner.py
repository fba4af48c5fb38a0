"""DraftRunner: runs rounds of drafts of one forward function, each round eagerly or as one graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from rocm_attn.batch.padding import PaddedShape, PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import Check
from rocm_attn.capture.graphs import draft_shapes
from rocm_attn.capture.split_forward import Forward, SplitForward
from rocm_attn.capture.step_runner import CAPTURE_WATCHDOG, StepRunner
from rocm_attn.hip_graphs.recorder import Recorder
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.drafts import DraftSteps, SplitDrafts
from rocm_attn.step.outputs import Outputs
from rocm_attn.step.protocols import NO_FLIGHT_RECORDER, Flight, Watch

DraftForward = Callable[[DraftSteps], Outputs]
# What each half gives, as DraftForward gives it.
SplitDraftForward = Callable[[SplitDrafts], tuple[Outputs, Outputs]]


class DraftRunner(StepRunner[Outputs]):
    """A StepRunner of rounds of drafts: a graph holds all draft steps, and what the forward picks between them.

    Rounds of RuntimeOptions.drafts are captured, checked against the eager run and replayed as steps are; others run
    eagerly. A StepRunner of the same runtime may serve the draft model's other steps.

    forward:  DraftSteps -> what StepRunner's forward returns: rows for sequences, or PerToken for the tokens of a draft
              step. It runs the draft steps in order, and otherwise keeps to what a StepRunner asks for
    split_forward: what graphs of rounds in two halves are made of; not given: forward, one half after the other
    other parameters: as StepRunner's
    """

    def __init__(
        self,
        runtime: AttentionRuntime,
        forward: DraftForward[Outputs],
        recorder: Recorder | None,
        *,
        split_forward: SplitDraftForward[Outputs] | None = None,
        check: Check | None = None,
        watchdog: Watch = CAPTURE_WATCHDOG,
        flight: Flight = NO_FLIGHT_RECORDER,
        capture_after: int = 0,
    ) -> None:
        super().__init__(
            runtime,
            # Nothing but this class stages what its forward gets.
            cast(Forward[Outputs], forward),
            recorder,
            split_forward=cast(SplitForward[Outputs] | None, split_forward),
            check=check,
            watchdog=watchdog,
            flight=flight,
            capture_after=capture_after,
        )

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Outputs:
        """One round (draft_batch()). Returns what forward gave for real sequences, and of PerToken for the real tokens
        of a draft step, [num_seqs * branches, ...]. Valid until the next round.

        Raises what begin_drafts and forward raise; the runtime is ready for another step then.
        """
        return self._run(partial(self._runtime.stage_drafts, batch, pad_to), batch)

    def run_split(self, batch: StepBatch, pad_to: PadTo | None = None) -> Outputs:
        """As run, in two halves, each with all draft steps. pad_to: of both together; even."""
        return self._run(partial(self._runtime.stage_split_drafts, batch, pad_to), batch)

    def run_eagerly(self, batch: StepBatch, pad_to: PadTo | None = None) -> Outputs:
        """run() without a graph and without a trace in the counters: a round again, to compare."""
        return self._eagerly(partial(self._runtime.stage_drafts, batch, pad_to), batch)

    def _shapes(self) -> tuple[PaddedShape, ...]:
        """Those that capture_all() makes graphs of."""
        return draft_shapes(self._runtime.padding)
