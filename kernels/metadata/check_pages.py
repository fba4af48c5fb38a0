"""Turns sequences whose pages do not exist into pads, before anything is derived from an engine's table.

    page(i, j) = table[row_of_seq[i], j]       for first_no[i] <= j < kv_len[i] / page_size, rounded up
    start[i] = max(kv_len[i] - q_len[i], 0)
    window_no[i] = max(start[i] - window_left, start[i] - start[i] % chunk) // page_size
    first_no[i] = window_no[i]; if spans pass the window, at most (first key of its new tokens' spans) // page_size

If one of them is negative, or num_pages or more, sequence i becomes a pad as in publish_engine.py: no kernel reads or
writes by its row, and the other sequences keep their tokens. PAGE_NOT_IN_POOL in the step's error word reports it.
Pages before first_no are seen by no token, and may have been given back. From first_no to window_no page 0 is wrong
too, if it belongs to no sequence: an engine has given back a page that a span needs. One that has another owner by now
looks like a right one.

A program has a share of one sequence's pages; the shares follow from the padded sizes, never from the lengths. If one
has found a wrong page, others of the sequence may meet the pad instead, and leave it unchanged. So the launch may run
twice. It runs after publish_engine and gather_table, before fill, and may be captured with them.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.fill_roles import first_page_seen
from rocm_attn.kernels.metadata.publish_engine import keys_of_pad
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, StepTensors, shares_of_seq

_PAGES_AT_ONCE = 1024
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_NOT_IN_POOL = tl.constexpr(error_word.PAGE_NOT_IN_POOL)
_PAST_ALL_KEYS = tl.constexpr(ALL_KEYS)


@triton.jit
def _first_of_spans(counts, q_len, span_begin, span_end, seq, BLOCK: tl.constexpr):
    """The first key of the spans that a sequence's new tokens are in; past all keys if there are none."""
    lane = tl.arange(0, BLOCK)
    tokens_before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, seq, BLOCK):
        tokens_before += tl.load(q_len + first + lane, mask=first + lane < seq, other=0)
    first_token = tl.sum(tokens_before, 0)
    end_token = tl.minimum(first_token + tl.load(q_len + seq), tl.load(counts + 1))
    begin = tl.full([BLOCK], _PAST_ALL_KEYS, tl.int32)
    for first in range(first_token, end_token, BLOCK):
        token = first + lane
        in_span = tl.load(span_end + token, mask=token < end_token, other=0) > 0
        begin = tl.minimum(begin, tl.load(span_begin + token, mask=in_span, other=_PAST_ALL_KEYS))
    return tl.maximum(tl.min(begin, 0), 0)


@at_any_alignment
@triton.jit(do_not_specialize=["table_stride", "table_width", "window_left", "chunk", "pad_kv_len", "shares"])
def _check_pages_kernel(
    counts,
    row_of_seq,
    kv_len,
    q_len,
    table,
    num_pages,
    span_begin,
    span_end,
    table_stride,
    table_width,
    window_left,
    chunk,
    pad_kv_len,
    shares,
    PAGE_SIZE: tl.constexpr,
    SPANS_PASS: tl.constexpr,
    NULL_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0) // shares
    share = tl.program_id(0) % shares
    is_live = seq < tl.load(counts)
    most = tl.load(num_pages)
    line = table + tl.load(row_of_seq + seq).to(tl.int64) * table_stride
    length = tl.load(kv_len + seq)
    # The largest published length fits a row.
    pages = tl.where(is_live, tl.minimum(tl.cdiv(length, PAGE_SIZE), table_width), 0)
    # Tokens before the KV, which short sequences have, see no key: their places lose nothing.
    new = tl.load(q_len + seq)
    window_no = first_page_seen(length, new, window_left, chunk, PAGE_SIZE)
    first_no = window_no
    if SPANS_PASS:
        first_of_spans = _first_of_spans(counts, q_len, span_begin, span_end, seq, BLOCK)
        first_no = tl.minimum(window_no, first_of_spans // PAGE_SIZE)
    num_wrong = 0
    for first in range(first_no + share * BLOCK, pages, shares * BLOCK):
        page_no = first + tl.arange(0, BLOCK)
        page = tl.load(line + page_no, mask=page_no < pages, other=0)
        wrong = (page < 0) | (page >= most)
        if SPANS_PASS and NULL_PAGE:
            wrong |= (page == 0) & (page_no < window_no)
        num_wrong += tl.sum((wrong & (page_no < pages)).to(tl.int32), 0)
    if num_wrong > 0:
        tl.store(kv_len + seq, keys_of_pad(new, pad_kv_len))
        tl.store(row_of_seq + seq, 0)
        tl.atomic_or(counts + _ERROR_WORD, _NOT_IN_POOL, sem="relaxed")


_variant = repeated_launches(_check_pages_kernel)


def launch_check_pages(
    step: StepTensors, num_pages: Tensor, *, page_size: int, window_left: int, spans_pass: bool, chunk: int = ALL_KEYS
) -> None:
    """Turns the sequences of a step whose pages in its table do not exist into pads.

    step:        counts, row_of_seq, kv_len and q_len as published; row_of_seq, kv_len and the error word are written
    num_pages:   int32 [1], pages that every layer which reads the table has
    window_left: previous keys that the furthest-looking of them sees, below 2**31
    spans_pass:  whether one of them sees all of the step's spans, even what lies before the window; if so span_begin
                 and span_end are read, which place_spans has written
    chunk:       as in launch_fill, if all of them have chunks
    """
    num_seqs, (_, table_width) = step.kv_len.shape[0], step.table.shape
    shares = shares_of_seq(table_width, num_seqs, _PAGES_AT_ONCE)
    fixed = page_size, spans_pass, spans_pass and step.terms.null_page
    _variant(*fixed)(
        step.counts.device,
        (num_seqs * shares, 1, 1),
        step.counts,
        step.row_of_seq,
        step.kv_len,
        step.q_len,
        step.table,
        num_pages,
        step.span_begin,
        step.span_end,
        step.table.stride(0),
        table_width,
        window_left,
        chunk,
        step.pads.kv_len,
        shares,
        *fixed,
        _PAGES_AT_ONCE,
        num_warps=4,
    )
