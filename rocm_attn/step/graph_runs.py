"""GraphRuns: how many graphs have run that take their inputs by themselves, as host and device have counted them.

A slot that a graph takes says how many runs come before (kernels/metadata/take_inputs.py). Where the host may have
miscounted, as after a launch that raised, both go on from a number that no run has had for long.

A launch that the driver has lost raises nothing: each step after it would take the inputs of the one before it, and
say that all is well. So the host asks the device for its count now and then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rocm_attn.kernels.metadata.slot_layout import MOST_RUNS
from rocm_attn.step.host_ring import Fence, NoFence

# More than may have gone uncounted.
_UNCOUNTED_RUNS = 1 << 16
# Steps from one question for the device's count to the next one.
STEPS_UNTIL_COMPARED = 64
# In the place of what the device should have counted.
_NOT_ASKED = -1


class GraphRuns:
    """The runs of one runtime.

    on_device: int32 [1], which the kernel at the head of such a graph counts up
    number:    what it holds when all that was launched is done, unless the count is lost
    """

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.zeros(1, dtype=torch.int32, device=device)
        self.number = 0
        self._is_known = True
        pinned = device.type == "cuda"
        self._answer = torch.zeros(1, dtype=torch.int32, pin_memory=pinned)
        self._answered: Fence = torch.Event(device) if pinned else NoFence()
        self._asked_at = _NOT_ASKED
        self._steps_left = STEPS_UNTIL_COMPARED

    def run(self, replay: Callable[[], object]) -> None:
        """Launch a graph that takes inputs."""
        is_known, self._is_known = self._is_known, False
        replay()
        # One statement: what breaks it off loses the count, as a launch does that raises.
        self.number, self._is_known = (self.number + 1) & MOST_RUNS, is_known

    def lose_count(self) -> None:
        """Runs may come, or have come, that are not counted."""
        self._is_known = False

    def next(self) -> int:
        """How many runs come before the next one, of a step whose slot is written now."""
        self._steps_left -= 1
        if self._steps_left <= 0:
            self._compare()
        if not self._is_known:
            number = (self.number + _UNCOUNTED_RUNS) & MOST_RUNS
            self.on_device.fill_(number)
            self.number, self._is_known = number, True
        return self.number

    def _compare(self) -> None:
        """Ask the device for its count, and lose the count if its answer is another. Nobody waits for the answer.

        The step whose graph was lost, or one after it, has left a slot that no graph takes then, and is told by it.
        """
        if self._asked_at == _NOT_ASKED and self._is_known:
            self._answer.copy_(self.on_device, non_blocking=True)
            self._answered.record()
            self._asked_at = self.number
        if self._asked_at != _NOT_ASKED and self._answered.query():
            if int(self._answer) != self._asked_at:
                self._is_known = False
            self._asked_at, self._steps_left = _NOT_ASKED, STEPS_UNTIL_COMPARED
