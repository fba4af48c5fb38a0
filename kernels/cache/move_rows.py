"""Moves tokens between pages and the contiguous rows that engines send: one launch for all layers laid out alike.

See moved_rows.py for the formula. Page sizes may differ on the two sides, because rows do not depend on them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.cache.moved_rows import AlikePages, MovedTokens
from rocm_attn.kernels.launch import launch, only_launches

# Words that a program moves at a time; up to this many words of one row.
_BLOCK, _ROW_BLOCK = 2048, 256


class MoveGeometry(NamedTuple):
    """The values that the kernel is compiled for. GROUP_TOKENS and INNER as in AlikePages"""

    TO_PAGES: bool
    PAGE_SIZE: int
    GROUP_TOKENS: int
    ROW_WORDS: int
    INNER: int
    BLOCK_TOKENS: int
    BLOCK_WORDS: int


@triton.jit(do_not_specialize=["pages", "begin", "first", "end", "until", "num_pages"])
def _move_rows_kernel(
    words,
    rows,
    pages,
    places,
    begin,
    first,
    end,
    until,
    num_pages,
    p_page,
    p_group,
    p_token,
    p_outer,
    p_inner,
    G: tl.constexpr,
):
    part = tl.program_id(1)
    # Parts are allocations of their own: their distances need 64 bits, and `pages` must not count as one's begin.
    its_pages = pages + tl.load(places + part)
    its_rows = rows + tl.load(words + num_pages + part)
    tokens = begin + tl.program_id(0) * G.BLOCK_TOKENS + tl.arange(0, G.BLOCK_TOKENS)
    live = tokens < until
    page = tl.load(words + tokens // G.PAGE_SIZE - begin // G.PAGE_SIZE, mask=live, other=0)
    offset = (tokens % G.PAGE_SIZE).to(tl.int64)
    cells = page * p_page + offset // G.GROUP_TOKENS * p_group + offset % G.GROUP_TOKENS * p_token
    row = (tokens - first).to(tl.int64) * G.ROW_WORDS
    for start in range(0, G.ROW_WORDS, G.BLOCK_WORDS):
        word = start + tl.arange(0, G.BLOCK_WORDS)
        inside = (word < G.ROW_WORDS)[None, :]
        has_row = inside & ((tokens >= first) & (tokens < end))[:, None]
        cell = (word // G.INNER).to(tl.int64) * p_outer + (word % G.INNER).to(tl.int64) * p_inner
        in_pages = its_pages + cells[:, None] + cell[None, :]
        in_rows = its_rows + row[:, None] + word[None, :]
        if G.TO_PAGES:
            tl.store(in_pages, tl.load(in_rows, mask=has_row, other=0), mask=inside & live[:, None])
        else:
            tl.store(in_rows, tl.load(in_pages, mask=has_row, other=0), mask=has_row)


@only_launches
def launch_export_rows(pages: AlikePages, moved: MovedTokens) -> None:
    """Copies the tokens [first, end) from pages to rows, for every part. begin is not after first, and end is until."""
    _launch(pages, moved, to_pages=False)


@only_launches
def launch_import_rows(pages: AlikePages, moved: MovedTokens) -> None:
    """Copies rows to the tokens [begin, until) in pages, for every part; those outside of [first, end) become 0."""
    _launch(pages, moved, to_pages=True)


def _launch(pages: AlikePages, moved: MovedTokens, *, to_pages: bool) -> None:
    side = pages.sides[0]
    block_words = min(_ROW_BLOCK, triton.next_power_of_2(pages.row_words))
    geometry = MoveGeometry(
        TO_PAGES=to_pages,
        PAGE_SIZE=pages.page_size,
        GROUP_TOKENS=side.shape[2],
        ROW_WORDS=pages.row_words,
        INNER=side.shape[4],
        BLOCK_TOKENS=_BLOCK // block_words,
        BLOCK_WORDS=block_words,
    )
    launch(
        _move_rows_kernel,
        (triton.cdiv(moved.until - moved.begin, geometry.BLOCK_TOKENS), len(pages.sides)),
        moved.words,
        moved.rows,
        side,
        pages.places,
        moved.begin,
        moved.first,
        moved.end,
        moved.until,
        moved.num_pages,
        *side.stride(),
        G=geometry,
        num_warps=4,
    )
