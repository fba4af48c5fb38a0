"""Gathers the pages of a step's sequences from an engine's table into one that kernels read.

    table[seq + 1, j] = page of the sequence's page_no j, for the pages that kv_len takes

    entries[row, j]                                     a table of pages
    entries[row, j * page_size] // page_size            a table of slots
    entries[csr_indptr[row] + j]                        lists of pages
    slot_map[entry] // page_size                        another space: slot -> its slot there, for a table of slots;
                                                        for pages: slot_map[entry * page_size] // page_size

An entry that is negative, outside of slot_map or past int32, and a page past the sequence's row or outside of the
lists, give -1, which is no page in any table: check_pages reports it. Entries after a sequence's last page stay
unchanged: fill passes none of them on, and kernels read no page after kv_len.

A program has a share of one sequence's pages; the shares follow from the padded sizes, never from the lengths.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.metadata.engine_tensors import GatherSource
from rocm_attn.kernels.metadata.step_tensors import shares_of_seq

_PAGES_AT_ONCE = 1024
_MOST_PAGE = 2**31 - 1


@at_any_alignment
@triton.jit(
    do_not_specialize=[
        "row_stride",
        "entry_stride",
        "width",
        "csr_stride",
        "map_stride",
        "map_len",
        "table_stride",
        "table_width",
        "shares",
    ]
)
def _gather_table_kernel(
    entries,
    csr_indptr,
    slot_map,
    engine_row,
    kv_len,
    table,
    row_stride,
    entry_stride,
    width,
    csr_stride,
    map_stride,
    map_len,
    table_stride,
    table_width,
    shares,
    HAS_SLOTS: tl.constexpr,
    HAS_CSR: tl.constexpr,
    HAS_MAP: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0) // shares
    share = tl.program_id(0) % shares
    row = tl.load(engine_row + seq).to(tl.int64)
    # The largest published length fits a row.
    pages = tl.minimum(tl.cdiv(tl.load(kv_len + seq), PAGE_SIZE), table_width)
    begin = tl.full([], 0, tl.int64)
    end = begin + width
    line = entries
    if HAS_CSR:
        begin = tl.load(csr_indptr + row * csr_stride).to(tl.int64)
        # Entries of a list past the end of all entries give -1.
        end = tl.minimum(tl.load(csr_indptr + (row + 1) * csr_stride).to(tl.int64), width)
    else:
        line += row * row_stride
    for first in range(share * BLOCK, pages, shares * BLOCK):
        page_no = first + tl.arange(0, BLOCK)
        live = page_no < pages
        column = page_no * PAGE_SIZE if HAS_SLOTS else page_no
        place = begin + column
        is_entry = live & (place >= 0) & (place < end)
        entry = tl.load(line + place * entry_stride, mask=is_entry, other=-1).to(tl.int64)
        if HAS_MAP:
            slot = entry if HAS_SLOTS else entry * PAGE_SIZE
            in_map = (slot >= 0) & (slot < map_len)
            entry = tl.load(slot_map + slot * map_stride, mask=in_map, other=-1).to(tl.int64)
        page = entry
        if HAS_SLOTS or HAS_MAP:
            page = entry // PAGE_SIZE
        page = tl.where((entry >= 0) & (page <= MOST), page, -1)
        tl.store(table + (seq + 1).to(tl.int64) * table_stride + page_no, page.to(tl.int32), mask=live)


_variant = repeated_launches(_gather_table_kernel)


def launch_gather_table(
    source: GatherSource, engine_row: Tensor, kv_len: Tensor, table: Tensor, *, page_size: int
) -> None:
    """Writes the pages of every sequence to its row of the table, seq + 1; row 0 stays unchanged.

    engine_row, kv_len: int32 [S], rows of the source and tokens of each sequence
    table:              int32 [S + 1 or more, width], written in place
    """
    num_seqs, (_, table_width) = kv_len.shape[0], table.shape
    assert table.shape[0] > num_seqs
    shares = shares_of_seq(table_width, num_seqs, _PAGES_AT_ONCE)
    entries, csr_indptr, slot_map = source.entries, source.csr_indptr, source.slot_map
    fixed = source.has_slots, csr_indptr is not None, slot_map is not None, page_size, _MOST_PAGE, _PAGES_AT_ONCE
    csr_indptr = kv_len if csr_indptr is None else csr_indptr
    slot_map = kv_len if slot_map is None else slot_map
    _variant(entries.dtype, csr_indptr.dtype, slot_map.dtype, *fixed)(
        table.device,
        (num_seqs * shares, 1, 1),
        entries,
        csr_indptr,
        slot_map,
        engine_row,
        kv_len,
        table,
        entries.stride(0),
        entries.stride(-1),
        entries.shape[-1],
        csr_indptr.stride(0),
        slot_map.stride(0),
        slot_map.shape[0],
        table.stride(0),
        table_width,
        shares,
        *fixed,
        num_warps=4,
    )
