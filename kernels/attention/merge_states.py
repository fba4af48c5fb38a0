"""Merges attention over two sets of keys into attention over both.

    m   = max(lse_a, lse_b)         a = exp(lse_a - m)         b = exp(lse_b - m)
    out = out_a * (a / (a + b)) + out_b * (b / (a + b))        lse = m + ln(a + b)

The sets must share no key, and a sink is in the log-sum-exp of one of them only. A side that has seen no key has LSE
-inf; its output is not read and may be NaN. If both have seen none, out is 0 and lse is -inf.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.arguments import rows_are_contiguous
from rocm_attn.kernels.attention.softmax import LN_2, LOG2_E
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Elements that a program merges: 8 of each side for each thread of 4 warps.
_ELEMENTS = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _merge_states_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_rows,
    a_token,
    a_head,
    lse_a_token,
    lse_a_head,
    b_token,
    b_head,
    lse_b_token,
    lse_b_head,
    out_token,
    out_head,
    lse_token,
    lse_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DIM_BLOCK)
    is_row = row < num_rows
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    log_a = tl.load(lse_a + token * lse_a_token + head * lse_a_head, mask=is_row, other=float("-inf")) * LOG2_E
    log_b = tl.load(lse_b + token * lse_b_token + head * lse_b_head, mask=is_row, other=float("-inf")) * LOG2_E
    maximum = tl.maximum(log_a, log_b)
    # If both sides are empty, the subtractions must not be inf - inf.
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    share_a, share_b = tl.exp2(log_a - base), tl.exp2(log_b - base)
    # Without keys 0 / 1, and -inf + log2(1).
    total = tl.where(maximum == float("-inf"), 1.0, share_a + share_b)
    # Rounded to nearest: a plain division may miss 1 / 1, and a side must stay unchanged if the other is empty.
    weight_a, weight_b = tl.div_rn(share_a, total), tl.div_rn(share_b, total)
    is_element = is_row[:, None]
    if DIM_BLOCK > DIM:
        is_element = is_element & (column < DIM)[None, :]
    at_a = out_a + (token * a_token + head * a_head)[:, None] + column[None, :]
    at_b = out_b + (token * b_token + head * b_head)[:, None] + column[None, :]
    # A value with weight 0 may be NaN.
    value_a = tl.load(at_a, mask=is_element & (share_a > 0.0)[:, None], other=0.0).to(tl.float32)
    value_b = tl.load(at_b, mask=is_element & (share_b > 0.0)[:, None], other=0.0).to(tl.float32)
    merged = value_a * weight_a[:, None] + value_b * weight_b[:, None]
    at_out = out + (token * out_token + head * out_head)[:, None] + column[None, :]
    tl.store(at_out, merged.to(out.dtype.element_ty), mask=is_element)
    tl.store(lse + token * lse_token + head * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)


def launch_merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Writes attention over the keys of a and of b to out and lse.

    out_a, out_b, out: [T, heads, dim], any strides but the last, each in a floating type of its own; out may be out_a
                       or out_b
    lse_a, lse_b, lse: float32 [T, heads], natural logarithm, any strides; lse may be lse_a or lse_b
    """
    num_tokens, num_heads, dim = out.shape
    assert out_a.shape == out_b.shape == out.shape
    assert lse_a.shape == lse_b.shape == lse.shape == (num_tokens, num_heads)
    assert lse_a.dtype == lse_b.dtype == lse.dtype == torch.float32
    assert rows_are_contiguous(out_a, out_b, out), "the last stride must be 1"
    dim_block = next_power_of_2(dim)
    rows = max(1, _ELEMENTS // dim_block)
    launch(
        _merge_states_kernel,
        (triton.cdiv(num_tokens * num_heads, rows),),
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        num_tokens * num_heads,
        out_a.stride(0),
        out_a.stride(1),
        *lse_a.stride(),
        out_b.stride(0),
        out_b.stride(1),
        *lse_b.stride(),
        out.stride(0),
        out.stride(1),
        *lse.stride(),
        HEADS=num_heads,
        DIM=dim,
        DIM_BLOCK=dim_block,
        ROWS=rows,
        num_warps=4,
    )
