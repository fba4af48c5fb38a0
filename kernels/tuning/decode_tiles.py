"""Tiles of paged decode: which row of decode.json serves a problem. See tiles.py for where its numbers come from."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from rocm_attn.kernels.tuning.rows import Rows, rows_of
from rocm_attn.kernels.tuning.tiles import Alone, Codes, DecodeRow, DecodeTiles, NoTiles, next_power_of_2, no_row

# The first row that serves wins.
DECODE_ROWS = Rows(DecodeRow, "decode.json", "decode")


@functools.cache
def alone_of(tiles: DecodeTiles) -> Alone | None:
    """The tiles that take the place of these in steps whose rows are few enough; None: none do."""
    return next((row.alone for row in DECODE_ROWS if row.alone and row.tiles == tiles), None)


def decode_tiles(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: Codes = Codes.NONE,
) -> DecodeTiles:
    """The tiles of paged decode. Raises NoTiles."""
    for of_arch in rows_of(DECODE_ROWS, arch, dtype):
        rows = [
            row
            for row in of_arch
            if codes in row.codes
            and max(head_dim, v_head_dim) <= row.max_head_dim
            and (row.tiles.heads_per_row == 1 or _pairs(row, gqa_ratio, num_kv_heads, head_dim, v_head_dim))
            and not (row.tiles.dim_block and row.tiles.columns(head_dim) != row.tiles.columns(v_head_dim))
        ]
        for row in rows:
            if gqa_ratio * row.tiles.heads_per_row <= row.max_q_rows:
                return row.tiles
        if rows:
            # Among rows for the most query heads, the one with the fewest columns.
            last = min(rows, key=lambda row: (len(row.codes), -row.max_q_rows, row.max_head_dim))
            return replace(last.tiles, head_blocks=-(-gqa_ratio // last.max_q_rows))
    raise NoTiles(no_row("decode", DECODE_ROWS, arch, dtype, (head_dim, v_head_dim), codes))


def _pairs(row: DecodeRow, gqa_ratio: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> bool:
    """True if the KV heads can be read as rows of row.tiles.heads_per_row."""
    heads = row.tiles.heads_per_row
    fits = num_kv_heads % heads == 0 and gqa_ratio * heads <= row.max_q_rows
    return fits and head_dim == v_head_dim and (row.any_dim or head_dim == next_power_of_2(head_dim))
