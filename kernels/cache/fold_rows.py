"""Folds the values of several tokens into one row, with a softmax over their gates in each column.

    rows[t, c] = sum over j in [0, SPAN):   softmax over j (gates[p - SPAN + 1 + j, c]) * values[p - SPAN + 1 + j, c]

p is the place of token t, which ends a row if TOKENS divides p + 1; other tokens get 0, and so do pads. SPAN is TOKENS,
or twice as many if rows overlap: then column c of the first TOKENS places is column c of their tokens, and that of the
others column COLUMNS + c. Places before 0 have no weight. Values and gates are the K and V of pages, in float32 or
bfloat16; they are summed in float32. With V and G the largest magnitudes of a column's values and gates, bfloat16 adds
an error of at most

    V * (2**-8 + expm1(2 * D)),   D = 2**-8 * G

The sum is DeepSeek-V4's compressor (transformers, modeling_deepseek_v4.py: DeepseekV4CSACompressor, whose rows overlap,
and DeepseekV4HCACompressor), without norm and rotation. Its order depends on nothing but the row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.softmax import LOG2_E
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.launch import launch, only_launches
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Columns of a program: one for each thread of two wavefronts, or of four warps.
_BLOCK = 128
# Places that a program loads at once.
_MOST_AT_ONCE = 8


@triton.jit
def _fold_rows_kernel(
    values,
    gates,
    table,
    row_of_token,
    position_of_token,
    counts,
    rows,
    values_page,
    values_token,
    gates_page,
    gates_token,
    table_row,
    rows_token,
    TOKENS: tl.constexpr,
    SPAN: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < COLUMNS
    seen = 0
    if token < tl.load(counts + 1):
        seen = tl.load(position_of_token + token) + 1
    acc = tl.zeros([BLOCK], tl.float32)
    if (seen > 0) & (seen % TOKENS == 0):
        line = table + tl.load(row_of_token + token).to(tl.int64) * table_row
        maximum = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for first in range(0, SPAN, AT_ONCE):
            # place, position, page: [AT_ONCE]; at, gate, value: [AT_ONCE, BLOCK]
            place = first + tl.arange(0, AT_ONCE)
            position = seen - SPAN + place
            is_there = (place < SPAN) & (position >= 0)
            # A place that is not there has the page of one that is.
            position = tl.minimum(tl.maximum(position, 0), seen - 1)
            page = tl.load(line + position // PAGE_SIZE).to(tl.int64)
            offset = (position % PAGE_SIZE).to(tl.int64)
            half = tl.where(place < SPAN - TOKENS, 0, SPAN - TOKENS) // TOKENS * COLUMNS
            at = half[:, None] + column[None, :]
            mask = is_there[:, None] & is_column[None, :]
            gate = tl.load(gates + (page * gates_page + offset * gates_token)[:, None] + at, mask=mask, other=0.0)
            value = tl.load(values + (page * values_page + offset * values_token)[:, None] + at, mask=mask, other=0.0)
            gate = tl.where(mask, gate.to(tl.float32), float("-inf"))
            value = value.to(tl.float32)
            new_maximum = tl.maximum(maximum, tl.max(gate, 0))
            # All of these places may be before the sequence; the subtractions below must not be inf - inf.
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            # Differences of gates, not gates, are made larger: these may have any size.
            decay = tl.exp2((maximum - base) * LOG2_E)
            weight = tl.exp2((gate - base[None, :]) * LOG2_E)
            acc = acc * decay + tl.sum(weight * value, 0)
            total = total * decay + tl.sum(weight, 0)
            maximum = new_maximum
        acc = acc / tl.where(is_column, total, 1.0)
    tl.store(rows + token.to(tl.int64) * rows_token + column, acc, mask=is_column)


@only_launches
def launch_fold_rows(pages: LayerPages, step: StepTensors, rows: Tensor, *, tokens: int, overlaps: bool) -> None:
    """Writes rows of tokens that end one, and 0 for others and for pads.

    pages:    float32 or bfloat16, K and V of one head, [pages, page_size, 1, columns]: values and gates, with new ones
    step:     counts, row_of_token, position_of_token and table are read, of the space of these pages
    rows:     float32 [T, columns], or half as many columns if rows overlap; any strides but the last
    tokens:   of a row
    overlaps: whether a row is folded from as many tokens before its own, too
    """
    num_tokens, columns = rows.shape
    span = tokens * (1 + overlaps)
    assert rows.dtype == torch.float32
    assert pages.k.dtype == pages.v.dtype
    assert pages.k.dtype in (torch.float32, torch.bfloat16)
    assert pages.k.shape[3] == pages.v.shape[3] == columns * (1 + overlaps)
    assert rows.stride(1) == pages.k.stride(3) == pages.v.stride(3) == 1
    assert len(step.row_of_token) == len(step.position_of_token) == num_tokens
    launch(
        _fold_rows_kernel,
        (num_tokens, triton.cdiv(columns, _BLOCK)),
        pages.k,
        pages.v,
        step.table,
        step.row_of_token,
        step.position_of_token,
        step.counts,
        rows,
        pages.k.stride(0),
        pages.k.stride(1),
        pages.v.stride(0),
        pages.v.stride(1),
        step.table.stride(0),
        rows.stride(0),
        TOKENS=tokens,
        SPAN=span,
        COLUMNS=columns,
        PAGE_SIZE=pages.format.page_size,
        AT_ONCE=min(next_power_of_2(span), _MOST_AT_ONCE),
        BLOCK=_BLOCK,
        num_warps=4,
    )
