"""Decode over codes in pairs, a softmax for each slice of a key block: warps then wait for nothing of each other.

A key block is cut into as many slices as a program has warps. Each has a maximum, a sum and an accumulator of its own,
which batched products keep in one warp. After the last block they are added up: what a program leaves to be merged is
as much as one warp alone would leave, of more keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.coded import LEAST_PART, SMALLEST_FACTOR, row_factor, scaled_value_parts
from rocm_attn.kernels.attention.key_rows import pages_of_block
from rocm_attn.kernels.attention.softmax import capped, in_range
from rocm_attn.kernels.cache.codes import TOKEN_SCALES, decoded_pairs


@triton.jit
def _factors(scale, page, offset, head, live, G: tl.constexpr):
    """Factors of keys, [SLICES, heads, keys of a slice]; 0 of keys that are not live."""
    C: tl.constexpr = G.coding
    HEADS: tl.constexpr = G.rows.HEADS_PER_ROW
    place = page * (C.KV_HEADS * C.PAGE_SIZE) + offset
    if HEADS == 1:
        factor = tl.load(scale + head * C.PAGE_SIZE + place, mask=live, other=0.0)[:, None, :]
    else:
        of_head = (head + tl.arange(0, HEADS)) * C.PAGE_SIZE
        factor = tl.load(scale + place[:, None, :] + of_head[None, :, None], mask=live[:, None, :], other=0.0)
    return factor


@triton.jit
def _of_rows(factor, ROWS: tl.constexpr):
    """Factors of keys for each row of a block, [SLICES, rows, keys]: of two heads each has half of the rows."""
    SLICES: tl.constexpr = factor.shape[0]
    HEADS: tl.constexpr = factor.shape[1]
    KEYS: tl.constexpr = factor.shape[2]
    wide = tl.broadcast_to(factor[:, :, None, :], [SLICES, HEADS, ROWS // HEADS, KEYS])
    return tl.reshape(wide, [SLICES, ROWS, KEYS])


@triton.jit
def attend_key_slices(q, k_side, v_side, read, logits, factors, G: tl.constexpr):
    """What some key blocks give each q row, as decode's loop over blocks that are not cut; q: its even columns, its odd
    ones."""
    pages, blocks, keys, _ = read
    C: tl.constexpr = G.coding
    KEY_BLOCK: tl.constexpr = G.rows.KEY_BLOCK
    SLICES: tl.constexpr = G.SLICES
    KEYS: tl.constexpr = KEY_BLOCK // SLICES
    ROWS: tl.constexpr = G.QUERY_ROWS
    COLUMNS: tl.constexpr = G.V_COLUMNS // 2
    K_READ: tl.constexpr = G.HEAD_DIM * G.rows.HEADS_PER_ROW // 2
    V_READ: tl.constexpr = G.V_HEAD_DIM * G.rows.HEADS_PER_ROW // 2
    BY_TOKEN: tl.constexpr = C.SCALES == TOKEN_SCALES
    SCALED_LATE: tl.constexpr = BY_TOKEN and not G.CAPPED and logits.slope is None
    early = 1.0 if SCALED_LATE else logits.qk_scale
    late = logits.qk_scale if SCALED_LATE else 1.0
    lane = tl.arange(0, SLICES)[:, None] * KEYS + tl.arange(0, KEYS)[None, :]
    maximum = tl.full([SLICES, ROWS], float("-inf"), tl.float32)
    total = tl.zeros([SLICES, ROWS], tl.float32)
    even = tl.zeros([SLICES, ROWS, COLUMNS], tl.float32)
    odd = tl.zeros([SLICES, ROWS, COLUMNS], tl.float32)
    exponent = tl.zeros([SLICES, ROWS], tl.float32)
    largest = tl.zeros([SLICES, ROWS], tl.float32)
    q_even = tl.broadcast_to(q[0][None, :, :], [SLICES, ROWS, q[0].shape[1]])
    q_odd = tl.broadcast_to(q[1][None, :, :], [SLICES, ROWS, q[1].shape[1]])
    next_page = pages_of_block(pages, blocks.first, lane, G.PAGE_SIZE, KEY_BLOCK, False)
    for block in tl.range(blocks.first, blocks.end, num_stages=G.STAGES):
        # kv_index, page, live, offset: [SLICES, KEYS]
        kv_index = block * KEY_BLOCK + lane
        live = in_range(kv_index, keys.first, keys.end) if G.rows.WINDOWED else kv_index < keys.end
        page = next_page.to(tl.uint32, bitcast=True).to(tl.int64)
        next_page = pages_of_block(pages, block + 1, lane, G.PAGE_SIZE, KEY_BLOCK, False)
        offset = (kv_index % G.PAGE_SIZE).to(tl.int64)
        k_row = page * k_side.page + offset * k_side.token
        v_row = k_row if G.SAME_OFFSETS else page * v_side.page + offset * v_side.token
        k_mask = live[:, :, None]
        v_mask = live[:, :, None]
        if G.K_COLUMNS // 2 > K_READ:
            k_mask = k_mask & (tl.arange(0, G.K_COLUMNS // 2) < K_READ)[None, None, :]
        if COLUMNS > V_READ:
            v_mask = v_mask & (tl.arange(0, COLUMNS) < V_READ)[None, None, :]
        if BY_TOKEN:
            k_factor = _factors(factors.k, page, offset, factors.head, live, G)
            v_factor = _factors(factors.v, page, offset, factors.head, live, G)
        k_pairs = tl.load(k_side.at + k_row[:, :, None] + k_side.column[None, None, :], mask=k_mask, other=0)
        k_even, k_odd = decoded_pairs(k_pairs, C.ENCODING)
        # products, scores, weights: [SLICES, ROWS, KEYS]
        products = tl.dot(q_even, tl.permute(k_even, (0, 2, 1)))
        products = tl.dot(q_odd, tl.permute(k_odd, (0, 2, 1)), products)
        if BY_TOKEN:
            products = products * _of_rows(k_factor, ROWS)
        scores = (capped(products, logits.tanh_scale) if G.CAPPED else products) * early
        if logits.slope is not None:
            scores += logits.slope[None, :, None] * (kv_index - (keys.end - 1))[:, None, :]
        scores = tl.where(live[:, None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 2) * late)
        # A slice may have seen no key yet.
        seen = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - seen)
        maximum = new_maximum
        if BY_TOKEN:
            # As amount_of, of each row.
            v_factors = tl.where(scores == float("-inf"), 0.0, _of_rows(v_factor, ROWS))
            of_block = tl.max(v_factors, 2)
            largest = tl.maximum(largest, of_block)
            now = tl.maximum(tl.maximum(of_block, largest * LEAST_PART), SMALLEST_FACTOR)
            before = exponent
            exponent = ((now.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)
            weights = tl.exp2(scores * late - (seen + exponent)[:, :, None])
            more = tl.sum(weights, 2) * tl.exp2(exponent)
            shares = weights * v_factors
            wide = decay * tl.exp2(before - exponent)
        else:
            weights = tl.exp2(scores * late - seen[:, :, None])
            more = tl.sum(weights, 2)
            shares = weights
            wide = decay
        v_pairs = tl.load(v_side.at + v_row[:, :, None] + v_side.column[None, None, :], mask=v_mask, other=0)
        v_even, v_odd = decoded_pairs(v_pairs, C.ENCODING)
        half = shares.to(tl.float16)
        even = tl.dot(half, v_even, even * wide[:, :, None])
        odd = tl.dot(half, v_odd, odd * wide[:, :, None])
        total = total * decay + more
    # Every part of a row has a key that it sees.
    of_all = tl.max(maximum, 0)
    share = tl.exp2(maximum - of_all[None, :])
    total = tl.sum(total * share, 0)
    if BY_TOKEN:
        share = share * tl.exp2(exponent)
    even = tl.sum(even * share[:, :, None], 0)
    odd = tl.sum(odd * share[:, :, None], 0)
    acc = tl.reshape(tl.join(even, odd), [ROWS, G.V_COLUMNS])
    return scaled_value_parts(Softmax((acc,), of_all, total), row_factor(factors.v, factors.head, C), C)
