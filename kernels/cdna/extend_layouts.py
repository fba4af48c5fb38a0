"""Layouts of extend on CDNA: operands of products, rows in memory, and blocks of keys and values in LDS."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_HEAD_DIM, EXTEND_TILES, ExtendUnits

DIM = gl.constexpr(EXTEND_HEAD_DIM)
KEYS = gl.constexpr(EXTEND_TILES.key_block)
ROWS = gl.constexpr(EXTEND_TILES.query_rows)
WARPS = gl.constexpr(EXTEND_TILES.num_warps)

# Rows in memory: 16 lanes read the 256 bytes of one.
ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 16], [WARPS.value, 1], [1, 0]))
_COLUMNS = [[0, 1 << bit] for bit in range(7)]
_KEYS = [[1 << bit, 0] for bit in range(6)]


@constexpr_function
def product(units: ExtendUnits) -> gl.constexpr:
    """The layout of a product's result: a lane has four neighbouring columns of each eight, of one row."""
    return gl.amd.AMDMFMALayout(units.VERSION, [32, 32, units.DEPTH], True, [WARPS.value, 1])


@constexpr_function
def operand(units: ExtendUnits, at: int, of_scores: bool) -> gl.constexpr:
    """The layout of the first or second operand of a product with K, or with V, whose order the weights have."""
    return gl.DotOperandLayout(at, product(units), units.DEPTH // 2 if of_scores else 4)


@constexpr_function
def rows_in(units: ExtendUnits) -> gl.constexpr:
    """The layout in which rows of K or V are loaded.

    Into LDS: a wave's instruction reads four rows of 16 keys' distance, and LDS has them next to each other. By
    registers: a lane has four elements of four neighbouring keys, and a wave has keys of one page.
    """
    if units.LOADS_INTO_LDS:
        registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
        lanes = [[0, 8], [0, 16], [0, 32], [0, 64], [16, 0], [32, 0]]
        waves = [[1, 0], [2, 0], [4, 0]]
    else:
        registers = [[0, 1], [0, 2], [1, 0], [2, 0]]
        lanes = [[0, 4], [0, 8], [0, 16], [8, 0], [0, 32], [0, 64]]
        waves = [[4, 0], [16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [KEYS.value, DIM.value])


@constexpr_function
def rows_in_lds(units: ExtendUnits, of_keys: bool) -> gl.constexpr:
    """The layout of rows of K or V in LDS, such that operands meet in no bank.

    By registers V^T lies there: four keys of each element that a lane has. A read of 16 bytes has the elements of two
    products.
    """
    if units.LOADS_INTO_LDS:
        padding, bits = [[512, 8 if of_keys else 32]], [*_COLUMNS, [16, 0], [32, 0], *_KEYS[:4]]
    elif of_keys:
        padding, bits = [[128, 8]], [[0, 1], [0, 2], [0, 8], [0, 4], *_COLUMNS[4:], *_KEYS]
    else:
        padding, bits = [[64, 8], [1024, 16]], [[1, 0], [2, 0], [8, 0], [4, 0], *_KEYS[4:], *_COLUMNS]
    return gl.PaddedSharedLayout(padding, bits, [], [KEYS.value, DIM.value])
