"""Moves the K and V of accepted paths to the places that their tokens have from then on, in all layers.

    row of token older + i of sequence s <- row of token older + path[s, i]      0 < i <= num_accepted[s]
    older = kv_len[s] - 1 - num_accepted[s]

A path rises, so path[i] >= i: no later move reads what one has written, and in a block of moves all rows are loaded
before one is stored. The moved words are not interpreted: words of K, of V, of scales of tokens, of index keys
(cache/moved_rows.py). Each word of a row has one program. A place without a page is neither read nor written.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.cache.moved_rows import AlikePages
from rocm_attn.kernels.launch import launch, only_launches
from rocm_attn.kernels.speculative.paths import AcceptedPaths
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Words of a row that a program moves, and words that it holds.
_ROW_WORDS, _WORDS = 128, 2048


class PathGeometry(NamedTuple):
    """The values that the kernel is compiled for. GROUP_TOKENS and INNER as in AlikePages"""

    PAGE_SIZE: int
    GROUP_TOKENS: int
    ROW_WORDS: int
    INNER: int
    BLOCK_MOVES: int
    BLOCK_WORDS: int


class PathPages(NamedTuple):
    """The pages of a sequence in order, int32: pointer, and their number; pages up to no_page are none."""

    at: tl.tensor
    width: tl.tensor
    no_page: tl.tensor


class Strides(NamedTuple):
    """Words between pages, between groups of a page, and between tokens of a group."""

    page: tl.tensor
    group: tl.tensor
    token: tl.tensor


@triton.jit
def _cells_of(line, strides, kv_index, live, G: tl.constexpr):
    """Offsets of rows of tokens in their pages, int64 words, and whether there is a page. line: PathPages"""
    page_no = kv_index // G.PAGE_SIZE
    in_row = live & (kv_index >= 0) & (page_no < line.width)
    page = tl.load(line.at + page_no, mask=in_row, other=-1)
    offset = (kv_index % G.PAGE_SIZE).to(tl.int64)
    in_page = offset // G.GROUP_TOKENS * strides.group + offset % G.GROUP_TOKENS * strides.token
    return page.to(tl.int64) * strides.page + in_page, page > line.no_page


@triton.jit(do_not_specialize=["pages", "num_nodes", "width", "no_page"])
def _move_paths_kernel(
    pages,
    places,
    path,
    num_accepted,
    kv_len,
    row_of_seq,
    table,
    num_nodes,
    width,
    table_row,
    no_page,
    p_page,
    p_group,
    p_token,
    p_outer,
    p_inner,
    G: tl.constexpr,
):
    WORD_BLOCKS: tl.constexpr = (G.ROW_WORDS + G.BLOCK_WORDS - 1) // G.BLOCK_WORDS
    seq = tl.program_id(0) // WORD_BLOCKS
    word = tl.program_id(0) % WORD_BLOCKS * G.BLOCK_WORDS + tl.arange(0, G.BLOCK_WORDS)
    # Parts are allocations of their own: their distances need 64 bits, and `pages` must not count as one's start.
    of_part = pages + tl.load(places + tl.program_id(1))
    num_moves = tl.minimum(tl.load(num_accepted + seq), num_nodes - 1)
    older = tl.load(kv_len + seq) - 1 - num_moves
    line = PathPages(table + tl.load(row_of_seq + seq).to(tl.int64) * table_row, width, no_page)
    strides = Strides(p_page, p_group, p_token)
    in_row = (word // G.INNER).to(tl.int64) * p_outer + (word % G.INNER).to(tl.int64) * p_inner
    for first in range(1, num_moves + 1, G.BLOCK_MOVES):
        at = first + tl.arange(0, G.BLOCK_MOVES)
        is_move = at <= num_moves
        node = tl.load(path + seq.to(tl.int64) * num_nodes + at, mask=is_move, other=0)
        is_move = is_move & (node > at)
        source, has_source = _cells_of(line, strides, older + node, is_move, G)
        target, has_target = _cells_of(line, strides, older + at, is_move, G)
        live = (has_source & has_target)[:, None] & (word < G.ROW_WORDS)[None, :]
        moved = tl.load(of_part + source[:, None] + in_row[None, :], mask=live, other=0)
        # Threads may load other words than they store, so all wait.
        tl.debug_barrier()
        tl.store(of_part + target[:, None] + in_row[None, :], moved, mask=live)
        tl.debug_barrier()


@only_launches
def launch_move_paths(pages: AlikePages, paths: AcceptedPaths) -> None:
    """Moves the rows of accepted drafts in every part."""
    side, num_nodes = pages.sides[0], paths.path.shape[1]
    num_seqs = paths.path.shape[0]
    assert paths.path.is_contiguous()
    block_words = min(_ROW_WORDS, next_power_of_2(pages.row_words))
    geometry = PathGeometry(
        PAGE_SIZE=pages.page_size,
        GROUP_TOKENS=side.shape[2],
        ROW_WORDS=pages.row_words,
        INNER=side.shape[4],
        BLOCK_MOVES=min(next_power_of_2(num_nodes), _WORDS // block_words),
        BLOCK_WORDS=block_words,
    )
    launch(
        _move_paths_kernel,
        (num_seqs * triton.cdiv(pages.row_words, block_words), len(pages.sides)),
        side,
        pages.places,
        paths.path,
        paths.num_accepted,
        paths.kv_len,
        paths.row_of_seq,
        paths.table,
        num_nodes,
        paths.table.shape[1],
        paths.table.stride(0),
        paths.no_page,
        *side.stride(),
        G=geometry,
        num_warps=4,
    )
