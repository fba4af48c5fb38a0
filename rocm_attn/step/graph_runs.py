"""GraphRuns: how many graphs have run that take their inputs by themselves, as host and device have counted them.

A slot that a graph takes says how many runs come before (kernels/metadata/take_inputs.py). Where the host may have
miscounted, as after a launch that raised, both go on from a number that no run has had for long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rocm_attn.kernels.metadata.slot_layout import MOST_RUNS

# More than may have gone uncounted.
_UNCOUNTED_RUNS = 1 << 16


class GraphRuns:
    """The runs of one runtime.

    on_device: int32 [1], which the kernel at the head of such a graph counts up
    number:    what it holds when all that was launched is done, unless the count is lost
    """

    def __init__(self, device: torch.device) -> None:
        self.on_device = torch.zeros(1, dtype=torch.int32, device=device)
        self.number = 0
        self._is_known = True

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
        """How many runs come before the next one."""
        if not self._is_known:
            number = (self.number + _UNCOUNTED_RUNS) & MOST_RUNS
            self.on_device.fill_(number)
            self.number, self._is_known = number, True
        return self.number
