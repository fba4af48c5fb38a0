"""SpeculativeSteps: the engine's interface to verify steps that the device prepares itself (device_steps.py)."""

from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.scheduler import Scheduler
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

    def end(self) -> bool:
        """Ends the series, after all its rounds were read and before another step. True if a round had a fault."""
        return False

    def first_fault_of(self, step: int | None) -> int:
        """The first of the rounds that followed from a step that may have had its fault; 0 if none has reported one."""
        return 0
