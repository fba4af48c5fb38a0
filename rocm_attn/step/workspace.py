"""Workspace: scratch memory that the kernels of a step share, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.errors import NeverFits
from rocm_attn.step.buffers import ALL_MEMORY_GUARDS, MemoryGuards


class Workspace:
    """float32 words at one address until they have to grow.

    A layer's kernel is done with its words when the next one starts, so the arena is as large as the largest need. The
    children of a split step, whose kernels may run at the same time, have a part of it each.
    """

    def __init__(self, device: torch.device, guards: MemoryGuards = ALL_MEMORY_GUARDS) -> None:
        self._words = torch.empty(0, dtype=torch.float32, device=device)
        self._guards = guards
        self._sealed = False

    @property
    def capacity(self) -> int:
        """Words that fit without growing."""
        return self._words.numel()

    def seal(self) -> None:
        """From now on a graph reads the address: growing raises."""
        self._sealed = True

    def ensure(self, words: int) -> bool:
        """Make room for `words` float32 words; whether the address changed. Raises NeverFits when sealed."""
        if words <= self.capacity:
            return False
        if self._sealed:
            self._guards.sealed_growth(
                f"a step needs {words * 4} bytes of workspace and captured graphs hold {self.capacity * 4}; "
                "raise the largest of capture_sizes before the first capture"
            )
        with torch.inference_mode(False):  # what is made in that mode cannot be written outside of it
            self._words = torch.empty(words, dtype=torch.float32, device=self._words.device)
        return True

    def view(self, words: int, first: int = 0) -> Tensor:
        """`words` words from the first one on, float32 [words]; their content is undefined."""
        if first + words > self.capacity:
            raise NeverFits(f"{first + words} words of workspace were asked for, {self.capacity} were ensured")
        return self._words[first : first + words]
