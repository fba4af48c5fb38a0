"""Write new keys and values to their slots.

    k_pages[slot // page_size, slot % page_size] = k[token]      likewise v

Pages are linear or vectorised (page_rows.py): two compilations of one kernel.

Tokens at or past num_tokens, slots of page 0 where it belongs to no one, and negative slots are dropped: a pad's hidden
state may be NaN, and page 0 stays zero. What is infinite or no number in a token that is stored is stored as 0 and sets
a bit of the step's error word: attention multiplies the V of keys that a token does not see by a probability of 0, and
0 * inf is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.cache.cells import element_cell, token_cell
from rocm_attn.kernels.cache.page_rows import key_rows, value_rows
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.metadata import error_word

_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_NOT_FINITE = tl.constexpr(error_word.NOT_FINITE)


@triton.jit
def _store_kernel(
    k,
    v,
    slot_of_token,
    counts,
    k_pages,
    v_pages,
    k_token,
    k_head,
    v_token,
    v_head,
    kp_page,
    kp_group,
    kp_head,
    kp_vector,
    vp_page,
    vp_group,
    vp_head,
    vp_vector,
    PAGE_SIZE: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_ELEMENTS: tl.constexpr,
    K_TOKENS: tl.constexpr,
    V_ELEMENTS: tl.constexpr,
    V_TOKENS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slot_of_token + token).to(tl.int64)
    if (token < tl.load(counts + 1)) & (slot >= FIRST_SLOT):
        t = token.to(tl.int64)
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
        # 64-bit before multiplying: HND layouts have head strides beyond int32.
        head64 = head.to(tl.int64)
        d = tl.arange(0, K_BLOCK)[None, :]
        inside = (head < HEADS) & (d < K_DIM)
        row = tl.load(k + t * k_token + head64 * k_head + d, mask=inside, other=0.0)
        finite = tl.abs(row.to(tl.float32)) < float("inf")
        strange = tl.max((~finite).to(tl.int32), 1)
        heads = k_pages + page * kp_page + token_cell(offset, kp_group, K_TOKENS) + head64 * kp_head
        cell = element_cell(d, kp_vector, K_ELEMENTS, K_TOKENS, K_DIM)
        tl.store(heads + cell, tl.where(finite, row, 0.0), mask=inside)
        d = tl.arange(0, V_BLOCK)[None, :]
        inside = (head < HEADS) & (d < V_DIM)
        row = tl.load(v + t * v_token + head64 * v_head + d, mask=inside, other=0.0)
        finite = tl.abs(row.to(tl.float32)) < float("inf")
        strange |= tl.max((~finite).to(tl.int32), 1)
        heads = v_pages + page * vp_page + token_cell(offset, vp_group, V_TOKENS) + head64 * vp_head
        cell = element_cell(d, vp_vector, V_ELEMENTS, V_TOKENS, V_DIM)
        tl.store(heads + cell, tl.where(finite, row, 0.0), mask=inside)
        if tl.max(strange, 0) > 0:
            tl.atomic_or(counts + _ERROR_WORD, _NOT_FINITE, sem="relaxed")


def launch_store_kv(
    k: Tensor,
    v: Tensor,
    slot_of_token: Tensor,
    counts: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    null_page: bool = True,
) -> None:
    """Write k and v to the slots of their tokens, 0 in the place of what is infinite or no number.

    k, v:             [T, kv_heads, head_dim | v_head_dim], any strides but the last
    slot_of_token:    int32 [T]
    counts:           int32 [4]; [1] is num_tokens, [3] receives an error bit where a token was not finite
    k_pages, v_pages: linear, with any strides but the last, or vectorised; written in place
    null_page:        whether page 0 belongs to no one
    """
    keys, values = key_rows(k_pages), value_rows(v_pages)
    num_tokens, heads, k_dim = k.shape
    v_dim = v.shape[2]
    k_block, v_block = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
    heads_block = max(1, min(triton.next_power_of_2(heads), 4096 // max(k_block, v_block)))
    launch(
        _store_kernel,
        (num_tokens, triton.cdiv(heads, heads_block)),
        k,
        v,
        slot_of_token,
        counts,
        k_pages,
        v_pages,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *keys.cells.stride()[:4],
        *values.cells.stride()[:4],
        PAGE_SIZE=keys.page_size,
        FIRST_SLOT=keys.page_size if null_page else 0,
        HEADS=heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_ELEMENTS=keys.vector_elements,
        K_TOKENS=keys.group_tokens,
        V_ELEMENTS=values.vector_elements,
        V_TOKENS=values.group_tokens,
        HEADS_BLOCK=heads_block,
        K_BLOCK=k_block,
        V_BLOCK=v_block,
        num_warps=4,
    )
