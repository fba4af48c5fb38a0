"""Tiles of the product of rows with the matrices of their experts, a literal row for each arch and size of group.

No row was measured; "gfx942" and "gfx950" rows were chosen from the compiler's reports (no spills, LDS).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_attn.kernels.tuning.tiles import NoTiles, names_of


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The cut of an expert's product by programs.

    rows, columns: of the result
    step:          elements of a row that are multiplied at a time
    num_warps:     warps (waves on AMD) of a program
    num_stages:    steps whose loads are in flight at the same time
    """

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """tiles serve an arch, an element size in bytes and groups of up to max_rows rows."""

    arch: str
    item_bytes: int
    max_rows: int
    tiles: ExpertTiles


_ANY = 2**31
# The first row that serves wins.
EXPERT_ROWS = (
    ExpertRow("sm_90", 2, 16, ExpertTiles(16, 64, 128, 4, 4)),
    ExpertRow("sm_90", 2, _ANY, ExpertTiles(64, 128, 64, 4, 4)),
    ExpertRow("sm_90", 4, _ANY, ExpertTiles(16, 32, 32, 4, 3)),
    ExpertRow("sm_", 2, 16, ExpertTiles(16, 64, 64, 4, 3)),
    ExpertRow("sm_", 2, _ANY, ExpertTiles(64, 64, 32, 4, 3)),
    ExpertRow("sm_", 4, _ANY, ExpertTiles(16, 32, 32, 4, 2)),
    ExpertRow("gfx942", 2, 16, ExpertTiles(16, 64, 128, 4, 2)),
    ExpertRow("gfx942", 2, _ANY, ExpertTiles(64, 128, 64, 4, 2)),
    ExpertRow("gfx942", 4, _ANY, ExpertTiles(16, 64, 32, 4, 2)),
    ExpertRow("gfx950", 2, 16, ExpertTiles(16, 64, 128, 4, 2)),
    ExpertRow("gfx950", 2, _ANY, ExpertTiles(64, 128, 64, 4, 2)),
    ExpertRow("gfx950", 4, _ANY, ExpertTiles(16, 64, 32, 4, 2)),
    ExpertRow("interpreter", 2, _ANY, ExpertTiles(16, 32, 32, 1, 1)),
    ExpertRow("interpreter", 4, _ANY, ExpertTiles(16, 32, 32, 1, 1)),
)


def expert_tiles(arch: str, dtype: torch.dtype, rows: int) -> ExpertTiles:
    """The tiles for groups of `rows` rows on average. Raises NoTiles."""
    for name in names_of(arch):
        for row in EXPERT_ROWS:
            if row.arch == name and row.item_bytes == dtype.itemsize and rows <= row.max_rows:
                return row.tiles
    raise NoTiles(
        f"no tiles of experts for {arch} with {dtype}; "
        f"rows exist for {', '.join(dict.fromkeys(row.arch for row in EXPERT_ROWS))}"
    )
