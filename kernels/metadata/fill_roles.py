"""The roles of a program of the fill launch: each writes a share of some index tensors. What they hold: fill.py.

`share` counts from 0 within the role; `shares` programs share a sequence. Each sums the lengths itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _units(length_of_seq, seq, num_seqs, UNIT: tl.constexpr):
    """Units of UNIT tokens that each sequence's length takes; none where seq is no sequence."""
    return tl.cdiv(tl.load(length_of_seq + seq, mask=seq < num_seqs, other=0), UNIT)


@triton.jit
def _units_around(length_of_seq, seq, num_seqs, UNIT: tl.constexpr, SEQS: tl.constexpr):
    """Units of the sequences before seq, and of all."""
    before = tl.zeros([SEQS], tl.int32)
    total = tl.zeros([SEQS], tl.int32)
    for first in range(0, num_seqs, SEQS):
        other = first + tl.arange(0, SEQS)
        units = _units(length_of_seq, other, num_seqs, UNIT)
        before += tl.where(other < seq, units, 0)
        total += units
    return tl.sum(before, 0), tl.sum(total, 0)


@triton.jit
def _cells_before(q_len, kv_len, seq, SEQS: tl.constexpr):
    """Mask cells of the sequences before seq, a multiple of SEQS."""
    cells = tl.zeros([SEQS], tl.int64)
    for first in range(0, seq, SEQS):
        other = first + tl.arange(0, SEQS)
        cells += tl.load(q_len + other).to(tl.int64) * tl.load(kv_len + other)
    return tl.sum(cells, 0)


@triton.jit
def write_boundaries(
    block,
    kv_len,
    q_len,
    q_indptr,
    last_token_of_seq,
    page_indptr,
    last_page_len,
    kv_len_int64,
    mask_indptr,
    num_seqs,
    PAGE_SIZE: tl.constexpr,
    WITH_PAGE_LIST: tl.constexpr,
    WITH_INT64: tl.constexpr,
    WITH_MASK: tl.constexpr,
    SEQS: tl.constexpr,
):
    """What there is one of for each sequence or boundary, for SEQS boundaries; num_seqs is one of them."""
    seq = block * SEQS + tl.arange(0, SEQS)
    inside = seq < num_seqs
    boundary = seq <= num_seqs
    new = tl.load(q_len + seq, mask=inside, other=0)
    length = tl.load(kv_len + seq, mask=inside, other=0)

    tokens_before, _ = _units_around(q_len, block * SEQS, num_seqs, 1, SEQS)
    first_token = tokens_before + tl.cumsum(new, 0) - new
    tl.store(q_indptr + seq, first_token, mask=boundary)
    tl.store(last_token_of_seq + seq, tl.where(new > 0, first_token + new - 1, 0), mask=inside)
    if WITH_PAGE_LIST:
        pages = tl.cdiv(length, PAGE_SIZE)
        pages_before, _ = _units_around(kv_len, block * SEQS, num_seqs, PAGE_SIZE, SEQS)
        tl.store(page_indptr + seq, pages_before + tl.cumsum(pages, 0) - pages, mask=boundary)
        tl.store(last_page_len + seq, tl.where(length > 0, (length - 1) % PAGE_SIZE + 1, 1), mask=inside)
    if WITH_INT64:
        tl.store(kv_len_int64 + seq, length.to(tl.int64), mask=inside)
    if WITH_MASK:
        cells = new.to(tl.int64) * length
        cells_before = _cells_before(q_len, kv_len, block * SEQS, SEQS)
        tl.store(mask_indptr + seq, cells_before + tl.cumsum(cells, 0) - cells, mask=boundary)


@triton.jit
def write_groups(
    block,
    counts,
    kv_len,
    prefix_len,
    group_end,
    group_indptr,
    suffix_kv_len,
    suffix_page,
    num_seqs_padded,
    PAGE_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Where groups begin and what lies behind their prefixes, for SEQS boundaries."""
    seq = block * SEQS + tl.arange(0, SEQS)
    num_seqs = tl.load(counts)
    live = seq < num_seqs
    inside = seq < num_seqs_padded
    # The first sequence begins a group: 0 is where a group before it would end.
    end_before = tl.load(group_end + seq - 1, mask=live & (seq > 0), other=0)
    end = tl.load(group_end + seq, mask=live, other=0)
    first = tl.where(end_before == seq, seq, end)
    tl.store(group_indptr + seq, tl.where(live, first, num_seqs), mask=seq <= num_seqs_padded)
    shared = tl.load(prefix_len + seq, mask=live, other=0)
    length = tl.load(kv_len + seq, mask=live, other=0)
    tl.store(suffix_kv_len + seq, length - shared, mask=inside)
    tl.store(suffix_page + seq, shared // PAGE_SIZE, mask=inside)


@triton.jit
def write_tokens(
    share,
    shares,
    counts,
    row_of_seq,
    kv_len,
    q_len,
    table,
    table_stride,
    table_width,
    position_of_token,
    slot_of_token,
    num_seqs,
    num_tokens_padded,
    window_left,
    PAGE_SIZE: tl.constexpr,
    ERROR: tl.constexpr,
    NO_PAGE: tl.constexpr,
    NO_WINDOW: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Positions and slots: a share of one sequence's tokens, and one of the tokens behind all sequences."""
    seq = share // shares
    before, total = _units_around(q_len, seq, num_seqs, 1, SEQS)
    new = tl.load(q_len + seq)
    prefix = tl.load(kv_len + seq) - new
    row = tl.load(row_of_seq + seq).to(tl.int64)
    num_tokens = tl.load(counts + 1)
    for first in range((share % shares) * BLOCK, new, shares * BLOCK):
        offset = first + tl.arange(0, BLOCK)
        token = before + offset
        inside = (offset < new) & (token < num_tokens_padded)
        live = inside & (token < num_tokens)
        kv_index = prefix + offset
        page_no = kv_index // PAGE_SIZE
        in_row = live & (kv_index >= 0) & (page_no < table_width)
        page = tl.load(table + row * table_stride + page_no, mask=in_row, other=0)
        position = tl.where(live, tl.maximum(kv_index, 0), 0)
        tl.store(position_of_token + token, position, mask=inside)
        tl.store(slot_of_token + token, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)
        error = counts + ERROR + tl.zeros([BLOCK], tl.int32)
        tl.atomic_or(error, NO_PAGE, mask=live & (page == 0), sem="relaxed")
        # Pages are given back from the front: if the first one that the token sees is there, all are.
        first_no = tl.maximum(position - window_left, 0) // PAGE_SIZE
        first_page = tl.load(table + row * table_stride + first_no, mask=in_row, other=1)
        tl.atomic_or(error, NO_WINDOW, mask=first_page == 0, sem="relaxed")
    for first in range(total + share * BLOCK, num_tokens_padded, num_seqs * shares * BLOCK):
        token = first + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], tl.int32)
        tl.store(position_of_token + token, zeros, mask=token < num_tokens_padded)
        tl.store(slot_of_token + token, zeros, mask=token < num_tokens_padded)


@triton.jit
def write_page_list(
    share,
    shares,
    row_of_seq,
    kv_len,
    table,
    table_stride,
    table_width,
    page_list,
    page_list_len,
    num_seqs,
    PAGE_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A share of one sequence's pages, and one of the entries behind all sequences."""
    seq = share // shares
    before, total = _units_around(kv_len, seq, num_seqs, PAGE_SIZE, SEQS)
    pages = _units(kv_len, seq, num_seqs, PAGE_SIZE)
    row = tl.load(row_of_seq + seq).to(tl.int64)
    for first in range((share % shares) * BLOCK, pages, shares * BLOCK):
        page_no = first + tl.arange(0, BLOCK)
        live = page_no < pages
        page = tl.load(table + row * table_stride + page_no, mask=live & (page_no < table_width), other=0)
        tl.store(page_list + before + page_no, page, mask=live & (before + page_no < page_list_len))
    for first in range(total + share * BLOCK, page_list_len, num_seqs * shares * BLOCK):
        entry = first + tl.arange(0, BLOCK)
        tl.store(page_list + entry, tl.zeros([BLOCK], tl.int32), mask=entry < page_list_len)


@triton.jit
def write_block_table(
    share,
    shares,
    row_of_seq,
    kv_len,
    table,
    table_stride,
    table_width,
    block_table,
    block_table_stride,
    block_table_width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A share of one sequence's row."""
    seq = share // shares
    pages = tl.minimum(tl.cdiv(tl.load(kv_len + seq), PAGE_SIZE), table_width)
    row = tl.load(row_of_seq + seq).to(tl.int64)
    for first in range((share % shares) * BLOCK, block_table_width, shares * BLOCK):
        page_no = first + tl.arange(0, BLOCK)
        page = tl.load(table + row * table_stride + page_no, mask=page_no < pages, other=0)
        cell = block_table + seq.to(tl.int64) * block_table_stride + page_no
        tl.store(cell, page, mask=page_no < block_table_width)
