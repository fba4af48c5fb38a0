"""Layouts of extend on CDNA: operands of products, rows in memory, and blocks of keys and values in LDS."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_HEAD_DIM, EXTEND_TILES, ExtendUnits

DIM = gl.constexpr(EXTEND_HEAD_DIM)
KEYS = gl.constexpr(EXTEND_TILES.key_block)
ROWS = gl.constexpr(EXTEND_TILES.query_rows)
WARPS = gl.constexpr(EXTEND_TILES.num_warps)

# Rows in memory: 16 lanes read the 256 bytes of one.
ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 16], [WARPS.value, 1], [1, 0]))
_COLUMN_BITS = [[1], [2], [4], [8], [16], [32], [64]]
_KEY_BITS = [[16], [32], [1], [2], [4], [8]]


@constexpr_function
def product(units: ExtendUnits) -> Any:
    """The layout of a product's result: a lane has four neighbouring columns of each eight, of one row."""
    return gl.amd.AMDMFMALayout(units.VERSION, [32, 32, units.DEPTH], True, [WARPS.value, 1])


@constexpr_function
def operand(units: ExtendUnits, at: int, of_scores: bool) -> Any:
    """The layout of the first or second operand of a product with K, or with V, whose order the weights have."""
    return gl.DotOperandLayout(at, product(units), units.DEPTH // 2 if of_scores else 4)


@constexpr_function
def load_v(units: ExtendUnits) -> Any:
    """The layout in which V is loaded.

    Into LDS: a wave's instruction reads four rows of 16 keys' distance, and LDS has them next to each other. By
    registers: a lane has four elements of four neighbouring keys, which go into LDS as four keys of each element; a
    wave has keys of one page.
    """
    if units.LOADS_INTO_LDS:
        return gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [8, 0]],
            [[0, 8], [0, 16], [0, 32], [0, 64], [16, 0], [32, 0]],
            [[1, 0], [2, 0], [4, 0]],
            [],
            [KEYS.value, DIM.value],
        )
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0]],
        [[0, 4], [0, 8], [0, 16], [8, 0], [0, 32], [0, 64]],
        [[4, 0], [16, 0], [32, 0]],
        [],
        [KEYS.value, DIM.value],
    )


@constexpr_function
def load_k(units: ExtendUnits) -> Any:
    """The layout in which K^T is loaded: that of V."""
    v = load_v(units)
    bases = ([base[::-1] for base in each] for each in (v.reg_bases, v.lane_bases, v.warp_bases))
    return gl.DistributedLinearLayout(*bases, [], [DIM.value, KEYS.value])


@constexpr_function
def lds_k(units: ExtendUnits) -> Any:
    """K^T in LDS: no banks are met twice, neither by loads nor by operands."""
    if units.LOADS_INTO_LDS:
        return gl.PaddedSharedLayout(
            [[512, 8]],
            [[column[0], 0] for column in _COLUMN_BITS] + [[0, key[0]] for key in _KEY_BITS],
            [],
            [DIM.value, KEYS.value],
        )
    return gl.PaddedSharedLayout(
        [[128, 8]],
        [[1, 0], [2, 0], [8, 0], [4, 0], [16, 0], [32, 0], [64, 0], *([0, 1 << i] for i in range(6))],
        [],
        [DIM.value, KEYS.value],
    )


@constexpr_function
def lds_v(units: ExtendUnits) -> Any:
    """V in LDS, or V^T where loads go by registers."""
    if units.LOADS_INTO_LDS:
        return gl.PaddedSharedLayout(
            [[512, 32]],
            [[0, column[0]] for column in _COLUMN_BITS] + [[key[0], 0] for key in _KEY_BITS],
            [],
            [KEYS.value, DIM.value],
        )
    return gl.PaddedSharedLayout(
        [[64, 8], [1024, 16]],
        [[1, 0], [2, 0], [8, 0], [4, 0], [16, 0], [32, 0], *([0, 1 << i] for i in range(7))],
        [],
        [KEYS.value, DIM.value],
    )
