"""Pages on both sides of the places where an offset that is too short would wrap.

A pool hands its pages out from the first one on, so that a test of a few requests stays below the first 2 GiB however
large the pool is. Here requests get pages at the beginning of the pool and around every boundary: an offset that wraps
at one of them leads from a page that is in use to another one that is.
"""

from __future__ import annotations

from collections.abc import Sequence

from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.problem import Problem

# Elements and bytes that int32 and uint32 reach.
_REACHES = (1 << 31, 1 << 32)
# Sequences take their pages in so many turns, so that each has some everywhere.
_TURNS = 32


def wrapping_pages(problems: Sequence[Problem], pages: int) -> tuple[int, ...]:
    """Pages of a pool of so many at which a 32-bit offset into some layer wraps, in bytes or in elements, ascending."""
    found: set[int] = set()
    for problem in problems:
        form = problem.page_format
        for elements in {form.page_size * side for side in form.side_elements if side}:
            for unit in {1, form.encoding.dtype.itemsize}:
                found.update(reach // (elements * unit) for reach in _REACHES)
    return tuple(sorted(page for page in found if page < pages))


def rows_needed(pages: int, width: int, boundaries: int) -> int:
    """Rows of a table that place_rows() takes besides those of the sequences. width: pages in a row."""
    return -(-pages // width) + 3 * (boundaries + 1)


def place_rows(table: RequestTable, kv_len: Sequence[int], boundaries: Sequence[int]) -> tuple[list[int], list[int]]:
    """Admit a row for each sequence, with pages for kv_len[i] tokens of it around all boundaries of an untouched pool.

    boundaries: ascending pages, of wrapping_pages()
    The table's rows have room for whole pages. Returns the rows of the sequences, and those that hold the other pages;
    free both. Raises CapacityExceeded.
    """
    wanted = sum(num_pages(length, table.page_size) for length in kv_len)
    share = -(-wanted // (len(boundaries) + 1)) + 1
    spans = _spans(boundaries, share, table.full.num_usable_pages)
    others, ours = [], []
    page = 1
    for first, end in spans:
        others += _take(table, first - page)
        ours += _take(table, end - first)
        page = end
    others += _take(table, table.full.num_free_pages)
    for row in ours:  # the only pages that are free now
        table.free(row)
    rows = [table.admit() for _ in kv_len]
    for turn in range(1, _TURNS + 1):
        for row, length in zip(rows, kv_len, strict=True):
            table.reserve(row, -(-length * turn // _TURNS))
    return rows, others


def _spans(boundaries: Sequence[int], share: int, usable: int) -> list[tuple[int, int]]:
    """Ranges of pages: `share` at the beginning, and as many around each boundary, those that meet as one."""
    spans = [(1, 1 + share)]
    for boundary in boundaries:
        first = max(1, boundary - share // 4)
        end = min(first + share, usable + 1)
        if first <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((first, end))
    # What ranges that meet, or the end of the pool, have cost comes from the pages that follow the last range.
    short = share * (len(boundaries) + 1) - sum(end - first for first, end in spans)
    first, end = spans[0]
    if short > 0:
        limit = spans[1][0] if len(spans) > 1 else usable + 1
        spans[0] = first, min(end + short, limit)
    return spans


def _take(table: RequestTable, pages: int) -> list[int]:
    """New rows that hold the next free pages."""
    rows = []
    width = table.width
    while pages > 0:
        rows.append(table.admit())
        table.reserve(rows[-1], min(pages, width) * table.page_size)
        pages -= width
    return rows
