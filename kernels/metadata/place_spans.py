"""Writes the spans of a step whose tokens see each other within them, to the fixed addresses that its kernels read.

    position of (i, t)         = kv_len[i] - q_len[i] + t
    span_begin, span_end there = the span [begin, end) of sequence i with begin <= position < end; 0 and 0 without one
    start[i]                   = kv_len[i]: no key has cells

A token in several spans receives the first begin and the last end, and sets SPANS_OVERLAP in the step's error word.
Tokens at or past num_tokens receive 0. A kernel does it, not a copy, for the reason in publish.py. It runs after
publish and device_inputs, which write the lengths.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import RepeatedLaunch
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, StepTensors

_TOKENS = 64
_SPANS = 64
_SEQS = 256
# Programs of a sequence, which take its tokens in turn.
_SHARES = 4
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_OVERLAP = tl.constexpr(error_word.SPANS_OVERLAP)
_PAST_ALL_KEYS = tl.constexpr(ALL_KEYS)


@at_any_alignment
@triton.jit(do_not_specialize=["num_spans", "num_seqs_padded", "num_tokens_padded"])
def _place_spans_kernel(
    spans,
    counts,
    kv_len,
    q_len,
    start,
    position_of_token,
    span_begin,
    span_end,
    num_spans,
    num_seqs_padded,
    num_tokens_padded,
    SHARES: tl.constexpr,
    TOKENS: tl.constexpr,
    SPANS: tl.constexpr,
    SEQS: tl.constexpr,
):
    seq = tl.program_id(0) // SHARES
    share = tl.program_id(0) % SHARES
    num_tokens = tl.load(counts + 1)
    tokens_before = tl.zeros([SEQS], tl.int32)
    for first in range(0, seq, SEQS):
        other = first + tl.arange(0, SEQS)
        tokens_before += tl.load(q_len + other, mask=other < seq, other=0)
    first_token = tl.sum(tokens_before, 0)
    new = tl.load(q_len + seq)
    length = tl.load(kv_len + seq)
    if share == 0:
        tl.store(start + seq, length)
    lane = tl.arange(0, SPANS)
    for at in range(share * TOKENS, new, SHARES * TOKENS):
        token = at + tl.arange(0, TOKENS)
        place = length - new + token
        found = tl.zeros([TOKENS], tl.int32)
        begin = tl.full([TOKENS], _PAST_ALL_KEYS, tl.int32)
        end = tl.zeros([TOKENS], tl.int32)
        for number in range(0, num_spans, SPANS):
            span = spans + (number + lane) * 3
            is_span = number + lane < num_spans
            is_span = is_span & (tl.load(span, mask=is_span, other=-1) == seq)
            its_begin = tl.load(span + 1, mask=is_span, other=0)[None, :]
            its_end = tl.load(span + 2, mask=is_span, other=0)[None, :]
            holds = is_span[None, :] & (its_begin <= place[:, None]) & (place[:, None] < its_end)
            found += tl.sum(holds.to(tl.int32), 1)
            begin = tl.minimum(begin, tl.min(tl.where(holds, its_begin, _PAST_ALL_KEYS), 1))
            end = tl.maximum(end, tl.max(tl.where(holds, its_end, 0), 1))
        begin = tl.where(found > 0, begin, 0)
        at_token = first_token + token
        live = at_token < num_tokens
        is_token = (token < new) & (at_token < num_tokens_padded)
        error = counts + _ERROR_WORD + tl.zeros([TOKENS], tl.int32)
        tl.atomic_or(error, _OVERLAP, mask=(found > 1) & is_token & live, sem="relaxed")
        tl.store(position_of_token + at_token, tl.where(live, tl.maximum(place, 0), 0), mask=is_token)
        tl.store(span_begin + at_token, tl.where(live, begin, 0), mask=is_token)
        tl.store(span_end + at_token, tl.where(live, end, 0), mask=is_token)
    # Pads of sequences that have tokens were written above, too; all write zeros.
    zeros = tl.zeros([TOKENS], tl.int32)
    for at in range(num_tokens + tl.program_id(0) * TOKENS, num_tokens_padded, num_seqs_padded * SHARES * TOKENS):
        token = at + tl.arange(0, TOKENS)
        for to in tl.static_range(3):
            row = position_of_token if to == 0 else (span_begin if to == 1 else span_end)
            tl.store(row + token, zeros, mask=token < num_tokens_padded)


_place = RepeatedLaunch(_place_spans_kernel)


def launch_place_spans(spans: Tensor, to: StepTensors) -> None:
    """Writes a step's spans and positions.

    spans: int32 [n, 3], contiguous: sequence, begin, end; places in the sequence's KV, without overlaps
    to:    counts, kv_len and q_len are read; counts[3] receives an error bit; mask_start, mask_positions, span_begin
           and span_end are written
    """
    num_seqs_padded = to.kv_len.shape[0]
    _place(
        to.counts.device,
        (num_seqs_padded * _SHARES, 1, 1),
        spans,
        to.counts,
        to.kv_len,
        to.q_len,
        to.mask_start,
        to.mask_positions,
        to.span_begin,
        to.span_end,
        spans.shape[0],
        num_seqs_padded,
        to.mask_positions.shape[0],
        _SHARES,
        _TOKENS,
        _SPANS,
        _SEQS,
        num_warps=4,
    )
