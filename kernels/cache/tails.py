"""Zeroes the rest of each sequence's last page, for kernels that multiply it by a probability of 0.

    k_pages[page, kv_len % page_size :] = 0    likewise v        page = table[row_of_seq[i], (kv_len - 1) // page_size]

Pages are linear or vectorised, as for the store.

Only sequences with new tokens are handled: they have just written to that page, so no other sequence has it. Pads may
have KV, in row 0, which is no sequence's then: they have written nothing, and page 0 may be another's. A page that was
used before holds another request's keys and values, which may be NaN, and 0 * NaN is NaN.
"""

import triton
import triton.language as tl

from rocm_attn.kernels.cache.cells import CellGeometry, element_cell, token_cell
from rocm_attn.kernels.cache.codes import TOKEN_SCALES
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.launch import launch, only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors


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
    k_scale,
    v_scale,
    kp_page,
    kp_group,
    kp_head,
    kp_vector,
    vp_page,
    vp_group,
    vp_head,
    vp_vector,
    G: tl.constexpr,
    FIRST_PAGE: tl.constexpr,
    FIRST_ROW: tl.constexpr,
):
    HEADS_BLOCK: tl.constexpr = G.HEADS_BLOCK
    K_COLUMNS: tl.constexpr = G.K_COLUMNS
    V_COLUMNS: tl.constexpr = G.V_COLUMNS
    seq = tl.program_id(0)
    length = tl.load(kv_len + seq)
    used = length % G.PAGE_SIZE
    page_no = (length - 1) // G.PAGE_SIZE
    row = tl.load(row_of_seq + seq).to(tl.int64)
    if (tl.load(q_len + seq) > 0) & (used > 0) & (page_no < table_width) & (row >= FIRST_ROW):
        page = tl.load(table + row * table_stride + page_no).to(tl.int64)
        if page >= FIRST_PAGE:
            # 64-bit before multiplying: HND layouts have head strides beyond int32.
            head = tl.program_id(1) * G.HEADS_BLOCK + tl.arange(0, G.HEADS_BLOCK)[:, None]
            head64 = head.to(tl.int64)
            k_d = tl.arange(0, G.K_COLUMNS)[None, :]
            v_d = tl.arange(0, G.V_COLUMNS)[None, :]
            k_inside = (head < G.HEADS) & (k_d < G.K_DIM)
            v_inside = (head < G.HEADS) & (v_d < G.V_DIM)
            k_cell = element_cell(k_d, kp_vector, G.K_ELEMENTS, G.K_TOKENS, G.K_DIM)
            v_cell = element_cell(v_d, vp_vector, G.V_ELEMENTS, G.V_TOKENS, G.V_DIM)
            for offset in range(used, G.PAGE_SIZE):
                token = tl.cast(offset, tl.int64)
                k_row = k_pages + page * kp_page + token_cell(token, kp_group, G.K_TOKENS) + head64 * kp_head
                v_row = v_pages + page * vp_page + token_cell(token, vp_group, G.V_TOKENS) + head64 * vp_head
                tl.store(k_row + k_cell, tl.zeros([HEADS_BLOCK, K_COLUMNS], k_pages.dtype.element_ty), mask=k_inside)
                tl.store(v_row + v_cell, tl.zeros([HEADS_BLOCK, V_COLUMNS], v_pages.dtype.element_ty), mask=v_inside)
                if G.SCALES == TOKEN_SCALES:
                    # The codes are 0; a scale that is NaN would not leave their values 0.
                    first_scale = page * (G.HEADS * G.PAGE_SIZE) + token
                    nothing = tl.zeros([HEADS_BLOCK, 1], tl.float32)
                    tl.store(k_scale + first_scale + head64 * G.PAGE_SIZE, nothing, mask=head < G.HEADS)
                    tl.store(v_scale + first_scale + head64 * G.PAGE_SIZE, nothing, mask=head < G.HEADS)


@only_launches
def launch_zero_tails(step: StepTensors, pages: LayerPages) -> None:
    """Zeroes the rows after the last token of every sequence that has new tokens, in its last page.

    step:  row_of_seq, kv_len, q_len and table are read; page 0 stays unchanged if it belongs to no sequence
    pages: linear, with any strides but the last, or vectorised; written in place, as are scales of tokens
    """
    geometry = CellGeometry.of(pages)
    launch(
        _zero_tails_kernel,
        (step.kv_len.shape[0], triton.cdiv(geometry.HEADS, geometry.HEADS_BLOCK)),
        step.table,
        step.table.stride(0),
        step.table.shape[1],
        step.row_of_seq,
        step.kv_len,
        step.q_len,
        pages.raw_k,
        pages.raw_v,
        pages.k_scale,
        pages.v_scale,
        *pages.keys.cells.stride()[:4],
        *pages.values.cells.stride()[:4],
        G=geometry,
        FIRST_PAGE=1 if step.terms.null_page else 0,
        FIRST_ROW=1 if step.pads.kv_len else 0,
        num_warps=4,
    )
