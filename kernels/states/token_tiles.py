"""Tiles of new tokens: each sequence's new tokens, cut from its first one on.

A grid has a place for each tile of any sequences that fit into a step of T tokens and S sequences. The first tile of
sequence s is at place

    q_indptr[s] // TILE + s

and its others follow. That leaves room for all of them: the next sequence begins at least ceil(q / TILE) places later.
A sequence without new tokens has one tile, which is empty.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class TokenTile(NamedTuple):
    """A tile: its sequence; that one's first token and number of new ones; the tile's first among those."""

    seq: Any
    first_token: Any
    q_len: Any
    begin: Any


def num_tiles(num_tokens: int, num_seqs: int, tile: int) -> int:
    """Places that a grid needs for T tokens and S sequences."""
    return num_tokens // tile + num_seqs


@triton.jit
def tile_at(place, q_indptr, num_seqs, TILE: tl.constexpr, ONE_EACH: tl.constexpr):
    """The tile at a place. It begins at q_len or later if no tile is there, unless q_len is 0.

    ONE_EACH: whether no sequence has more tokens than a tile; then place s is sequence s
    """
    seq = place
    tile = 0
    if not ONE_EACH:
        # The last sequence that begins at this place or before it.
        seq = 0
        end = num_seqs
        while end - seq > 1:
            middle = (seq + end) // 2
            is_before = tl.load(q_indptr + middle) // TILE + middle <= place
            seq = tl.where(is_before, middle, seq)
            end = tl.where(is_before, end, middle)
        tile = place - (tl.load(q_indptr + seq) // TILE + seq)
    first_token = tl.load(q_indptr + seq)
    return TokenTile(seq, first_token, tl.load(q_indptr + seq + 1) - first_token, tile * TILE)
