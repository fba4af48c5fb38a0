"""The loop over latent rows: key blocks added to a running softmax, of which one load is K and V.

A token's row is c | r: v_head_dim elements that are its V, then the rest of its K (a rotated part, or nothing).

    score = q . (c | r)        out = sum of softmax(scores) * c

So a block of rows is loaded once and multiplied twice. V's columns are two halves with an accumulator each: shorter
chains of matrix instructions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.coded import token_factor
from rocm_attn.kernels.attention.mask_bits import bit_is_set, bits_from, row_bits, seen_by_some
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.softmax import LN_2, add_sink, capped, in_range
from rocm_attn.kernels.cache.codes import HEAD_SCALES, LAYER_SCALES, TOKEN_SCALES, decoded
from rocm_attn.kernels.cache.page_format import Coding
from rocm_attn.kernels.tuning.latent_tiles import LatentTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2


class LatentGeometry(NamedTuple):
    """What the loop is compiled for.

    HEAD_DIM, V_HEAD_DIM: elements of a row, and of them those that are V
    HALF:                 columns of a half of V, padding included
    REST:                 columns of what comes after V, padding included; 0: nothing does
    PAGE_SIZE:            tokens of a page
    KEY_BLOCK:            keys of a block
    CAUSAL:               whether a row sees no key after its own
    WINDOWED, CAPPED:     whether scores have a window, a cap
    EXACT:                whether results may not depend on which products and sums the compiler fuses
    CHAINS:               sums of products that a score is added up of, 1 or 2
    coding:               how rows are encoded
    """

    HEAD_DIM: int
    V_HEAD_DIM: int
    HALF: int
    REST: int
    PAGE_SIZE: int
    KEY_BLOCK: int
    CAUSAL: bool
    WINDOWED: bool
    CAPPED: bool
    EXACT: bool
    CHAINS: int
    coding: Coding


class LatentRows(NamedTuple):
    """Latent pages, and one sequence's line of the table: pointer, strides between pages and between tokens, line.

    scale: factors of codes: pointer, or None
    """

    at: Any
    page: Any
    token: Any
    line: Any
    scale: Any


class LatentQuery(NamedTuple):
    """Rows of q.

    low, high: what meets the halves of V's columns, [rows, HALF]
    rest:      what meets the columns after V, [rows, REST]; not read where there are none
    kv_index:  [rows] of each, or [1] of all
    logits:    how products become logits
    """

    low: Any
    high: Any
    rest: Any
    kv_index: Any
    logits: Any


class LatentSoftmax(NamedTuple):
    """What some keys gave: accumulators of both halves [rows, HALF], maximum (base 2) and total [rows]; float32."""

    low: Any
    high: Any
    maximum: Any
    total: Any


def latent_geometry(
    args: AttendArgs, scores: Scores, tiles: LatentTiles, *, causal: bool, exact: bool
) -> LatentGeometry:
    """The geometry of a layer."""
    head_dim, v_head_dim = args.q.shape[2], args.out.shape[2]
    rest = head_dim - v_head_dim
    return LatentGeometry(
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        HALF=max(16, next_power_of_2(v_head_dim) // 2),
        REST=max(16, next_power_of_2(rest)) if rest else 0,
        PAGE_SIZE=args.pages.format.page_size,
        KEY_BLOCK=tiles.key_block,
        CAUSAL=causal,
        WINDOWED=scores.windowed,
        CAPPED=scores.soft_cap > 0,
        EXACT=exact,
        CHAINS=tiles.chains,
        coding=args.pages.coding,
    )


@triton.jit
def no_latents_seen(ROWS: tl.constexpr, HALF: tl.constexpr):
    """The softmax of no key."""
    low = tl.zeros([ROWS, HALF], tl.float32)
    high = tl.zeros([ROWS, HALF], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    return LatentSoftmax(low, high, maximum, tl.zeros([ROWS], tl.float32))


@triton.jit
def load_part(rows, live, FIRST: tl.constexpr, COLUMNS: tl.constexpr, END: tl.constexpr):
    """Columns [FIRST, FIRST + COLUMNS) of rows, 0 from END on and where a row is not live.

    rows: pointers to the first columns [n]; live: [n]
    """
    column = FIRST + tl.arange(0, COLUMNS)
    mask = live[:, None]
    if FIRST + COLUMNS > END:
        mask = mask & (column < END)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0)


@triton.jit
def load_latent_query(rows, is_row, K: tl.constexpr):
    """What meets both halves of V and the rest of rows of q; 0 where there is no row. rows: pointers [rows]"""
    low = load_part(rows, is_row, 0, K.HALF, K.V_HEAD_DIM)
    high = load_part(rows, is_row, K.HALF, K.HALF, K.V_HEAD_DIM)
    # Without a rest something that is not read: Triton 3.6 returns no tuple with None.
    rest = low
    if K.REST > 0:
        rest = load_part(rows, is_row, K.V_HEAD_DIM, K.REST, K.HEAD_DIM)
    return low, high, rest


@triton.jit
def load_latents(rows, live, factor, K: tl.constexpr, FIRST: tl.constexpr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr):
    """Columns [FIRST, FIRST + COLUMNS) of V, or from V's end on of the rest, in DTYPE.

    factor: of each token, [keys], if tokens have one. Float16's weights would lose their smallest bits by it, so there
            rows are multiplied; elsewhere columns of scores and weights are, by the caller
    """
    C: tl.constexpr = K.coding
    END: tl.constexpr = K.V_HEAD_DIM if FIRST < K.V_HEAD_DIM else K.HEAD_DIM
    held = load_part(rows, live, FIRST, COLUMNS, END)
    if C.SCALES == TOKEN_SCALES and tl.float16 == DTYPE:
        values = (decoded(held, C.ENCODING, tl.float32) * factor[:, None]).to(DTYPE)
    else:
        values = decoded(held, C.ENCODING, DTYPE)
    return values


@triton.jit
def scaled_latents(softmax, factor, C: tl.constexpr):
    """What codes gave, with the factor that all rows share."""
    low, high, maximum, total = softmax
    if C.SCALES == LAYER_SCALES or C.SCALES == HEAD_SCALES:
        low = low * factor
        high = high * factor
    return LatentSoftmax(low, high, maximum, total)


@triton.jit
def attend_latents(softmax, query, rows, seen, blocks, K: tl.constexpr, MASKED: tl.constexpr, STAGES: tl.constexpr):
    """Key blocks [blocks.first, blocks.end) added to a softmax. Only keys that some row sees are loaded.

    If not MASKED, every row sees all keys of the blocks. If MASKED, a row sees those of its window; with bits those
    before the end whose bits are set, of a window from bits.first_key on.

    seen:   key_loop.Seen
    STAGES: blocks whose loads are in flight
    """
    KEY_BLOCK: tl.constexpr = K.KEY_BLOCK
    PACKED: tl.constexpr = MASKED and seen.bits is not None
    C: tl.constexpr = K.coding
    DTYPE: tl.constexpr = query.low.dtype
    BY_COLUMN: tl.constexpr = C.SCALES == TOKEN_SCALES and tl.float16 != DTYPE
    low, high, maximum, total = softmax
    logits = query.logits
    pages = rows.line
    lane = tl.arange(0, KEY_BLOCK)
    # Page ids travel one block ahead of the loads that need them, clamped to the table (see attention/decode.py).
    next_page = tl.load(pages.at + tl.minimum((blocks.first * KEY_BLOCK + lane) // K.PAGE_SIZE, pages.width - 1))
    for block in tl.range(blocks.first, blocks.end, num_stages=STAGES):
        # kv_index, page, row: [KEY_BLOCK]; k_low, k_high: [KEY_BLOCK, HALF]; k_rest: [KEY_BLOCK, REST]
        kv_index = block * KEY_BLOCK + lane
        page = next_page.to(tl.int64)
        next_page = tl.load(pages.at + tl.minimum((kv_index + KEY_BLOCK) // K.PAGE_SIZE, pages.width - 1))
        offset = (kv_index % K.PAGE_SIZE).to(tl.int64)
        row = rows.at + (page * rows.page + offset * rows.token)
        if PACKED:
            bits = row_bits(seen.bits.words, seen.bits.cell, seen.bits.end, block * KEY_BLOCK, seen.keys.end)
            if K.WINDOWED:
                bits = bits & bits_from(seen.bits.first_key - block * KEY_BLOCK)
            live = bit_is_set(seen_by_some(bits), lane)
        else:
            live = in_range(kv_index, seen.keys.first, seen.keys.end) if K.WINDOWED else kv_index < seen.keys.end
        # Without factors of tokens something that is not read.
        factor = token_factor(rows.scale, page, offset, 0, live, True, C) if C.SCALES == TOKEN_SCALES else live
        k_low = load_latents(row, live, factor, K, 0, K.HALF, DTYPE)
        k_high = load_latents(row, live, factor, K, K.HALF, K.HALF, DTYPE)
        # scores, weights: [rows, KEY_BLOCK]
        scores = tl.dot(query.low, tl.trans(k_low), input_precision="ieee")
        if K.CHAINS == 2:
            others = tl.dot(query.high, tl.trans(k_high), input_precision="ieee")
        else:
            others = tl.dot(query.high, tl.trans(k_high), scores, input_precision="ieee")
        if K.REST > 0:
            k_rest = load_latents(row, live, factor, K, K.V_HEAD_DIM, K.REST, DTYPE)
            others = tl.dot(query.rest, tl.trans(k_rest), others, input_precision="ieee")
        scores = scores + others if K.CHAINS == 2 else others
        if BY_COLUMN:
            scores = scores * factor[None, :]
        if K.CAPPED:
            scores = capped(scores, logits.tanh_scale)
        if MASKED:
            if PACKED:
                visible = bit_is_set(bits[:, None], lane[None, :])
            elif K.WINDOWED:
                visible = in_range(query.kv_index[:, None] - kv_index[None, :], 0, seen.window_left + 1)
            elif K.CAUSAL:
                visible = kv_index[None, :] <= query.kv_index[:, None]
            else:
                visible = live[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * logits.qk_scale)
        # A row of a masked block may have seen no key yet; the subtractions below must not be inf - inf.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
        decay = tl.exp2(maximum - base)
        if K.EXACT:
            weights = tl.exp2(tl.fma(scores, logits.qk_scale, -base[:, None]))
            total = tl.fma(total, decay, tl.sum(weights, 1))
        else:
            weights = tl.exp2(scores * logits.qk_scale - base[:, None])
            total = total * decay + tl.sum(weights, 1)
        if BY_COLUMN:
            weights = weights * factor[None, :]
        weights = weights.to(DTYPE)
        low = tl.dot(weights, k_low, low * decay[:, None], input_precision="ieee")
        high = tl.dot(weights, k_high, high * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    return LatentSoftmax(low, high, maximum, total)


@triton.jit
def store_part(rows, values, is_row, FIRST: tl.constexpr, COLUMNS: tl.constexpr, END: tl.constexpr):
    """Write values to columns [FIRST, FIRST + COLUMNS) of rows, none from END on. rows: pointers [n]; is_row: [n]"""
    column = FIRST + tl.arange(0, COLUMNS)
    mask = is_row[:, None]
    if FIRST + COLUMNS > END:
        mask = mask & (column < END)[None, :]
    tl.store(rows[:, None] + column[None, :], values.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def store_latent_results(softmax, token, head, is_row, sinks, out, lse, K: tl.constexpr):
    """Write out and, if lse.at is not None, LSE of the rows, with their sinks."""
    low, high, maximum, total = softmax
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
        maximum, total, decay = add_sink(maximum, total, sink)
        low = low * decay[:, None]
        high = high * decay[:, None]
    # A token that has seen no key: 0 / 1, and LSE -inf + log2(1).
    total = tl.where(total == 0.0, 1.0, total)
    rows = out.at + (token * out.token + head * out.head)
    store_part(rows, low / total[:, None], is_row, 0, K.HALF, K.V_HEAD_DIM)
    store_part(rows, high / total[:, None], is_row, K.HALF, K.HALF, K.V_HEAD_DIM)
    if lse.at is not None:
        tl.store(lse.at + token * lse.token + head * lse.head, (maximum + tl.log2(total)) * LN_2, mask=is_row)
