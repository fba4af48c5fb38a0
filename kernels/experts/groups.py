"""ExpertGroups: the tokens of each expert, as the device sorts them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertGroups(NamedTuple):
    """The pairs of a token and an expert that it has chosen, by expert. Pair token * chosen + i is a token's i-th.

    tokens: int64 [pairs]        place -> the token of the pair there; those of one expert are in the order of pairs
    places: int64 [pairs]        pair -> its place
    indptr: int64 [experts + 1]  expert -> its first place; [0] == 0
    drawn:  int32 [1]            blocks that programs of a product have drawn; each product leaves 0
    """

    tokens: Tensor
    places: Tensor
    indptr: Tensor
    drawn: Tensor

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
        by_expert, pairs = expert.flatten().to(dtype).sort(stable=True)
        numbers = torch.arange(num_experts + 1, dtype=dtype, device=expert.device)
        places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=expert.device))
        drawn = torch.zeros(1, dtype=torch.int32, device=expert.device)
        return cls(pairs // expert.shape[1], places, torch.searchsorted(by_expert, numbers), drawn)
