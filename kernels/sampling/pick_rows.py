"""Picks a token from each row of logits.

    best      = the largest logit of the row; NaN if the row holds one
    greedy:     token = the first one whose logit is best
    drawing:    weight[t] = exp((logits[t] - best) / temperature), of the tokens that are kept; others have 0
                token     = the first one with weight[0] + ... + weight[t] > uniform * (the sum of all)

The kept tokens are the likeliest ones, the first of equal ones, up to the one with which the sum of the weights reaches
top_p of the sum of all weights.

A program has a row and passes over it again and again, in blocks, each time in the same order: its pick depends on
nothing but the row. The least likely logit that is kept is found bit by bit, from the sum of weights of all logits
above a candidate. So nothing is sorted, and nothing is stored but the results.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.sampling.order import SAME_BITS_OF, block_of, order_of
from rocm_attn.kernels.sampling.row_results import ALL_ZERO

_BLOCK = 4096
_ALL_ZERO = tl.constexpr(ALL_ZERO)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _mass_from(row_logits, vocab, best, sharpness, least, SAME_BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the weights of all tokens whose logits are at least as large as that of an order."""
    mass = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        _, x = block_of(row_logits, begin, vocab, BLOCK)
        weight = tl.exp2((x - best) * sharpness)
        mass += tl.where(order_of(x, SAME_BITS) >= least, weight, 0.0)
    return tl.sum(mass, 0)


@at_any_alignment
@triton.jit(do_not_specialize=["vocab", "logits_stride", "num_drawing"])
def _pick_rows_kernel(
    logits,
    terms,
    tokens,
    found,
    vocab,
    logits_stride,
    num_drawing,
    SAME_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_logits = logits + row.to(tl.int64) * logits_stride
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where_top = tl.zeros([BLOCK], tl.int32)
    odd = tl.zeros([BLOCK], tl.int32)  # bit 0: a logit that is not 0; bit 1: NaN
    for begin in range(0, vocab, BLOCK):
        token, x = block_of(row_logits, begin, vocab, BLOCK)
        odd |= ((x != 0) & (token < vocab)).to(tl.int32) | ((x != x).to(tl.int32) << 1)
        better = x > top
        top = tl.where(better, x, top)
        where_top = tl.where(better, token, where_top)
    has_nan = tl.max(odd >> 1, 0) > 0
    best = tl.where(has_nan, float("nan"), tl.max(top, 0))
    # A row of NaN or of -inf gets some token.
    picked = tl.min(tl.where(top == tl.max(top, 0), where_top, vocab - 1), 0)
    temperature = 0.0
    if num_drawing > 0:
        temperature = tl.load(terms + 3 * row)
    if (temperature > 0) & (tl.abs(best) < float("inf")):
        sharpness = _LOG2_E / temperature
        top_p = tl.load(terms + 3 * row + 1)
        lowest = order_of(tl.full([1], float("-inf"), tl.float32), SAME_BITS)
        least = tl.min(lowest, 0)
        mass = _mass_from(row_logits, vocab, best, sharpness, least, SAME_BITS, BLOCK)
        num_equal = vocab  # the number of tokens with the least kept logit that are kept
        if top_p < 1:
            wanted = top_p * mass
            above = tl.min(order_of(best + tl.zeros([1], tl.float32), SAME_BITS), 0) + 1
            mass_above = 0.0
            while least + 1 < above:
                middle = (least >> 1) + (above >> 1) + (least & above & 1)  # their difference may not fit int32
                of_middle = _mass_from(row_logits, vocab, best, sharpness, middle, SAME_BITS, BLOCK)
                if of_middle >= wanted:
                    least = middle
                    mass = of_middle
                else:
                    above = middle
                    mass_above = of_middle
            # All tokens between two orders that are next to each other have one logit.
            num_least = 0
            for begin in range(0, vocab, BLOCK):
                token, x = block_of(row_logits, begin, vocab, BLOCK)
                num_least += tl.sum(((order_of(x, SAME_BITS) == least) & (token < vocab)).to(tl.int32), 0)
            of_each = (mass - mass_above) / tl.maximum(num_least, 1)
            needed = tl.ceil((wanted - mass_above) / tl.maximum(of_each, 1e-38))
            num_equal = tl.minimum(tl.maximum(needed, 1.0), num_least * 1.0).to(tl.int32)
            mass = mass_above + num_equal * of_each
        goal = tl.load(terms + 3 * row + 2) * mass
        drawn = vocab
        last = picked
        summed = 0.0
        num_before = 0
        begin = 0
        while (begin < vocab) & (drawn == vocab):
            token, x = block_of(row_logits, begin, vocab, BLOCK)
            order = order_of(x, SAME_BITS)
            is_least = ((order == least) & (token < vocab)).to(tl.int32)
            rank = num_before + tl.cumsum(is_least, 0)
            kept = (order > least) | ((is_least > 0) & (rank <= num_equal))
            weight = tl.where(kept, tl.exp2((x - best) * sharpness), 0.0)
            so_far = summed + tl.cumsum(weight, 0)
            drawn = tl.min(tl.where((so_far > goal) & (weight > 0), token, vocab), 0)
            last = tl.maximum(last, tl.max(tl.where(weight > 0, token, 0), 0))
            summed += tl.sum(weight, 0)
            num_before += tl.sum(is_least, 0)
            begin += BLOCK
        # Rounding may leave the sum below a uniform number next to 1.
        picked = tl.where(drawn < vocab, drawn, last)
    tl.store(tokens + row, picked)
    tl.store(found + 2 * row, tl.where(tl.max(odd & 1, 0) > 0, picked, _ALL_ZERO))
    tl.store(found + 2 * row + 1, best.to(tl.int32, bitcast=True))


_variant = repeated_launches(_pick_rows_kernel)


@only_launches
def launch_pick_rows(logits: Tensor, terms: Tensor, tokens: Tensor, found: Tensor, *, num_drawing: int) -> None:
    """Picks a token from each row.

    logits:      float32, float16 or bfloat16 [rows, vocab], rows of contiguous logits; read only
    terms:       float32 [rows, 3], contiguous: temperature (0: greedy; at least 1e-30 and at most 1e30 if it draws),
                 top_p and a uniform number of [0, 1); in pinned host memory or on the device. Not read if num_drawing
                 is 0
    tokens:      int32 [rows], receives the tokens; some token of the vocabulary if none can be picked
    found:       int32 [rows, 2], contiguous, receives the token, or ALL_ZERO if all logits are 0, and the bits of the
                 largest logit as float32; may lie in pinned host memory
    num_drawing: rows that draw
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    assert vocab + _BLOCK < 2**31
    if rows:
        _variant(logits.dtype)(
            logits.device,
            (rows, 1, 1),
            logits,
            terms,
            tokens,
            found,
            vocab,
            logits.stride(0),
            num_drawing,
            SAME_BITS_OF[logits.dtype],
            _BLOCK,
            num_warps=8,
        )
