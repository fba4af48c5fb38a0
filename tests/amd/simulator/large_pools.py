"""Pools above 4 GiB, whose unwritten pages take no memory."""

import numpy as np
import torch
from torch import Tensor

# So much that neither the elements fit int32 nor the bytes uint32.
LARGE_POOL_BYTES = 5 << 30


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written."""
    return torch.from_numpy(np.zeros((*shape, dtype.itemsize), np.uint8)).view(dtype).squeeze(-1)


def pool_ending_with(pages: Tensor, num_pages: int) -> Tensor:
    """A pool of num_pages pages, the last of which are copies of these; the others are zeros. pages: [pages, ...]"""
    pool = zeros((num_pages, *pages.shape[1:]), pages.dtype)
    pool[num_pages - len(pages) :] = pages
    return pool
