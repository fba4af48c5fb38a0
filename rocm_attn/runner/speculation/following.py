"""What an engine asks of rounds that follow from each other on the device (rounds.py), and an engine without any."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

from rocm_attn.runner.scheduler import ScheduledStep, Scheduler
from rocm_attn.runner.speculation.reading import Together
from rocm_attn.runner.speculation.speculation import StepPicks


class Rounds(Protocol):
    """Series of rounds."""

    def goes_on(self, scheduler: Scheduler) -> bool:
        """Whether a round may be launched now, for which pages are reserved."""
        ...

    def begin(self, step: ScheduledStep, picks: StepPicks, scheduler: Scheduler) -> StepPicks:
        """The picks of a step that was launched, after which rounds follow if they can."""
        ...

    def launch(self) -> tuple[ScheduledStep, StepPicks]:
        """Launch a round. Its sequences are those of the step."""
        ...

    def read_together(self, unread: Many[StepPicks], most: int, scheduler: Scheduler) -> Together | None:
        """Read the oldest rounds, where none of their sequences ends or fails: `most` of them, which are waited for.

        More, if the device has finished them already. None: the oldest step is to be read by itself.
        unread: all that were launched and not read, oldest first
        """
        ...

    def took(self, together: Together) -> None:
        """The sequences have taken what was read together."""
        ...

    def noted(self) -> None:
        """What begin() or launch() has given will be read: rounds may follow. Without this none does."""
        ...

    def end(self) -> bool:
        """End the series, after all its rounds were read and before another step. Whether a round had a fault.

        Of any rank: all end it together.
        """
        ...

    def first_fault_of(self, step: int | None) -> int:
        """Of the rounds that followed from a step, the first one that may have had its fault; 0 where none has told."""
        ...


class NoRounds:
    """The host plans every step."""

    def goes_on(self, scheduler: Scheduler) -> bool:
        """As Rounds.goes_on."""
        return False

    def begin(self, step: ScheduledStep, picks: StepPicks, scheduler: Scheduler) -> StepPicks:
        """As Rounds.begin."""
        return picks

    def launch(self) -> tuple[ScheduledStep, StepPicks]:
        """As Rounds.launch."""
        raise AssertionError("no round goes on")

    def read_together(self, unread: Many[StepPicks], most: int, scheduler: Scheduler) -> Together | None:
        """As Rounds.read_together."""
        return None

    def took(self, together: Together) -> None:
        """As Rounds.took."""

    def noted(self) -> None:
        """As Rounds.noted."""

    def end(self) -> bool:
        """As Rounds.end."""
        return False

    def first_fault_of(self, step: int | None) -> int:
        """As Rounds.first_fault_of."""
        return 0
