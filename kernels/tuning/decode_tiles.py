"""Tiles of paged decode: which row of decode.json serves a problem. See tiles.py for where its numbers come from."""

import functools
from dataclasses import replace

import torch

from rocm_attn.kernels.tuning.tile_choices import TableFile, choices_of
from rocm_attn.kernels.tuning.tiles import (
    CodeKind,
    DecodeTileChoice,
    DecodeTiles,
    NoTiles,
    TilesByRows,
    next_power_of_2,
    no_tile_choice,
)

# The first row that serves wins.
DECODE_CHOICES = TableFile(DecodeTileChoice, "decode.json", "decode")


@functools.cache
def others_of(tiles: DecodeTiles) -> tuple[TilesByRows, ...]:
    """The tiles that take the place of these in steps with other numbers of rows."""
    return next((choice.by_rows for choice in DECODE_CHOICES if choice.tiles == tiles), ())


def decode_tiles(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: CodeKind = CodeKind.NONE,
) -> DecodeTiles:
    """The tiles of paged decode. Raises NoTiles."""
    for of_arch in choices_of(DECODE_CHOICES, arch, dtype):
        rows = [
            choice
            for choice in of_arch
            if codes in choice.codes
            and max(head_dim, v_head_dim) <= choice.max_head_dim
            and (choice.tiles.heads_per_row == 1 or _pairs(choice, gqa_ratio, num_kv_heads, head_dim, v_head_dim))
            and not (choice.tiles.dim_block and choice.tiles.columns(head_dim) != choice.tiles.columns(v_head_dim))
        ]
        for choice in rows:
            if gqa_ratio * choice.tiles.heads_per_row <= choice.max_q_rows:
                return choice.tiles
        if rows:
            # Among rows for the most query heads, the one with the fewest columns.
            last = min(rows, key=lambda choice: (len(choice.codes), -choice.max_q_rows, choice.max_head_dim))
            return replace(last.tiles, head_blocks=-(-gqa_ratio // last.max_q_rows))
    raise NoTiles(no_tile_choice("decode", DECODE_CHOICES, arch, dtype, (head_dim, v_head_dim), codes))


def _pairs(choice: DecodeTileChoice, gqa_ratio: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> bool:
    """True if the KV heads can be read as rows of choice.tiles.heads_per_row."""
    heads = choice.tiles.heads_per_row
    fits = num_kv_heads % heads == 0 and gqa_ratio * heads <= choice.max_q_rows
    return fits and head_dim == v_head_dim and (choice.any_dim or head_dim == next_power_of_2(head_dim))
