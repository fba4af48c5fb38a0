"""Pages on both sides of the places where an offset with too few bits would wrap.

A pool hands out its pages from the first one on. So a test of a few requests stays below the first 2 GiB, however large
the pool is. Here requests get pages at the beginning of the pool and around every boundary: an offset that wraps at one
of them leads from a page in use to another one in use.
"""

from collections.abc import Sequence

from rocm_attn.paging.index_spaces import num_pages
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.problem import Problem

# The limits of int32 and uint32, for elements and for bytes.
_REACHES = (1 << 31, 1 << 32)
# Sequences take their pages in this many turns, so that each has some in every range.
_TURNS = 32


def wrapping_pages(problems: Sequence[Problem], pages: int) -> tuple[int, ...]:
    """Returns the pages, ascending, at which a 32-bit offset into some layer wraps, in bytes or elements."""
    found: set[int] = set()
    for problem in problems:
        for form in filter(None, (problem.page_format, problem.state_format)):
            for elements in {form.line, form.page_size * form.side_elements[1]} - {0}:
                for unit in {1, form.encoding.dtype.itemsize}:
                    found.update(reach // (elements * unit) for reach in _REACHES)
    return tuple(sorted(page for page in found if page < pages))


def rows_needed(pages: int, width: int, boundaries: int) -> int:
    """Returns the rows that place_rows() takes in addition to those of the sequences. width: pages in a row."""
    return -(-pages // width) + 3 * (boundaries + 1)


def place_rows(table: RequestTable, kv_len: Sequence[int], boundaries: Sequence[int]) -> tuple[list[int], list[int]]:
    """Admits a row per sequence, with pages for its kv_len[i] tokens around all boundaries of an untouched pool.

    boundaries: ascending pages, from wrapping_pages()
    The table's choices have room for whole pages. Returns the rows of the sequences, and those that hold the other
    pages; free both. Raises CapacityExceeded.
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
    for row in ours:  # these become the only free pages
        table.free(row)
    rows = [table.admit() for _ in kv_len]
    for turn in range(1, _TURNS + 1):
        for row, length in zip(rows, kv_len, strict=True):
            table.reserve(row, -(-length * turn // _TURNS))
    return rows, others


def _spans(boundaries: Sequence[int], share: int, usable: int) -> list[tuple[int, int]]:
    """Returns ranges of pages: `share` at the beginning and around each boundary. Overlapping ranges are merged."""
    spans = [(1, 1 + share)]
    for boundary in boundaries:
        first = max(1, boundary - share // 4)
        end = min(first + share, usable + 1)
        if first <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((first, end))
    # Pages that are lost to overlaps, or to the end of the pool, are added after the first range.
    short = share * (len(boundaries) + 1) - sum(end - first for first, end in spans)
    first, end = spans[0]
    if short > 0:
        limit = spans[1][0] if len(spans) > 1 else usable + 1
        spans[0] = first, min(end + short, limit)
    return spans


def _take(table: RequestTable, pages: int) -> list[int]:
    """Returns new rows that hold the next free pages."""
    rows = []
    width = table.width
    while pages > 0:
        rows.append(table.admit())
        table.reserve(rows[-1], min(pages, width) * table.page_size)
        pages -= width
    return rows
