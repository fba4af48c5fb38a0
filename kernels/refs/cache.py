"""Torch twins of kernels/cache: same signatures, same results, fixed shapes, no host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, NOT_FINITE


def store_kv(
    k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, pages: LayerPages, *, null_page: bool = True
) -> None:
    """Twin of launch_store_kv.

    Shapes stay fixed: a dropped token writes again what a token that is not dropped writes, or, where all are dropped,
    what slot 0 holds.
    """
    keys, values = pages.keys, pages.values
    page_size = keys.page_size
    token = torch.arange(k.shape[0], device=k.device)
    live = (token < counts[1]) & (slot_of_token >= (page_size if null_page else 0))
    any_live, source = live.any(), torch.where(live, token, live.int().argmax())
    slot = torch.where(any_live, slot_of_token[source], 0)
    page, offset = slot // page_size, slot % page_size
    for side, rows in ((keys, k), (values, v)):
        held = torch.empty_like(rows)
        side.read_tokens(page, offset, held)
        finite = torch.where(rows.isfinite(), rows, 0)
        side.write_tokens(page, offset, torch.where(any_live, finite[source], held))
    strange = live & ~(k.isfinite().flatten(1).all(1) & v.isfinite().flatten(1).all(1))
    counts[ERROR_WORD].bitwise_or_(strange.any().to(torch.int32) * NOT_FINITE)


def zero_tails(
    table: Tensor, row_of_seq: Tensor, kv_len: Tensor, q_len: Tensor, pages: LayerPages, *, null_page: bool = True
) -> None:
    """Twin of launch_zero_tails.

    Shapes stay fixed: a sequence that is left alone does again what is done for one that is not, or, where all are left
    alone, writes again what page 0 holds.
    """
    keys, values = pages.keys, pages.values
    page_size = keys.page_size
    page_no = (kv_len - 1).clamp(min=0) // page_size
    page = table[row_of_seq.long(), page_no.clamp(max=table.shape[1] - 1).long()]
    live = (q_len > 0) & (kv_len > 0) & (page_no < table.shape[1]) & (page >= (1 if null_page else 0))
    any_live = live.any()
    source = torch.where(live, torch.arange(len(live), device=live.device), live.int().argmax())
    used = torch.where(any_live, (kv_len - page_no * page_size)[source], page_size)
    dead = torch.arange(page_size, device=page.device) >= used[:, None]
    page = torch.where(any_live, page[source], 0).long()
    keys.zero_tokens(page, dead)
    values.zero_tokens(page, dead)
