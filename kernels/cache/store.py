"""Write new keys and values to their slots.

    k_pages[slot // page_size, slot % page_size] = k[token]      likewise v

Tokens at or past num_tokens and every slot of page 0 are dropped: a pad's hidden state may be NaN, and page 0 stays
zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch


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
    kp_token,
    kp_head,
    vp_page,
    vp_token,
    vp_head,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slot_of_token + token).to(tl.int64)
    if (token < tl.load(counts + 1)) & (slot >= PAGE_SIZE):
        t = token.to(tl.int64)
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
        # 64-bit before multiplying: HND layouts have head strides beyond int32.
        head64 = head.to(tl.int64)
        d = tl.arange(0, K_BLOCK)[None, :]
        inside = (head < HEADS) & (d < K_DIM)
        row = tl.load(k + t * k_token + head64 * k_head + d, mask=inside, other=0.0)
        tl.store(k_pages + page * kp_page + offset * kp_token + head64 * kp_head + d, row, mask=inside)
        d = tl.arange(0, V_BLOCK)[None, :]
        inside = (head < HEADS) & (d < V_DIM)
        row = tl.load(v + t * v_token + head64 * v_head + d, mask=inside, other=0.0)
        tl.store(v_pages + page * vp_page + offset * vp_token + head64 * vp_head + d, row, mask=inside)


def launch_store_kv(
    k: Tensor, v: Tensor, slot_of_token: Tensor, counts: Tensor, k_pages: Tensor, v_pages: Tensor
) -> None:
    """Write k and v to the slots of their tokens.

    k, v:             [T, kv_heads, head_dim | v_head_dim], any strides but the last
    slot_of_token:    int32 [T]
    counts:           int32 [4]; [1] is num_tokens
    k_pages, v_pages: [pages, page_size, kv_heads, head_dim | v_head_dim], written in place, any strides but the last
    """
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
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        PAGE_SIZE=k_pages.shape[1],
        HEADS=heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        HEADS_BLOCK=heads_block,
        K_BLOCK=k_block,
        V_BLOCK=v_block,
        num_warps=4,
    )
