"""WatchedSteps: names a step that hangs."""

from __future__ import annotations

from typing import Generic

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.machine.watchdog import Watchdog
from rocm_attn.step.outputs import Outputs
from rocm_attn.step.protocols import RunsSteps


class WatchedSteps(Generic[Outputs]):
    """Runs steps under a watchdog. A replay that hangs is named by the step that waits for it, one or two later."""

    def __init__(self, steps: RunsSteps[Outputs], watchdog: Watchdog) -> None:
        self._steps = steps
        self._watchdog = watchdog
        self._num_steps = 0

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Outputs:
        """See `StepRunner.run`."""
        self._num_steps += 1
        with self._watchdog.watch(f"step {self._num_steps} ({batch.num_seqs} sequences, {batch.num_tokens} tokens)"):
            return self._steps.run(batch, pad_to)
