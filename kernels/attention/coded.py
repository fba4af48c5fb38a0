"""Eight-bit K and V in attention: a code becomes a number exactly, and its scale is multiplied in where that is cheap.

    q . k = k_scale_value * (q . code of k)        out = sum of weight * v_scale_value * code of v

k_scale_value and v_scale_value are the scales. A scale of the layer or of a head is one number for a row of q: K's goes
into the constant that multiplies products anyway, V's into the accumulator. Scales of tokens multiply columns: K's
those of the products, V's those of the weights. C is a Coding (page_format.py).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.softmax import rounded
from rocm_attn.kernels.cache.codes import (
    HEAD_SCALES,
    LAYER_SCALES,
    TOKEN_SCALES,
    decoded,
    decoded_pairs,
    is_coded,
)

# The smallest normal number of float32. Scores are not multiplied with less: 0 times the -inf of an unseen key is NaN.
LEAST_SCALE = tl.constexpr(2.0**-126)
# A block whose scales are all 0 has codes of 0 only.
_SMALLEST_SCALE = tl.constexpr(2.0**-120)
_LEAST_PART = tl.constexpr(2.0**-60)
# 2^-63, biased: scores of smaller rows of q are 0 in effect. So the factor of rows of zeros is large enough that its
# product with K's factor is not 0: 0 times the -inf of an unseen key is NaN.
_LEAST_EXPONENT = tl.constexpr(64)


class ScalePointers(NamedTuple):
    """Scales of K and of V: pointers, or None if there are none; head: the KV head that is read, int64."""

    k: Any
    v: Any
    head: Any


@triton.jit
def row_scale(scale, head, C: tl.constexpr):
    """Returns the scale of rows that read these KV heads (of any shape); 1 if rows do not share one."""
    if C.SCALES == LAYER_SCALES:
        scale_value = tl.load(scale)
    elif C.SCALES == HEAD_SCALES:
        # Rows without a query head may lie past the last KV head.
        scale_value = tl.load(scale + tl.minimum(head, C.KV_HEADS - 1))
    else:
        scale_value = 1.0
    return scale_value


@triton.jit
def exponent_to_move(largest):
    """The biased float32 exponent that rows with this largest magnitude are moved by, so that factors are finite.

    largest: float32, of any shape
    """
    return tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, _LEAST_EXPONENT), 254)


@triton.jit
def largest_exponent(q):
    """exponent_to_move of a block of bfloat16."""
    return exponent_to_move(tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0))


@triton.jit
def moved_to_half(q, exponent):
    """bfloat16 times a power of two, as float16. exponent: largest_exponent of it, or of more."""
    return (q.to(tl.float32) * ((268 - exponent) << 23).to(tl.float32, bitcast=True)).to(tl.float16)


@triton.jit
def scale_of_moved(exponent):
    """Returns the factor for products with moved_to_half(q, exponent)."""
    return ((exponent - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def half_query(q):
    """Returns a block of q of sixteen bits as float16, and the factor for products with it.

    bfloat16 is moved by a power of two, so that the block's largest element is 2^14 or more: an element 2^-28 times as
    large is still exact. Products are summed in float32.
    """
    scale_value = 1.0
    if q.dtype == tl.bfloat16:
        exponent = largest_exponent(q)
        q = moved_to_half(q, exponent)
        scale_value = scale_of_moved(exponent)
    return q, scale_value


@triton.jit
def coded_scales(qk_scale, tanh_scale, scale_value, CAPPED: tl.constexpr, C: tl.constexpr):
    """qk_scale and tanh_scale of products with codes.

    scale_value: scale of K's rows; if 0, all seen keys weigh alike
    """
    if is_coded(C.ENCODING):
        if CAPPED:
            tanh_scale = tanh_scale * scale_value
        else:
            qk_scale = qk_scale * scale_value
            if C.SCALES != TOKEN_SCALES:  # token scales are in the scores before any key is hidden
                qk_scale = tl.maximum(qk_scale, LEAST_SCALE)
    return qk_scale, tanh_scale


@triton.jit
def scaled_values(softmax, scale_value, C: tl.constexpr):
    """Multiplies the scale of the rows of V's codes into the accumulator."""
    acc = softmax.acc
    if C.SCALES == LAYER_SCALES or C.SCALES == HEAD_SCALES:
        acc = acc * scale_value
    return Softmax(acc, softmax.maximum, softmax.total)


@triton.jit
def scaled_parts(parts, scale_value):
    """Multiplies each block of a tuple by a factor."""
    scaled = ()
    for i in tl.static_range(len(parts)):
        scaled += (parts[i] * scale_value,)  # type: ignore[assignment]
    return scaled


@triton.jit
def scaled_value_parts(softmax, scale_value, C: tl.constexpr):
    """Does the same as `scaled_values`, for an acc that is a tuple of blocks."""
    acc = softmax.acc
    if C.SCALES == LAYER_SCALES or C.SCALES == HEAD_SCALES:
        acc = scaled_parts(acc, scale_value)
    return Softmax(acc, softmax.maximum, softmax.total)


@triton.jit
def token_scale(scale, page, offset, head, live, MASKED: tl.constexpr, C: tl.constexpr):
    """The scales of keys, float32 [keys]; 1 if tokens have none.

    page, offset: int64 [keys]; live: which of them may be read
    """
    scale_value = 1.0
    if C.SCALES == TOKEN_SCALES:
        # Dead keys read page 0: a mask would be kept in pairs of scalar registers, and then AMD's compiler has too few.
        if MASKED:
            page = tl.where(live, page, 0)
        scale_value = tl.load(scale + (page * C.KV_HEADS + head) * C.PAGE_SIZE + offset)
        if MASKED:
            scale_value = tl.where(live, scale_value, 0.0)
    return scale_value


@triton.jit
def scales_of_two(scale, page, offset, head, live, HEADS: tl.constexpr, C: tl.constexpr):
    """The scales of keys for a KV head and for the next one, float32 [2, keys]; for one head the same twice."""
    # [keys]; page is one number if all keys lie in one page.
    place = page * (C.KV_HEADS * C.PAGE_SIZE) + offset
    of_head = (head + tl.arange(0, 2) * (HEADS - 1)) * C.PAGE_SIZE
    return tl.load(scale + place[None, :] + of_head[:, None], mask=live[None, :], other=0.0)


@triton.jit
def times_scales(block, scale_value, TRANSPOSED: tl.constexpr):
    """A block of rows and keys times the scales of keys. scale_value: [keys], or [2, keys] for either half of the rows

    block: [rows, keys], or swapped
    """
    if len(scale_value.shape) == 1:
        block = block * (scale_value[:, None] if TRANSPOSED else scale_value[None, :])
    elif TRANSPOSED:
        halves = tl.reshape(block, [block.shape[0], 2, block.shape[1] // 2]) * tl.trans(scale_value)[:, :, None]
        block = tl.reshape(halves, block.shape)
    else:
        halves = tl.reshape(block, [2, block.shape[0] // 2, block.shape[1]]) * scale_value[:, None, :]
        block = tl.reshape(halves, block.shape)
    return block


@triton.jit
def shared_scale(scale_value):
    """Splits scales of keys for two heads, [2, keys]: the larger one of each key, [keys], and each one's part of it."""
    larger = tl.max(scale_value, 0)
    return larger, scale_value / tl.maximum(larger, _SMALLEST_SCALE)[None, :]


@triton.jit
def add_values(acc, decay, weights, v, scale_value, DTYPE: tl.constexpr, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """acc * decay + weights * V, of blocks that are multiplied in DTYPE.

    acc:     float32 [rows, columns], or swapped; decay: of its shape but for columns
    weights: float32 [rows, keys], or swapped; v: elements of pages [keys, columns]; scale_value: token scales, [keys],
             or 1
    """
    if C.SCALES == TOKEN_SCALES and tl.float16 == DTYPE:
        # Weights of float16 would lose their smallest bits.
        v = (decoded(v, C.ENCODING, tl.float32) * scale_value[:, None]).to(DTYPE)
    else:
        if C.SCALES == TOKEN_SCALES:
            weights = weights * (scale_value[:, None] if TRANSPOSED else scale_value[None, :])
        v = decoded(v, C.ENCODING, DTYPE)
    # The product of a weight and a scale may be a NaN that the sums of weights do not contain.
    weights = weights.to(DTYPE) if C.SCALES == TOKEN_SCALES else rounded(weights, DTYPE)
    if TRANSPOSED:
        acc = tl.dot(tl.trans(v), weights, acc * decay, input_precision="ieee")
    else:
        acc = tl.dot(weights, v, acc * decay, input_precision="ieee")
    return acc


@triton.jit
def add_value_pairs(even, odd, decay, shares, pairs, C: tl.constexpr):
    """Does the same as `add_values` in float16, with V's codes in pairs.

    even, odd: float32 [rows, columns / 2], the accumulators of even columns and of odd ones
    decay:     float32 [rows, 1]; if tokens have scales, it includes the change of the amount
    shares:    float16 [rows, keys], at most 2
    pairs:     uint16 [keys, columns / 2]
    """
    v_even, v_odd = decoded_pairs(pairs, C.ENCODING)
    return tl.dot(shares, v_even, even * decay), tl.dot(shares, v_odd, odd * decay)


class Amount(NamedTuple):
    """The power of 2 that multiplies an accumulator, as its exponent; and the largest scale so far.

    float32, scalars
    """

    exponent: Any
    largest: Any


@triton.jit
def no_amount():
    """The amount of an accumulator of zeros."""
    return Amount(tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32))


@triton.jit
def amount_of(scale_value, before):
    """The amount for a block of keys with these scales, of any shape: that of the largest one.

    This keeps small weights in float16. It is at least 2^-60 of the largest of all blocks, so that sums stay finite.
    """
    # Compared as integers, which have the same order: a warp has one instruction for that. NaN counts as 0, because as
    # the largest scale it would spoil the rows of other heads.
    block = tl.max(tl.maximum(scale_value, 0.0).to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    largest = tl.maximum(before.largest, block)
    now = tl.maximum(tl.maximum(block, largest * _LEAST_PART), _SMALLEST_SCALE)
    return Amount(((now.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32), largest)


@triton.jit
def half_shares(weights, scale_value, C: tl.constexpr):
    """Returns weights of V's codes in float16, and the factor for their products if tokens have scales."""
    amount = 1.0
    if C.SCALES == TOKEN_SCALES:
        # float16 keeps small weights if scales are fractions of the block's largest one.
        amount = tl.maximum(tl.max(scale_value, 0), _SMALLEST_SCALE)
        weights = weights * (scale_value * (1.0 / amount))[None, :]
    return weights.to(tl.float16), amount


@triton.jit
def add_shares(acc, decay, shares, v, amount, C: tl.constexpr):
    """acc * decay + shares * V, of half_shares and of codes that are already float16."""
    acc = acc * decay
    if C.SCALES == TOKEN_SCALES:
        acc += tl.dot(shares, v) * amount
    else:
        acc = tl.dot(shares, v, acc)
    return acc
