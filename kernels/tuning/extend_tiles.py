"""Tiles of paged extend: which row of extend.json serves a problem. See tiles.py for where its numbers come from."""

import torch

from rocm_attn.kernels.tuning.tile_choices import TableFile, choices_of
from rocm_attn.kernels.tuning.tiles import ANY_ROWS, CodeKind, ExtendTileChoice, ExtendTiles, NoTiles, no_tile_choice

EXTEND_CHOICES = TableFile(ExtendTileChoice, "extend.json", "extend")


def extend_choices(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: CodeKind = CodeKind.NONE,
    window: int = ANY_ROWS,
) -> tuple[ExtendTileChoice, ...]:
    """The tuning choices of paged extend.

    The first whose max_rows holds a step's rows serves it; the last one holds any.

    window: the most keys that a token sees, its own among them; ANY_ROWS: all. Raises NoTiles.
    """
    for rows in choices_of(EXTEND_CHOICES, arch, dtype):
        found: list[ExtendTileChoice] = []
        for choice in rows:
            if (
                codes in choice.codes
                and max(head_dim, v_head_dim) <= choice.max_head_dim
                and not (choice.alike and choice.tiles.columns(head_dim) != choice.tiles.columns(v_head_dim))
                and gqa_ratio <= choice.max_rows
                and window <= choice.max_window
                and num_kv_heads % choice.tiles.heads_per_row == 0
                and not (found and choice.max_rows <= found[-1].max_rows)
            ):
                found.append(choice)
                if choice.max_rows == ANY_ROWS:
                    return tuple(found)
    raise NoTiles(no_tile_choice("extend", EXTEND_CHOICES, arch, dtype, (head_dim, v_head_dim), codes))


def extend_tiles(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: CodeKind = CodeKind.NONE,
) -> ExtendTiles:
    """The tiles of paged extend for sequences with any number of new tokens. Raises NoTiles."""
    rows = extend_choices(
        arch,
        gqa_ratio=gqa_ratio,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        codes=codes,
    )
    return rows[-1].tiles
