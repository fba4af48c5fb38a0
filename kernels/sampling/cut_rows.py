"""Rules out all but the likeliest tokens of rows, in place.

    kept:      the top_k likeliest tokens, the first ones of equal logits, whose logits are at least best + depth
    shaped[t]  = shaped[t] of kept tokens, else -inf

best is the row's largest logit; depth is temperature * log(min_p). A program has a row, as in pick_rows.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.sampling import parameter_columns as columns
from rocm_attn.kernels.sampling.order import block_of, least_of_likeliest, order_of

_BLOCK = 4096
_COLUMNS, _TOP_K, _DEPTH = (tl.constexpr(n) for n in (columns.NUM_COLUMNS, columns.TOP_K, columns.DEPTH))


@at_any_alignment
@triton.jit(do_not_specialize=["vocab"])
def _cut_rows_kernel(parameters, shaped, vocab, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = shaped + place.to(tl.int64) * vocab
    top_k = tl.load(parameters + place * _COLUMNS + _TOP_K)
    depth = tl.load(parameters + place * _COLUMNS + _DEPTH).to(tl.float32, bitcast=True)
    if ((top_k > 0) & (top_k < vocab)) | (depth > float("-inf")):
        best = float("-inf")
        for begin in range(0, vocab, BLOCK):
            _, x = block_of(row, begin, vocab, BLOCK)
            best = tl.maximum(best, tl.max(x, 0))
        least = tl.min(order_of(tl.full([1], float("-inf"), tl.float32), 0), 0)
        num_equal = vocab
        if (top_k > 0) & (top_k < vocab):
            least, num_above = least_of_likeliest(row, vocab, best, top_k, 0, BLOCK)
            num_equal = top_k - num_above
        num_before = 0
        for begin in range(0, vocab, BLOCK):
            token, x = block_of(row, begin, vocab, BLOCK)
            order = order_of(x, 0)
            is_least = (order == least).to(tl.int32)
            rank = num_before + tl.cumsum(is_least, 0)
            kept = ((order > least) | ((is_least > 0) & (rank <= num_equal))) & (x >= best + depth)
            tl.store(row + token, tl.where(kept, x, float("-inf")), mask=token < vocab)
            num_before += tl.sum(is_least, 0)


_variant = repeated_launches(_cut_rows_kernel)


def launch_cut_rows(parameters: Tensor, shaped: Tensor) -> None:
    """Rules out all but the likeliest tokens of rows.

    parameters: int32 [num, NUM_COLUMNS], contiguous; see parameter_columns.py
    shaped:     float32 [num, vocab], contiguous, no NaN; changed
    """
    num, vocab = shaped.shape
    assert vocab + _BLOCK < 2**31
    if num:
        _variant(torch.float32)(shaped.device, (num, 1, 1), parameters, shaped, vocab, _BLOCK, num_warps=8)
