"""The interface of rounds that follow from each other on the device (device_steps.py).

An engine without such rounds.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from rocm_serve.scheduler import ScheduledStep, Scheduler
from rocm_serve.speculation.reading import Together
from rocm_serve.speculation.speculation import StepPicks


class SpeculativeSteps(Protocol):
    """Series of rounds."""

    def goes_on(self, scheduler: Scheduler) -> bool:
        """True if a round may be launched now. Pages are reserved for it."""
        ...

    def begin(self, step: ScheduledStep, picks: StepPicks, scheduler: Scheduler) -> StepPicks:
        """Returns the picks of a step that was launched. Rounds follow after it if they can."""
        ...

    def launch(self) -> tuple[ScheduledStep, StepPicks]:
        """Launches a round. Its sequences are those of the step."""
        ...

    def read_together(self, pending: Many[StepPicks], most: int, scheduler: Scheduler) -> Together | None:
        """Waits for the `most` oldest rounds and reads them, if none of their sequences ends or fails.

        It also reads further rounds that the device has finished. None: the oldest step is to be read by itself.
        pending: all that were launched and not read, oldest first
        """
        ...

    def took(self, together: Together) -> None:
        """Notes that the sequences have taken the tokens that were read together."""
        ...

    def noted(self) -> None:
        """Notes that the result of begin() or launch() will be read: rounds may follow. Without this none does."""
        ...

    def end(self) -> bool:
        """Ends the series, after all its rounds were read and before another step. True if a round had a fault."""
        ...

    def first_fault_of(self, step: int | None) -> int:
        """The first of the rounds that followed from a step that may have had its fault; 0 if none has reported one."""
        ...


class NoSpeculativeSteps:
    """The rounds of an engine whose host plans every step."""

    def goes_on(self, scheduler: Scheduler) -> bool:
        """Like SpeculativeSteps.goes_on."""
        return False

    def begin(self, step: ScheduledStep, picks: StepPicks, scheduler: Scheduler) -> StepPicks:
        """Like SpeculativeSteps.begin."""
        return picks

    def launch(self) -> tuple[ScheduledStep, StepPicks]:
        """Like SpeculativeSteps.launch."""
        raise AssertionError("no round goes on")

    def read_together(self, pending: Many[StepPicks], most: int, scheduler: Scheduler) -> Together | None:
        """Like SpeculativeSteps.read_together."""
        return None

    def took(self, together: Together) -> None:
        """Like SpeculativeSteps.took."""

    def noted(self) -> None:
        """Like SpeculativeSteps.noted."""

    def end(self) -> bool:
        """Like SpeculativeSteps.end."""
        return False

    def first_fault_of(self, step: int | None) -> int:
        """Like SpeculativeSteps.first_fault_of."""
        return 0
