"""The loop over latent rows: key blocks added to a running softmax, with one load for K and V.

A token's row is c | r: v_head_dim elements that are its V, then the rest of its K (a rotated part, or nothing).

    score = q . (c | r)        out = sum of softmax(scores) * c

So a block of rows is loaded once and multiplied twice. V's columns are two parts with an accumulator each, which gives
shorter chains of matrix instructions: its halves, or if codes are read in pairs its even and its odd columns. Products
of warpgroups want them as one part (WIDE).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.coded import (
    add_shares,
    half_shares,
    largest_exponent,
    moved_to_half,
    scale_of_moved,
    token_scale,
)
from rocm_attn.kernels.attention.key_rows import are_read_by_page, lie_in_one_page, near, pages_of_block
from rocm_attn.kernels.attention.mask_bits import is_seen, row_words, seen_by_some
from rocm_attn.kernels.attention.query_block import BlockGeometry
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.softmax import LN_2, add_sink, capped, in_range, sum_by_pairs
from rocm_attn.kernels.backend import on_nvidia
from rocm_attn.kernels.cache.codes import HEAD_SCALES, LAYER_SCALES, TOKEN_SCALES, decoded, decoded_pairs
from rocm_attn.kernels.cache.page_format import Coding
from rocm_attn.kernels.tuning.latent_tiles import LatentTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2


class LatentGeometry(NamedTuple):
    """The values that the loop is compiled for.

    HEAD_DIM, V_HEAD_DIM: elements of a row, and the number of them that are V
    PART:                 columns of a part of V, padding included
    REST:                 columns after V, padding included; 0: there are none. With codes in pairs: pairs
    PAGE_SIZE:            tokens of a page
    KEY_BLOCK:            keys of a block
    IN_ONE_PAGE:          whether they lie in one page (attention/key_rows.py)
    CAUSAL:               whether a row sees no key after its own
    WINDOWED, CAPPED:     whether scores have a window, a cap
    EXACT:                whether results may not depend on which products and sums the compiler fuses
    BY_PAIRS:             if EXACT, whether weights of keys are added up pair by pair (softmax.sum_by_pairs)
    CHAINS:               sums of products that a score is added up from, 1 or 2
    WIDE:                 whether V's columns are one part, and scores are masked only if a row does not see a key
    PAIRED:               whether codes are read in pairs, and multiplied as float16
    coding:               how rows are encoded
    """

    HEAD_DIM: int
    V_HEAD_DIM: int
    PART: int
    REST: int
    PAGE_SIZE: int
    KEY_BLOCK: int
    IN_ONE_PAGE: bool
    CAUSAL: bool
    WINDOWED: bool
    CAPPED: bool
    EXACT: bool
    BY_PAIRS: bool
    CHAINS: int
    WIDE: bool
    PAIRED: bool
    coding: Coding


class LatentRows(NamedTuple):
    """Latent pages, and one sequence's line of the table: pointer, strides between pages and between tokens, line.

    scale: scales of codes: pointer, or None

    With codes in pairs the pointer is one to pairs, and strides count them.
    """

    at: Any
    page: Any
    token: Any
    line: Any
    scale: Any


class LatentQuery(NamedTuple):
    """Rows of q.

    low, high: operands for the parts of V's columns, [rows, PART]; WIDE: high is not read
    rest:      operand for the columns after V, [rows, REST]; not read if there are none
    rest_high: with codes in pairs, operand for the second ones of those columns; otherwise not read
    kv_index:  [rows] of each, or [1] of all
    logits:    how products become logits
    """

    low: Any
    high: Any
    rest: Any
    rest_high: Any
    kv_index: Any
    logits: Any


class LatentSoftmax(NamedTuple):
    """The softmax state of some keys, float32: accumulators of both parts [rows, PART], maximum (base 2), total [rows].

    WIDE: high holds nothing.
    """

    low: Any
    high: Any
    maximum: Any
    total: Any


def latent_geometry(
    args: AttendArgs, scores: Scores, tiles: LatentTiles, *, causal: bool, exact: bool, by_pairs: bool = False
) -> LatentGeometry:
    """The geometry of a layer."""
    head_dim, v_head_dim = args.q.shape[2], args.out.shape[2]
    rest = head_dim - v_head_dim
    is_paired = tiles.paired and _has_pairs(args)
    rest_columns = rest // 2 if is_paired else rest
    return LatentGeometry(
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        PART=max(16, next_power_of_2(v_head_dim) // (1 if tiles.wide else 2)),
        REST=max(16, next_power_of_2(rest_columns)) if rest else 0,
        PAGE_SIZE=args.pages.format.page_size,
        KEY_BLOCK=tiles.key_block,
        IN_ONE_PAGE=lie_in_one_page(args, tiles.key_block),
        CAUSAL=causal,
        WINDOWED=scores.visibility.windowed,
        CAPPED=scores.soft_cap > 0,
        EXACT=exact,
        BY_PAIRS=by_pairs,
        CHAINS=tiles.chains,
        WIDE=tiles.wide,
        PAIRED=is_paired,
        coding=args.pages.coding,
    )


def latent_block_geometry(
    args: AttendArgs, scores: Scores, tiles: LatentTiles, *, causal: bool, segment_len: int, by_pairs: bool = False
) -> BlockGeometry:
    """The geometry of a layer's query blocks. segment_len: keys of a segment of deterministic attention; 0: none"""
    num_heads = args.q.shape[1]
    return BlockGeometry(
        keys=latent_geometry(args, scores, tiles, causal=causal, exact=segment_len > 0, by_pairs=by_pairs),
        KV_HEADS=1,
        GQA_RATIO=num_heads,
        BLOCK_HEADS=tiles.block_heads(num_heads),
        HEAD_BLOCKS=tiles.head_blocks(num_heads),
        QUERY_ROWS=tiles.query_rows,
        ROW_KEYS=0,
        SHARES=False,
        WHOLE_ROWS=True,
        SEGMENT_LEN=segment_len,
        STAGES=tiles.num_stages,
        EDGE_STAGES=tiles.num_stages,
    )


def read_strides(args: AttendArgs) -> tuple[int, ...]:
    """Strides in the kernels' order: q's tokens and heads, the pages' pages and tokens, the table's lines."""
    pages = args.pages.k
    return args.q.stride(0), args.q.stride(1), pages.stride(0), pages.stride(1), args.table.stride(0)


def _has_pairs(args: AttendArgs) -> bool:
    """True if rows can be read as pairs of codes, and multiplied as float16."""
    is_even = not any(dim % 2 for dim in (args.q.shape[2], args.out.shape[2]))
    return args.q.dtype.itemsize == 2 and is_even and args.has_pairs


@triton.jit
def as_loaded(pages, page, token, K: tl.constexpr):
    """Returns pointer and strides of LatentRows, from those that count elements."""
    if K.PAIRED:
        pages = pages.to(tl.pointer_type(tl.uint16))
        page = page // 2
        token = token // 2
    return pages, page, token


@triton.jit
def no_latents_seen(ROWS: tl.constexpr, K: tl.constexpr):
    """The softmax state before any key."""
    PART: tl.constexpr = K.PART
    low = tl.zeros([ROWS, PART], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    high = total
    if not K.WIDE:
        high = tl.zeros([ROWS, PART], tl.float32)
    return LatentSoftmax(low, high, maximum, total)


@triton.jit
def load_part(
    rows, near_rows, live, FIRST: tl.constexpr, COLUMNS: tl.constexpr, END: tl.constexpr, STEP: tl.constexpr = 1
):
    """COLUMNS columns of rows, every STEP-th from FIRST on; 0 from END on and for rows that are not live.

    rows:      pointers to the first columns [n]; or one pointer, and near_rows the offset of each row, int32 [n]
    near_rows: or None
    live:      [n]
    """
    column = FIRST + STEP * tl.arange(0, COLUMNS)
    mask = live[:, None]
    if FIRST + STEP * (COLUMNS - 1) >= END:
        mask = mask & (column < END)[None, :]
    elements = rows[:, None] + column[None, :] if near_rows is None else rows + (near_rows[:, None] + column[None, :])
    return tl.load(elements, mask=mask, other=0)


@triton.jit
def load_latent_query(rows, is_row, K: tl.constexpr):
    """The operands for the parts of V and the rest, from rows of q; 0 for missing rows; and the factor for products.

    rows: pointers [rows]
    """
    # A missing operand is replaced by one that is not read: Triton 3.6 returns no tuple with None.
    scale_value = 1.0
    if K.PAIRED:
        low = load_part(rows, None, is_row, 0, K.PART, K.V_HEAD_DIM, 2)
        high = load_part(rows, None, is_row, 1, K.PART, K.V_HEAD_DIM, 2)
        rest = low
        rest_high = high
        if K.REST > 0:
            rest = load_part(rows, None, is_row, K.V_HEAD_DIM, K.REST, K.HEAD_DIM, 2)
            rest_high = load_part(rows, None, is_row, K.V_HEAD_DIM + 1, K.REST, K.HEAD_DIM, 2)
        if low.dtype == tl.bfloat16:
            exponent = tl.maximum(largest_exponent(low), largest_exponent(high))
            exponent = tl.maximum(exponent, tl.maximum(largest_exponent(rest), largest_exponent(rest_high)))
            low = moved_to_half(low, exponent)
            high = moved_to_half(high, exponent)
            rest = moved_to_half(rest, exponent)
            rest_high = moved_to_half(rest_high, exponent)
            scale_value = scale_of_moved(exponent)
    else:
        low = load_part(rows, None, is_row, 0, K.PART, K.V_HEAD_DIM)
        high = low
        if not K.WIDE:
            high = load_part(rows, None, is_row, K.PART, K.PART, K.V_HEAD_DIM)
        rest = low
        if K.REST > 0:
            rest = load_part(rows, None, is_row, K.V_HEAD_DIM, K.REST, K.HEAD_DIM)
        rest_high = rest
    return low, high, rest, rest_high, scale_value


@triton.jit
def load_latents(
    rows, near_rows, live, scale_value, K: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr
):
    """Columns [FIRST, FIRST + COLUMNS) of V, or from V's end on of the rest, in DTYPE.

    scale_value: scale of each token, [keys], if tokens have one. It would cost float16's weights their smallest bits,
                 so with float16 rows are multiplied; otherwise the caller multiplies columns of scores and weights
    """
    C: tl.constexpr = K.coding
    END: tl.constexpr = K.V_HEAD_DIM if FIRST < K.V_HEAD_DIM else K.HEAD_DIM
    held = load_part(rows, near_rows, live, FIRST, COLUMNS, END)
    if C.SCALES == TOKEN_SCALES and tl.float16 == DTYPE:
        values = (decoded(held, C.ENCODING, tl.float32) * scale_value[:, None]).to(DTYPE)
    else:
        values = decoded(held, C.ENCODING, DTYPE)
    return values


@triton.jit
def scaled_latents(softmax, scale_value, K: tl.constexpr):
    """Multiplies the scale that all rows share into the accumulators of codes."""
    C: tl.constexpr = K.coding
    low, high, maximum, total = softmax
    if C.SCALES == LAYER_SCALES or C.SCALES == HEAD_SCALES:
        low = low * scale_value
        if not K.WIDE:
            high = high * scale_value
    return LatentSoftmax(low, high, maximum, total)


@triton.jit
def attend_latents(softmax, query, rows, seen, blocks, K: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr):
    """Adds key blocks [blocks.first, blocks.end) to a softmax state. Only keys that some row sees are loaded.

    If not MASKED, every row sees all keys of the blocks. If MASKED, a row sees those of its window; with seen.rows
    those of its range that no cell hides.

    seen:   key_loop.SeenKeys
    STAGES: blocks whose loads are in flight
    """
    KEY_BLOCK: tl.constexpr = K.KEY_BLOCK
    PACKED: tl.constexpr = MASKED and seen.rows is not None
    PAGE_SIZE: tl.constexpr = K.PAGE_SIZE
    BY_PAGE: tl.constexpr = are_read_by_page(K.IN_ONE_PAGE)
    C: tl.constexpr = K.coding
    DTYPE: tl.constexpr = query.low.dtype
    BY_COLUMN: tl.constexpr = C.SCALES == TOKEN_SCALES and (K.PAIRED or tl.float16 != DTYPE)
    # True if some masked blocks show all their keys to all rows, which is tested for each. AMD's compiler moves nothing
    # across that branch: gfx942 keeps 85 registers less with it.
    PARTLY: tl.constexpr = MASKED and K.WIDE and not K.WINDOWED and not PACKED
    # After such a branch LLVM may forget that a matrix result takes time to be there (docs/waits.md, "A fault of the
    # compiler"): on AMD each side of it uses the result.
    IN_BRANCHES: tl.constexpr = PARTLY and not on_nvidia()
    low, high, maximum, total = softmax
    logits = query.logits
    pages = rows.line
    lane = tl.arange(0, KEY_BLOCK)
    end_of_all = seen.keys.end
    if PARTLY and K.CAUSAL:
        end_of_all = tl.minimum(tl.min(query.kv_index, 0) + 1, end_of_all)
    near_row = lane * near(rows.token) if BY_PAGE else None
    # Page ids travel one block ahead of the loads that need them, clamped to the table (see attention/decode.py).
    next_page = pages_of_block(pages, blocks.first, lane, PAGE_SIZE, KEY_BLOCK, BY_PAGE)
    for block in tl.range(blocks.first, blocks.end, num_stages=STAGES):
        # kv_index, offset: [KEY_BLOCK]; page, row: [KEY_BLOCK], or one; k_low, k_high: [KEY_BLOCK, PART];
        # k_rest, k_rest_high: [KEY_BLOCK, REST]
        kv_index = block * KEY_BLOCK + lane
        page = next_page.to(tl.int64)
        next_page = pages_of_block(pages, block + 1, lane, PAGE_SIZE, KEY_BLOCK, BY_PAGE)
        offset = (kv_index % PAGE_SIZE).to(tl.int64)
        if BY_PAGE:
            first = tl.cast(block * KEY_BLOCK % PAGE_SIZE, tl.int64)
            row = rows.at + (page * rows.page + first * rows.token)
        else:
            row = rows.at + (page * rows.page + offset * rows.token)
        if PACKED:
            bits, more_bits = row_words(seen, block * KEY_BLOCK, K, KEY_BLOCK)
            live = is_seen(seen_by_some(bits), seen_by_some(more_bits), lane, KEY_BLOCK)
        else:
            live = in_range(kv_index, seen.keys.first, seen.keys.end) if K.WINDOWED else kv_index < seen.keys.end
        # If tokens have no scales, a value that is not read.
        scale_value = token_scale(rows.scale, page, offset, 0, live, True, C) if C.SCALES == TOKEN_SCALES else live
        if K.PAIRED:
            k_low, k_high = decoded_pairs(load_part(row, near_row, live, 0, K.PART, K.V_HEAD_DIM // 2), C.ENCODING)
        else:
            k_low = load_latents(row, near_row, live, scale_value, K, 0, K.PART, DTYPE)
            k_high = k_low
            if not K.WIDE:
                k_high = load_latents(row, near_row, live, scale_value, K, K.PART, K.PART, DTYPE)
        if K.REST > 0 and K.PAIRED:
            rest_pairs = load_part(row, near_row, live, K.V_HEAD_DIM // 2, K.REST, K.HEAD_DIM // 2)
            k_rest, k_rest_high = decoded_pairs(rest_pairs, C.ENCODING)
        elif K.REST > 0:
            k_rest = load_latents(row, near_row, live, scale_value, K, K.V_HEAD_DIM, K.REST, DTYPE)
        # scores, weights: [rows, KEY_BLOCK]
        scores = tl.dot(query.low, tl.trans(k_low), input_precision="ieee")
        if not K.WIDE or K.REST > 0:
            others = scores
            if K.CHAINS == 2:
                others = tl.zeros_like(scores)
            if not K.WIDE:
                others = tl.dot(query.high, tl.trans(k_high), others, input_precision="ieee")
            if K.REST > 0 and K.PAIRED:
                others = tl.dot(query.rest, tl.trans(k_rest), others, input_precision="ieee")
                others = tl.dot(query.rest_high, tl.trans(k_rest_high), others, input_precision="ieee")
            elif K.REST > 0:
                others = tl.dot(query.rest, tl.trans(k_rest), others, input_precision="ieee")
            if K.CHAINS == 2 and K.WIDE:
                # From a plain sum Triton would make one chain again.
                scores = tl.fma(scores, 1.0, others)
            elif K.CHAINS == 2:
                scores = scores + others
            else:
                scores = others
        if BY_COLUMN:
            scores = scores * scale_value[None, :]
        if K.CAPPED:
            scores = capped(scores, logits.tanh_scale)
        if MASKED:
            if PACKED:
                visible = is_seen(bits[:, None], more_bits[:, None], lane[None, :], KEY_BLOCK)
            elif K.WINDOWED:
                visible = in_range(query.kv_index[:, None] - kv_index[None, :], 0, seen.window_left + 1)
            elif K.CAUSAL:
                visible = kv_index[None, :] <= query.kv_index[:, None]
            else:
                visible = live[None, :]
            if not PARTLY:
                scores = tl.where(visible, scores, float("-inf"))
            elif (block + 1) * KEY_BLOCK > end_of_all:
                # Products of a warpgroup are laid out for the code that follows them, but not through a branch: without
                # one two warpgroups would compute the same scores (Triton 3.6).
                scores = tl.where(visible, scores, float("-inf"))
                if IN_BRANCHES:
                    largest = tl.max(scores, 1)
            elif IN_BRANCHES:
                largest = tl.max(scores, 1)
        if not IN_BRANCHES:
            largest = tl.max(scores, 1)
        new_maximum = tl.maximum(maximum, largest * logits.qk_scale)
        # A row of a masked block may have seen no key yet; the subtractions below must not be inf - inf.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
        decay = tl.exp2(maximum - base)
        if K.EXACT:
            weights = tl.exp2(tl.fma(scores, logits.qk_scale, -base[:, None]))
            total = tl.fma(total, decay, sum_by_pairs(weights) if K.BY_PAIRS else tl.sum(weights, 1))
        else:
            weights = tl.exp2(scores * logits.qk_scale - base[:, None])
            total = total * decay + tl.sum(weights, 1)
        if K.PAIRED:
            shares, amount = half_shares(weights, scale_value, C)
            low = add_shares(low, decay[:, None], shares, k_low, amount, C)
            high = add_shares(high, decay[:, None], shares, k_high, amount, C)
        else:
            if BY_COLUMN:
                weights = weights * scale_value[None, :]
            weights = weights.to(DTYPE)
            low = tl.dot(weights, k_low, low * decay[:, None], input_precision="ieee")
            if not K.WIDE:
                high = tl.dot(weights, k_high, high * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    return LatentSoftmax(low, high, maximum, total)


@triton.jit
def store_part(rows, values, is_row, FIRST: tl.constexpr, COLUMNS: tl.constexpr, END: tl.constexpr):
    """Writes values to columns [FIRST, FIRST + COLUMNS) of rows, none from END on. rows: pointers [n]; is_row: [n]"""
    column = FIRST + tl.arange(0, COLUMNS)
    mask = is_row[:, None]
    if FIRST + COLUMNS > END:
        mask = mask & (column < END)[None, :]
    tl.store(rows[:, None] + column[None, :], values.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def store_parts(rows, low, high, is_row, K: tl.constexpr):
    """Writes both parts of V's columns to rows. rows: pointers [n]; is_row: [n]"""
    if K.PAIRED:
        values = tl.reshape(tl.join(low, high), [low.shape[0], 2 * K.PART])
        store_part(rows, values, is_row, 0, 2 * K.PART, K.V_HEAD_DIM)
    else:
        store_part(rows, low, is_row, 0, K.PART, K.V_HEAD_DIM)
        if not K.WIDE:
            store_part(rows, high, is_row, K.PART, K.PART, K.V_HEAD_DIM)


@triton.jit
def store_latent_results(softmax, token, head, is_row, sinks, out, lse, K: tl.constexpr):
    """Writes out and, if lse.at is not None, LSE of the rows, with their sinks."""
    low, high, maximum, total = softmax
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
        maximum, total, decay = add_sink(maximum, total, sink)
        low = low * decay[:, None]
        if not K.WIDE:
            high = high * decay[:, None]
    # A token that has seen no key: 0 / 1, and LSE -inf + log2(1).
    total = tl.where(total == 0.0, 1.0, total)
    rows = out.at + (token * out.token + head * out.head)
    if not K.WIDE:
        high = high / total[:, None]
    store_parts(rows, low / total[:, None], high, is_row, K)
    if lse.at is not None:
        tl.store(lse.at + token * lse.token + head * lse.head, (maximum + tl.log2(total)) * LN_2, mask=is_row)
