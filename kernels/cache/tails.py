"""Zero what lies behind each sequence in its last page, for kernels that multiply it by a probability of 0.

    k_pages[page, kv_len % page_size :] = 0    likewise v        page = table[row_of_seq[i], (kv_len - 1) // page_size]

Pages are linear or vectorised, as for the store.

Only of sequences that have new tokens: they have just written to that page, so nobody shares it. A page that was used
before holds another request's keys and values, which may be NaN, and 0 * NaN is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.cache.cells import element_cell, token_cell
from rocm_attn.kernels.cache.page_rows import key_rows, value_rows
from rocm_attn.kernels.launch import launch


@triton.jit
def _zero_tails_kernel(
    table,
    table_stride,
    table_width,
    row_of_seq,
    kv_len,
    q_len,
    k_pages,
    v_pages,
    kp_page,
    kp_group,
    kp_head,
    kp_vector,
    vp_page,
    vp_group,
    vp_head,
    vp_vector,
    PAGE_SIZE: tl.constexpr,
    FIRST_PAGE: tl.constexpr,
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
    seq = tl.program_id(0)
    length = tl.load(kv_len + seq)
    used = length % PAGE_SIZE
    page_no = (length - 1) // PAGE_SIZE
    if (tl.load(q_len + seq) > 0) & (used > 0) & (page_no < table_width):
        row = tl.load(row_of_seq + seq).to(tl.int64)
        page = tl.load(table + row * table_stride + page_no).to(tl.int64)
        if page >= FIRST_PAGE:
            # 64-bit before multiplying: HND layouts have head strides beyond int32.
            head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
            head64 = head.to(tl.int64)
            k_d = tl.arange(0, K_BLOCK)[None, :]
            v_d = tl.arange(0, V_BLOCK)[None, :]
            k_inside = (head < HEADS) & (k_d < K_DIM)
            v_inside = (head < HEADS) & (v_d < V_DIM)
            k_cell = element_cell(k_d, kp_vector, K_ELEMENTS, K_TOKENS, K_DIM)
            v_cell = element_cell(v_d, vp_vector, V_ELEMENTS, V_TOKENS, V_DIM)
            for offset in range(used, PAGE_SIZE):
                token = tl.cast(offset, tl.int64)
                k_row = k_pages + page * kp_page + token_cell(token, kp_group, K_TOKENS) + head64 * kp_head
                v_row = v_pages + page * vp_page + token_cell(token, vp_group, V_TOKENS) + head64 * vp_head
                tl.store(k_row + k_cell, tl.zeros([HEADS_BLOCK, K_BLOCK], k_pages.dtype.element_ty), mask=k_inside)
                tl.store(v_row + v_cell, tl.zeros([HEADS_BLOCK, V_BLOCK], v_pages.dtype.element_ty), mask=v_inside)


def launch_zero_tails(
    table: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_len: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    null_page: bool = True,
) -> None:
    """Zero the rows behind the last token of every sequence that has new tokens, in its last page.

    table:                     int32 [rows, width]
    row_of_seq, kv_len, q_len: int32 [S]
    k_pages, v_pages:          linear, with any strides but the last, or vectorised; written in place
    null_page:                 whether page 0 belongs to no one, and stays as it is
    """
    keys, values = key_rows(k_pages), value_rows(v_pages)
    heads, k_dim, v_dim = keys.num_heads, keys.dim, values.dim
    k_block, v_block = triton.next_power_of_2(k_dim), triton.next_power_of_2(v_dim)
    heads_block = max(1, min(triton.next_power_of_2(heads), 4096 // max(k_block, v_block)))
    launch(
        _zero_tails_kernel,
        (kv_len.shape[0], triton.cdiv(heads, heads_block)),
        table,
        table.stride(0),
        table.shape[1],
        row_of_seq,
        kv_len,
        q_len,
        k_pages,
        v_pages,
        *keys.cells.stride()[:4],
        *values.cells.stride()[:4],
        PAGE_SIZE=keys.page_size,
        FIRST_PAGE=1 if null_page else 0,
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
