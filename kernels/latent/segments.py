"""Deterministic attention over latent pages, which decode and extend share: softmax of a segment, sum of segments.

It works like attention/segments.py: segment m is KV [m, m + 1) * segment_len, an online softmax over its key blocks
gives a partial result, and partial results are merged from left to right, every sum of products an explicit fma. Decode
and extend have the same tiles, so that a row's products are the same matrix instructions in both.
"""

import triton
import triton.language as tl

from rocm_attn.kernels.attention.bundles import KeyRange
from rocm_attn.kernels.latent.key_loop import LatentSoftmax, attend_latents, no_latents_seen


@triton.jit
def attend_latent_segment(segment, query, rows, seen, G: tl.constexpr):
    """The softmax state of a segment's keys. seen: some row sees its keys; G: QUERY_ROWS, SEGMENT_LEN, STAGES, keys"""
    K: tl.constexpr = G.keys
    BLOCKS: tl.constexpr = G.SEGMENT_LEN // K.KEY_BLOCK
    first_block = tl.maximum(segment * BLOCKS, seen.keys.first // K.KEY_BLOCK)
    end_block = tl.minimum((segment + 1) * BLOCKS, tl.cdiv(seen.keys.end, K.KEY_BLOCK))
    nothing = no_latents_seen(G.QUERY_ROWS, K)
    return attend_latents(nothing, query, rows, seen, KeyRange(first_block, end_block), K, True, G.STAGES)


@triton.jit
def merge_latent_segment(left, segment):
    """Merges the softmax state of everything left of a segment with the segment's.

    A side that saw no key (0, 0, -inf, 0) changes no bit.
    """
    maximum = tl.maximum(left.maximum, segment.maximum)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    decay = tl.exp2(left.maximum - base)
    weight = tl.exp2(segment.maximum - base)
    total = tl.fma(left.total, decay, segment.total * weight)
    low = tl.fma(left.low, decay[:, None], segment.low * weight[:, None])
    high = tl.fma(left.high, decay[:, None], segment.high * weight[:, None])
    return LatentSoftmax(low, high, maximum, total)
