"""Eight-bit K and V in attention: a code becomes a number exactly, and its factor is multiplied in where that is cheap.

    q . k = k_factor * (q . code of k)        out = sum of weight * v_factor * code of v

A factor of the layer or of a head is one number for a row of q: K's goes into what products are multiplied with anyway,
V's into the accumulator. Factors of tokens multiply columns: K's those of the products, V's those of the weights. The
weights of float16 would lose their smallest bits so; there V's own rows are multiplied. C is a Coding (page_format.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.cache.codes import HEAD_SCALES, LAYER_SCALES, TOKEN_SCALES, decoded


class Factors(NamedTuple):
    """Factors of K and of V: pointers, or None where there are none; head: the KV head that is read, int64."""

    k: Any
    v: Any
    head: Any


@triton.jit
def row_factor(scale, head, C: tl.constexpr):
    """The factor of rows that read these KV heads (of any shape); 1 where rows do not share one."""
    if C.SCALES == LAYER_SCALES:
        factor = tl.load(scale)
    elif C.SCALES == HEAD_SCALES:
        # Rows without a query head may lie past the last KV head.
        factor = tl.load(scale + tl.minimum(head, C.KV_HEADS - 1))
    else:
        factor = 1.0
    return factor


@triton.jit
def coded_scales(qk_scale, tanh_scale, factor, CAPPED: tl.constexpr, C: tl.constexpr):
    """qk_scale and tanh_scale of products with codes. factor: of K's rows"""
    if C.SCALES == LAYER_SCALES or C.SCALES == HEAD_SCALES:
        if CAPPED:
            tanh_scale = tanh_scale * factor
        else:
            qk_scale = qk_scale * factor
    return qk_scale, tanh_scale


@triton.jit
def scaled_values(softmax, factor, C: tl.constexpr):
    """What codes of V gave, with the factor of their rows."""
    acc = softmax.acc
    if C.SCALES == LAYER_SCALES or C.SCALES == HEAD_SCALES:
        acc = acc * factor
    return Softmax(acc, softmax.maximum, softmax.total)


@triton.jit
def token_factor(scale, page, offset, head, live, MASKED: tl.constexpr, C: tl.constexpr):
    """The factors of keys, float32 [keys]; 1 where tokens have none.

    page, offset: int64 [keys]; live: which of them may be read
    """
    factor = 1.0
    if C.SCALES == TOKEN_SCALES:
        at = scale + (page * C.PAGE_SIZE + offset) * C.KV_HEADS + head
        factor = tl.load(at, mask=live, other=0.0) if MASKED else tl.load(at)
    return factor


@triton.jit
def weighted_values(weights, v, factor, DTYPE: tl.constexpr, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """Weights and V as they are multiplied, in DTYPE.

    weights: float32 [rows, keys], or swapped; v: elements of pages [keys, columns]; factor: of tokens, [keys], or None
    """
    if C.SCALES == TOKEN_SCALES:
        if tl.float16 == DTYPE:
            v = (decoded(v, C.ENCODING, tl.float32) * factor[:, None]).to(DTYPE)
        else:
            weights = weights * (factor[:, None] if TRANSPOSED else factor[None, :])
            v = decoded(v, C.ENCODING, DTYPE)
    else:
        v = decoded(v, C.ENCODING, DTYPE)
    return weights.to(DTYPE), v
