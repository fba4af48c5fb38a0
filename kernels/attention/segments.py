"""The arithmetic of deterministic attention, which decode and extend share: softmax of a segment, sum of segments.

A segment is KV [m, m + 1) * segment_len, at absolute places. Starting empty, an online softmax over its key blocks,
at absolute places too, gives a partial result: accumulator a, maximum m, sum l (base 2). Partial results are
merged from left to right:

    m' = max(m, m_i)    l' = 2^(m - m') l + 2^(m_i - m') l_i    a' = 2^(m - m') a + 2^(m_i - m') a_i

A row's bits depend on nothing else, because:
  - every sum of products is an explicit fma, and kernels are launched without fusion, so that no compiler chooses;
  - a key block that a row does not see at all adds 0 and scales by 1 (or scales the 0 that is there by 0): with masks
    or without, with other rows in the query block or without, the row's numbers stay unchanged;
  - a matrix instruction computes a row from that row and from K, V alone, in one order of keys.
"""

import triton
import triton.language as tl

from rocm_attn.kernels.attention.bundles import KeyRange, Softmax
from rocm_attn.kernels.attention.coded import row_scale, scaled_value_parts
from rocm_attn.kernels.attention.extend_schedule import BLOCK_KEYS, BLOCK_WORDS
from rocm_attn.kernels.attention.key_loop import attend_key_blocks, nothing_seen
from rocm_attn.kernels.attention.query_block import rows_again, store_columns, store_results

# The source decides here whether a product and a sum become one rounding or two, not the compiler.
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def attend_segment(segment, query, kv, seen, edge_block, G: tl.constexpr):
    """The softmax state of a segment's keys.

    seen:       its keys are seen by some row, those of blocks before edge_block by all
    G:          QUERY_ROWS, SEGMENT_LEN, STAGES and EDGE_STAGES, and keys: KeyGeometry with EXACT
    """
    K: tl.constexpr = G.keys
    C: tl.constexpr = K.coding
    BLOCKS: tl.constexpr = G.SEGMENT_LEN // K.KEY_BLOCK
    first_block = tl.maximum(segment * BLOCKS, seen.keys.first // K.KEY_BLOCK)
    end_block = tl.minimum((segment + 1) * BLOCKS, tl.cdiv(seen.keys.end, K.KEY_BLOCK))
    softmax = nothing_seen(G.QUERY_ROWS, K)
    if K.WINDOWED:
        # Masks for all blocks: a loop of its own for the blocks between the edges spills.
        softmax = attend_key_blocks(softmax, query, kv, seen, KeyRange(first_block, end_block), K, True, G.STAGES)
    else:
        masked_block = tl.maximum(tl.minimum(edge_block, end_block), first_block)
        softmax = attend_key_blocks(softmax, query, kv, seen, KeyRange(first_block, masked_block), K, False, G.STAGES)
        softmax = attend_key_blocks(softmax, query, kv, seen, KeyRange(masked_block, end_block), K, True, G.EDGE_STAGES)
    # Scaled here, not after all segments: decode and extend then merge the same numbers.
    return scaled_value_parts(softmax, row_scale(kv.scale_values.v, kv.scale_values.head, C), C)


@triton.jit
def merge_segment(left, segment):
    """Merges the softmax state of everything left of a segment with the segment's.

    A side that saw no key (0, -inf, 0) changes no bit. acc: tuples of equally many blocks
    """
    maximum, total, decay, weight = _merged_sums(left.maximum, left.total, segment)
    acc = ()
    for i in tl.static_range(len(left.acc)):
        acc += (tl.fma(left.acc[i], decay[:, None], segment.acc[i] * weight[:, None]),)  # type: ignore[assignment]
    return Softmax(acc, maximum, total)


@triton.jit
def _merged_sums(maximum, total, segment):
    """Maximum and sum of a segment and everything left of it, and the factors for both accumulators."""
    merged = tl.maximum(maximum, segment.maximum)
    base = tl.where(merged == float("-inf"), 0.0, merged)
    decay = tl.exp2(maximum - base)
    weight = tl.exp2(segment.maximum - base)
    return merged, tl.fma(total, decay, segment.total * weight), decay, weight


@triton.jit
def left_of_program(left, G: tl.constexpr):
    """Pointers [QUERY_ROWS, V_COLUMNS] to a program's accumulators of everything left of a segment."""
    K: tl.constexpr = G.keys
    ROW: tl.constexpr = K.V_PARTS * K.V_COLUMNS
    row = tl.program_id(0).to(tl.int64) * G.QUERY_ROWS + tl.arange(0, G.QUERY_ROWS)
    return left + (row * ROW)[:, None] + tl.arange(0, K.V_COLUMNS)[None, :]


@triton.jit
def merge_in_memory(rows_left, maximum, total, segment, num_left, K: tl.constexpr):
    """Does the same as `merge_segment`, with the left accumulators in memory. Returns maximum and sum.

    num_left: segments that lie left of it; if there are none, nothing was written yet
    """
    maximum, total, decay, weight = _merged_sums(maximum, total, segment)
    V_PARTS: tl.constexpr = K.V_PARTS
    is_left = tl.full([1, 1], 0, tl.int32) + num_left > 0
    # One thread may have written an element, and another may read it.
    tl.debug_barrier()
    for i in tl.static_range(V_PARTS):
        rows = rows_left + i * K.V_COLUMNS
        acc = tl.load(rows, mask=is_left, other=0.0)
        tl.store(rows, tl.fma(acc, decay[:, None], segment.acc[i] * weight[:, None]))
    return maximum, total


@triton.jit
def load_left(rows_left, num_left, K: tl.constexpr):
    """The accumulators that merge_in_memory has written for num_left segments; 0 if there are none."""
    V_PARTS: tl.constexpr = K.V_PARTS
    is_left = tl.full([1, 1], 0, tl.int32) + num_left > 0
    tl.debug_barrier()
    acc = ()
    for i in tl.static_range(V_PARTS):
        acc += (tl.load(rows_left + i * K.V_COLUMNS, mask=is_left, other=0.0),)  # type: ignore[assignment]
    return acc


@triton.jit
def segments_of_share(words, seen, done, take, G: tl.constexpr):
    """The segments of a row, [first, end), that end in a share with [done, done + take) of its cost; whether the row
    ends there too.
    """
    num_keys = tl.load(words + BLOCK_KEYS)
    ends = done + take == num_keys + G.ROW_KEYS
    row_key = seen.keys.end - num_keys
    first_key = row_key + tl.maximum(done - G.ROW_KEYS, 0)
    end_key = row_key + tl.maximum(done + take - G.ROW_KEYS, 0)
    first = tl.maximum(first_key, seen.keys.first) // G.SEGMENT_LEN
    end = tl.where(ends, tl.cdiv(seen.keys.end, G.SEGMENT_LEN), end_key // G.SEGMENT_LEN)
    return first, end, ends


@triton.jit
def _store_segment(softmax, to, slot, is_row, G: tl.constexpr):
    """Stores the program's part of a row that it shares, to one of its slots."""
    K: tl.constexpr = G.keys
    acc, maximum, total = softmax
    place = tl.arange(0, G.QUERY_ROWS)
    line = ((tl.program_id(0) * G.SLOTS + slot) * G.QUERY_ROWS + place).to(tl.int64)
    store_columns(to.workspace + (line * K.V_HEAD_DIM)[:, None], acc, place, is_row, K)
    sums = to.workspace + to.num_programs.to(tl.int64) * (G.SLOTS * G.QUERY_ROWS * K.V_HEAD_DIM)
    tl.store(sums + line * 2, maximum)
    tl.store(sums + line * 2 + 1, total)


@triton.jit
def attend_segments(x, to, query_block, row, done, take, query, kv, seen, edge_block, G: tl.constexpr):
    """Attends for a row of extend, as extend.py's loop does, but by segments; and stores the results."""
    K: tl.constexpr = G.keys
    words = x.schedule + query_block * BLOCK_WORDS
    acc, maximum, total = nothing_seen(G.QUERY_ROWS, K)
    if G.SHARES:
        # The program that begins a row merges its segments from left to right, and writes the results if it ends the
        # row too. If an earlier program began it, each segment is stored for itself, as a part (segment_parts.py).
        first, end, ends = segments_of_share(words, seen, done, take, G)
        for segment in range(first, end):
            part = attend_segment(segment, query, kv, seen, edge_block, G)
            if done == 0:
                acc, maximum, total = merge_segment(Softmax(acc, maximum, total), part)
            else:
                _, _, is_row = rows_again(x.schedule, query_block, row, G)
                _store_segment(part, to, 1 + segment - first, is_row, G)
        if done == 0:
            token, head, is_row = rows_again(x.schedule, query_block, row, G)
            if ends:
                store_results(Softmax(acc, maximum, total), token, head, is_row, to.sinks, to.out, to.lse, K)
            else:
                _store_segment(Softmax(acc, maximum, total), to, 0, is_row, G)
    else:
        first_segment = seen.keys.first // G.SEGMENT_LEN
        end_segment = tl.cdiv(seen.keys.end, G.SEGMENT_LEN)
        if to.workspace is None:
            for segment in range(first_segment, end_segment):
                part = attend_segment(segment, query, kv, seen, edge_block, G)
                acc, maximum, total = merge_segment(Softmax(acc, maximum, total), part)
        else:
            rows_left = left_of_program(to.workspace, G)
            for segment in range(first_segment, end_segment):
                part = attend_segment(segment, query, kv, seen, edge_block, G)
                maximum, total = merge_in_memory(rows_left, maximum, total, part, segment - first_segment, K)
            acc = load_left(rows_left, end_segment - first_segment, K)
        token, head, is_row = rows_again(x.schedule, query_block, row, G)
        store_results(Softmax(acc, maximum, total), token, head, is_row, to.sinks, to.out, to.lse, K)
