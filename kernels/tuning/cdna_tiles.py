"""Tiles of the decode kernel for CDNA (kernels/cdna), by arch and head dim. cdna.json has the rows.

No AMD GPU has run them: they were chosen from the compiler's reports (no spills, registers) and from bounds on
the hot loop, like all AMD rows (tiles.py); docs/amd_tuning.md has figures next to those of paged decode.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from rocm_attn.kernels.cache.page_format import Encoding, Scales
from rocm_attn.kernels.tuning.tile_choices import TableFile
from rocm_attn.kernels.tuning.tiles import CdnaTiles, ExtendTiles, NoTiles

# Keys of a chunk, the number that one product with K takes. A chunk lies in one page.
CHUNK = 16
# Query heads of a row, padded.
ROWS = 16


@dataclass(frozen=True, slots=True)
class _CdnaTileChoice:
    """item_bytes: of an element of K and V; 1: codes"""

    arch: str
    head_dim: int
    item_bytes: int
    tiles: CdnaTiles


# Keys of a block, by arch, in whole products with V: 16 on CDNA 3, 32 on CDNA 4 and of codes. Longer blocks have fewer
# maxima to exchange and fewer waits; but K and V of a block are in registers. With heads of 128, blocks of 64 keys in
# 16 bits and of 96 codes leave a SIMD two waves. Longer ones leave it one, as 128 codes do in float16; and with windows
# these spill scalar registers.
KEY_BLOCKS = {"gfx942": (16, 32, 64, 96), "gfx950": (32, 64, 96)}
# Heads of 256 have none on gfx950: blocks of 32 take 293 VGPRs, which leave a SIMD one wave.
_TILES = {
    (choice.arch, choice.head_dim, choice.item_bytes): choice.tiles
    for choice in TableFile(_CdnaTileChoice, "cdna.json", "cdna")
}

ARCHS = tuple(dict.fromkeys(arch for arch, _, _ in _TILES))
HEAD_DIMS = tuple(dict.fromkeys(dim for _, dim, _ in _TILES))


class ExtendUnits(NamedTuple):
    """The features of an arch that extend's order of instructions follows.

    VERSION:      of the layout of products
    DEPTH:        of a product of 32 rows and columns, elements
    EXP_2:        clocks for which exp2 keeps the vector unit
    EXCHANGE:     clocks until a lane has a number of another one, by LDS; 0 if an instruction swaps them
    ROUNDS_PAIRS: whether one instruction rounds two numbers to 16 bits
    MAXIMA_OF_3:  whether the maximum of three numbers, or NaN, is one instruction
    TRANSPOSES:   whether LDS gives a lane elements of a column, so that V lies there in rows
    CONVERTS:     whether an instruction makes two numbers of 16 bits from two codes of E4M3FN
    LOADS_INTO_LDS: whether loads of 16 bytes a lane go into LDS past the registers, as elements that are no codes may
    """

    VERSION: int
    DEPTH: int
    EXP_2: int
    EXCHANGE: int
    ROUNDS_PAIRS: bool
    MAXIMA_OF_3: bool
    TRANSPOSES: bool
    CONVERTS: bool
    LOADS_INTO_LDS: bool


# By arch. An exchange by LDS takes 64 clocks, and may wait for some loads of the other wave (rocm_lab/cycles/rates.py).
EXTEND_UNITS = {
    "gfx942": ExtendUnits(3, 8, 16, 144, False, False, TRANSPOSES=False, CONVERTS=False, LOADS_INTO_LDS=False),
    "gfx950": ExtendUnits(4, 16, 8, 0, True, True, TRANSPOSES=True, CONVERTS=True, LOADS_INTO_LDS=True),
}


class ExtendHeads(NamedTuple):
    """The dims of heads, and how extend's program holds them.

    DIM, V_DIM: of K and of V
    PART:       columns of a row of K or V that lie next to each other in LDS
    KEY_ROUNDS: rounds of products in which a block's scores are computed, with as many parts of its keys in registers
    """

    DIM: int
    V_DIM: int
    PART: int
    KEY_ROUNDS: int


# Tiles of extend, whose kernel is written for them, its archs and heads.
EXTEND_ARCHS = tuple(EXTEND_UNITS)
EXTEND_HEADS = {
    (heads.DIM, heads.V_DIM): heads
    for heads in (ExtendHeads(64, 64, 64, 1), ExtendHeads(128, 128, 128, 1), ExtendHeads(192, 128, 64, 2))
}
# The codes that each arch's hardware reads.
EXTEND_CODES = {"gfx942": Encoding.E4M3FNUZ, "gfx950": Encoding.E4M3FN}
EXTEND_TILES = ExtendTiles(query_rows=256, key_block=64, num_warps=8, num_stages=1, waves_per_eu=2)


def extend_heads(arch: str, *, head_dim: int, v_head_dim: int, encoding: Encoding) -> ExtendHeads:
    """Extend's heads on an arch of EXTEND_ARCHS, of dims in EXTEND_HEADS. encoding: of K and V. Raises NoTiles."""
    if encoding.is_fp8 and encoding is not EXTEND_CODES[arch]:
        raise NoTiles(f"it reads codes of {EXTEND_CODES[arch].value} on {arch}, not of {encoding.value}")
    return EXTEND_HEADS[head_dim, v_head_dim]


def key_blocks(arch: str, encoding: Encoding) -> tuple[int, ...]:
    """The keys that a block may have, of K and V in an encoding."""
    return tuple(keys for keys in KEY_BLOCKS[arch] if keys % 32 == 0 or not encoding.is_fp8)


def cdna_tiles(
    arch: str, *, num_kv_heads: int, gqa_ratio: int, head_dim: int, encoding: Encoding, scales: Scales, windowed: bool
) -> CdnaTiles:
    """The tiles of an arch of ARCHS and heads of one of HEAD_DIMS. Raises NoTiles.

    encoding, scales: of K and V; windowed: whether rows have a window
    """
    if encoding.is_fp8 and encoding is not EXTEND_CODES[arch]:
        raise NoTiles(f"it reads codes of {EXTEND_CODES[arch].value} on {arch}, not of {encoding.value}")
    tiles = _TILES.get((arch, head_dim, encoding.dtype.itemsize))
    if tiles is None:
        bits = 8 * encoding.dtype.itemsize
        raise NoTiles(f"it has no faster tiles for heads of {head_dim} in {bits} bits on {arch}")
    heads = tiles.heads_per_row
    if num_kv_heads % heads:
        raise NoTiles(f"it reads KV heads of {head_dim} in pairs, and there are {num_kv_heads}")
    if gqa_ratio * heads > ROWS:
        raise NoTiles(f"{gqa_ratio} query heads share a KV head of {head_dim}; at most {ROWS // heads} may")
    # With windows and scales of tokens, blocks of 96 keys leave a SIMD of gfx942 one wave, and spill on gfx950.
    return replace(tiles, key_block=64) if windowed and scales is Scales.TOKEN else tiles
