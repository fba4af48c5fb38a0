"""DraftRunner: runs rounds of drafts of one forward function, each round eagerly or as one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import Check
from rocm_attn.capture.graphs import draft_shapes
from rocm_attn.capture.split_forward import Forward, SplitForward
from rocm_attn.capture.step_runner import CAPTURE_WATCHDOG, StepRunner
from rocm_attn.errors import BadBatch
from rocm_attn.hip_graphs.recorder import Recorder
from rocm_attn.machine.watchdog import Watchdog
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.outputs import Outputs
from rocm_attn.step.protocols import NO_FLIGHT_RECORDER, Flight
from rocm_attn.step.step import Series

# Gets the draft steps of a round, or of a half of one.
DraftForward = Callable[[Series], Outputs]


class DraftRunner(StepRunner[Outputs]):
    """A StepRunner of rounds of drafts: a graph holds all draft steps, and the forward's picks between them.

    Rounds of RuntimeOptions.drafts are captured, checked against the eager run and replayed as steps are; others run
    eagerly. A StepRunner of the same runtime may serve the draft model's other steps. run() takes a draft_batch() and
    returns the forward's outputs for real sequences, and of PerToken for the real tokens of a draft step,
    [num_seqs * branches, ...].

    forward:  the parts of a round -> what StepRunner's forward returns: rows for sequences, or PerToken for the tokens
              of a draft step. It runs the parts in order, and otherwise keeps to what a StepRunner asks for
    split_forward: makes graphs of rounds in two halves; not given: forward, one half after the other
    other parameters: as StepRunner's
    """

    _takes_plain = False

    def __init__(
        self,
        runtime: AttentionRuntime,
        forward: DraftForward[Outputs],
        recorder: Recorder | None,
        *,
        split_forward: SplitForward[Outputs] | None = None,
        check: Check | None = None,
        watchdog: Watchdog = CAPTURE_WATCHDOG,
        flight: Flight = NO_FLIGHT_RECORDER,
        capture_after: int = 0,
    ) -> None:
        super().__init__(
            runtime,
            # Nothing but this class runs it.
            cast(Forward[Outputs], forward),
            recorder,
            split_forward=split_forward,
            check=check,
            watchdog=watchdog,
            flight=flight,
            capture_after=capture_after,
        )
        self._draft = forward

    def _run_half(self, half: Series) -> Outputs:
        return self._draft(half)

    def _require_kind(self, batch: StepBatch) -> None:
        if batch.drafts is NO_DRAFTS:
            raise BadBatch("the batch has no drafts; make it by draft_batch(), or run it by a StepRunner")

    def _shapes(self) -> tuple[PaddedShape, ...]:
        """Those that capture_all() makes graphs of."""
        return draft_shapes(self._runtime.padding)
