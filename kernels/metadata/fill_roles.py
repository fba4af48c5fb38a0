"""The roles of a program of the fill launch: each writes a share of some index tensors. See fill.py.

A share is one of `Share.of` programs that work on the same sequence. Each sums the lengths itself, _SEQS sequences at a
time. Constants of a compilation stay out of the tuples: Triton 3.9 passes their members as values.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.metadata import error_word

# The elements that a program reads at a time; fixed numbers, so that no batch size needs another compilation.
SEQS_AT_ONCE = 256
TOKENS_AT_ONCE = 128
PAGES_AT_ONCE = 1024

_SEQS = tl.constexpr(SEQS_AT_ONCE)
_TOKENS = tl.constexpr(TOKENS_AT_ONCE)
_PAGES = tl.constexpr(PAGES_AT_ONCE)
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_TOKEN_WITHOUT_PAGE = tl.constexpr(error_word.TOKEN_WITHOUT_PAGE)
_WINDOW_WITHOUT_PAGE = tl.constexpr(error_word.WINDOW_WITHOUT_PAGE)


class Seqs(NamedTuple):
    """The `num` padded sequences of a step.

    Their tokens see at most window_left keys before their own, and none before their chunk of `chunk` keys.
    """

    counts: tl.tensor
    row_of_seq: tl.tensor
    kv_len: tl.tensor
    q_len: tl.tensor
    num: tl.tensor
    window_left: tl.tensor
    chunk: tl.tensor


class TableRole(NamedTuple):
    """A table of pages: row and page_no -> page, at entries + row * stride + page_no, below width."""

    entries: tl.tensor
    stride: tl.tensor
    width: tl.tensor


class Share(NamedTuple):
    """Share number `id`, counted over all sequences; `of` shares make a sequence."""

    id: tl.tensor
    of: tl.tensor


class SequenceRoles(NamedTuple):
    """Tensors with an element for each sequence or boundary."""

    q_indptr: tl.tensor
    last_token_of_seq: tl.tensor
    page_indptr: tl.tensor
    last_page_len: tl.tensor
    kv_len_int64: tl.tensor
    mask_indptr: tl.tensor


class Groups(NamedTuple):
    """Shared prefixes: their published tensors, and those derived from them."""

    prefix_len: tl.tensor
    end: tl.tensor
    indptr: tl.tensor
    suffix_kv_len: tl.tensor
    suffix_page: tl.tensor


class TokenRoles(NamedTuple):
    """Tensors with an element for each of `num` padded tokens."""

    seq: tl.tensor
    row: tl.tensor
    position: tl.tensor
    last_key: tl.tensor
    slot: tl.tensor
    num: tl.tensor


@triton.jit
def _units(length_of_seq, seq, num_seqs, UNIT: tl.constexpr):
    """Units of UNIT tokens that each sequence's length takes; none where seq is no sequence."""
    return tl.cdiv(tl.load(length_of_seq + seq, mask=seq < num_seqs, other=0), UNIT)


@triton.jit
def _units_around(length_of_seq, seq, num_seqs, UNIT: tl.constexpr):
    """Units of the sequences before seq, and of all."""
    before = tl.zeros([_SEQS], tl.int32)
    total = tl.zeros([_SEQS], tl.int32)
    for first in range(0, num_seqs, _SEQS):
        other = first + tl.arange(0, _SEQS)
        units = _units(length_of_seq, other, num_seqs, UNIT)
        before += tl.where(other < seq, units, 0)
        total += units
    before = tl.sum(before, 0)
    total = tl.sum(total, 0)
    return before, total


@triton.jit
def _cells_before(seqs, mask_start, seq):
    """Mask cells of the sequences before seq, a multiple of _SEQS."""
    cells = tl.zeros([_SEQS], tl.int64)
    for first in range(0, seq, _SEQS):
        other = first + tl.arange(0, _SEQS)
        keys = tl.load(seqs.kv_len + other) - tl.load(mask_start + other)
        cells += tl.load(seqs.q_len + other).to(tl.int64) * keys
    return tl.sum(cells, 0)


@triton.jit
def write_boundaries(
    block,
    seqs,
    mask_start,
    to,
    PAGE_SIZE: tl.constexpr,
    WITH_PAGE_LIST: tl.constexpr,
    WITH_INT64: tl.constexpr,
    WITH_MASK: tl.constexpr,
):
    """A block of boundaries; num is one of them."""
    first_seq = block * _SEQS
    seq = first_seq + tl.arange(0, _SEQS)
    inside = seq < seqs.num
    boundary = seq <= seqs.num
    new = tl.load(seqs.q_len + seq, mask=inside, other=0)
    length = tl.load(seqs.kv_len + seq, mask=inside, other=0)

    tokens_before, _ = _units_around(seqs.q_len, first_seq, seqs.num, 1)
    first_token = tokens_before + tl.cumsum(new, 0) - new
    tl.store(to.q_indptr + seq, first_token, mask=boundary)
    tl.store(to.last_token_of_seq + seq, tl.where(new > 0, first_token + new - 1, 0), mask=inside)
    if WITH_PAGE_LIST:
        pages = tl.cdiv(length, PAGE_SIZE)
        pages_before, _ = _units_around(seqs.kv_len, first_seq, seqs.num, PAGE_SIZE)
        tl.store(to.page_indptr + seq, pages_before + tl.cumsum(pages, 0) - pages, mask=boundary)
        tl.store(to.last_page_len + seq, tl.where(length > 0, (length - 1) % PAGE_SIZE + 1, 1), mask=inside)
    if WITH_INT64:
        tl.store(to.kv_len_int64 + seq, length.to(tl.int64), mask=inside)
    if WITH_MASK:
        cells = new.to(tl.int64) * (length - tl.load(mask_start + seq, mask=inside, other=0))
        cells_before = _cells_before(seqs, mask_start, first_seq)
        tl.store(to.mask_indptr + seq, cells_before + tl.cumsum(cells, 0) - cells, mask=boundary)


@triton.jit
def write_groups(block, seqs, groups, PAGE_SIZE: tl.constexpr):
    """Where groups begin and what comes after their prefixes, for a block of boundaries."""
    seq = block * _SEQS + tl.arange(0, _SEQS)
    num_seqs = tl.load(seqs.counts)
    live = seq < num_seqs
    inside = seq < seqs.num
    # The first sequence begins a group: 0 is where a group before it would end.
    end_before = tl.load(groups.end + seq - 1, mask=live & (seq > 0), other=0)
    end = tl.load(groups.end + seq, mask=live, other=0)
    first = tl.where(end_before == seq, seq, end)
    tl.store(groups.indptr + seq, tl.where(live, first, num_seqs), mask=seq <= seqs.num)
    shared = tl.load(groups.prefix_len + seq, mask=live, other=0)
    length = tl.load(seqs.kv_len + seq, mask=live, other=0)
    tl.store(groups.suffix_kv_len + seq, length - shared, mask=inside)
    tl.store(groups.suffix_page + seq, shared // PAGE_SIZE, mask=inside)


@triton.jit
def _first_key_seen(position, window_left, chunk):
    """The first key that a token sees, by its window and its chunk."""
    return tl.maximum(position - window_left, position - position % chunk)


@triton.jit
def write_tokens(
    share,
    seqs,
    table,
    tokens,
    PAGE_SIZE: tl.constexpr,
    NULL_PAGE: tl.constexpr,
    SHORT_KV: tl.constexpr,
    PADS_HAVE_KV: tl.constexpr,
):
    """Sequences, rows, positions, slots: a share of one sequence's tokens and one of the tokens after all sequences."""
    # Where page 0 is a real page, no page and no slot are -1.
    NO_PAGE: tl.constexpr = 0 if NULL_PAGE else -1
    seq = share.id // share.of
    before, total = _units_around(seqs.q_len, seq, seqs.num, 1)
    new = tl.load(seqs.q_len + seq)
    prefix = tl.load(seqs.kv_len + seq) - new
    table_row = tl.load(seqs.row_of_seq + seq)
    row = table_row.to(tl.int64)
    num_tokens = tl.load(seqs.counts + 1)
    for first in range((share.id % share.of) * _TOKENS, new, share.of * _TOKENS):
        offset = first + tl.arange(0, _TOKENS)
        token = before + offset
        inside = (offset < new) & (token < tokens.num)
        live = inside & (token < num_tokens)
        kv_index = prefix + offset
        if PADS_HAVE_KV:
            # A pad before other sequences, or one that lost its pages, has KV for kernels alone: row 0 is no request's.
            kv_index = tl.where(table_row == 0, -1, kv_index)
        page_no = kv_index // PAGE_SIZE
        # A token before its KV, or past its row, meets no page, and is reported below; its position has no meaning.
        in_row = live & (kv_index >= 0) & (page_no < table.width)
        page = tl.load(table.entries + row * table.stride + page_no, mask=in_row, other=NO_PAGE)
        position = tl.where(live, tl.maximum(kv_index, 0), 0)
        zeros = tl.zeros([_TOKENS], tl.int32)
        tl.store(tokens.seq + token, zeros + seq, mask=inside)
        tl.store(tokens.row + token, zeros + table_row, mask=inside)
        tl.store(tokens.position + token, position, mask=inside)
        tl.store(tokens.last_key + token, tl.where(live, tl.maximum(kv_index, -1), -1), mask=inside)
        slot = page * PAGE_SIZE + position % PAGE_SIZE
        if not NULL_PAGE:
            slot = tl.where(page < 0, -1, slot)
        tl.store(tokens.slot + token, slot, mask=inside)
        error = seqs.counts + _ERROR_WORD + zeros
        needs_page = live
        if SHORT_KV:
            needs_page = live & (kv_index >= 0)
        tl.atomic_or(error, _TOKEN_WITHOUT_PAGE, mask=needs_page & (page <= NO_PAGE), sem="relaxed")
        # Pages are given back from the front: if the first one that the token sees is there, all are.
        first_key = _first_key_seen(position, seqs.window_left, seqs.chunk)
        first_no = tl.maximum(first_key, 0) // PAGE_SIZE
        first_page = tl.load(table.entries + row * table.stride + first_no, mask=in_row, other=1)
        tl.atomic_or(error, _WINDOW_WITHOUT_PAGE, mask=first_page <= NO_PAGE, sem="relaxed")
    for first in range(total + share.id * _TOKENS, tokens.num, seqs.num * share.of * _TOKENS):
        token = first + tl.arange(0, _TOKENS)
        zeros = tl.zeros([_TOKENS], tl.int32)
        tl.store(tokens.seq + token, zeros + (seqs.num - 1), mask=token < tokens.num)
        tl.store(tokens.row + token, zeros, mask=token < tokens.num)
        tl.store(tokens.position + token, zeros, mask=token < tokens.num)
        tl.store(tokens.last_key + token, zeros - 1, mask=token < tokens.num)
        tl.store(tokens.slot + token, zeros + NO_PAGE, mask=token < tokens.num)


@triton.jit
def first_page_seen(length, new, window_left, chunk, PAGE_SIZE: tl.constexpr):
    """The first page that new tokens see a key of; those before it may have been given back."""
    return _first_key_seen(tl.maximum(length - new, 0), window_left, chunk) // PAGE_SIZE


@triton.jit
def _first_page_of(seqs, seq, PAGE_SIZE: tl.constexpr):
    length, new = tl.load(seqs.kv_len + seq), tl.load(seqs.q_len + seq)
    return first_page_seen(length, new, seqs.window_left, seqs.chunk, PAGE_SIZE)


@triton.jit
def _page_to_read_ahead(seqs, table, PAGE_SIZE: tl.constexpr, NULL_PAGE: tl.constexpr, PADS_HAVE_KV: tl.constexpr):
    """Page 0 if it is zero. If not, it may hold NaN, and the last page of a sequence with KV holds its tokens."""
    page = 0
    if not NULL_PAGE:
        last = tl.zeros([_SEQS], tl.int32)
        for first in range(0, seqs.num, _SEQS):
            seq = first + tl.arange(0, _SEQS)
            has_kv = tl.load(seqs.kv_len + seq, mask=seq < seqs.num, other=0) > 0
            if PADS_HAVE_KV:
                has_kv &= tl.load(seqs.row_of_seq + seq, mask=seq < seqs.num, other=0) > 0
            last = tl.maximum(last, tl.where(has_kv, seq, 0))
        last = tl.max(last, 0)
        pages = tl.minimum(tl.cdiv(tl.load(seqs.kv_len + last), PAGE_SIZE), table.width)
        line = table.entries + tl.load(seqs.row_of_seq + last).to(tl.int64) * table.stride
        page = tl.where(pages > 0, tl.load(line + tl.maximum(pages, 1) - 1), 0)
    return page


@triton.jit
def write_page_list(
    share,
    seqs,
    table,
    page_list,
    page_list_len,
    PAGE_SIZE: tl.constexpr,
    NULL_PAGE: tl.constexpr,
    PADS_HAVE_KV: tl.constexpr,
):
    """A share of one sequence's pages, and one of the entries after all sequences."""
    ahead = _page_to_read_ahead(seqs, table, PAGE_SIZE, NULL_PAGE, PADS_HAVE_KV)
    seq = share.id // share.of
    before, total = _units_around(seqs.kv_len, seq, seqs.num, PAGE_SIZE)
    pages = _units(seqs.kv_len, seq, seqs.num, PAGE_SIZE)
    row = tl.load(seqs.row_of_seq + seq).to(tl.int64)
    first_no = _first_page_of(seqs, seq, PAGE_SIZE)
    for first in range((share.id % share.of) * _PAGES, pages, share.of * _PAGES):
        page_no = first + tl.arange(0, _PAGES)
        # Nothing of a live sequence is left out: the list has room for full rows, and one that is longer than its row
        # has its newest token past it, which write_tokens reports.
        live = page_no < pages
        page = tl.load(table.entries + row * table.stride + page_no, mask=live & (page_no < table.width), other=0)
        is_unseen = page_no < first_no
        if PADS_HAVE_KV:
            is_unseen |= row == 0
        page = tl.where(is_unseen, ahead, page)
        tl.store(page_list + before + page_no, page, mask=live & (before + page_no < page_list_len))
    for first in range(total + share.id * _PAGES, page_list_len, seqs.num * share.of * _PAGES):
        entry = first + tl.arange(0, _PAGES)
        tl.store(page_list + entry, tl.zeros([_PAGES], tl.int32) + ahead, mask=entry < page_list_len)


@triton.jit
def write_block_table(
    share,
    seqs,
    table,
    block_table,
    PAGE_SIZE: tl.constexpr,
    NULL_PAGE: tl.constexpr,
    PADS_HAVE_KV: tl.constexpr,
):
    """A share of one sequence's row of another table."""
    ahead = _page_to_read_ahead(seqs, table, PAGE_SIZE, NULL_PAGE, PADS_HAVE_KV)
    seq = share.id // share.of
    # Pages past the table are left out for the reason given in write_page_list.
    pages = tl.minimum(tl.cdiv(tl.load(seqs.kv_len + seq), PAGE_SIZE), table.width)
    row = tl.load(seqs.row_of_seq + seq).to(tl.int64)
    first_no = _first_page_of(seqs, seq, PAGE_SIZE)
    for first in range((share.id % share.of) * _PAGES, block_table.width, share.of * _PAGES):
        page_no = first + tl.arange(0, _PAGES)
        is_seen = (page_no >= first_no) & (page_no < pages)
        page = tl.load(table.entries + row * table.stride + page_no, mask=is_seen, other=ahead)
        cell = block_table.entries + seq.to(tl.int64) * block_table.stride + page_no
        tl.store(cell, page, mask=page_no < block_table.width)
