"""Layouts of extend on CDNA: operands of products, rows in memory, and blocks of keys and values in LDS."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.cache.page_format import Coding
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_TILES, ExtendHeads, ExtendUnits

KEYS = gl.constexpr(EXTEND_TILES.key_block)
ROWS = gl.constexpr(EXTEND_TILES.query_rows)
WARPS = gl.constexpr(EXTEND_TILES.num_warps)
_KEYS = [[1 << bit, 0] for bit in range(6)]


class ExtendGeometry(NamedTuple):
    """The values that the kernel is compiled for: of query_block.BlockGeometry and of key_loop.KeyGeometry."""

    HEAD_ROWS: int
    GQA_RATIO: int
    BLOCK_HEADS: int
    HEAD_BLOCKS: int
    PAGE_SIZE: int
    SAME_OFFSETS: bool
    CAUSAL: bool
    WINDOWED: bool
    STRIDE_UNIT: int
    UNITS: ExtendUnits
    HEADS: ExtendHeads
    CODING: Coding


@constexpr_function
def _columns(width: int) -> list[list[int]]:
    return [[0, 1 << bit] for bit in range(width.bit_length() - 1)]


@constexpr_function
def row_of(width: int) -> gl.constexpr:
    """Rows of q and of out in memory: a lane reads 16 bytes."""
    return gl.BlockedLayout([1, 8], [512 // width, width // 8], [WARPS.value, 1], [1, 0])


@constexpr_function
def product(G: ExtendGeometry) -> gl.constexpr:
    """The layout of a product's result: a lane has four neighbouring columns of each eight, of one row."""
    return gl.amd.AMDMFMALayout(G.UNITS.VERSION, [32, 32, G.UNITS.DEPTH], True, [WARPS.value, 1])


@constexpr_function
def sum_tiles(G: ExtendGeometry) -> int:
    """Tiles of V that are ones, so that products add up weights: 1 where additions take longer, else 0."""
    return int(G.HEADS.V_DIM == 64 and G.UNITS.DEPTH == 16)


@constexpr_function
def operand(G: ExtendGeometry, at: int, of_scores: bool) -> gl.constexpr:
    """The layout of the first or second operand of a product with K, or with V, whose order the weights have."""
    return gl.DotOperandLayout(at, product(G), G.UNITS.DEPTH // 2 if of_scores else 4)


@constexpr_function
def rows_in(G: ExtendGeometry) -> gl.constexpr:
    """The layout in which a part of rows of K or V is loaded.

    Into LDS: a wave's instruction reads 1 KiB, of keys 16 or 8 apart, and LDS has them next to each other. By
    registers: a lane has elements of four neighbouring keys, and a wave has keys of one page.
    """
    width = G.HEADS.PART
    columns = _columns(width)
    if G.UNITS.TRANSPOSES:
        registers = [*columns[:3], *_KEYS[3 : len(columns) - 3]]
        lanes = [*columns[3:], *_KEYS[len(columns) - 3 :]]
        waves = _KEYS[:3]
    else:
        own = len(columns) - 5
        registers = [*columns[:own], *_KEYS[:2]]
        lanes = [*columns[own : own + 3], _KEYS[3], *columns[own + 3 :]]
        waves = [_KEYS[2], *_KEYS[4:]]
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [KEYS.value, width])


@constexpr_function
def rows_in_lds(G: ExtendGeometry, of_keys: bool) -> gl.constexpr:
    """The layout of a part of rows of K or V in LDS, such that operands meet in no bank.

    By registers V^T lies there: four keys of each element that a lane has. A read of 16 bytes has the elements of two
    products.
    """
    width = G.HEADS.PART
    columns = _columns(width)
    if G.UNITS.TRANSPOSES:
        apart = len(columns) - 3
        padding, bits = [[512, 8 if of_keys else 32]], [*columns, *_KEYS[apart:], *_KEYS[:apart]]
    elif of_keys:
        padding, bits = [[width, 8]], [[0, 1], [0, 2], [0, 8], [0, 4], *columns[4:], *_KEYS]
    else:
        padding, bits = [[64, 8], [1024, 16]], [[1, 0], [2, 0], [8, 0], [4, 0], *_KEYS[4:], *columns]
    return gl.PaddedSharedLayout(padding, bits, [], [KEYS.value, width])
