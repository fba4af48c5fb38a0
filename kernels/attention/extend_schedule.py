"""List the tiles of an extend step on the device, the longest first, from the live lengths.

A tile is up to tokens_per_tile consecutive new tokens of one sequence; its extent is the number of keys that the last
of them sees. A program places one tile at its rank: the number of tiles of all sequences that reach further, which has
a closed form for each sequence, so nothing is sorted. Tiles of equal extent keep the order of their sequences.

The schedule is int32, flat, 4 words a tile:

    seq         -1: the tokens belong to no sequence (the padded tail); they receive 0 and LSE -inf
    first token
    tokens      0: nothing to do
    kv_index of the first token

num_tokens // tokens_per_tile + num_seqs + 1 tiles are enough for any split of num_tokens, the tail included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import ExtendTiles

TILE_WORDS = tl.constexpr(4)
# Sequences that a program looks at in one step; a fixed number, so that no batch size needs another compilation.
_SEQS_AT_ONCE = 512


@triton.jit
def _tiles_of(q_indptr, seq, num_seqs, min_q_len, TILE_TOKENS: tl.constexpr):
    """First token, new tokens and tiles of each sequence; no tiles below min_q_len."""
    inside = seq < num_seqs
    token = tl.load(q_indptr + seq, mask=inside, other=0)
    q_len = tl.load(q_indptr + seq + 1, mask=inside, other=0) - token
    return token, q_len, tl.where(inside & (q_len >= min_q_len), tl.cdiv(q_len, TILE_TOKENS), 0)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "min_q_len"])
def _list_kernel(
    kv_len,
    q_indptr,
    schedule,
    num_seqs,
    num_tokens,
    min_q_len,
    TILE_TOKENS: tl.constexpr,
    SEQS: tl.constexpr,
):
    tile = tl.program_id(0)
    lane = tl.arange(0, SEQS)

    # The tile's sequence, its place among that sequence's tiles, and the number of all tiles.
    total = 0
    seq = 0
    first_tile = 0
    first_token = 0
    seq_q_len = 0
    for first in range(0, num_seqs, SEQS):
        token, q_len, tiles = _tiles_of(q_indptr, first + lane, num_seqs, min_q_len, TILE_TOKENS)
        end = total + tl.cumsum(tiles, 0)
        here = (end > tile) & (end - tiles <= tile)
        seq += tl.sum(tl.where(here, first + lane, 0), 0)
        first_tile += tl.sum(tl.where(here, end - tiles, 0), 0)
        first_token += tl.sum(tl.where(here, token, 0), 0)
        seq_q_len += tl.sum(tl.where(here, q_len, 0), 0)
        total += tl.sum(tiles, 0)

    if tile < total:
        prefix = tl.load(kv_len + seq) - seq_q_len
        offset = (tile - first_tile) * TILE_TOKENS
        extent = prefix + tl.minimum(seq_q_len, offset + TILE_TOKENS)
        rank = 0
        for first in range(0, num_seqs, SEQS):
            other = first + lane
            _, q_len, tiles = _tiles_of(q_indptr, other, num_seqs, min_q_len, TILE_TOKENS)
            other_prefix = tl.load(kv_len + other, mask=other < num_seqs, other=0) - q_len
            # New tokens of the other sequence whose tiles do not go before this one: those with a smaller extent, and
            # for sequences that are not earlier those with the same.
            behind = tl.maximum(extent - (other < seq).to(tl.int32) - other_prefix, 0)
            tiles_behind = tl.where(behind >= q_len, tiles, behind // TILE_TOKENS)
            rank += tl.sum(tiles - tl.minimum(tiles_behind, tiles), 0)
        words = schedule + rank * TILE_WORDS
        tl.store(words, seq)
        tl.store(words + 1, first_token + offset)
        tl.store(words + 2, tl.minimum(seq_q_len - offset, TILE_TOKENS))
        tl.store(words + 3, prefix + offset)
    else:
        tail = tl.load(q_indptr + num_seqs) + (tile - total) * TILE_TOKENS
        words = schedule + tile * TILE_WORDS
        tl.store(words, -1)
        tl.store(words + 1, tail)
        tl.store(words + 2, tl.minimum(tl.maximum(num_tokens - tail, 0), TILE_TOKENS))
        tl.store(words + 3, 0)


def max_extend_tiles(num_tokens: int, num_seqs: int, *, gqa_ratio: int, tiles: ExtendTiles) -> int:
    """The most tiles that num_tokens padded tokens of num_seqs padded sequences can make."""
    return num_tokens // tiles.tokens_per_tile(gqa_ratio) + num_seqs + 1


def extend_schedule_words(num_tokens: int, num_seqs: int, *, gqa_ratio: int, tiles: ExtendTiles) -> int:
    """int32 words of the schedule buffer for num_tokens padded tokens and num_seqs padded sequences."""
    return max_extend_tiles(num_tokens, num_seqs, gqa_ratio=gqa_ratio, tiles=tiles) * int(TILE_WORDS.value)


def launch_extend_schedule(
    kv_len: Tensor,
    q_indptr: Tensor,
    schedule: Tensor,
    *,
    min_q_len: int,
    num_tokens: int,
    gqa_ratio: int,
    tiles: ExtendTiles,
) -> None:
    """Fill the schedule that launch_paged_extend reads, for the same padded tokens, sequences, gqa_ratio and tiles.

    kv_len:      int32 [S]      tokens, the new ones included
    q_indptr:    int32 [S + 1]  sequence -> first token
    schedule:    int32 [extend_schedule_words(num_tokens, S, ...)] or longer, written
    min_q_len:   sequences with fewer new tokens are left out; 2 where decode serves those with one, else 1
    num_tokens:  padded tokens T, at least q_indptr[S]
    """
    num_seqs = kv_len.shape[0]
    assert kv_len.dtype == q_indptr.dtype == schedule.dtype == torch.int32
    assert all(x.is_contiguous() for x in (kv_len, q_indptr, schedule))
    assert q_indptr.shape == (num_seqs + 1,)
    assert min_q_len >= 1
    assert schedule.numel() >= extend_schedule_words(num_tokens, num_seqs, gqa_ratio=gqa_ratio, tiles=tiles)
    launch(
        _list_kernel,
        (max_extend_tiles(num_tokens, num_seqs, gqa_ratio=gqa_ratio, tiles=tiles),),
        kv_len,
        q_indptr,
        schedule,
        num_seqs,
        num_tokens,
        min_q_len,
        TILE_TOKENS=tiles.tokens_per_tile(gqa_ratio),
        SEQS=_SEQS_AT_ONCE,
        num_warps=4,
    )
