"""The loop over keys that extend and deterministic attention share: key blocks added to a running softmax.

From maximum m, sum l and accumulator a (base 2), a block with scores s and values V gives

    m' = max(m, max s)    l' = 2^(m - m') l + sum 2^(s - m')    a' = 2^(m - m') a + 2^(s - m') V

q, K, V and a are tuples of equally wide blocks of columns: a head of 96 as three of 32 needs no padding, and one of 128
as two of 64 needs fewer registers. With EXACT every sum of products is an explicit fma (segments.py says why);
otherwise the compiler chooses.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.coded import add_values, token_scale
from rocm_attn.kernels.attention.key_rows import (
    are_read_by_page,
    lie_in_one_page,
    near,
    offsets_in_page,
    pages_at_once,
    pages_of_block,
)
from rocm_attn.kernels.attention.mask_bits import is_seen, row_words, seen_by_some
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.softmax import LN_2, capped, capped_at_once, exact_maximum, has_tanh, in_range
from rocm_attn.kernels.cache.codes import TOKEN_SCALES, decoded
from rocm_attn.kernels.cache.page_format import Coding
from rocm_attn.kernels.tuning.tiles import ExtendTiles


class KeyGeometry(NamedTuple):
    """The values that the loop is compiled for.

    HEAD_DIM, V_HEAD_DIM: elements of a K row and of a V row of one KV head
    HEADS_PER_ROW:        KV heads that are read as one
    HEAD_ROWS:            query heads that share a KV head
    K_COLUMNS, V_COLUMNS: columns of a block of K and of a block of V, the KV heads next to each other; the last block
                          is padded
    K_PARTS, V_PARTS:     blocks of columns of a K row and of a V row; one if several KV heads are read as one
    PAGE_SIZE:            tokens of a page
    KEY_BLOCK:            keys of a block
    EDGE_BLOCK:           keys of a block if rows do not see all of them; divides KEY_BLOCK
    CAUSAL:               whether a row sees no key after its own
    WINDOWED, CAPPED:     whether scores have a window, a cap
    BOUNDED:              whether a cap keeps exponentials within V's range, so that no maximum is subtracted
    SAME_OFFSETS:         whether K and V of a token lie at the same place of their pages
    IN_ONE_PAGE:          whether the keys of a block lie in one page (key_rows.py)
    BY_NUMBER:            of the tiles: whether page numbers are loaded once per page on NVIDIA
    EXACT:                whether results may not depend on which products and sums the compiler fuses
    coding:               how elements of pages are encoded
    """

    HEAD_DIM: int
    V_HEAD_DIM: int
    HEADS_PER_ROW: int
    HEAD_ROWS: int
    K_COLUMNS: int
    V_COLUMNS: int
    K_PARTS: int
    V_PARTS: int
    PAGE_SIZE: int
    KEY_BLOCK: int
    EDGE_BLOCK: int
    CAUSAL: bool
    WINDOWED: bool
    CAPPED: bool
    BOUNDED: bool
    SAME_OFFSETS: bool
    IN_ONE_PAGE: bool
    BY_NUMBER: bool
    EXACT: bool
    coding: Coding


class Query(NamedTuple):
    """Rows that attend to keys: blocks of columns, [rows, K_COLUMNS] each; kv_index [rows], or [1] for all rows; how
    they are scored.
    """

    blocks: Any
    kv_index: Any
    logits: Any


class RowKeys(NamedTuple):
    """The keys that rows of a block see: a range of each, from which cells of a packed mask may hide some.

    first, end: some row sees keys of [first, end), and none any other
    edge:       every row sees the keys of [first, edge)
    first_key:  [rows] the first key of a row's range; not read without a window
    end_key:    [rows] the end of it; 0 for a row without a token
    words:      of the cell that cells are counted from
    cell:       [rows] a row's first cell
    start:      the first key that has cells
    Without cells the last three are not read. No field is None: Triton 3.6 can neither return nor compare such a tuple.
    """

    first: Any
    end: Any
    edge: Any
    first_key: Any
    end_key: Any
    words: Any
    cell: Any
    start: Any


class SeenKeys(NamedTuple):
    """The keys that rows see: keys, a KeyRange of those that some row sees; window_left; RowKeys, or None if causality
    and the window determine them; the words of the step's cells, or None if it has none.
    """

    keys: Any
    window_left: Any
    rows: Any
    words: Any


def key_geometry(args: AttendArgs, scores: Scores, *, tiles: ExtendTiles, causal: bool, exact: bool) -> KeyGeometry:
    """The geometry of a layer. tiles: how keys and columns are cut"""
    head_dim, v_head_dim = args.q.shape[2], args.out.shape[2]
    k_columns, v_columns = tiles.columns(head_dim), tiles.columns(v_head_dim)
    return KeyGeometry(
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        HEADS_PER_ROW=tiles.heads_per_row,
        HEAD_ROWS=args.heads[1],
        K_COLUMNS=k_columns,
        V_COLUMNS=v_columns,
        K_PARTS=-(-head_dim * tiles.heads_per_row // k_columns),
        V_PARTS=-(-v_head_dim * tiles.heads_per_row // v_columns),
        PAGE_SIZE=args.pages.format.page_size,
        KEY_BLOCK=tiles.key_block,
        EDGE_BLOCK=tiles.key_block,
        CAUSAL=causal,
        WINDOWED=scores.visibility.windowed,
        CAPPED=scores.soft_cap > 0,
        BOUNDED=exact
        and scores.is_bounded
        and args.q.dtype == torch.bfloat16
        and not args.pages.format.encoding.is_fp8,
        SAME_OFFSETS=args.same_offsets,
        IN_ONE_PAGE=lie_in_one_page(args, tiles.key_block),
        BY_NUMBER=tiles.by_number,
        EXACT=exact,
        coding=args.pages.coding,
    )


@triton.jit
def nothing_seen(ROWS: tl.constexpr, K: tl.constexpr):
    """The softmax state before any key."""
    acc = ()
    PARTS: tl.constexpr = K.V_PARTS
    COLUMNS: tl.constexpr = K.V_COLUMNS
    for _ in tl.static_range(PARTS):
        acc += (tl.zeros([ROWS, COLUMNS], tl.float32),)  # type: ignore[assignment]
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    return Softmax(acc, maximum, tl.zeros([ROWS], tl.float32))


@triton.jit
def is_column(PART: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr):
    """A mask of the columns of a block that lie in the row, [1, COLUMNS]."""
    return (PART * COLUMNS + tl.arange(0, COLUMNS) < DIM)[None, :]


@triton.jit
def _elements(rows, live, PART: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """A block of columns of K rows or V rows; 0 beyond the row and, if MASKED, for keys that are not live [keys, 1]."""
    block = rows + PART * COLUMNS
    if (PART + 1) * COLUMNS > DIM:
        x = tl.load(block, mask=live & is_column(PART, COLUMNS, DIM), other=0)
    elif MASKED:
        x = tl.load(block, mask=live, other=0)
    else:
        x = tl.load(block)
    return x


@triton.jit
def _column_offsets(COLUMNS: tl.constexpr, DIM: tl.constexpr, head_stride, K: tl.constexpr):
    """Offsets of a block's columns in a token's rows, from its first head on. DIM: of a head"""
    column = tl.arange(0, COLUMNS)
    if K.HEADS_PER_ROW > 1 and are_read_by_page(K.IN_ONE_PAGE):
        column = column // DIM * near(head_stride) + column % DIM
    elif K.HEADS_PER_ROW > 1:
        column = (column // DIM).to(tl.int64) * head_stride + column % DIM
    return column


@triton.jit
def attend_key_blocks(softmax, query, kv, seen, blocks, K: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr):
    """Adds key blocks [blocks.first, blocks.end) to a softmax state: of KEY_BLOCK keys, or of EDGE_BLOCK if MASKED.

    If not MASKED, every row sees all their keys. If MASKED, a row sees the keys of its window, or with seen.rows those
    of its range that no cell hides. Only keys that some row sees are loaded; ranges of neighbours leave none out.

    STAGES: blocks whose loads are in flight
    """
    KEY_BLOCK: tl.constexpr = K.EDGE_BLOCK if MASKED else K.KEY_BLOCK
    C: tl.constexpr = K.coding
    DTYPE: tl.constexpr = query.blocks[0].dtype
    PACKED: tl.constexpr = MASKED and seen.words is not None
    RANGED: tl.constexpr = MASKED and seen.rows is not None and seen.words is None
    K_DIM: tl.constexpr = K.HEAD_DIM * K.HEADS_PER_ROW
    V_DIM: tl.constexpr = K.V_HEAD_DIM * K.HEADS_PER_ROW
    PAGE_SIZE: tl.constexpr = K.PAGE_SIZE
    BY_PAGE: tl.constexpr = are_read_by_page(K.IN_ONE_PAGE)
    acc, maximum, total = softmax
    qk_scale, tanh_scale, slope = query.logits
    AT_ONCE: tl.constexpr = K.CAPPED and has_tanh(DTYPE)
    if AT_ONCE:
        # capped() gives half a tanh, of an exponent in base 2 of twice the number.
        qk_scale, tanh_scale = qk_scale * 0.5, tanh_scale * (0.5 * LN_2)
    # Hopper's deterministic extend computes the same bits.
    BOUNDED: tl.constexpr = K.BOUNDED and AT_ONCE and slope is None
    pages = kv.line
    lane = tl.arange(0, KEY_BLOCK)
    k_column = _column_offsets(K.K_COLUMNS, K.HEAD_DIM, kv.k.head, K)
    v_column = _column_offsets(K.V_COLUMNS, K.V_HEAD_DIM, kv.v.head, K)
    if BY_PAGE:
        k_offsets = offsets_in_page(lane, kv.k.token, k_column)
        v_offsets = offsets_in_page(lane, kv.v.token, v_column)
    # Page ids travel one block ahead of the loads that need them, clamped to the table (see decode.py).
    PAGES: tl.constexpr = pages_at_once(PAGE_SIZE, KEY_BLOCK) if K.BY_NUMBER else KEY_BLOCK
    BY_NUMBER: tl.constexpr = PAGES < KEY_BLOCK and not BY_PAGE
    page_lane = tl.arange(0, PAGES) * (KEY_BLOCK // PAGES) if BY_NUMBER else lane
    next_page = pages_of_block(pages, blocks.first, page_lane, PAGE_SIZE, KEY_BLOCK, BY_PAGE)
    for block in tl.range(blocks.first, blocks.end, num_stages=STAGES):
        # kv_index, offset: [KEY_BLOCK]; page: [KEY_BLOCK], or one; k_rows: [KEY_BLOCK, K_COLUMNS]; v_rows: of V_COLUMNS
        kv_index = block * KEY_BLOCK + lane
        if BY_NUMBER:
            # No page is negative. The cast says so, to save a sign extension.
            page = next_page.to(tl.uint32, bitcast=True).to(tl.int64)
            page = tl.reshape(tl.broadcast_to(page[:, None], [PAGES, KEY_BLOCK // PAGES]), [KEY_BLOCK])
        else:
            page = next_page.to(tl.int64)
        next_page = pages_of_block(pages, block + 1, page_lane, PAGE_SIZE, KEY_BLOCK, BY_PAGE)
        if BY_NUMBER and PAGES * PAGE_SIZE == KEY_BLOCK:
            offset = (lane % PAGE_SIZE).to(tl.int64)
        else:
            offset = (kv_index % PAGE_SIZE).to(tl.int64)
        first = tl.cast(block * KEY_BLOCK % PAGE_SIZE, tl.int64) if BY_PAGE else offset
        k_row = page * kv.k.page + first * kv.k.token
        v_row = k_row if K.SAME_OFFSETS else page * kv.v.page + first * kv.v.token
        if BY_PAGE:
            k_rows = kv.k.at + k_row + k_offsets
            v_rows = kv.v.at + v_row + v_offsets
        else:
            k_rows = kv.k.at + k_row[:, None] + k_column[None, :]
            v_rows = kv.v.at + v_row[:, None] + v_column[None, :]
        if PACKED:
            bits, more_bits = row_words(seen, block * KEY_BLOCK, K, KEY_BLOCK)
            live = is_seen(seen_by_some(bits), seen_by_some(more_bits), lane, KEY_BLOCK)
        elif RANGED:
            live = in_range(kv_index, seen.rows.first, seen.rows.end)
        else:
            live = in_range(kv_index, seen.keys.first, seen.keys.end) if K.WINDOWED else kv_index < seen.keys.end
        k_scale_value = token_scale(kv.scale_values.k, page, offset, kv.scale_values.head, live, MASKED, C)
        v_scale_value = token_scale(kv.scale_values.v, page, offset, kv.scale_values.head, live, MASKED, C)
        live = live[:, None]
        # scores, weights: [rows, KEY_BLOCK]
        K_PARTS: tl.constexpr = K.K_PARTS
        for i in tl.static_range(K_PARTS):
            k = decoded(_elements(k_rows, live, i, K.K_COLUMNS, K_DIM, MASKED), C.ENCODING, DTYPE)
            if i == 0:
                scores = tl.dot(query.blocks[i], tl.trans(k), input_precision="ieee")
            else:
                scores = tl.dot(query.blocks[i], tl.trans(k), scores, input_precision="ieee")
        if C.SCALES == TOKEN_SCALES:
            scores = scores * k_scale_value[None, :]
        if K.CAPPED:
            scores = capped_at_once(scores, tanh_scale) if AT_ONCE else capped(scores, tanh_scale)
        if slope is not None:
            # Scaled here already, because the slope is not scaled.
            distance = kv_index[None, :] - query.kv_index[:, None]
            if K.EXACT:
                scores = tl.fma(slope[:, None], distance.to(tl.float32), scores * qk_scale)
            else:
                scores = scores * qk_scale + slope[:, None] * distance
        if MASKED:
            if PACKED:
                visible = is_seen(bits[:, None], more_bits[:, None], lane[None, :], KEY_BLOCK)
            elif RANGED and K.WINDOWED:
                visible = in_range(kv_index[None, :], seen.rows.first_key[:, None], seen.rows.end_key[:, None])
            elif RANGED:
                visible = kv_index[None, :] < seen.rows.end_key[:, None]
            elif K.WINDOWED:
                visible = in_range(query.kv_index[:, None] - kv_index[None, :], 0, seen.window_left + 1)
            elif K.CAUSAL:
                visible = kv_index[None, :] <= query.kv_index[:, None]
            else:
                visible = (kv_index < seen.keys.end)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        scale_value = qk_scale if slope is None else 1.0
        new_maximum = maximum if BOUNDED else tl.maximum(maximum, tl.max(scores, 1) * scale_value)
        if K.EXACT and not BOUNDED:
            new_maximum = exact_maximum(maximum, new_maximum)
        # A row of a masked block may have seen no key yet; the subtractions below must not be inf - inf.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
        decay = tl.exp2(maximum - base)
        if BOUNDED:
            decay = tl.full(maximum.shape, 1.0, tl.float32)
            weights = tl.exp2(scores * scale_value)
        elif K.EXACT:
            weights = tl.exp2(tl.fma(scores, scale_value, -base[:, None]))
        else:
            weights = tl.exp2(scores * scale_value - base[:, None])
        total = tl.fma(total, decay, tl.sum(weights, 1)) if K.EXACT else total * decay + tl.sum(weights, 1)
        # The compiler rounds: by hand (see rounded) deterministic extend of 256 columns spills 2 registers on gfx942.
        shares = weights.to(DTYPE) if K.EXACT and C.SCALES != TOKEN_SCALES else weights
        left = acc
        acc = ()
        V_PARTS: tl.constexpr = K.V_PARTS
        for i in tl.static_range(V_PARTS):
            v = _elements(v_rows, live, i, K.V_COLUMNS, V_DIM, MASKED)
            acc += (add_values(left[i], decay[:, None], shares, v, v_scale_value, DTYPE, False, C),)
        maximum = new_maximum
    if BOUNDED:
        maximum = tl.where(total > 0.0, 0.0, maximum)
    return Softmax(acc, maximum, total)
