"""Protocols at the seams of a step: what runs steps, what a forward calls, and what looks on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.step.plan import StepPlan


class Steps(Protocol):
    """Whatever runs steps: a StepRunner, or something around one."""

    def run(self, batch: StepBatch, pad_to: int | None = None) -> Tensor:
        """As StepRunner.run."""
        ...


class LayerCalls(Protocol):
    """What a model's forward calls in each layer: an AttentionRuntime, or something around one."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """As AttentionRuntime.store."""
        ...

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """As AttentionRuntime.attend."""
        ...

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """As AttentionRuntime.store_and_attend."""
        ...


class Flight(Protocol):
    """Hears of every step."""

    def note(self, batch: StepBatch, plan: StepPlan, replayed: bool, epoch: int) -> None:
        """A step is about to run.

        replayed: whether a graph of it exists
        epoch:    of the addresses that graphs read
        """
        ...

    def failed(self, error: BaseException) -> None:
        """The step that was noted last, or one that could not be staged, has raised."""
        ...


class NoFlightRecorder:
    """Remembers nothing."""

    def note(self, batch: StepBatch, plan: StepPlan, replayed: bool, epoch: int) -> None:
        """As Flight.note."""

    def failed(self, error: BaseException) -> None:
        """As Flight.failed."""


NO_FLIGHT_RECORDER = NoFlightRecorder()


class Watch(Protocol):
    """Looks on while something runs that might not end."""

    def watch(self, what: str) -> AbstractContextManager[None]:
        """A context to run it in."""
        ...


class NoWatchdog:
    """Looks away."""

    def watch(self, what: str) -> AbstractContextManager[None]:
        """As Watch.watch."""
        return nullcontext()


NO_WATCHDOG = NoWatchdog()
