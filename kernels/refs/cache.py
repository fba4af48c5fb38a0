"""Torch twin of kernels/cache: same signature, same result, fixed shapes, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


def store_kv(k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, k_pages: Tensor, v_pages: Tensor) -> None:
    """Twin of launch_store_kv. A dropped token writes a zero to slot 0, which is zero already: shapes stay fixed."""
    page_size = k_pages.shape[1]
    token = torch.arange(k.shape[0], device=k.device)
    live = (token < counts[1]) & (slot_of_token >= page_size)
    slot = torch.where(live, slot_of_token, 0)
    page, offset = slot // page_size, slot % page_size
    keep = live[:, None, None]
    k_pages[page, offset] = torch.where(keep, k, 0)
    v_pages[page, offset] = torch.where(keep, v, 0)
