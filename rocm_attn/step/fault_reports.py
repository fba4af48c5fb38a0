"""FaultReports: raises faults that the device found in earlier steps, at the same step on all ranks."""

from collections.abc import Callable
from typing import TypeVar

from rocm_attn.errors import DeviceFault, WrongState
from rocm_attn.machine.agreement import Agreement
from rocm_attn.machine.devices import wait_for_device
from rocm_attn.step.echo import STEPS_UNTIL_ECHO
from rocm_attn.step.gate import IDLE, StepHolder
from rocm_attn.step.publisher import Publisher

_Result = TypeVar("_Result")


class FaultReports:
    """The faults of one runtime's steps.

    While steps run, stage() or meet() raises a fault some steps later. After the last steps no step comes that could
    report their faults: report() and check() wait for the device and raise those too. One DeviceFault names all faults.

    agree:    how ranks that share the layers agree; they call each method alike
    canary:   describes writes to row 0 of the table, or to page 0 of a layer; empty if there were none
    meetings: the messages of ranks between steps
    """

    def __init__(self, publisher: Publisher, holder: StepHolder, agree: Agreement, canary: Callable[[], str]) -> None:
        self._publisher, self._holder = publisher, holder
        self._canary = canary
        self.meetings = agree.new_meetings()
        publisher.holds_faults = self.meetings.holds_faults

    @property
    def step_number(self) -> int:
        """The number of the step that was staged last, from 1 on; a DeviceFault names its step by it."""
        return self._publisher.step_number

    @property
    def steps_until_known(self) -> int:
        """The most steps that come after a faulty one before its fault is raised."""
        return STEPS_UNTIL_ECHO + self.meetings.steps_late

    def meet(self) -> None:
        """Collects the other ranks' faults before a step is staged.

        Ranks that call AttentionRuntime.step(), or run steps by a StepRunner, meet there. Raises DeviceFault for an
        earlier step, on all ranks alike, and RanksDiverged.
        """
        self._publisher.report(self.meetings.before_step(self.step_number, self._publisher.found))

    def check(self) -> None:
        """See AttentionRuntime.check_device."""
        written, found = self._find(lambda: (self._canary(), list(self._publisher.found)))
        if written:
            found.append(DeviceFault(f"{written}; padded sequences read it, so every later step may be wrong"))
        self._publisher.report(self.meetings.all_faults(self.step_number, found))

    def report(self) -> None:
        """Does the same as check(), but does not read the memory that padded sequences read."""
        found = self._find(lambda: self._publisher.found)
        self._publisher.report(self.meetings.all_faults(self.step_number, found))

    def report_own(self) -> None:
        """Does the same as report(), but for this rank alone: ranks may leave trial steps at different places."""
        self._publisher.report(self._find(lambda: self._publisher.found))

    def forget(self) -> None:
        """Waits for the device, and drops the faults that were not raised yet. For trial steps."""
        self._find(self._publisher.found.clear)

    def _find(self, then: Callable[[], _Result]) -> _Result:
        """Waits for the device, finds faults, and calls `then` before another thread may begin a step."""
        with self._holder.alone("the device's faults cannot be read"):
            if self._publisher.launching is not None and self._holder.state is not IDLE:
                # Reading the slot of a graph that is about to be launched would treat its step as abandoned.
                raise WrongState(
                    "the device's faults cannot be read while a staged step waits for its launch; read them after it"
                )
            wait_for_device(self._publisher.device)
            self._publisher.find_faults()
            return then()
