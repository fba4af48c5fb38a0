"""Wraps an engine's forward and runner in the observers that its options request: watchdog, flight recorder, checks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.split_forward import Forward
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.machine.watchdog import Watchdog
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.outputs import Outputs
from rocm_attn.step.protocols import NO_WATCHDOG, Evidence, Flight, LayerCalls, RunsSteps
from rocm_attn.watch.flight_recorder import FlightRecorder
from rocm_attn.watch.sampled_check import LayerTap, SampledCheck
from rocm_serve.options import EngineOptions


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


def watched_steps(
    runtime: AttentionRuntime,
    forward: Forward,
    options: EngineOptions,
    flight: Flight,
    evidence: Evidence,
    new_runner: Callable[[Forward], StepRunner],
) -> tuple[StepRunner, RunsSteps, Watchdog]:
    """A runner of the forward, the object that runs the engine's steps, and the watchdog.

    The steps are run by the runner, wrapped as the options request. The watchdog also watches while the engine waits
    for a step's tokens.

    evidence:   keeps what the sampled check found wrong
    new_runner: makes the runner of a forward
    """
    tap = LayerTap()
    if options.check_every:
        forward = around_layers(forward, tap.around)
    runner = new_runner(forward)
    steps: RunsSteps = runner
    if options.check_every:
        steps = SampledCheck(runner, runtime, runtime.kinds.problems, tap, every=options.check_every, evidence=evidence)
    if not options.hang_after:
        return runner, steps, NO_WATCHDOG
    watchdog = Watchdog(options.hang_after, on_hang=partial(_dump, flight))
    return runner, WatchedSteps(steps, watchdog), watchdog


def around_layers(forward: Forward, wrap: Callable[[LayerCalls], LayerCalls]) -> Forward:
    """The forward, with the layers of its steps wrapped."""
    return lambda step: forward(replace(step, layers=wrap(step.layers)))


def _dump(flight: Flight, sentence: str) -> None:
    """Writes the flight record of a step that hangs, if one is kept."""
    if isinstance(flight, FlightRecorder):
        flight.dump_or_log(sentence)
