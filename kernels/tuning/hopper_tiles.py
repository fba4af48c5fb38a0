"""Tiles of the extend kernel for Hopper (kernels/hopper), by head dim: its query blocks are two groups of 64 rows."""

from __future__ import annotations

from collections.abc import Mapping

from rocm_attn.kernels.tuning.tiles import ExtendTiles

HOPPER_EXTEND_TILES: Mapping[int, ExtendTiles] = {
    64: ExtendTiles(128, 128, 4, 4, programs_per_cu=1),
    128: ExtendTiles(128, 64, 4, 4, programs_per_cu=1),
    192: ExtendTiles(128, 32, 4, 4, dim_block=64, programs_per_cu=1),
}
