"""Tiles of the extend kernel for Hopper (kernels/hopper), by head dim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocm_attn.kernels.tuning.tiles import ExtendTiles


@dataclass(frozen=True, slots=True)
class HopperTiles:
    """How new tokens and KV are cut.

    extend:   query blocks of two groups of 64 rows, of num_warps each; num_stages key blocks of K and of V in flight
    overlaps: whether products with V run under those of the next key block with K, which takes registers
    registers: of a thread of a consumer; the warp that loads pages has what is left
    """

    extend: ExtendTiles
    overlaps: bool
    registers: int


# One H200, torch 2.11, Triton 3.6. llama8b is (32 query heads, 8 KV heads, 128), gptoss (64, 8, 64).
HOPPER_EXTEND_TILES: Mapping[int, HopperTiles] = {
    # gptoss 1 x 2048 new + 6144 cached: 536 us; the plain kernel 631.
    64: HopperTiles(ExtendTiles(128, 128, 4, 4, programs_per_cu=1, merge_stages=4), overlaps=True, registers=224),
    # llama8b 1 x 2048 + 6144: 392 us, 8 x 512 + 4096: 513, 1 x 2048 + 30720: 1664; with three stages 396, 519 and 1683;
    # in blocks of 64 keys with four 423, 566 and 1936; the plain kernel 535 and 694.
    128: HopperTiles(ExtendTiles(128, 128, 4, 2, programs_per_cu=1, merge_stages=4), overlaps=True, registers=224),
    # 64 x 8 heads, 777 new of 5778: 353 to 378 us, 12 ragged chunks 553; without overlap 370 to 378 and 584.
    192: HopperTiles(
        ExtendTiles(128, 64, 4, 3, dim_block=64, programs_per_cu=1, merge_stages=4), overlaps=True, registers=232
    ),
}
