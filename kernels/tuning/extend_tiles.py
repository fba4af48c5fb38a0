"""Tiles of paged extend: which row of extend.json serves a problem. See tiles.py for where its numbers come from."""

from __future__ import annotations

import torch

from rocm_attn.kernels.tuning.rows import Rows, rows_of
from rocm_attn.kernels.tuning.tiles import ANY_ROWS, Codes, ExtendRow, ExtendTiles, NoTiles, no_row

EXTEND_ROWS = Rows(ExtendRow, "extend.json", "extend")


def extend_rows(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: Codes = Codes.NONE,
    window: int = ANY_ROWS,
) -> tuple[ExtendRow, ...]:
    """The tuning rows of paged extend. The first whose max_rows holds a step's rows serves it; the last one holds any.

    window: the most keys that a token sees, its own among them; ANY_ROWS: all. Raises NoTiles.
    """
    for rows in rows_of(EXTEND_ROWS, arch, dtype):
        found: list[ExtendRow] = []
        for row in rows:
            if (
                codes in row.codes
                and max(head_dim, v_head_dim) <= row.max_head_dim
                and not (row.alike and row.tiles.columns(head_dim) != row.tiles.columns(v_head_dim))
                and gqa_ratio <= row.max_rows
                and window <= row.max_window
                and num_kv_heads % row.tiles.heads_per_row == 0
                and not (found and row.max_rows <= found[-1].max_rows)
            ):
                found.append(row)
                if row.max_rows == ANY_ROWS:
                    return tuple(found)
    raise NoTiles(no_row("extend", EXTEND_ROWS, arch, dtype, (head_dim, v_head_dim), codes))


def extend_tiles(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: Codes = Codes.NONE,
) -> ExtendTiles:
    """The tiles of paged extend for sequences with any number of new tokens. Raises NoTiles."""
    rows = extend_rows(
        arch,
        gqa_ratio=gqa_ratio,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        codes=codes,
    )
    return rows[-1].tiles
