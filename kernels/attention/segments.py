"""The arithmetic of deterministic attention: what a segment gives, and how segments add up. Decode and extend share it.

A segment is KV [m, m + 1) * segment_len, at absolute places. From nothing, an online softmax over its key blocks,
at absolute places too, gives a partial result: accumulator a, maximum m, sum l (base 2). Partial results are
merged from left to right:

    m' = max(m, m_i)    l' = 2^(m - m') l + 2^(m_i - m') l_i    a' = 2^(m - m') a + 2^(m_i - m') a_i

Why a row's bits depend on nothing else:
  - every sum of products is an explicit fma, and kernels are launched without fusion, so that no compiler chooses;
  - a key block that a row does not see at all adds 0 and scales by 1 (or scales the 0 that is there by 0): with masks
    or without, with other rows in the query block or without, the row's numbers stay as they are;
  - a matrix instruction computes a row from that row and from K, V alone, in one order of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_attn.kernels.attention.bundles import Softmax, Span
from rocm_attn.kernels.attention.coded import row_factor, scaled_value_parts
from rocm_attn.kernels.attention.key_loop import attend_key_blocks, nothing_seen

# Whether a product and a sum become one rounding or two is the source's choice here, not the compiler's.
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def attend_segment(segment, query, kv, seen, edge_block, G: tl.constexpr):
    """The softmax of a segment's keys.

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
        # Masks all the way: a loop of its own for what lies between the edges spills.
        softmax = attend_key_blocks(softmax, query, kv, seen, Span(first_block, end_block), K, True, G.STAGES)
    else:
        masked_block = tl.maximum(tl.minimum(edge_block, end_block), first_block)
        softmax = attend_key_blocks(softmax, query, kv, seen, Span(first_block, masked_block), K, False, G.STAGES)
        softmax = attend_key_blocks(softmax, query, kv, seen, Span(masked_block, end_block), K, True, G.EDGE_STAGES)
    # Here, not after all segments: decode and extend then merge the same numbers.
    return scaled_value_parts(softmax, row_factor(kv.factors.v, kv.factors.head, C), C)


@triton.jit
def merge_segment(left, segment):
    """The softmax of what lies left of a segment, merged with the segment's.

    A side that saw no key (0, -inf, 0) changes no bit. acc: tuples of as many blocks
    """
    maximum = tl.maximum(left.maximum, segment.maximum)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    decay = tl.exp2(left.maximum - base)
    weight = tl.exp2(segment.maximum - base)
    total = tl.fma(left.total, decay, segment.total * weight)
    acc = ()
    for i in tl.static_range(len(left.acc)):
        acc += (tl.fma(left.acc[i], decay[:, None], segment.acc[i] * weight[:, None]),)  # type: ignore[assignment]
    return Softmax(acc, maximum, total)
