"""RecentSteps: the requests of recent steps, for which the device may still report a fault."""

from collections import deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.step.echo import STEPS_UNTIL_ECHO
from rocm_serve.request import Sequence

# Twice the number of steps until a fault is found, and two for ranks that hear of it from another rank.
_KEPT = 2 * STEPS_UNTIL_ECHO + 2

# Later than every round: for a step without rounds, or for a fault that no round has reported.
NO_ROUND = INT32_MAX
_BEFORE = -1


@dataclass(slots=True)
class _Run:
    """One run of the step runner: steps before + 1 to last of the runtime, more than one if a graph was made.

    ended: request that has ended in it, or in a round that followed from it -> the number of that round; _BEFORE for
           one that had ended before it
    """

    before: int
    last: int
    sequences: Many[Sequence]
    ended: dict[int, int] = field(default_factory=dict)


class RecentSteps:
    """Step numbers, as counted by runtime.faults.step_number -> numbers of the requests in these steps."""

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque(maxlen=_KEPT)

    def note(self, before: int, last: int, sequences: Many[Sequence]) -> None:
        """Records a run; before, last: the runtime's step number before and after it."""
        self._runs.append(_Run(before, last, sequences))

    def leave(self, request: int, last: int, speculative_step_number: int) -> None:
        """Records that a request ended with the run up to step `last`: faults of later runs are not its own.

        speculative_step_number: see StepPicks.speculative_step_number; faults of later rounds are not its own either
        """
        for run in reversed(self._runs):
            if run.last == last:
                run.ended[request] = speculative_step_number
                return
            run.ended[request] = _BEFORE

    def requests_in(self, step: int | None, first_speculative_step: int) -> frozenset[int] | None:
        """The requests that a fault of a step may concern; None if the step, or its requests, are not known.

        first_speculative_step: of the rounds that followed from it, the first one that may have had the fault
        """
        if step is None:
            return None
        for run in self._runs:
            # the numbers wrap
            if 0 < (step - run.before) & INT32_MAX <= (run.last - run.before) & INT32_MAX:
                requests = [sequence.number for sequence in run.sequences]
                return frozenset(each for each in requests if run.ended.get(each, NO_ROUND) >= first_speculative_step)
        return None
