"""Logits in blocks, and integers of the same order: shared by kernels that find the likeliest tokens."""

import torch
import triton
import triton.language as tl

# Low bits of a float32 that are the same for every value of a narrower dtype.
SAME_BITS_OF = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def order_of(x, SAME_BITS: tl.constexpr):
    """int32 in the order of the values of x. x: float32, no NaN"""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SAME_BITS


@triton.jit
def block_of(row_logits, begin, vocab, BLOCK: tl.constexpr):
    """The tokens of a block, and their logits; -inf after the last token."""
    token = begin + tl.arange(0, BLOCK)
    return token, tl.load(row_logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _num_from(row_logits, vocab, least, SAME_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The number of tokens with logits at least as large as that of an order, which is above that of -inf."""
    num = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocab, BLOCK):
        _, x = block_of(row_logits, begin, vocab, BLOCK)
        num += (order_of(x, SAME_BITS) >= least).to(tl.int32)
    return tl.sum(num, 0)


@triton.jit
def least_of_likeliest(row_logits, vocab, best, num, SAME_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The order of the num-th likeliest token, and the number of tokens above it. It is found bit by bit.

    best: the largest logit; num: 1 to vocab
    """
    least = tl.min(order_of(tl.full([1], float("-inf"), tl.float32), SAME_BITS), 0)
    above = tl.min(order_of(best + tl.zeros([1], tl.float32), SAME_BITS), 0) + 1
    num_above = 0
    while least + 1 < above:
        middle = (least >> 1) + (above >> 1) + (least & above & 1)  # their difference may not fit int32
        from_middle = _num_from(row_logits, vocab, middle, SAME_BITS, BLOCK)
        if from_middle >= num:
            least = middle
        else:
            above = middle
            num_above = from_middle
    return least, num_above
