"""Columns of decode's blocks: where they lie in rows of K and V, and which of them are a query row's own.

A row of decode reads one KV head, or several next to each other, cut into blocks of columns, of which the last one may
be narrower. G: a DecodeGeometry
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.key_loop import is_column
from rocm_attn.kernels.attention.key_rows import are_read_by_page, near, offsets_in_page
from rocm_attn.kernels.tuning.tiles import equal_columns


class KeyRows(NamedTuple):
    """Pointers into K or V of a key block: to the first block of columns, and to the last one if it has a TAIL."""

    first: Any
    tails: Any


def tail_of(dim: int, heads: int, columns: int) -> int:
    """Columns of the last block of `heads` KV heads if it is read by offsets of its own; else 0.

    columns: of the others. With several heads it always has its own offsets: there may be something between heads, so
    that its offsets are not those of another block moved on.
    """
    rest = (dim * heads - 1) % columns + 1
    if rest == dim * heads:
        return 0
    tail = equal_columns(rest, columns)
    return tail if heads > 1 or tail < columns else 0


@triton.jit
def elements(rows, live, PART: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr, DIM: tl.constexpr):
    """A block of columns of K rows or V rows; 0 beyond the row and for keys that are not live, [keys].

    rows: KeyRows; DIM: of the row
    """
    mask = live[:, None]
    if TAIL > 0 and (PART + 1) * COLUMNS >= DIM:
        if PART * COLUMNS + TAIL > DIM:
            mask = mask & is_column(PART * COLUMNS // TAIL, TAIL, DIM)
        block = tl.load(rows.tails, mask=mask, other=0)
    else:
        if (PART + 1) * COLUMNS > DIM:
            mask = mask & is_column(PART, COLUMNS, DIM)
        block = tl.load(rows.first + PART * COLUMNS, mask=mask, other=0)
    return block


@triton.jit
def even_and_odd(block):
    """The even columns of a block and the odd ones, a tuple."""
    pairs = tl.reshape(block, [block.shape[0], block.shape[1] // 2, 2])
    return tl.split(pairs)


@triton.jit
def by_row(x, G: tl.constexpr):
    """A number of each query row along its side of scores and of accumulators."""
    return x[None, :] if G.TRANSPOSED else x[:, None]


@triton.jit
def by_key(x, G: tl.constexpr):
    """A number of each key along its side of scores."""
    return x[:, None] if G.TRANSPOSED else x[None, :]


@triton.jit
def alone(block):
    """A tuple of one block."""
    return (block,)


@triton.jit
def zeros_of_values(COLUMNS: tl.constexpr, G: tl.constexpr):
    """The accumulator before any key: a tuple of blocks of COLUMNS columns, the last one of V_TAIL if that is not 0."""
    blocks = ()
    PARTS: tl.constexpr = G.V_PARTS
    for i in tl.static_range(PARTS):
        blocks += (_zeros(G.V_TAIL if G.V_TAIL > 0 and i == PARTS - 1 else COLUMNS, G),)  # type: ignore[assignment]
    return blocks


@triton.jit
def _zeros(COLUMNS: tl.constexpr, G: tl.constexpr):
    QUERY_ROWS: tl.constexpr = G.QUERY_ROWS
    return tl.zeros([COLUMNS, QUERY_ROWS] if G.TRANSPOSED else [QUERY_ROWS, COLUMNS], tl.float32)


@triton.jit
def tail_offsets(
    PARTS: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr, DIM: tl.constexpr, head_stride, G: tl.constexpr
):
    """Does the same as `column_offsets`, for the last block."""
    return column_offsets((PARTS - 1) * COLUMNS + tl.arange(0, TAIL), DIM, head_stride, G)


@triton.jit
def tails_of_keys(side, row, lane, BY_PAGE: tl.constexpr):
    """Pointers of the last block of keys, [keys, columns]. side: a PageSide; row: of each key, or the page's first"""
    if BY_PAGE:
        tails = side.at + row + offsets_in_page(lane, side.token, side.tail)
    else:
        tails = side.at + row[:, None] + side.tail[None, :]
    return tails


@triton.jit
def column_offsets(column, DIM: tl.constexpr, head_stride, G: tl.constexpr):
    """Offsets of a block's columns in a token's rows, from its first head on. DIM: of a head"""
    R: tl.constexpr = G.rows
    if R.HEADS_PER_ROW > 1 and are_read_by_page(G.IN_ONE_PAGE):
        column = column // DIM * near(head_stride) + column % DIM
    elif R.HEADS_PER_ROW > 1:
        column = (column // DIM).to(tl.int64) * head_stride + column % DIM
    return column


@triton.jit
def own_columns(half, FIRST: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, G: tl.constexpr):
    """Each column's element of its head, and whether it is the row's own column; [rows, COLUMNS] or swapped.

    half: [rows], which of a row's KV heads it reads; FIRST: the block's first column in the row
    """
    column = FIRST + tl.arange(0, COLUMNS)
    column = column[:, None] if G.TRANSPOSED else column[None, :]
    if G.rows.HEADS_PER_ROW > 1:
        own = column // DIM == by_row(half, G)
        column = column % DIM
    else:
        own = column < DIM
    return column, own


@triton.jit
def _own_part(
    half,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
    DIM: tl.constexpr,
    G: tl.constexpr,
):
    """Does the same as `own_columns`, for the block PART."""
    return own_columns(half, PART * COLUMNS, TAIL if TAIL > 0 and PART == PARTS - 1 else COLUMNS, DIM, G)


@triton.jit
def blocks_of_q(q_line, half, is_row, G: tl.constexpr):
    """The q block, a tuple of blocks of columns. q_line: of each row; is_row: whether it is one"""
    blocks = ()
    PARTS: tl.constexpr = G.K_PARTS
    for i in tl.static_range(PARTS):
        own, is_k = _own_part(half, i, PARTS, G.K_COLUMNS, G.K_TAIL, G.HEAD_DIM, G)
        mask = is_row & is_k
        blocks += (tl.load(q_line + own, mask=mask, other=0.0),)  # type: ignore[assignment]
    return blocks


@triton.jit
def own_places(half, is_row, G: tl.constexpr):
    """own_columns of each block of columns of the output; only lines that are rows own any."""
    places, inside = (), ()
    PARTS: tl.constexpr = G.V_PARTS
    for i in tl.static_range(PARTS):
        own, is_v = _own_part(half, i, PARTS, G.V_COLUMNS, G.V_TAIL, G.V_HEAD_DIM, G)
        is_own = is_row & is_v
        places += (own,)  # type: ignore[assignment]
        inside += (is_own,)  # type: ignore[assignment]
    return places, inside
