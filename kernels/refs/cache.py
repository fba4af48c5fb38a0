"""Torch twins of kernels/cache: same signatures, same results, fixed shapes, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, NOT_FINITE


def store_kv(k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages) -> None:
    """Twin of launch_store_kv. A dropped token writes a zero to slot 0, which is zero already: shapes stay fixed."""
    keys, values = pages.keys, pages.values
    page_size = keys.page_size
    token = torch.arange(k.shape[0], device=k.device)
    live = (token < counts[1]) & (slot_of_token >= page_size)
    slot = torch.where(live, slot_of_token, 0)
    page, offset = slot // page_size, slot % page_size
    keep = live[:, None, None]
    finite_k, finite_v = k.isfinite(), v.isfinite()
    keys.write_tokens(page, offset, torch.where(keep & finite_k, k, 0))
    values.write_tokens(page, offset, torch.where(keep & finite_v, v, 0))
    strange = live & ~(finite_k.flatten(1).all(1) & finite_v.flatten(1).all(1))
    counts[ERROR_WORD].bitwise_or_(strange.any().to(torch.int32) * NOT_FINITE)


def zero_tails(table: Tensor, row_of_seq: Tensor, kv_len: Tensor, q_len: Tensor, pages: LayerPages) -> None:
    """Twin of launch_zero_tails. A sequence that is left alone zeroes page 0, which is zero already."""
    keys, values = pages.keys, pages.values
    page_size = keys.page_size
    page_no = (kv_len - 1).clamp(min=0) // page_size
    live = (q_len > 0) & (page_no < table.shape[1])
    page = torch.where(live, table[row_of_seq.long(), page_no.clamp(max=table.shape[1] - 1).long()], 0).long()
    used = torch.where(live, kv_len - page_no * page_size, 0)
    dead = torch.arange(page_size, device=page.device) >= used[:, None]
    keys.zero_tokens(page, dead)
    values.zero_tokens(page, dead)
