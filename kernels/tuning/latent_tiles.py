"""Tiles of attention over latent pages: how programs walk latent rows, a literal row for each arch and count of rows.

"sm_90" rows with times in their comments were measured on one H200 (torch 2.11, Triton 3.6, CUDA-graph replays). AMD's
were chosen from the compiler's reports: no spills, registers, LDS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rocm_attn.kernels.tuning.tiles import NoTiles, names_of


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """The way that a program walks latent rows.

    query_rows:      rows of a query block: new tokens times query heads
    key_block:       keys of a block of the loop
    num_warps:       warps (waves on AMD) of a program
    num_stages:      key blocks whose loads are in flight at the same time
    programs_per_cu: programs that a decode grid holds for each compute unit
    row_cost:        cost of starting a row in addition to its key blocks, in blocks; at least 1
    chains:          sums of products that a score is added up from, 1 or 2: two are shorter, and take registers
    wide:            whether V's columns are one part, not two: products of sm_90's warpgroups want that
    paired:          whether codes are read in pairs, as float16 that matrix units take in turn; not wide
    waves_per_eu:    waves per SIMD that the AMD compiler must make room for; 0: its own choice, and elsewhere
    early:           whether launches of decode may begin while the one before still runs (tiles.py)
    even:            whether decode cuts rows that are alike alike, with one new token each (DecodeCut)
    """

    query_rows: int
    key_block: int
    num_warps: int
    num_stages: int
    programs_per_cu: int = 1
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
    """The way that decode for Hopper walks latent rows (hopper/latent.py).

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
        tiles = self.decoders or (self.block,)
        return next((each for each in tiles if num_heads <= each.query_rows), tiles[-1])

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
class LatentSegmentRow:
    """tiles serve an arch, an element size in bytes, and rows of up to _LARGEST elements."""

    arch: str
    item_bytes: int
    tiles: LatentSegmentTiles


@dataclass(frozen=True, slots=True)
class LatentRow:
    """tiles serve an arch, an element size of q in bytes, and rows of up to max_dims elements: of V, and after it.

    coded: whether they serve pages of eight bits only
    """

    arch: str
    item_bytes: int
    max_dims: tuple[int, int]
    tiles: LatentTiles
    coded: bool = False


# Elements of V, and after it.
_LARGEST = (512, 64)

# Among the rows that serve, the first one whose query_rows hold all wanted rows is taken, else the last one. Rows for
# codes come before rows that serve codes too.
DECODE_ROWS: tuple[LatentRow, ...] = (
    # 128 sequences x 4k: 120 us, 1.25 of the floor; 122 if rows are not cut alike, 124 with launches that are not
    # early either; 136 with two stages, 153 to 272 in other tiles.
    LatentRow(
        "sm_90", 2, _LARGEST, LatentTiles(16, 64, 4, 3, 2, chains=2, paired=True, early=True, even=True), coded=True
    ),
    # 32 heads, 128 x 4k: 258 us; 270 with blocks of 64 keys and 8 warps, 293 as two blocks of 16 heads.
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(32, 32, 4, 3, 2, chains=2, paired=True), coded=True),
    # 128 heads, 128 x 4k: 521 us, 2.83 of the products; 593 with two stages, 754 in the tiles of 32 heads.
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(64, 64, 8, 3, chains=2, wide=True), coded=True),
    # 16 heads, 128 x 4k: 159 us, 1.02 of the floor; 164 if rows are not cut alike, 166 with launches that are not
    # early either.
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(16, 32, 4, 3, 2, chains=2, early=True, even=True)),
    # 32 heads, 128 x 4k: 217 us, 1.37 of the floor; 415 with 8 warps.
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(32, 32, 4, 3, 2, chains=2, early=True, even=True)),
    # 128 heads, 128 x 4k: 525 us, 2.85 of the products; 535 if rows are not cut alike, of which the merge takes 12; 566
    # in two parts, 765 in the tiles of 32 heads, 605 with blocks of 32 keys and three or four stages, 528 if the next
    # rows are fetched to L2 ahead. The only tiles with warpgroup products. Their spills lie outside of these products.
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(64, 64, 8, 2, chains=2, wide=True, early=True, even=True)),
    # For float32, which no model is served in: 72 KiB of shared memory, up to 128 registers, 8 bytes of stack.
    LatentRow("sm_90", 4, _LARGEST, LatentTiles(16, 16, 8, 1)),
    LatentRow("sm_", 2, _LARGEST, LatentTiles(16, 32, 4, 2)),
    LatentRow("sm_", 2, _LARGEST, LatentTiles(32, 32, 8, 2)),
    # AMD's: clocks of a CU per key if a load takes 1.5 us, by the model of docs/amd_tuning.md. HBM takes 139 of them on
    # gfx942 and 89 on gfx950, half of that for codes; with 128 heads LDS and the matrix units take about as many.
    # 152 clocks. With blocks of 32 keys 81, and up to 187 VGPRs spill with a cap and a window.
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(16, 16, 2, 2, 2, wide=True), coded=True),
    # 304 clocks. In two waves 164, and up to 51 VGPRs spill.
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(32, 16, 4, 2, wide=True), coded=True),
    # 1650 clocks. With two blocks in flight 606, and up to 29 VGPRs spill.
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(64, 16, 4, 1), coded=True),
    # 126, 137 and 507 clocks. In one chain 3 VGPRs spill with Triton 3.6.
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(16, 16, 4, 2, 2, wide=True), coded=True),
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(32, 16, 2, 2, 2, wide=True), coded=True),
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(64, 16, 4, 2, chains=2, wide=True), coded=True),
    # 139 clocks: 222 VGPRs, so that a SIMD has two waves. One wave per program 78, and up to 119 VGPRs spill.
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(16, 16, 4, 2, 2, wide=True)),
    # 137 clocks, 413 to 439 VGPRs.
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(32, 16, 2, 2, 2, wide=True)),
    # 538 clocks, 357 to 397 VGPRs, 64 KiB of LDS. Blocks of 32 keys spill 11 VGPRs.
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(64, 16, 4, 2, wide=True)),
    # 122 clocks, 238 VGPRs, two waves per SIMD. One wave per program 75, of which 67 VGPRs spill with Triton 3.6.
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(16, 16, 4, 2, 2, wide=True)),
    # 127 clocks, 348 to 421 VGPRs.
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(32, 16, 2, 2, 2, wide=True)),
    # 496 clocks, 327 to 376 VGPRs. With blocks of 32 keys 255, and up to 16 SGPRs are kept in lanes of VGPRs.
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(64, 16, 4, 2, wide=True)),
    LatentRow("interpreter", 2, _LARGEST, LatentTiles(16, 16, 1, 1, chains=2, paired=True), coded=True),
    LatentRow("interpreter", 2, _LARGEST, LatentTiles(64, 16, 1, 1, chains=2, wide=True), coded=True),
    LatentRow("interpreter", 2, _LARGEST, LatentTiles(16, 16, 1, 1, even=True)),
    LatentRow("interpreter", 2, _LARGEST, LatentTiles(64, 16, 1, 1, chains=2, wide=True, even=True)),
    LatentRow("interpreter", 4, _LARGEST, LatentTiles(16, 16, 1, 1, even=True)),
    LatentRow("interpreter", 4, _LARGEST, LatentTiles(64, 16, 1, 1)),
)
EXTEND_ROWS: tuple[LatentRow, ...] = (
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(64, 64, 8, 2)),
    LatentRow("sm_90", 4, _LARGEST, LatentTiles(16, 16, 8, 1)),
    LatentRow("sm_", 2, _LARGEST, LatentTiles(32, 32, 8, 2)),
    # For codes: 320 to 421 VGPRs. With 8 waves up to 17 spill.
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(64, 16, 4, 1), coded=True),
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(64, 16, 4, 1), coded=True),
    # 230 to 250 VGPRs, 32 KiB of LDS: one workgroup of 8 waves, 2 per SIMD.
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(64, 16, 8, 1)),
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(64, 16, 8, 1)),
    LatentRow("interpreter", 2, _LARGEST, LatentTiles(32, 16, 1, 1)),
    LatentRow("interpreter", 4, _LARGEST, LatentTiles(32, 16, 1, 1)),
)
# 128 heads, 128 x 4k: 280 us, 520 by the plain kernel; 64 heads 168 and 299; 32 heads 155 and 219 (H200, torch 2.11,
# Triton 3.6). In blocks of 32 keys 1.2 of the time. Loads by TMA take 0.96 to 1.04; rows fetched to L2 ahead 1.07 to
# 1.26; with the next block's first products under a block's softmax 1.25, since it is there late. If the second
# half's values wait for the next block's scores 0.97, with 16 heads 1.05.
HOPPER_LATENT_TILES = HopperLatentTiles(LatentTiles(64, 64, 4, 2, early=True, even=True), 128, 48)
_INTERPRETED = LatentSegmentTiles(64, LatentTiles(32, 16, 1, 1), decoders=(LatentTiles(16, 16, 1, 1),))
SEGMENT_ROWS: tuple[LatentSegmentRow, ...] = (
    # 16 heads, 32 x 4k: 53 us, as in normal mode; 128 x 4k: 190, in normal mode 161. In segments of 1024 keys 88, 176;
    # of 256 61 and 221.
    LatentSegmentRow(
        "sm_90",
        2,
        LatentSegmentTiles(
            512,
            LatentTiles(32, 32, 8, 2),
            decoders=(LatentTiles(16, 32, 4, 3, 2, early=True), LatentTiles(32, 32, 4, 3, 2, early=True)),
        ),
    ),
    LatentSegmentRow("sm_90", 4, LatentSegmentTiles(2048, LatentTiles(16, 16, 8, 1))),
    LatentSegmentRow("sm_", 2, LatentSegmentTiles(2048, LatentTiles(16, 32, 8, 2))),
    LatentSegmentRow("gfx942", 2, LatentSegmentTiles(2048, LatentTiles(16, 16, 4, 1, 2), 16)),
    LatentSegmentRow("gfx950", 2, LatentSegmentTiles(2048, LatentTiles(16, 16, 4, 1, 2), 16)),
    LatentSegmentRow("interpreter", 2, _INTERPRETED),
    LatentSegmentRow("interpreter", 4, _INTERPRETED),
)


def latent_decode_tiles(
    arch: str, *, num_rows: int, dims: tuple[int, int], dtype: torch.dtype, is_coded: bool
) -> LatentTiles:
    """The tiles of latent decode. Raises NoTiles.

    num_rows: query heads times new tokens of a sequence, at most
    dims:     head_dim, v_head_dim
    dtype:    of q
    is_coded: whether pages are of eight bits
    """
    rows = tuple(row for row in DECODE_ROWS if is_coded or not row.coded)
    return _tiles(rows, arch, num_rows, dims, dtype)


def latent_extend_tiles(arch: str, *, dims: tuple[int, int], dtype: torch.dtype, is_coded: bool) -> LatentTiles:
    """The tiles of latent extend. dims: head_dim, v_head_dim. Raises NoTiles."""
    rows = tuple(row for row in EXTEND_ROWS if is_coded or not row.coded)
    return _tiles(rows, arch, 1, dims, dtype)


def latent_segment_tiles(arch: str, *, dims: tuple[int, int], dtype: torch.dtype) -> LatentSegmentTiles:
    """The tiles of deterministic latent decode and extend. dims: head_dim, v_head_dim. Raises NoTiles."""
    for name in names_of(arch):
        for row in SEGMENT_ROWS:
            if row.arch == name and row.item_bytes == dtype.itemsize and _fit(dims, _LARGEST):
                return row.tiles
    raise _no_tiles("deterministic latent tiles", arch, dims, dtype, {row.arch for row in SEGMENT_ROWS})


def _tiles(
    rows: tuple[LatentRow, ...], arch: str, num_rows: int, dims: tuple[int, int], dtype: torch.dtype
) -> LatentTiles:
    for name in names_of(arch):
        serving = [
            row for row in rows if row.arch == name and row.item_bytes == dtype.itemsize and _fit(dims, row.max_dims)
        ]
        # Rows for codes are whole by themselves.
        tiles = [row.tiles for row in serving if row.coded == serving[0].coded]
        for each in tiles:
            if num_rows <= each.query_rows:
                return each
        if tiles:
            return tiles[-1]
    raise _no_tiles("latent tiles", arch, dims, dtype, {row.arch for row in rows})


def _fit(dims: tuple[int, int], most: tuple[int, int]) -> bool:
    """True if rows of (head_dim, v_head_dim) have at most `most` elements of V, and after it."""
    return dims[1] <= most[0] and dims[0] - dims[1] <= most[1]


def _no_tiles(what: str, arch: str, dims: tuple[int, int], dtype: torch.dtype, archs: set[str]) -> NoTiles:
    return NoTiles(
        f"no {what} for {arch} with {dtype} and rows of {dims[1]} + {dims[0] - dims[1]} elements; "
        f"rows exist for {', '.join(sorted(archs))}, for up to {_LARGEST[0]} + {_LARGEST[1]}"
    )
