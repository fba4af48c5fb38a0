"""Rounds that follow from each other on the device, as the engine sees them (device_steps.py)."""

from __future__ import annotations

from collections.abc import Sequence as Many

from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.scheduler import Scheduler
from rocm_serve.speculation.reading import Together
from rocm_serve.speculation.speculation import StepPicks


class SpeculativeSteps:
    """Series of rounds. This one has none: the host plans every step."""

    def goes_on(self, scheduler: Scheduler) -> bool:
        """True if a round may be launched now. Pages are reserved for it."""
        return False

    def begin(self, step: ScheduledStep, picks: StepPicks, scheduler: Scheduler) -> StepPicks:
        """Returns the picks of a step that was launched. Rounds follow after it if they can."""
        return picks

    def launch(self) -> tuple[ScheduledStep, StepPicks]:
        """Launches a round. Its sequences are those of the step."""
        raise AssertionError("no round goes on")

    def read_together(self, pending: Many[StepPicks], most: int, scheduler: Scheduler) -> Together | None:
        """Waits for the `most` oldest rounds and reads them, if none of their sequences ends or fails.

        It also reads further rounds that the device has finished. None: the oldest step is to be read by itself.
        pending: all that were launched and not read, oldest first
        """
        return None

    def took(self, together: Together) -> None:
        """Notes that the sequences have taken the tokens that were read together."""

    def end(self) -> bool:
        """Ends the series, after all its rounds were read and before another step. True if a round had a fault."""
        return False

    def first_fault_of(self, step: int | None) -> int:
        """The first of the rounds that followed from a step that may have had its fault; 0 if none has reported one."""
        return 0
