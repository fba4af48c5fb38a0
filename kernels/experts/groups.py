"""ExpertGroups: the tokens of each expert, as the device sorts them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertGroups(NamedTuple):
    """The pairs of a token and an expert that it has chosen, by expert. Pair token * chosen + i is a token's i-th.

    order:  int64 [pairs]        pairs by expert, those of one expert in their order
    indptr: int64 [experts + 1]  expert -> its first place in order; [0] == 0
    """

    order: Tensor
    indptr: Tensor

    @property
    def num_experts(self) -> int:
        """Experts, those without a token included."""
        return self.indptr.shape[0] - 1

    @classmethod
    def of(cls, expert: Tensor, num_experts: int) -> ExpertGroups:
        """Sorts on the device, in sizes that depend on no value.

        expert: integer [tokens, chosen], each 0 to num_experts - 1
        """
        # A GPU sorts by a byte at a time.
        dtype = torch.int16 if num_experts < 1 << 15 else expert.dtype
        by_expert, order = expert.flatten().to(dtype).sort(stable=True)
        numbers = torch.arange(num_experts + 1, dtype=dtype, device=expert.device)
        return cls(order, torch.searchsorted(by_expert, numbers))
