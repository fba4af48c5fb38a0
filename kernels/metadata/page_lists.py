"""The forms of a request table that kernels of other libraries read: CSR page lists, last-page lengths, dense tables.

    page_indptr[i]    = pages of sequences 0 .. i-1
    page_list         = their pages, sequence after sequence
    last_page_len[i]  = (kv_len[i] - 1) % page_size + 1, and 1 where kv_len is 0
    block_table[i, j] = table[row_of_seq[i], j] for the sequence's pages, 0 behind them

Cells behind the last page, in page_list and block_table alike, receive page 0, a valid page for kernels that read
ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch

_BLOCK = 256


@triton.jit(do_not_specialize=["num_seqs_padded"])
def _page_indptr_kernel(
    kv_len, page_indptr, last_page_len, kv_len_int64, num_seqs_padded, PAGE_SIZE: tl.constexpr, SEQS: tl.constexpr
):
    i = tl.arange(0, SEQS)
    padded = i < num_seqs_padded
    lengths = tl.load(kv_len + i, mask=padded, other=0)
    pages = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
    tl.store(page_indptr + i + 1, tl.cumsum(pages, 0), mask=padded)
    tl.store(page_indptr, 0)
    tl.store(last_page_len + i, tl.where(lengths > 0, (lengths - 1) % PAGE_SIZE + 1, 1), mask=padded)
    tl.store(kv_len_int64 + i, lengths.to(tl.int64), mask=padded)


@triton.jit(do_not_specialize=["num_seqs_padded", "page_list_len"])
def _page_list_kernel(
    row_of_seq,
    kv_len,
    table,
    table_stride,
    page_list,
    table_width,
    num_seqs_padded,
    page_list_len,
    PAGE_SIZE: tl.constexpr,
    SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.arange(0, SEQS)
    padded = i < num_seqs_padded
    pages = (tl.load(kv_len + i, mask=padded, other=0) + PAGE_SIZE - 1) // PAGE_SIZE
    total = tl.sum(pages, 0)
    seq = tl.program_id(1)
    if seq < num_seqs_padded:
        first = tl.sum(tl.where(i < seq, pages, 0), 0)
        mine = tl.sum(tl.where(i == seq, pages, 0), 0)
        row = tl.load(row_of_seq + seq).to(tl.int64)
        for start in range(tl.program_id(0) * BLOCK, mine, tl.num_programs(0) * BLOCK):
            page_no = start + tl.arange(0, BLOCK)
            live = page_no < mine
            # A length beyond the row, which a device may bring, lists page 0 instead of another row's pages.
            page = tl.load(table + row * table_stride + page_no, mask=live & (page_no < table_width), other=0)
            tl.store(page_list + first + page_no, page, mask=live & (first + page_no < page_list_len))
    else:
        for start in range(total + tl.program_id(0) * BLOCK, page_list_len, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(page_list + at, tl.zeros([BLOCK], tl.int32), mask=at < page_list_len)


@triton.jit(do_not_specialize=["width"])
def _block_table_kernel(
    row_of_seq,
    kv_len,
    table,
    table_stride,
    block_table,
    block_table_stride,
    table_width,
    width,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(1).to(tl.int64)
    page_no = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pages = (tl.load(kv_len + seq) + PAGE_SIZE - 1) // PAGE_SIZE
    row = tl.load(row_of_seq + seq).to(tl.int64)
    live = (page_no < pages) & (page_no < table_width)
    page = tl.load(table + row * table_stride + page_no, mask=live, other=0)
    tl.store(block_table + seq * block_table_stride + page_no, page, mask=page_no < width)


def launch_page_indptr(
    kv_len: Tensor, page_indptr: Tensor, last_page_len: Tensor, kv_len_int64: Tensor, *, page_size: int
) -> None:
    """Fill page_indptr int32 [S + 1], last_page_len int32 [S] and kv_len_int64 int64 [S] from kv_len int32 [S]."""
    num_seqs = kv_len.shape[0]
    launch(
        _page_indptr_kernel,
        (1,),
        kv_len,
        page_indptr,
        last_page_len,
        kv_len_int64,
        num_seqs,
        PAGE_SIZE=page_size,
        SEQS=triton.next_power_of_2(max(num_seqs, 2)),
        num_warps=4,
    )


def launch_page_list(
    row_of_seq: Tensor, kv_len: Tensor, table: Tensor, page_list: Tensor, *, page_size: int, programs_per_seq: int
) -> None:
    """Fill the CSR page list.

    row_of_seq, kv_len: int32 [S]
    table:              int32 [rows, width]
    page_list:          int32 [L]; L holds the pages of every sequence; what is behind them receives page 0
    programs_per_seq:   programs that share a sequence's pages; a fixed number, whatever the lengths
    """
    num_seqs = row_of_seq.shape[0]
    launch(
        _page_list_kernel,
        (programs_per_seq, num_seqs + 1),
        row_of_seq,
        kv_len,
        table,
        table.stride(0),
        page_list,
        table.shape[1],
        num_seqs,
        page_list.shape[0],
        PAGE_SIZE=page_size,
        SEQS=triton.next_power_of_2(max(num_seqs, 2)),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def launch_block_table(
    row_of_seq: Tensor, kv_len: Tensor, table: Tensor, block_table: Tensor, *, page_size: int
) -> None:
    """Fill block_table int32 [S, W] with each sequence's row of the request table; W may exceed the table's width."""
    num_seqs, width = block_table.shape
    launch(
        _block_table_kernel,
        (triton.cdiv(width, _BLOCK), num_seqs),
        row_of_seq,
        kv_len,
        table,
        table.stride(0),
        block_table,
        block_table.stride(0),
        table.shape[1],
        width,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
