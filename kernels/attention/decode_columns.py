"""Columns of decode's blocks: where they lie in rows of K and V, and which of them are a query row's own.

A row of decode reads one KV head, cut into blocks of columns, or several beside each other. G: a DecodeGeometry
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_attn.kernels.attention.key_rows import are_read_by_page, near


@triton.jit
def column_offsets(column, DIM: tl.constexpr, head_stride, G: tl.constexpr):
    """Where columns of a block lie in a token's rows, from its first head's on. DIM: of a head"""
    R: tl.constexpr = G.rows
    if R.HEADS_PER_ROW > 1 and are_read_by_page(G.IN_ONE_PAGE):
        column = column // DIM * near(head_stride) + column % DIM
    elif R.HEADS_PER_ROW > 1:
        column = (column // DIM).to(tl.int64) * head_stride + column % DIM
    return column


@triton.jit
def own_columns(half, PART: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, G: tl.constexpr):
    """Of each column of a block the element of its head, and whether that is the row's own; [rows, COLUMNS] or swapped.

    half: [rows], which of a row's KV heads it reads
    """
    column = PART * COLUMNS + tl.arange(0, COLUMNS)
    column = column[:, None] if G.TRANSPOSED else column[None, :]
    if G.rows.HEADS_PER_ROW > 1:
        own = column // DIM == (half[None, :] if G.TRANSPOSED else half[:, None])
        column = column % DIM
    else:
        own = column < DIM
    return column, own


@triton.jit
def blocks_of_q(q_line, half, is_row, G: tl.constexpr):
    """The q block, a tuple of blocks of columns. q_line: of each row; is_row: whether it is one"""
    blocks = ()
    PARTS: tl.constexpr = G.K_PARTS
    for i in tl.static_range(PARTS):
        own, is_k = own_columns(half, i, G.K_COLUMNS, G.HEAD_DIM, G)
        mask = is_row & is_k
        blocks += (tl.load(q_line + own, mask=mask, other=0.0),)  # type: ignore[assignment]
    return blocks


@triton.jit
def own_places(half, is_row, G: tl.constexpr):
    """Of each block of columns of the output: own_columns of the rows that are one."""
    places, inside = (), ()
    PARTS: tl.constexpr = G.V_PARTS
    for i in tl.static_range(PARTS):
        own, is_v = own_columns(half, i, G.V_COLUMNS, G.V_HEAD_DIM, G)
        is_own = is_row & is_v
        places += (own,)  # type: ignore[assignment]
        inside += (is_own,)  # type: ignore[assignment]
    return places, inside
