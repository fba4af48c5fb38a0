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
    """

    extend: ExtendTiles
    overlaps: bool


# One H200, torch 2.11, Triton 3.6. llama8b is (32 query heads, 8 KV heads, 128), gptoss (64, 8, 64).
HOPPER_EXTEND_TILES: Mapping[int, HopperTiles] = {
    # gptoss 1 x 2048 new + 6144 cached: 522 us, 638 in blocks of 64 keys, 589 without overlap; the plain kernel 631.
    64: HopperTiles(ExtendTiles(128, 128, 4, 4, programs_per_cu=1, merge_stages=4), overlaps=True),
    # llama8b 1 x 2048 + 6144: 421 us, 8 x 512 + 4096: 557; 412 and 572 in blocks of 128 without overlap, 514 and 645
    # of 64; the plain kernel 535 and 694.
    128: HopperTiles(ExtendTiles(128, 64, 4, 4, programs_per_cu=1, merge_stages=4), overlaps=True),
    # With overlap there are too few registers, but in blocks of 32: 64 x 8 heads, 777 new of 5778: 454 us.
    192: HopperTiles(ExtendTiles(128, 64, 4, 3, dim_block=64, programs_per_cu=1, merge_stages=4), overlaps=False),
}
