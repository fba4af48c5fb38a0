"""Tensors that a check puts in its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GARBAGE = -0x7F7F7F7F
PAGE_SIZE = 3


def ints(values: Sequence[int]) -> Tensor:
    """int32."""
    return torch.tensor(values, dtype=torch.int32)


def garbage(count: int) -> Tensor:
    """int32 words that were never written."""
    return torch.full((count,), GARBAGE, dtype=torch.int32)


def gapped(*shape: int) -> Tensor:
    """Random rows with NaN between them."""
    memory = torch.full((*shape[:-1], shape[-1] + 8), float("nan"))
    return memory[..., : shape[-1]].copy_(torch.randn(*shape))
