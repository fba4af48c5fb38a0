"""Pools above 4 GiB, whose unwritten pages take no memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tests.amd.kernels.attention_cases import Tensors

# So much that neither the elements fit int32 nor the bytes uint32.
LARGE_POOL_BYTES = 5 << 30


def in_large_pools(tensors: Tensors) -> Tensors:
    """The same step with its pages at the end of pools above 4 GiB."""
    num_pages = LARGE_POOL_BYTES // min(pages[0].nbytes for pages in (tensors.k_pages, tensors.v_pages))
    first = num_pages - len(tensors.k_pages)
    pools = [zeros((num_pages, *pages.shape[1:]), pages.dtype) for pages in (tensors.k_pages, tensors.v_pages)]
    for pool, pages in zip(pools, (tensors.k_pages, tensors.v_pages), strict=True):
        pool[first:] = pages
    return replace(tensors, k_pages=pools[0], v_pages=pools[1], table=tensors.table + first)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written."""
    return torch.from_numpy(np.zeros(shape, np.uint16)).view(dtype)
