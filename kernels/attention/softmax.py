"""Pieces of the softmax that decode, extend and merge share. Everything is in base 2: exp(x) = 2^(x log2 e)."""

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import is_hip_cdna3
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention import scores
from rocm_attn.kernels.backend import on_hopper, on_nvidia

LOG2_E = tl.constexpr(scores.LOG2_E)
LN_2 = tl.constexpr(scores.LN_2)


@triton.jit
def capped(products, tanh_scale):
    """tanh(scale * products / cap) / 2 = 1/2 - 1 / (e^(2x) + 1); both ends saturate instead of overflowing.

    Half of it takes one operation per score less than all of it; the other half is in Scores.base_2_scale.
    """
    # rsqrt(x)^2 for 1 / x: AMD's division is a long sequence with a mask of its own.
    root = tl.rsqrt(tl.exp2(products * tanh_scale) + 1.0)
    return 0.5 - root * root


@constexpr_function
def has_tanh(dtype: tl.dtype) -> bool:
    """True if capped_at_once serves scores of rows of this dtype: one instruction on NVIDIA, none on AMD.

    Rows of float32 keep the form above, whose error is that of float32.
    """
    return bool(on_nvidia() and dtype.primitive_bitwidth == 16)


@triton.jit
def capped_at_once(products, half_scale):
    """tanh(half_scale * products) by one instruction, instead of two, a sum and a product. half_scale: scale / cap

    Its error is at most 1.1e-5 of the tanh on an H200 (float64, 8 million numbers up to 12); PTX promises 2^-11.
    """
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [products * half_scale], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def in_range(index, first, end):
    """first <= index < end by one comparison: on AMD each mask of a block is kept in pairs of scalar registers."""
    return (index - first).to(tl.uint32, bitcast=True) < (end - first).to(tl.uint32, bitcast=True)


@triton.jit
def visible_blocks(kv_len, window_left, KEY_BLOCK: tl.constexpr, WINDOWED: tl.constexpr):
    """First key, first key block and number of blocks that the last of kv_len tokens sees.

    Key block n is [n, n + 1) * KEY_BLOCK.
    """
    end = tl.cdiv(tl.maximum(kv_len, 0), KEY_BLOCK)
    first_key = tl.maximum(kv_len - 1 - window_left, 0) if WINDOWED else 0
    first_block = first_key // KEY_BLOCK
    return first_key, first_block, end - first_block


# In powers of two. A row's scores may exceed its maximum by this much before it is raised, as in FlashAttention-4
# (rescale_threshold of flash_attn/cute). Weights are then 256 at most, which float16 holds. The largest one is no
# longer exactly 1, and is rounded like the others: if one key outweighs all others, the error grows from 1.6e-4 to
# 1.1e-3 in bfloat16, before the output is rounded. And float32 sums may overflow at 256 times smaller values.
SLACK = tl.constexpr(8.0)


@triton.jit
def raised_seldom(maximum, new_maximum):
    """The maximum that rows go on with: the new one where it exceeds the old one by more than SLACK.

    A score that is NaN does not raise it; its weight is NaN either way.
    """
    return tl.where(new_maximum > maximum + SLACK, new_maximum, maximum)


@triton.jit
def exact_maximum(maximum, new_maximum):
    """The maximum that rows go on with in deterministic attention, where Hopper's extend kernel raises it seldom."""
    if on_hopper():
        new_maximum = raised_seldom(maximum, new_maximum)
    return new_maximum


@constexpr_function
def _halvings(n: int) -> int:
    """The number of times that a power of two can be halved."""
    return int(n).bit_length() - 1


@triton.jit
def sum_by_pairs(weights):
    """The sum of each row [rows, n]: of neighbours, then of neighbouring sums, and so on.

    Its order does not depend on which thread holds which of the numbers. tl.sum's order follows from a tile's layout.
    """
    LEVELS: tl.constexpr = _halvings(weights.shape[1])
    for _ in tl.static_range(LEVELS):
        weights = tl.sum(tl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]), 2)
    return tl.reshape(weights, [weights.shape[0]])


@triton.jit
def add_sink(maximum, total, sink):
    """Maximum and sum (base 2) with a sink (natural log) added, and the factor for earlier accumulators.

    Rows that have seen no key keep a sum of 0: without keys there is no output for a sink to take from.
    """
    new_maximum = tl.where(total > 0.0, tl.maximum(maximum, sink * LOG2_E), maximum)
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    decay = tl.exp2(maximum - base)
    share = tl.where(total > 0.0, tl.exp2(sink * LOG2_E - base), 0.0)
    return new_maximum, total * decay + share, decay


@triton.jit
def store_rows(softmax, heads, sinks, out, lse, columns, V_HEAD_DIM: tl.constexpr):
    """Writes out and, if lse.at is not None, LSE of rows, with their sinks.

    softmax: a Softmax; heads: a HeadsOfToken; out, lse: a HeadRows each; columns: of acc
    """
    acc, maximum, total = softmax
    token, head, is_row = heads
    if sinks is not None:
        sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
        maximum, total, decay = add_sink(maximum, total, sink)
        acc = acc * decay[:, None]
    # A token that sees no key: 0 / 1, and LSE -inf + log2(1).
    total = tl.where(total == 0.0, 1.0, total)
    out_rows = out.at + (token * out.token + head * out.head)
    value = (acc / total[:, None]).to(out.at.dtype.element_ty)
    tl.store(out_rows[:, None] + columns[None, :], value, mask=is_row[:, None] & (columns < V_HEAD_DIM)[None, :])
    if lse.at is not None:
        tl.store(lse.at + token * lse.token + head * lse.head, (maximum + tl.log2(total)) * LN_2, mask=is_row)


@constexpr_function
def _rounds_by_hand() -> bool:
    """True if the target has no instruction that rounds to bfloat16, so that Triton tests each number for NaN."""
    return not knobs.runtime.interpret and is_hip_cdna3()


@triton.jit
def rounded(weights, DTYPE: tl.constexpr):
    """Weights of keys, from 0 to 1, or other numbers, in DTYPE: the nearest number, the even one of two.

    Done by hand on gfx942, where Triton takes seven instructions for a bfloat16, most of them for NaN. A weight is NaN
    only if a logit is. Then the row's sum, which is of weights that are not rounded, is NaN too, and so are the row's
    results, whatever the weights become here.
    """
    if weights.dtype == DTYPE:
        result = weights
    elif tl.bfloat16 == DTYPE and _rounds_by_hand():
        bits = weights.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = weights.to(DTYPE)
    return result
