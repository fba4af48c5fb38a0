"""Logits of rows that request it, with penalties and a mask.

    x            = logits[row, t]
    seen[t]      = whether the prompt or the text has token t; n[t]: how often the text has it
    x            = x / repetition if x > 0, else x * repetition      of seen tokens
    x            = x - presence * (n[t] > 0) - frequency * n[t]
    shaped[i, t] = x if bit t % 32 of mask[t // 32] is set, else -inf

in float32, one program for each such row and block of tokens. A row without counts or without a mask skips those steps.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.sampling import parameter_columns as columns
from rocm_attn.kernels.sampling.order import block_of

_BLOCK = 2048
_COLUMNS = tl.constexpr(columns.NUM_COLUMNS)
_ROW, _COUNTS, _MASK = (tl.constexpr(column) for column in (columns.ROW, columns.COUNTS, columns.MASK))
_REPETITION, _PRESENCE, _FREQUENCY = (
    tl.constexpr(column) for column in (columns.REPETITION, columns.PRESENCE, columns.FREQUENCY)
)
_IN_PROMPT = tl.constexpr(columns.IN_PROMPT)


@triton.jit
def _float(word):
    return tl.load(word).to(tl.float32, bitcast=True)


@at_any_alignment
@triton.jit(do_not_specialize=["vocab", "logits_stride", "mask_words"])
def _shape_rows_kernel(
    logits, parameters, counts, masks, shaped, vocab, logits_stride, mask_words, BLOCK: tl.constexpr
):
    place = tl.program_id(0)
    of_row = parameters + place * _COLUMNS
    row_logits = logits + tl.load(of_row + _ROW).to(tl.int64) * logits_stride
    token, x = block_of(row_logits, tl.program_id(1) * BLOCK, vocab, BLOCK)
    is_token = token < vocab
    counted = tl.load(of_row + _COUNTS)
    if counted >= 0:
        count = tl.load(counts + counted.to(tl.int64) * vocab + token, mask=is_token, other=0)
        repetition = tl.where(count != 0, _float(of_row + _REPETITION), 1.0)
        x = tl.where(x > 0, x / repetition, x * repetition)
        times = (count & (_IN_PROMPT - 1)).to(tl.float32)
        x -= tl.where(times > 0, _float(of_row + _PRESENCE), 0.0) + times * _float(of_row + _FREQUENCY)
    masked = tl.load(of_row + _MASK)
    if masked >= 0:
        words = masks + masked.to(tl.int64) * mask_words
        word = tl.load(words + (token >> 5), mask=is_token, other=0)
        x = tl.where(((word >> (token & 31)) & 1) != 0, x, float("-inf"))
    tl.store(shaped + place.to(tl.int64) * vocab + token, x, mask=is_token)


_variant = repeated_launches(_shape_rows_kernel)


def launch_shape_rows(logits: Tensor, parameters: Tensor, counts: Tensor, masks: Tensor, shaped: Tensor) -> None:
    """Writes rows of logits, in the form from which they are picked, to a place of their own.

    logits:     float32, float16 or bfloat16 [rows, vocab], rows of contiguous logits; read only
    parameters: int32 [num, NUM_COLUMNS], contiguous; see parameter_columns.py
    counts:     int32 [any, vocab], contiguous; how often a text has each token, and IN_PROMPT
    masks:      int32 [any, at least vocab / 32], contiguous; a bit for each token
    shaped:     float32 [num, vocab], contiguous, is written
    """
    num, vocab = shaped.shape
    assert logits.stride(1) == 1
    assert vocab + _BLOCK < 2**31
    if num:
        _variant(logits.dtype)(
            logits.device,
            (num, triton.cdiv(vocab, _BLOCK), 1),
            logits,
            parameters,
            counts,
            masks,
            shaped,
            vocab,
            logits.stride(0),
            masks.shape[-1],
            _BLOCK,
            num_warps=4,
        )
