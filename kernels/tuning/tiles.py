"""Tiles: the shapes that the attention kernels are compiled with, one literal row for each arch and kind of problem.

A row with times in its comment was measured on one H200 (torch 2.11, Triton 3.6, CUDA-graph replays); the other "sm_90"
rows follow it. No AMD row was measured: "gfx942" and "gfx950" rows were chosen from what the compiler reports (no
spills, registers, LDS) and from llvm-mca's static model of the hot loop; docs/amd_tuning.md has the candidates. "sm_"
serves NVIDIA GPUs that have no row of their own with shapes that fit all of them. "interpreter" is Triton's
interpreter on a CPU.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch


class Codes(enum.Enum):
    """Whether K and V are eight-bit codes, and what shares a factor: both take registers.

    NONE:     elements are read as they are
    BY_ROW:   a row of q meets one factor of K and one of V: of the layer, or of its KV head
    BY_TOKEN: keys have factors
    """

    NONE = "no codes"
    BY_ROW = "codes with factors of layers or heads"
    BY_TOKEN = "codes with factors of tokens"


class NoTiles(LookupError):
    """No tuning row serves an arch, dtype or shape."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How paged decode walks its rows; a row is a sequence and heads_per_row KV heads, or a block of one's query heads.

    key_block:        keys of a block of the loop
    num_warps:        warps (waves on AMD) of a program
    num_stages:       key blocks whose loads are in flight at the same time
    programs_per_cu:  programs that the grid holds for each compute unit
    transposed:       whether scores are computed as k q^T: KV tokens then fill the long side of the matrix unit
    heads_per_row:    1, or 2: two KV heads of 64 are read as one of 128
    head_blocks:      blocks that the query heads of a KV head are cut into; each reads K and V
    row_cost:         what starting a row costs beside its key blocks, in blocks; at least 1
    paired:           whether V's codes are read two by two, as float16 that matrix units take in turned; not transposed
    dim_block:        columns of the equal blocks that the dims of K and of V are cut into; 0: they are one block. Not
                      paired, and not with two heads a row
    max_registers:    registers of a thread that NVIDIA's compiler may take; 0: its own choice
    early_merge:      whether the merge of rows is launched while programs still run (NVIDIA, from sm_90 on)
    """

    key_block: int
    num_warps: int
    num_stages: int
    programs_per_cu: int
    transposed: bool = False
    heads_per_row: int = 1
    head_blocks: int = 1
    row_cost: int = 2
    paired: bool = False
    dim_block: int = 0
    max_registers: int = 0
    early_merge: bool = False

    def columns(self, dim: int) -> int:
        """Columns of a block of rows of dim elements; a power of two."""
        return equal_columns(dim * self.heads_per_row, self.dim_block)

    def rows_per_seq(self, num_kv_heads: int) -> int:
        """Rows of a sequence."""
        assert num_kv_heads % self.heads_per_row == 0
        return num_kv_heads // self.heads_per_row * self.head_blocks

    def q_rows(self, gqa_ratio: int) -> int:
        """Query heads of a row, at most."""
        return -(-gqa_ratio // self.head_blocks) * self.heads_per_row

    def options(self) -> dict[str, int]:
        """Launch options beside the warps."""
        return {"maxnreg": self.max_registers} if self.max_registers else {}


@dataclass(frozen=True, slots=True)
class ExtendTiles:
    """How paged extend cuts new tokens and KV.

    query_rows:       rows of a query block: new tokens times the query heads that share a KV head
    key_block:        keys of a block of the loop
    num_warps:        warps (waves on AMD) of a program
    num_stages:       key blocks whose loads are in flight, where all keys are visible to all rows
    diagonal_stages:  the same on the diagonal
    waves_per_eu:     waves a SIMD that the AMD compiler shall make room for; 0: its own choice, and elsewhere
    dim_block:        columns of the equal blocks that a head dim is cut into; 0: it is one block
    max_registers:    registers of a thread that NVIDIA's compiler may take for whole rows; 0: its own choice
    programs_per_cu:  programs for each compute unit that share out the longest rows; 0: every row is one program's
    share_stages:     num_stages of those programs, which take more registers
    rows_at_once:     whole rows that run in the room of such a program, 1 or 2
    one_launch:       whether a launch takes shares and whole rows, and not one for each
    merge_stages:     parts of a row whose loads are in flight as they are added up
    row_keys:         what starting a row costs beside its keys, in keys
    split_keys:       what sharing costs a program, in keys
    """

    query_rows: int
    key_block: int
    num_warps: int
    num_stages: int
    diagonal_stages: int = 1
    waves_per_eu: int = 0
    dim_block: int = 0
    max_registers: int = 0
    programs_per_cu: int = 0
    share_stages: int = 1
    rows_at_once: int = 1
    one_launch: bool = False
    merge_stages: int = 1
    row_keys: int = 256
    split_keys: int = 384

    def columns(self, dim: int) -> int:
        """Columns of a block of rows of dim elements; a power of two."""
        return equal_columns(dim, self.dim_block)

    def heads_per_block(self, gqa_ratio: int) -> int:
        """Query heads of one KV head that share a query block."""
        return min(gqa_ratio, self.query_rows)

    def head_blocks(self, gqa_ratio: int) -> int:
        """Blocks that the query heads of a KV head are cut into."""
        return -(-gqa_ratio // self.heads_per_block(gqa_ratio))

    def tokens_per_block(self, gqa_ratio: int) -> int:
        """New tokens in a full query block."""
        return self.query_rows // self.heads_per_block(gqa_ratio)

    def options(self) -> dict[str, int]:
        """Launch options beside the warps; of whole rows, where others are shared out."""
        named = {"waves_per_eu": self.waves_per_eu, "maxnreg": self.max_registers}
        return {name: value for name, value in named.items() if value}

    def of_masked_steps(self, codes: Codes = Codes.NONE, *, is_short: bool = False) -> ExtendTiles:
        """Half the rows and at most 32 keys, for steps with packed masks.

        A row's bits of one key block are a word of 32; they take registers, and trees are small.

        is_short: whether the tiles are of short sequences; those keep their rows, lest each reads its keys twice
        """
        # With all rows sm_90 spills 32 bytes at head_dim 128.
        query_rows = self.query_rows if is_short else max(16, self.query_rows // 2)
        tiles = replace(self, query_rows=query_rows, key_block=min(32, self.key_block))
        # With factors of tokens and two stages up to 33 SGPRs spill on AMD.
        return replace(tiles, num_stages=1) if codes is Codes.BY_TOKEN else tiles


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """tiles serve an arch, an element size in bytes, head dims up to max_head_dim and rows of up to max_q_rows heads.

    The last row that fits but for max_q_rows serves larger groups of query heads too, cut into blocks.

    codes: what K and V may be
    """

    arch: str
    item_bytes: int
    max_head_dim: int
    max_q_rows: int
    tiles: DecodeTiles
    codes: tuple[Codes, ...] = tuple(Codes)


# More rows than a sequence can have.
ANY_ROWS = 1 << 62


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """tiles serve an arch, an element size in bytes and head dims up to max_head_dim.

    alike:    whether they serve only rows of K and of V whose blocks have as many columns
    codes:    as in DecodeRow
    max_rows: for steps whose sequences have so many rows at most: new tokens times the query heads of a KV head.
              ANY_ROWS: for all
    """

    arch: str
    item_bytes: int
    max_head_dim: int
    tiles: ExtendTiles
    alike: bool = False
    codes: tuple[Codes, ...] = tuple(Codes)
    max_rows: int = ANY_ROWS


# The first row that serves wins. In the comments llama8b is (32 query heads, 8 KV heads, 128), gptoss (64, 8, 64) and
# gemma (8, 4, 256), and "of the floor" means of the time to read K and V once.
DECODE_ROWS = (
    # gptoss 64 x 4k: 81 us, of bfloat16 135; 83 with one warp and blocks of 32 keys, 111 where codes are not read in
    # pairs.
    DecodeRow(
        "sm_90", 2, 64, 16, DecodeTiles(64, 2, 3, 4, heads_per_row=2, paired=True, early_merge=True), (Codes.BY_ROW,)
    ),
    # llama8b 64 x 4k: 143 us, of bfloat16 255; 146 with two warps and blocks of 64 keys, 171 not in pairs. At 128 x 8k:
    # 520 and 531.
    DecodeRow("sm_90", 2, 128, 16, DecodeTiles(32, 1, 3, 8, paired=True, early_merge=True), (Codes.BY_ROW,)),
    # gptoss 64 x 4k: 92 us; 89 to 91 in tiles of one warp that spill up to 288 bytes, 97 with six programs an SM, which
    # spill too, 136 where a row is one head.
    DecodeRow(
        "sm_90", 2, 64, 16, DecodeTiles(64, 2, 3, 4, heads_per_row=2, paired=True, early_merge=True), (Codes.BY_TOKEN,)
    ),
    # llama8b 64 x 4k: 150 us, though up to 120 bytes spill with Triton 3.9 where scores have a cap; 160 with two warps
    # and blocks of 64 keys, which spill nothing.
    DecodeRow("sm_90", 2, 128, 16, DecodeTiles(32, 1, 3, 8, paired=True, early_merge=True), (Codes.BY_TOKEN,)),
    # gemma 64 x 4k: 153 us with 4 KV heads, 234 not in pairs.
    DecodeRow("sm_90", 2, 256, 16, DecodeTiles(16, 2, 3, 4, paired=True, early_merge=True), (Codes.BY_ROW,)),
    # gptoss 64 x 4k: 136 us; 137 before the merge was early, 145 with one KV head a row.
    DecodeRow("sm_90", 2, 64, 16, DecodeTiles(64, 4, 3, 2, transposed=True, heads_per_row=2, early_merge=True)),
    # 32 query heads of 80 on 8 KV heads, 64 x 4k: 208 us; 219 in the tiles of 128, 224 to 297 in other equal blocks.
    DecodeRow("sm_90", 2, 80, 16, DecodeTiles(32, 4, 3, 4, dim_block=32, early_merge=True), (Codes.NONE,)),
    # llama8b and llama70b 64 x 4k: 255 and 256 us; 331 with 1 program an SM, 380 with blocks of 128 keys. 16 x 4k: 71,
    # 72, a microsecond less than before the merge was early. Pages of 8: 270 where those of 32 take 258. Heads of 96 as
    # equal blocks: 217 to 281 us where these tiles take 214 (32 KV heads, 16 x 4k).
    DecodeRow("sm_90", 2, 128, 16, DecodeTiles(64, 4, 3, 2, transposed=True, early_merge=True)),
    DecodeRow("sm_90", 2, 128, 64, DecodeTiles(32, 4, 2, 2, early_merge=True)),
    # 64 query heads of 192 on 8 KV heads, 64 x 4k: 387 us; 399 as one block of 256 columns, 393 with 2 programs an SM.
    DecodeRow("sm_90", 2, 192, 16, DecodeTiles(32, 4, 3, 3, dim_block=64, early_merge=True), (Codes.NONE,)),
    # gemma 64 x 4k: 494 us, 1.05 of the floor; 495 as one block, 602 transposed.
    DecodeRow("sm_90", 2, 256, 16, DecodeTiles(32, 4, 3, 2, dim_block=128, early_merge=True), (Codes.NONE,)),
    DecodeRow("sm_90", 2, 256, 16, DecodeTiles(32, 4, 3, 2, early_merge=True)),
    # With blocks of 32 keys up to 112 bytes of registers spill.
    DecodeRow("sm_90", 2, 256, 64, DecodeTiles(16, 8, 2, 1, early_merge=True), (Codes.BY_TOKEN,)),
    DecodeRow("sm_90", 2, 256, 64, DecodeTiles(32, 8, 2, 1, early_merge=True)),
    # Of 512 columns; with 64 query heads a row spills.
    DecodeRow("sm_90", 2, 512, 16, DecodeTiles(32, 8, 3, 1, early_merge=True)),
    DecodeRow("sm_90", 2, 512, 32, DecodeTiles(32, 8, 2, 1, early_merge=True)),
    DecodeRow("sm_90", 4, 128, 16, DecodeTiles(16, 4, 2, 2)),
    DecodeRow("sm_90", 4, 256, 16, DecodeTiles(16, 8, 2, 2)),
    DecodeRow("sm_90", 4, 512, 16, DecodeTiles(16, 8, 1, 1)),
    DecodeRow("sm_", 2, 128, 16, DecodeTiles(32, 4, 2, 2)),
    DecodeRow("sm_", 2, 256, 16, DecodeTiles(32, 4, 2, 1)),
    DecodeRow("sm_", 2, 512, 16, DecodeTiles(16, 8, 2, 1)),
    DecodeRow("sm_", 4, 128, 16, DecodeTiles(16, 4, 2, 2)),
    DecodeRow("sm_", 4, 256, 16, DecodeTiles(16, 8, 1, 1)),
    # Two blocks in flight, with the loads of factors, spill up to 38 SGPRs, with factors of heads 1. 91 to 196 VGPRs,
    # 2 to 32 KiB of LDS.
    DecodeRow("gfx942", 2, 128, 16, DecodeTiles(32, 4, 1, 3), (Codes.BY_TOKEN,)),
    DecodeRow("gfx942", 2, 128, 32, DecodeTiles(16, 4, 1, 3), (Codes.BY_TOKEN,)),
    DecodeRow("gfx942", 2, 256, 32, DecodeTiles(16, 4, 1, 2), (Codes.BY_TOKEN,)),
    DecodeRow("gfx942", 2, 256, 16, DecodeTiles(32, 4, 1, 2), (Codes.BY_ROW,)),
    # 124 to 153 VGPRs, 16 KiB of LDS: 3 workgroups a CU.
    DecodeRow("gfx942", 2, 64, 16, DecodeTiles(32, 4, 2, 3, heads_per_row=2)),
    DecodeRow("gfx942", 2, 128, 16, DecodeTiles(32, 4, 2, 3)),
    # 113 to 140 VGPRs, 9 KiB of LDS: 3 workgroups a CU, with Triton 3.9 room for a fourth.
    DecodeRow("gfx942", 2, 128, 32, DecodeTiles(16, 4, 2, 3)),
    # 187 to 208 VGPRs, 32 KiB of LDS: 2 workgroups a CU.
    DecodeRow("gfx942", 2, 256, 16, DecodeTiles(32, 4, 2, 2)),
    DecodeRow("gfx942", 2, 256, 32, DecodeTiles(16, 4, 2, 2)),
    # 154 to 242 VGPRs, 33 KiB of LDS: one workgroup of 8 waves, 2 a SIMD. 4 waves spill scalar registers.
    DecodeRow("gfx942", 2, 512, 32, DecodeTiles(16, 8, 2, 1), (Codes.NONE, Codes.BY_ROW)),
    DecodeRow("gfx942", 4, 128, 32, DecodeTiles(16, 4, 2, 2)),
    DecodeRow("gfx942", 4, 256, 32, DecodeTiles(16, 8, 1, 1)),
    # Two blocks in flight spill up to 63 SGPRs. 90 to 252 VGPRs, 2 to 32 KiB of LDS.
    DecodeRow("gfx950", 2, 128, 16, DecodeTiles(32, 4, 1, 2), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 128, 32, DecodeTiles(16, 4, 1, 3), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 256, 16, DecodeTiles(32, 4, 1, 2), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 256, 32, DecodeTiles(16, 4, 1, 2), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 512, 32, DecodeTiles(16, 8, 1, 1), (Codes.BY_TOKEN,)),
    DecodeRow("gfx950", 2, 64, 16, DecodeTiles(32, 4, 2, 3, heads_per_row=2), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 128, 16, DecodeTiles(32, 4, 2, 3), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 128, 32, DecodeTiles(16, 4, 2, 3), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 256, 16, DecodeTiles(32, 4, 1, 2), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 256, 32, DecodeTiles(16, 4, 1, 2), (Codes.BY_ROW,)),
    DecodeRow("gfx950", 2, 512, 32, DecodeTiles(16, 8, 1, 1), (Codes.BY_ROW,)),
    # 112 to 132 VGPRs, 16 KiB of LDS (33 with Triton's asynchronous copies): 4 workgroups a CU. Transposed blocks of 64
    # have 2/5 of the MFMAs, 180 to 212 VGPRs, and leave 2.
    DecodeRow("gfx950", 2, 64, 16, DecodeTiles(32, 4, 2, 4, heads_per_row=2)),
    DecodeRow("gfx950", 2, 128, 16, DecodeTiles(32, 4, 2, 4)),
    # 112 to 144 VGPRs, 9 KiB of LDS (17): 3 workgroups a CU, with Triton 3.9 room for a fourth.
    DecodeRow("gfx950", 2, 128, 32, DecodeTiles(16, 4, 2, 3)),
    DecodeRow("gfx950", 2, 256, 16, DecodeTiles(32, 4, 2, 2)),
    DecodeRow("gfx950", 2, 256, 32, DecodeTiles(16, 4, 2, 2)),
    # 166 to 200 VGPRs, 67 KiB of LDS: one workgroup of 8 waves, 2 a SIMD.
    DecodeRow("gfx950", 2, 512, 32, DecodeTiles(16, 8, 2, 1)),
    DecodeRow("gfx950", 4, 128, 32, DecodeTiles(16, 4, 2, 2)),
    DecodeRow("gfx950", 4, 256, 32, DecodeTiles(16, 8, 1, 1)),
    DecodeRow("interpreter", 2, 64, 16, DecodeTiles(16, 1, 1, 3, heads_per_row=2, paired=True), (Codes.BY_ROW,)),
    DecodeRow("interpreter", 2, 64, 16, DecodeTiles(16, 1, 1, 3, heads_per_row=2, paired=True), (Codes.BY_TOKEN,)),
    DecodeRow("interpreter", 2, 512, 16, DecodeTiles(16, 1, 1, 3, paired=True), (Codes.BY_ROW,)),
    DecodeRow("interpreter", 2, 512, 16, DecodeTiles(16, 1, 1, 3, paired=True), (Codes.BY_TOKEN,)),
    DecodeRow("interpreter", 2, 64, 16, DecodeTiles(16, 1, 1, 3, transposed=True, heads_per_row=2)),
    DecodeRow("interpreter", 2, 512, 16, DecodeTiles(16, 1, 1, 3, transposed=True)),
    DecodeRow("interpreter", 4, 512, 64, DecodeTiles(16, 1, 1, 3)),
)
EXTEND_ROWS = (
    # Of short sequences, 64 x 5 new tokens of 2505 and FA3 beside it. 12 x 4 heads: 49 us and 56.
    ExtendRow(
        "sm_90",
        2,
        64,
        ExtendTiles(16, 128, 4, 3, 2, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=16,
    ),
    ExtendRow(
        "sm_90",
        2,
        64,
        ExtendTiles(64, 64, 4, 3, 2, programs_per_cu=2, share_stages=3, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=64,
    ),
    # gptoss 1 x 2048 new + 6144 cached: 634 us, 646 with sinks; 657 with 4 warps, 791 and 847 with blocks of 32 keys
    # and 4 warps. With a window of 1024: 161; 184 with 4 warps, 174 with blocks of 32. Where blocks of V are narrower
    # than K's, what Triton 3.6 makes of blocks of 64 keys reads beyond the pages.
    ExtendRow(
        "sm_90",
        2,
        64,
        ExtendTiles(
            128, 64, 8, 3, max_registers=128, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4
        ),
        alike=True,
        codes=(Codes.NONE,),
    ),
    ExtendRow("sm_90", 2, 64, ExtendTiles(128, 64, 8, 3), alike=True, codes=(Codes.BY_ROW, Codes.BY_TOKEN)),
    ExtendRow(
        "sm_90",
        2,
        96,
        ExtendTiles(16, 64, 4, 3, 2, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=16,
    ),
    ExtendRow(
        "sm_90",
        2,
        96,
        ExtendTiles(32, 64, 4, 3, 2, dim_block=32, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    # 32 x 32 heads of 96, 777 new of 5778: 153 us where blocks of 128 columns took 266. With 128 registers at most, of
    # which two programs fit an SM, what scores may have beside that spills up to 48 bytes.
    ExtendRow(
        "sm_90",
        2,
        96,
        ExtendTiles(128, 64, 8, 3, 2, dim_block=32, programs_per_cu=1, share_stages=3, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
    ),
    # llama8b 1 x 2048 + 6144: 694 us, though up to 152 bytes spill; 844 in (128, 64, 8, 2), 758 in tiles of bfloat16.
    ExtendRow("sm_90", 2, 128, ExtendTiles(128, 64, 4, 2), alike=True, codes=(Codes.BY_ROW,)),
    # 820 us, though 8 bytes spill; 1230 in (128, 32, 8, 3), 931 in the tiles of bfloat16.
    ExtendRow("sm_90", 2, 128, ExtendTiles(64, 128, 4, 2), alike=True, codes=(Codes.BY_TOKEN,)),
    # With two stages 16 bytes spill.
    ExtendRow("sm_90", 2, 256, ExtendTiles(128, 32, 8, 1), codes=(Codes.BY_TOKEN,)),
    ExtendRow(
        "sm_90",
        2,
        128,
        ExtendTiles(32, 64, 4, 3, 2, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    ExtendRow(
        "sm_90",
        2,
        128,
        ExtendTiles(64, 64, 4, 3, 2, dim_block=64, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=64,
    ),
    # llama8b 1 x 2048 new + 6144 cached: 530 us, with a window of 4096 of 32k 362, though 8 to 32 bytes spill; 552 and
    # 409 in blocks of 32 keys, 589 and 541 in (128, 32, 4, 3), one program an SM. 16 new after 100k: 132, 173, 2766.
    ExtendRow(
        "sm_90",
        2,
        128,
        ExtendTiles(
            128,
            64,
            8,
            2,
            2,
            dim_block=64,
            max_registers=128,
            programs_per_cu=1,
            share_stages=3,
            rows_at_once=2,
            merge_stages=4,
        ),
        alike=True,
        codes=(Codes.NONE,),
    ),
    ExtendRow(
        "sm_90",
        2,
        192,
        ExtendTiles(64, 32, 4, 3, 2, dim_block=64, programs_per_cu=2, share_stages=3, one_launch=True, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=64,
    ),
    # 64 x 8 heads of 192, 777 new of 5778: 401 us, in (128, 32, 8, 2) of 256 columns 847; 580 with two stages. Shares
    # with three spill up to 80 bytes with Triton 3.9.
    ExtendRow(
        "sm_90",
        2,
        192,
        ExtendTiles(128, 64, 8, 3, 2, dim_block=64, programs_per_cu=1, share_stages=2, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
    ),
    ExtendRow(
        "sm_90",
        2,
        256,
        ExtendTiles(16, 64, 4, 2, 2, programs_per_cu=1, share_stages=2, one_launch=True, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=16,
    ),
    ExtendRow(
        "sm_90",
        2,
        256,
        # gemma, 16 x 16 new of 4112: 200 us, 254 without, though 48 bytes spill with Triton 3.6.
        ExtendTiles(32, 64, 4, 2, 2, dim_block=64, programs_per_cu=1, share_stages=2, one_launch=True, merge_stages=4),
        alike=True,
        codes=(Codes.NONE,),
        max_rows=32,
    ),
    # No row is shared: programs with shares spill up to 48 bytes.
    ExtendRow("sm_90", 2, 256, ExtendTiles(128, 32, 8, 2)),
    # 40 x 2 heads of 320, 824 new of 5940: 453 us, in (32, 32, 8, 2) of 512 columns 3602. Up to 200 bytes spill with
    # Triton 3.9, none of a plain layer with 3.6.
    ExtendRow(
        "sm_90",
        2,
        320,
        ExtendTiles(128, 32, 8, 2, 2, dim_block=64, programs_per_cu=1, share_stages=2),
        alike=True,
        codes=(Codes.NONE,),
    ),
    # The same of 512: 1277 us, though 32 bytes spill and up to 416 with Triton 3.9, and of 384 1021; 3789 and 3621 in
    # (32, 32, 8, 2), and of 512 1740 with 4 warps. Blocks of 128 rows do not fit.
    ExtendRow(
        "sm_90",
        2,
        512,
        ExtendTiles(64, 32, 8, 2, 2, dim_block=64, programs_per_cu=1, share_stages=2),
        alike=True,
        codes=(Codes.NONE,),
    ),
    # Beside rows of up to 32 elements. Blocks of 64 rows spill where a head is one block of columns.
    ExtendRow(
        "sm_90",
        2,
        512,
        ExtendTiles(32, 32, 8, 2, programs_per_cu=1, share_stages=2, merge_stages=4),
        codes=(Codes.NONE,),
    ),
    ExtendRow("sm_90", 2, 512, ExtendTiles(32, 32, 8, 2), codes=(Codes.BY_ROW, Codes.BY_TOKEN)),
    ExtendRow("sm_90", 4, 128, ExtendTiles(32, 16, 4, 1)),
    ExtendRow("sm_90", 4, 256, ExtendTiles(16, 16, 4, 1)),
    ExtendRow("sm_90", 4, 512, ExtendTiles(16, 16, 8, 1)),
    ExtendRow("sm_", 2, 128, ExtendTiles(64, 32, 4, 2)),
    ExtendRow("sm_", 2, 256, ExtendTiles(32, 32, 4, 1)),
    ExtendRow("sm_", 2, 512, ExtendTiles(32, 16, 8, 1)),
    ExtendRow("sm_", 4, 128, ExtendTiles(32, 16, 8, 1)),
    ExtendRow("sm_", 4, 256, ExtendTiles(16, 16, 4, 1)),
    # With 4 waves up to 60 VGPRs spill, with 8 and blocks of 32 keys 3 with Triton 3.6. 123 to 256 VGPRs.
    ExtendRow("gfx942", 2, 64, ExtendTiles(128, 32, 4, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx942", 2, 128, ExtendTiles(128, 16, 8, 2, waves_per_eu=2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx942", 2, 256, ExtendTiles(128, 16, 8, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx942", 2, 64, ExtendTiles(128, 32, 4, 2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx942", 2, 128, ExtendTiles(128, 32, 8, 2, waves_per_eu=2), codes=(Codes.BY_ROW,)),
    # Of whole rows. Programs with shares keep up to 17 SGPRs in lanes of VGPRs.
    # 120 to 180 VGPRs, 16 KiB of LDS: 2 or 3 workgroups a CU.
    ExtendRow("gfx942", 2, 64, ExtendTiles(128, 32, 4, 2, programs_per_cu=2, share_stages=2)),
    # 189 to 236 VGPRs, 32 KiB of LDS: 2 workgroups a CU. Without waves_per_eu up to 312 with Triton 3.6.
    ExtendRow("gfx942", 2, 128, ExtendTiles(128, 32, 4, 2, waves_per_eu=2, programs_per_cu=2)),
    # 110 to 190 VGPRs, 64 KiB of LDS: one workgroup of 8 waves, 2 a SIMD. Blocks of 32 keys: twice the issue cycles.
    ExtendRow("gfx942", 2, 256, ExtendTiles(128, 16, 8, 2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx942", 2, 256, ExtendTiles(128, 16, 8, 2, programs_per_cu=1)),
    # 171 to 214 VGPRs, 64 KiB of LDS: one workgroup of 8 waves, 2 a SIMD.
    ExtendRow("gfx942", 2, 512, ExtendTiles(64, 16, 8, 2), codes=(Codes.BY_ROW, Codes.BY_TOKEN)),
    ExtendRow("gfx942", 2, 512, ExtendTiles(64, 16, 8, 2, programs_per_cu=1)),
    ExtendRow("gfx942", 4, 128, ExtendTiles(64, 16, 4, 1, programs_per_cu=1)),
    ExtendRow("gfx942", 4, 256, ExtendTiles(32, 16, 8, 1, programs_per_cu=1)),
    # With blocks of 128 rows up to 69 VGPRs spill; with factors of heads and 4 waves, 2.
    ExtendRow("gfx950", 2, 64, ExtendTiles(128, 32, 4, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx950", 2, 128, ExtendTiles(64, 16, 4, 2, waves_per_eu=2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx950", 2, 256, ExtendTiles(64, 16, 8, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx950", 2, 512, ExtendTiles(32, 16, 8, 2), codes=(Codes.BY_TOKEN,)),
    ExtendRow("gfx950", 2, 64, ExtendTiles(128, 32, 4, 2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx950", 2, 128, ExtendTiles(128, 32, 8, 2, waves_per_eu=2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx950", 2, 256, ExtendTiles(128, 16, 8, 2), codes=(Codes.BY_ROW,)),
    ExtendRow("gfx950", 2, 512, ExtendTiles(32, 16, 8, 2), codes=(Codes.BY_ROW,)),
    # 120 to 180 VGPRs, 16 KiB of LDS: 2 or 3 workgroups a CU.
    ExtendRow("gfx950", 2, 64, ExtendTiles(128, 32, 4, 2, programs_per_cu=2, share_stages=2)),
    # 179 to 248 VGPRs, 32 KiB of LDS: 2 workgroups a CU.
    ExtendRow("gfx950", 2, 128, ExtendTiles(128, 32, 4, 2, waves_per_eu=2, programs_per_cu=2)),
    # 122 to 183 VGPRs, 64 KiB of LDS: one workgroup of 8 waves, 2 a SIMD.
    ExtendRow("gfx950", 2, 256, ExtendTiles(128, 16, 8, 2, programs_per_cu=1)),
    # 193 to 226 VGPRs, 68 KiB of LDS: one workgroup of 8 waves, 2 a SIMD.
    ExtendRow("gfx950", 2, 512, ExtendTiles(64, 16, 8, 2, programs_per_cu=1)),
    ExtendRow("gfx950", 4, 128, ExtendTiles(64, 16, 4, 1, programs_per_cu=1)),
    ExtendRow("gfx950", 4, 256, ExtendTiles(32, 16, 8, 1, programs_per_cu=1)),
    # Costs so small that short steps share rows too.
    ExtendRow(
        "interpreter",
        2,
        512,
        ExtendTiles(16, 16, 1, 1, programs_per_cu=1, one_launch=True, row_keys=8, split_keys=4),
        max_rows=16,
    ),
    ExtendRow("interpreter", 2, 512, ExtendTiles(32, 16, 1, 1, programs_per_cu=1, row_keys=8, split_keys=4)),
    ExtendRow(
        "interpreter",
        4,
        512,
        ExtendTiles(16, 16, 1, 1, programs_per_cu=1, one_launch=True, row_keys=8, split_keys=4),
        max_rows=16,
    ),
    ExtendRow("interpreter", 4, 512, ExtendTiles(32, 16, 1, 1, programs_per_cu=1, row_keys=8, split_keys=4)),
)


def decode_tiles(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: Codes = Codes.NONE,
) -> DecodeTiles:
    """The tiles of paged decode. Raises NoTiles."""
    for name in names_of(arch):
        rows = [
            row
            for row in DECODE_ROWS
            if row.arch == name
            and row.item_bytes == dtype.itemsize
            and codes in row.codes
            and max(head_dim, v_head_dim) <= row.max_head_dim
            and (row.tiles.heads_per_row == 1 or _pairs(row, gqa_ratio, num_kv_heads, head_dim, v_head_dim))
            and not (row.tiles.dim_block and row.tiles.columns(head_dim) != row.tiles.columns(v_head_dim))
        ]
        for row in rows:
            if gqa_ratio * row.tiles.heads_per_row <= row.max_q_rows:
                return row.tiles
        if rows:
            # Of rows for so many heads as can be, the one with the fewest columns.
            last = min(rows, key=lambda row: (len(row.codes), -row.max_q_rows, row.max_head_dim))
            return replace(last.tiles, head_blocks=-(-gqa_ratio // last.max_q_rows))
    raise NoTiles(no_row("decode", DECODE_ROWS, arch, dtype, (head_dim, v_head_dim), codes))


def extend_rows(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: Codes = Codes.NONE,
) -> tuple[ExtendRow, ...]:
    """The tuning rows of paged extend: of a step the first whose max_rows holds its rows. The last one holds any.

    Raises NoTiles.
    """
    for name in names_of(arch):
        found: list[ExtendRow] = []
        for row in EXTEND_ROWS:
            if (
                row.arch == name
                and row.item_bytes == dtype.itemsize
                and codes in row.codes
                and max(head_dim, v_head_dim) <= row.max_head_dim
                and not (row.alike and row.tiles.columns(head_dim) != row.tiles.columns(v_head_dim))
                and gqa_ratio <= row.max_rows
                and not (found and row.max_rows <= found[-1].max_rows)
            ):
                found.append(row)
                if row.max_rows == ANY_ROWS:
                    return tuple(found)
    raise NoTiles(no_row("extend", EXTEND_ROWS, arch, dtype, (head_dim, v_head_dim), codes))


def extend_tiles(
    arch: str,
    *,
    gqa_ratio: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    dtype: torch.dtype,
    codes: Codes = Codes.NONE,
) -> ExtendTiles:
    """The tiles of paged extend for sequences with any number of new tokens. Raises NoTiles."""
    rows = extend_rows(
        arch,
        gqa_ratio=gqa_ratio,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=dtype,
        codes=codes,
    )
    return rows[-1].tiles


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def equal_columns(dim: int, dim_block: int) -> int:
    """Columns of the blocks that rows of dim elements are cut into, of dim_block at most if it is not 0."""
    whole = max(16, next_power_of_2(dim))
    return min(dim_block, whole) if dim_block else whole


def names_of(arch: str) -> Iterator[str]:
    """The names under which rows of an arch are found, its own first."""
    yield arch
    if arch == "cpu":
        yield "interpreter"
    if arch.startswith("sm_"):
        yield "sm_"


def _pairs(row: DecodeRow, gqa_ratio: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> bool:
    """Whether the KV heads can be read as rows of row.tiles.heads_per_row."""
    heads = row.tiles.heads_per_row
    fits = num_kv_heads % heads == 0 and gqa_ratio * heads <= row.max_q_rows
    return fits and head_dim == v_head_dim == next_power_of_2(head_dim)


class _Row(Protocol):
    """What a row of any table says about the problems that it serves."""

    @property
    def arch(self) -> str: ...
    @property
    def item_bytes(self) -> int: ...
    @property
    def max_head_dim(self) -> int: ...
    @property
    def codes(self) -> tuple[Codes, ...]: ...


def no_row(
    what: str, rows: Sequence[_Row], arch: str, dtype: torch.dtype, dims: tuple[int, int], codes: Codes = Codes.NONE
) -> str:
    """Why no row of a table serves an arch, a dtype, head dims and codes: the nearest thing that one does serve."""
    given = str(dtype) if codes is Codes.NONE else f"{dtype} over {codes.value}"
    found = f"no {what} tiles for {arch} with {given} and head dims {dims[0]} and {dims[1]}; "
    for name in names_of(arch):
        of_kind = [row for row in rows if (row.arch, row.item_bytes) == (name, dtype.itemsize)]
        served = [row.max_head_dim for row in of_kind if codes in row.codes]
        if served:
            return f"{found}with {given} they may be up to {max(served)} there"
    names = dict.fromkeys(row.arch for row in rows)
    return f"{found}rows exist for {', '.join(f'{name}*' if name == 'sm_' else name for name in names)}"
