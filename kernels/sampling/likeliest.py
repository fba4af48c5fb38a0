"""The likeliest tokens of rows of logits, and the logprob of the token that was picked.

    logprob[t] = logits[t] - best - log(sum over u of exp(logits[u] - best))

in float32. A program has a row, as in pick_rows.py; nothing is sorted.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.sampling.order import SAME_BITS_OF, block_of, least_of_likeliest, order_of

_BLOCK = 4096
_LOG2_E = tl.constexpr(1.4426950408889634)


@at_any_alignment
@triton.jit(do_not_specialize=["vocab", "logits_stride", "width"])
def _likeliest_kernel(
    logits, parameters, tokens, likeliest, vocab, logits_stride, width, SAME_BITS: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0)
    row = tl.load(parameters + 2 * place)
    num = tl.minimum(tl.load(parameters + 2 * place + 1), vocab)
    row_logits = logits + row.to(tl.int64) * logits_stride
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for begin in range(0, vocab, BLOCK):
        _, x = block_of(row_logits, begin, vocab, BLOCK)
        top = tl.maximum(top, x)
    best = tl.max(top, 0)
    if tl.abs(best) < float("inf"):
        summed = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, vocab, BLOCK):
            _, x = block_of(row_logits, begin, vocab, BLOCK)
            summed += tl.exp2((x - best) * _LOG2_E)
        log_sum = best + tl.log(tl.sum(summed, 0))
        to = likeliest + place.to(tl.int64) * (1 + 2 * width)
        picked = tl.load(row_logits + tl.load(tokens + row)).to(tl.float32) - log_sum
        tl.store(to, picked.to(tl.int32, bitcast=True))
        if num > 0:
            least, num_above = least_of_likeliest(row_logits, vocab, best, num, SAME_BITS, BLOCK)
            num_found = 0
            num_least = num_above  # places of tokens that have the least logit come after those of the others
            for begin in range(0, vocab, BLOCK):
                token, x = block_of(row_logits, begin, vocab, BLOCK)
                order = order_of(x, SAME_BITS)
                is_above = (order > least).to(tl.int32)
                is_least = ((order == least) & (token < vocab)).to(tl.int32)
                at = tl.where(is_above > 0, num_found + tl.cumsum(is_above, 0), num_least + tl.cumsum(is_least, 0)) - 1
                is_found = ((is_above | is_least) > 0) & (at < num)
                tl.store(to + 1 + 2 * at, token, mask=is_found)
                tl.store(to + 2 + 2 * at, (x - log_sum).to(tl.int32, bitcast=True), mask=is_found)
                num_found += tl.sum(is_above, 0)
                num_least += tl.sum(is_least, 0)


_variant = repeated_launches(_likeliest_kernel)


def launch_likeliest(logits: Tensor, parameters: Tensor, tokens: Tensor, likeliest: Tensor) -> None:
    """Finds the likeliest tokens of some rows.

    logits:     float32, float16 or bfloat16 [rows, vocab], rows of contiguous logits; read only
    parameters: int32 [num, 2], contiguous: a row, and how many of its likeliest tokens, 0 to width
    tokens:     int32 [rows], the tokens that were picked
    likeliest:  int32 [num, 1 + 2 * width], contiguous, receives the bits of the picked token's logprob, and for each of
                the likeliest ones its id and the bits of its logprob, in no order; entries beyond stay unchanged. For a
                row that holds NaN, +inf or nothing but -inf it receives anything, or nothing
    """
    (num, words), vocab = likeliest.shape, logits.shape[1]
    assert logits.stride(1) == 1
    assert vocab + _BLOCK < 2**31
    if num:
        _variant(logits.dtype)(
            logits.device,
            (num, 1, 1),
            logits,
            parameters,
            tokens,
            likeliest,
            vocab,
            logits.stride(0),
            words // 2,
            SAME_BITS_OF[logits.dtype],
            _BLOCK,
            num_warps=8,
        )
