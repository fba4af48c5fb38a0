"""Tiles of attention over latent pages: how programs walk latent rows. latent.json has the rows.

"sm_90" rows for elements of two bytes were measured on one H200 (torch 2.11, Triton 3.6, CUDA-graph replays), most for
decode. AMD's were chosen from the compiler's reports: no spills, registers, LDS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from rocm_attn.kernels.tuning.tile_choices import TableFile, choices_of
from rocm_attn.kernels.tuning.tiles import NoTiles


@dataclass(frozen=True, slots=True)
class SelectedTiles:
    """The way that rows of query heads are attended, block of keys by block of keys.

    query_rows:      rows of a query block: query heads, or new tokens times query heads
    key_block:       keys of a block of the loop
    num_warps:       warps (waves on AMD) of a program
    num_stages:      key blocks whose loads are in flight at the same time
    programs_per_cu: programs that a decode grid holds for each compute unit; the most, if a selection is cut in parts
    """

    query_rows: int
    key_block: int
    num_warps: int
    num_stages: int
    programs_per_cu: int = 1


AnyRows = TypeVar("AnyRows", bound=SelectedTiles)


def that_hold(tiles: Sequence[AnyRows], rows: int) -> AnyRows:
    """The first tiles whose query_rows hold all rows, else the last."""
    return next((each for each in tiles if rows <= each.query_rows), tiles[-1])


@dataclass(frozen=True, slots=True)
class LatentTiles(SelectedTiles):
    """The way that a program walks latent rows.

    row_cost:        cost of starting a row in addition to its key blocks, in blocks; at least 1
    chains:          sums of products that a score is added up from, 1 or 2: two are shorter, and take registers
    wide:            whether V's columns are one part, not two: products of sm_90's warpgroups want that
    paired:          whether codes are read in pairs, as float16 that matrix units take in turn; not wide
    waves_per_eu:    waves per SIMD that the AMD compiler must make room for; 0: its own choice, and elsewhere
    early:           whether launches of decode may begin while the one before still runs (tiles.py)
    even:            whether decode, with one new token each, cuts rows of equal lengths alike (DecodeCut.is_even)
    """

    row_cost: int = 2
    chains: int = 1
    wide: bool = False
    paired: bool = False
    waves_per_eu: int = 0
    early: bool = False
    even: bool = False

    def head_blocks(self, num_heads: int) -> int:
        """Blocks that a token's query heads are cut into."""
        return -(-num_heads // self.query_rows)

    def block_heads(self, num_heads: int) -> int:
        """Query heads of a block; the last one may have fewer."""
        return -(-num_heads // self.head_blocks(num_heads))

    def tokens_per_block(self, num_heads: int) -> int:
        """New tokens in a full query block."""
        return self.query_rows // self.block_heads(num_heads)

    def of_masked_steps(self) -> LatentTiles:
        """The tiles for steps with packed masks: at most 32 rows and 32 keys.

        A row's bits of one key block are a word of 32; they take registers, and trees are small.
        """
        return replace(self, query_rows=min(32, self.query_rows), key_block=min(32, self.key_block))

    def of_few_masked_tokens(self, arch: str) -> LatentTiles:
        """The tiles for masked steps with keys split as in decode: at most 32 rows, except for warpgroup products."""
        if arch.startswith("gfx"):
            # 269 to 299 VGPRs. In one part, or with two blocks in flight, registers spill; and so they do with 64 rows.
            return LatentTiles(32, 16, 4, 1)
        return self if self.wide else replace(self, query_rows=min(32, self.query_rows))

    def options(self) -> dict[str, int]:
        """Launch options in addition to the warps."""
        return {"waves_per_eu": self.waves_per_eu} if self.waves_per_eu else {}


@dataclass(frozen=True, slots=True)
class HopperLatentTiles:
    """The way that decode for Hopper walks latent rows (hopper/latent.py), and selected ones (selected.py).

    latent: its programs, and how rows are cut; a program's warps are four groups of num_warps
    score_registers, loader_registers: of a thread of the group that weighs keys, and of the one that loads them; both
            that add up values have the rest
    """

    latent: LatentTiles
    score_registers: int
    loader_registers: int

    @property
    def value_registers(self) -> int:
        """The registers that the other warp groups leave of an SM's for a thread of each, in units of eight."""
        return (512 - self.score_registers - self.loader_registers) // 16 * 8


@dataclass(frozen=True, slots=True)
class LatentSegmentTiles:
    """The segments of latent KV in deterministic attention, and the way that its programs walk them.

    segment_len: KV tokens in a segment, a multiple of block.key_block; segment m is [m, m + 1) * segment_len
    block:       of extend; key_block, chains and wide decide a result's bits, and so are common to all
    matrix_dim:  rows of a matrix instruction that AMD's compiler must use; 0: its own choice, and elsewhere
    decoders:    of decode: the first whose query_rows hold a token's query heads, else the last. Without any, block is
                 decode's too, and all of it decides a result's bits
    """

    segment_len: int
    block: LatentTiles
    matrix_dim: int = 0
    decoders: tuple[LatentTiles, ...] = ()

    def __post_init__(self) -> None:
        assert self.segment_len % self.block.key_block == 0
        for tiles in self.decoders:
            assert (tiles.key_block, tiles.chains, tiles.wide) == (
                self.block.key_block,
                self.block.chains,
                self.block.wide,
            )

    @property
    def by_pairs(self) -> bool:
        """True if weights of keys are added up pair by pair; else the order follows from the shape of a tile."""
        return bool(self.decoders)

    def of_decode(self, num_heads: int) -> LatentTiles:
        """The tiles by which decode walks a segment."""
        return that_hold(self.decoders or (self.block,), num_heads)

    def decode(self, num_heads: int) -> LatentTiles:
        """The tiles by which decode's schedule is cut: its key blocks are segments."""
        # Like in SegmentTiles.decode. 128 sequences x 4k: some programs would have 5 segments of 512 keys, where 4 do.
        return replace(self.of_decode(num_heads), key_block=self.segment_len, row_cost=0)

    def options(self) -> dict[str, int]:
        """Launch options in addition to the warps."""
        return self.block.options() | ({"matrix_instr_nonkdim": self.matrix_dim} if self.matrix_dim else {})

    def most_segments(self, max_kv_len: int, window_left: int) -> int:
        """The most segments that a token of a sequence of up to max_kv_len tokens sees; window_left -1: no window."""
        segments = -(-max_kv_len // self.segment_len)
        return segments if window_left < 0 else min(segments, window_left // self.segment_len + 2)


@dataclass(frozen=True, slots=True)
class LatentSegmentTileChoice:
    """tiles serve an arch, an element size in bytes, and rows of up to _LARGEST elements."""

    arch: str
    item_bytes: int
    tiles: LatentSegmentTiles


@dataclass(frozen=True, slots=True)
class LatentTileChoice:
    """tiles serve an arch, an element size of q in bytes, and rows of up to _LARGEST elements.

    coded: whether they serve pages of eight bits only
    """

    arch: str
    item_bytes: int
    tiles: LatentTiles
    coded: bool = False


# Elements of V, and after it.
_LARGEST = (512, 64)

# Among the rows that serve, the first one whose query_rows hold all wanted rows is taken, else the last one. Rows for
# codes come before rows that serve codes too.
DECODE_ROWS = TableFile(LatentTileChoice, "latent.json", "decode")
EXTEND_ROWS = TableFile(LatentTileChoice, "latent.json", "extend")
SEGMENT_ROWS = TableFile(LatentSegmentTileChoice, "latent.json", "segment")
# Blocks of 32 keys are slower.
HOPPER_LATENT_TILES = HopperLatentTiles(LatentTiles(64, 64, 4, 2, early=True, even=True), 128, 48)

# For decode on CDNA, of up to 16 heads (cdna/latent_blocks.py) and of more (latent_heads.py). Two blocks take 490 of a
# wave's 512 registers with 16 heads.
CDNA_LATENT_TILES = (
    LatentTiles(query_rows=16, key_block=64, num_warps=4, num_stages=2),
    LatentTiles(query_rows=32, key_block=64, num_warps=4, num_stages=1),
    LatentTiles(query_rows=64, key_block=64, num_warps=4, num_stages=1),
)
# The same over codes (latent_codes.py): waves have 32 keys each, or with 64 heads half of the heads. Two blocks are for
# V that lies in LDS (latent.py).
CDNA_LATENT_CODE_TILES = (
    LatentTiles(query_rows=16, key_block=128, num_warps=4, num_stages=2),
    LatentTiles(query_rows=32, key_block=128, num_warps=4, num_stages=1),
    LatentTiles(query_rows=64, key_block=64, num_warps=4, num_stages=1),
)


def cdna_latent_tiles(num_heads: int, page_size: int, *, is_coded: bool) -> LatentTiles:
    """The tiles of latent decode on CDNA: the first that hold all heads, or the last. A program of 64 heads has no
    registers for the numbers of pages that hold fewer than eight tokens in a row."""
    tiles = CDNA_LATENT_CODE_TILES if is_coded else CDNA_LATENT_TILES
    return that_hold(tiles[: 3 if page_size % 8 == 0 else 2], num_heads)


def latent_decode_tiles(
    arch: str, *, num_rows: int, dims: tuple[int, int], dtype: torch.dtype, is_coded: bool
) -> LatentTiles:
    """The tiles of latent decode. Raises NoTiles.

    num_rows: query heads times new tokens of a sequence, at most
    dims:     head_dim, v_head_dim
    dtype:    of q
    is_coded: whether pages are of eight bits
    """
    return _tiles(DECODE_ROWS, arch, num_rows, dims, dtype, is_coded=is_coded)


def latent_extend_tiles(arch: str, *, dims: tuple[int, int], dtype: torch.dtype, is_coded: bool) -> LatentTiles:
    """The tiles of latent extend. dims: head_dim, v_head_dim. Raises NoTiles."""
    return _tiles(EXTEND_ROWS, arch, 1, dims, dtype, is_coded=is_coded)


def latent_segment_tiles(arch: str, *, dims: tuple[int, int], dtype: torch.dtype) -> LatentSegmentTiles:
    """The tiles of deterministic latent decode and extend. dims: head_dim, v_head_dim. Raises NoTiles."""
    if _fit(dims):
        for rows in choices_of(SEGMENT_ROWS, arch, dtype):
            for row in rows:
                return row.tiles
    raise _no_tiles("deterministic latent tiles", arch, dims, dtype, {row.arch for row in SEGMENT_ROWS})


def _tiles(
    rows: TableFile[LatentTileChoice],
    arch: str,
    num_rows: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    *,
    is_coded: bool,
) -> LatentTiles:
    for of_arch in choices_of(rows, arch, dtype):
        serving = [row for row in of_arch if (is_coded or not row.coded) and _fit(dims)]
        # Rows for codes are whole by themselves.
        if tiles := [row.tiles for row in serving if row.coded == serving[0].coded]:
            return that_hold(tiles, num_rows)
    raise _no_tiles("latent tiles", arch, dims, dtype, {row.arch for row in rows})


def _fit(dims: tuple[int, int]) -> bool:
    """True if rows of (head_dim, v_head_dim) have at most _LARGEST elements."""
    return dims[1] <= _LARGEST[0] and dims[0] - dims[1] <= _LARGEST[1]


def _no_tiles(what: str, arch: str, dims: tuple[int, int], dtype: torch.dtype, archs: set[str]) -> NoTiles:
    return NoTiles(
        f"no {what} for {arch} with {dtype} and rows of {dims[1]} + {dims[0] - dims[1]} elements; "
        f"rows exist for {', '.join(sorted(archs))}, for up to {_LARGEST[0]} + {_LARGEST[1]}"
    )
