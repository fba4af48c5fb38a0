"""Derive, in one launch, every index tensor that follows from a step's lengths and the request table.

    q_indptr[i]           = q_len[0] + ... + q_len[i-1]
    last_token_of_seq[i]  = q_indptr[i+1] - 1, or 0 where the sequence has no new token
    seq_of_token[t]       = i, where q_indptr[i] <= t < q_indptr[i+1]
    row_of_token[t]       = row_of_seq[seq_of_token[t]]
    position_of_token[t]  = kv_len[i] - q_len[i] + (t - q_indptr[i])            for token t of sequence i
    last_key_of_token[t]  = the same, or -1 where that is negative, as in a sequence that lost its KV
    slot_of_token[t]      = table[row_of_seq[i], position // page_size] * page_size + position % page_size
    page_indptr[i]        = pages of sequences 0 .. i-1
    page_list             = their pages, sequence after sequence
    last_page_len[i]      = (kv_len[i] - 1) % page_size + 1, and 1 where kv_len is 0
    block_table[i, j]     = table[row_of_seq[i], j] for the sequence's pages
    kv_len_int64[i]       = kv_len[i]
    mask_indptr[i]        = cells of sequences 0 .. i-1, in 64 bits: q_len * (kv_len - mask_start) each
    group_indptr[i]       = i where a group begins, group_end[i] where none does, num_seqs at or past num_seqs
    suffix_kv_len[i]      = kv_len[i] - prefix_len[i], and 0 for pads
    suffix_page[i]        = prefix_len[i] // page_size

The last three belong to decode steps, in which a token has the number of its sequence.

Tokens at or past num_tokens receive position 0, last key -1 and slot 0. Tokens at or past q_indptr[S], which are of no
sequence, receive the last one of S and row 0. In page_list and block_table, entries after a sequence's last page, and
before the first that its new tokens see, receive page 0 for kernels that read around them, or if it is a real page,
which may hold NaN, the last page of the last sequence that has KV and is no pad. So do the entries in page_list of pads
that have KV. A token or page beyond its sequence's row of the table, which lengths that only the device knows may
bring, meets page 0 and never another row's page. A live token that meets page 0 sets TOKEN_WITHOUT_PAGE in the error
word, and one whose window or chunk begins there sets WINDOW_WITHOUT_PAGE. Where page 0 is a real page (TableTerms),
slots of pads and of tokens without a page are -1.

A program has one role, by its id: boundaries of a block of sequences, or a share of one sequence's tokens, of its
pages in the list, or of its row of the block table. The shares follow from the padded sizes, never from the lengths.
Each program sums the lengths itself, so none reads what another writes and the launch may run twice.
"""

import inspect
from operator import attrgetter

import triton
import triton.language as tl

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.metadata.fill_roles import (
    PAGES_AT_ONCE,
    SEQS_AT_ONCE,
    TOKENS_AT_ONCE,
    Groups,
    Seqs,
    SequenceRoles,
    Share,
    TableRole,
    TokenRoles,
    write_block_table,
    write_boundaries,
    write_groups,
    write_page_list,
    write_tokens,
)
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, FIELDS, StepTensors, shares_of_seq

_SEQS = tl.constexpr(SEQS_AT_ONCE)


@at_any_alignment
@triton.jit(
    do_not_specialize=[
        "table_stride",
        "table_width",
        "block_table_stride",
        "block_table_width",
        "page_list_len",
        "num_seqs_padded",
        "num_tokens_padded",
        "window_left",
        "chunk",
        "token_shares",
        "list_shares",
        "row_shares",
    ]
)
def _fill_kernel(
    counts,
    row_of_seq,
    kv_len,
    q_len,
    table,
    prefix_len,
    group_end,
    mask_start,
    q_indptr,
    last_token_of_seq,
    seq_of_token,
    row_of_token,
    position_of_token,
    last_key_of_token,
    slot_of_token,
    page_indptr,
    page_list,
    last_page_len,
    block_table,
    kv_len_int64,
    mask_indptr,
    group_indptr,
    suffix_kv_len,
    suffix_page,
    table_stride,
    table_width,
    block_table_stride,
    block_table_width,
    page_list_len,
    num_seqs_padded,
    num_tokens_padded,
    window_left,
    chunk,
    token_shares,
    list_shares,
    row_shares,
    PAGE_SIZE: tl.constexpr,
    NULL_PAGE: tl.constexpr,
    SHORT_KV: tl.constexpr,
    PADS_HAVE_KV: tl.constexpr,
    WITH_PAGE_LIST: tl.constexpr,
    WITH_BLOCK_TABLE: tl.constexpr,
    WITH_INT64: tl.constexpr,
    WITH_MASK: tl.constexpr,
    WITH_PREFIXES: tl.constexpr,
):
    # Roles lie one after the other on the axis of program ids; the id within each counts from 0.
    block = tl.program_id(0)
    token_share = block - tl.cdiv(num_seqs_padded + 1, _SEQS)
    list_share = token_share - num_seqs_padded * token_shares
    row_share = list_share - num_seqs_padded * list_shares
    seqs = Seqs(counts, row_of_seq, kv_len, q_len, num_seqs_padded, window_left, chunk)
    request_table = TableRole(table, table_stride, table_width)
    if token_share < 0:
        boundaries = SequenceRoles(q_indptr, last_token_of_seq, page_indptr, last_page_len, kv_len_int64, mask_indptr)
        write_boundaries(block, seqs, mask_start, boundaries, PAGE_SIZE, WITH_PAGE_LIST, WITH_INT64, WITH_MASK)
        if WITH_PREFIXES:
            groups = Groups(prefix_len, group_end, group_indptr, suffix_kv_len, suffix_page)
            write_groups(block, seqs, groups, PAGE_SIZE)
    elif list_share < 0:
        tokens = TokenRoles(
            seq_of_token,
            row_of_token,
            position_of_token,
            last_key_of_token,
            slot_of_token,
            num_tokens_padded,
        )
        share = Share(token_share, token_shares)
        write_tokens(share, seqs, request_table, tokens, PAGE_SIZE, NULL_PAGE, SHORT_KV, PADS_HAVE_KV)
    elif row_share < 0:
        if WITH_PAGE_LIST:
            share = Share(list_share, list_shares)
            write_page_list(share, seqs, request_table, page_list, page_list_len, PAGE_SIZE, NULL_PAGE, PADS_HAVE_KV)
    else:
        if WITH_BLOCK_TABLE:
            dense_table = TableRole(block_table, block_table_stride, block_table_width)
            share = Share(row_share, row_shares)
            write_block_table(share, seqs, request_table, dense_table, PAGE_SIZE, NULL_PAGE, PADS_HAVE_KV)


# The kernel's tensors, in the order in which it takes them.
_tensors = attrgetter(*(name for name in inspect.signature(_fill_kernel.fn).parameters if name in (*FIELDS, "table")))


_variant = repeated_launches(_fill_kernel)


@only_launches
def launch_fill(step: StepTensors, *, page_size: int, window_left: int = ALL_KEYS, chunk: int = ALL_KEYS) -> None:
    """Write every tensor of the step that is derived and has elements; S and T are at least 1.

    window_left: previous keys that a token sees at most, below 2**31
    chunk:       keys of a chunk: a token sees none before its own chunk, which begins at a multiple; ALL_KEYS: no such
    """
    num_seqs, num_tokens = step.kv_len.shape[0], step.slot_of_token.shape[0]
    (_, table_width), (_, block_table_width) = step.table.shape, step.block_table.shape
    page_list_len = step.page_list.shape[0]
    assert num_seqs >= 1
    token_shares = shares_of_seq(num_tokens, num_seqs, TOKENS_AT_ONCE)
    list_shares = shares_of_seq(min(table_width, page_list_len), num_seqs, PAGES_AT_ONCE)
    row_shares = shares_of_seq(block_table_width, num_seqs, PAGES_AT_ONCE) if step.block_table.numel() else 0
    boundary_blocks = -(-(num_seqs + 1) // SEQS_AT_ONCE)
    num_programs = boundary_blocks + num_seqs * (token_shares + list_shares + row_shares)
    fixed = (
        page_size,
        step.terms.null_page,
        step.terms.short_kv,
        step.pads.kv_len > 0,
        step.page_indptr.numel() > 0,
        row_shares > 0,
        step.kv_len_int64.numel() > 0,
        step.mask_indptr.numel() > 0,
        step.group_indptr.numel() > 0,
    )
    _variant(*fixed)(
        step.counts.device,
        (num_programs, 1, 1),
        *_tensors(step),
        step.table.stride(0),
        table_width,
        step.block_table.stride(0),
        block_table_width,
        page_list_len,
        num_seqs,
        num_tokens,
        window_left,
        chunk,
        token_shares,
        list_shares,
        row_shares,
        *fixed,
        num_warps=4,
    )
