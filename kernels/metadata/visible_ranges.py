"""Computes the range of keys that each new token of a step sees in a layer (attention/scores.py has the definition).

It is part of the layer's schedule: it runs in every fill, in graphs and in each draft step, and reads what fill
derives. In a step with cells the end is the sequence's, and the window is the one that came with them, window_start; a
sequence whose cells begin at its end has none. Tokens at or past num_tokens see nothing: their range is [0, 0).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW, Visibility
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.metadata.step_tensors import StepTensors

_TOKENS = 256


class RangeGeometry(NamedTuple):
    """The values that the kernel is compiled for: of Visibility, MASKED only in masked steps; tokens of a program.

    TO_END: whether tokens see all later keys
    """

    TO_END: bool
    WINDOWED: bool
    CHUNKED: bool
    SPANS_PASS: bool
    MASKED: bool
    TOKENS: int


@at_any_alignment
@triton.jit(do_not_specialize=["num_tokens_padded", "window_left", "window_right", "chunk"])
def _visible_ranges_kernel(
    counts,
    kv_len,
    seq_of_token,
    position_of_token,
    mask_start,
    window_start,
    span_begin,
    span_end,
    first_key,
    end_key,
    num_tokens_padded,
    window_left,
    window_right,
    chunk,
    G: tl.constexpr,
):
    TOKENS: tl.constexpr = G.TOKENS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens_padded
    live = inside & (token < tl.load(counts + 1))
    seq = tl.load(seq_of_token + token, mask=live, other=0)
    place = tl.load(position_of_token + token, mask=live, other=0)
    # Pads read lengths of the first sequence, and use none.
    length = tl.load(kv_len + seq)
    # The sum may be more than 32 bits have room for.
    end = length if G.TO_END else place + tl.minimum(window_right, length - place - 1) + 1
    first = tl.zeros([TOKENS], tl.int32)
    if G.WINDOWED:
        first = tl.maximum(place - window_left, 0)
    if G.CHUNKED:
        first = tl.maximum(first, place - place % chunk)
    if G.MASKED:
        begin = tl.load(span_begin + token, mask=live, other=0)
        last = tl.load(span_end + token, mask=live, other=0)
        in_span = (begin <= place) & (place < last)
        end = tl.where(in_span, tl.maximum(end, last), end)
        if G.SPANS_PASS:
            # An engine's span may begin anywhere.
            first = tl.where(in_span, tl.minimum(first, tl.maximum(begin, 0)), first)
        has_cells = tl.load(mask_start + seq) < length
        end = tl.where(has_cells, length, end)
        if G.WINDOWED:
            of_cells = tl.load(window_start + token, mask=live, other=0)
            first = tl.where(has_cells, tl.maximum(of_cells, 0), first)
    # A sequence with fewer keys than new tokens has places below 0.
    end = tl.maximum(tl.minimum(end, length), 0)
    tl.store(first_key + token, tl.where(live, tl.minimum(first, end), 0), mask=inside)
    tl.store(end_key + token, tl.where(live, end, 0), mask=inside)


def launch_visible_ranges(step: StepTensors, visibility: Visibility, first: Tensor, end: Tensor) -> None:
    """Writes the ranges of the step's tokens.

    step:       after fill; mask_start, span_begin and span_end, and in a layer with a window window_start, are read if
                the step has a mask and the layer is masked
    first, end: int32 [T], written
    """
    num_tokens = step.position_of_token.shape[0]
    assert first.shape == end.shape == (num_tokens,)
    masked = visibility.masked and step.mask_start.numel() > 0
    assert not (masked and visibility.windowed) or step.window_start.numel() == num_tokens
    launch(
        _visible_ranges_kernel,
        (triton.cdiv(num_tokens, _TOKENS),),
        step.counts,
        step.kv_len,
        step.seq_of_token,
        step.position_of_token,
        step.mask_start,
        step.window_start,
        step.span_begin,
        step.span_end,
        first,
        end,
        num_tokens,
        visibility.window_left,
        visibility.window_right,
        visibility.chunk,
        G=RangeGeometry(
            visibility.window_right == UNLIMITED_WINDOW,
            visibility.windowed,
            visibility.chunk > 0,
            visibility.spans_pass,
            masked,
            _TOKENS,
        ),
        num_warps=4,
    )
