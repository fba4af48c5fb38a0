"""Tiles: the shapes that the attention kernels are compiled with.

Rows are in decode.json and extend.json (tile_choices.py).

"sm_90" rows were measured on one H200 (torch 2.11, Triton 3.6, CUDA-graph replays), or follow one that was. No AMD row
was measured: "gfx942" and "gfx950" rows were chosen from the compiler's reports (no spills, registers, LDS) and from
bounds on the hot loop; docs/amd_tuning.md says how. "sm_" serves NVIDIA GPUs that have no row of their own with shapes
that fit all of them. "interpreter" is Triton's interpreter on a CPU.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch

# A query block with this fraction of the rows that it can have gets no fewer query heads for more of them.
_FULL = 0.97


class CodeKind(enum.Enum):
    """The kind of K and V: eight-bit codes or not, and which elements share a scale. Both take registers.

    NONE:     elements are read unchanged
    BY_ROW:   a row of q meets one scale of K and one of V: of the layer, or of its KV head
    BY_TOKEN: keys have scales
    """

    NONE = "no codes"
    BY_ROW = "codes with scales of layers or heads"
    BY_TOKEN = "codes with scales of tokens"


class NoTiles(LookupError):
    """No tuning choice serves an arch, dtype or shape."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """The way decode walks its rows; a row is a sequence and heads_per_row KV heads, or a block of one's query heads.

    key_block:        keys of a block of the loop
    num_warps:        warps (waves on AMD) of a program
    num_stages:       key blocks whose loads are in flight at the same time
    programs_per_cu:  programs that the grid holds for each compute unit
    transposed:       whether scores are computed as k q^T: KV tokens then fill the long side of the matrix unit
    heads_per_row:    KV heads that are read as one, next to each other: two of 64 as one of 128. More than one only
                      with head_blocks 1, and more than two only if elements have no scales
    head_blocks:      blocks that the query heads of a KV head are cut into; each reads K and V
    row_cost:         cost of starting a row besides its key blocks, in blocks; 0: no more than a later part of it
    row_end:          cost of finishing it, in blocks; 0: no more than an earlier part. At least 1 if row_cost is 0
    paired:           whether codes of K and of V are read in pairs, as float16 that matrix units take in turn; not
                      transposed
    waves_per_eu:     see ExtendTiles
    dim_block:        columns of the blocks that rows of K and of V are cut into; 0: they are one block. The last one
                      has as many as it needs, a power of two from 16 on: 72 columns are 64 and 16. Not paired, and with
                      several heads per row two blocks at most
    max_registers:    registers of a thread that NVIDIA's compiler may take; 0: its own choice
    early:            whether launches may begin while the one before still runs, and wait on the device for its end
                      ("programmatic dependent launch" of NVIDIA from sm_90 on)
    side_by_side:     whether programs work side by side, each on the same keys of a sequence's rows (DecodeCut)
    whole_blocks:     key blocks of a step's longest row, up to which no share is smaller than that row: adding up two
                      parts would take longer than reading both. Rows that are alike have a program each then
    merge_group:      parts of a row that the program that ends last with them adds up, and then results of this many
                      groups (merge_within.py); 0: a launch of its own adds up all
    """

    key_block: int
    num_warps: int
    num_stages: int
    programs_per_cu: int
    transposed: bool = False
    heads_per_row: int = 1
    head_blocks: int = 1
    row_cost: int = 2
    row_end: int = 0
    paired: bool = False
    waves_per_eu: int = 0
    dim_block: int = 0
    max_registers: int = 0
    early: bool = False
    side_by_side: bool = False
    whole_blocks: int = 0
    merge_group: int = 0

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
        """Launch options in addition to the warps."""
        named = {"waves_per_eu": self.waves_per_eu, "maxnreg": self.max_registers}
        return {name: value for name, value in named.items() if value}


@dataclass(frozen=True, slots=True)
class CdnaTiles(DecodeTiles):
    """The way decode for CDNA (kernels/cdna) walks the same rows: key_block is one of cdna_tiles.KEY_BLOCKS.

    A program is one wave, which has all columns; the next block is in flight, in its registers, and num_stages is 1.
    """


@dataclass(frozen=True, slots=True)
class ExtendTiles:
    """The cut of new tokens and KV by paged extend.

    query_rows:       rows of a query block: new tokens times the query heads that share a KV head
    key_block:        keys of a block of the loop
    num_warps:        warps (waves on AMD) of a program
    num_stages:       key blocks whose loads are in flight, if all keys are visible to all rows
    diagonal_stages:  the same on the diagonal
    waves_per_eu:     waves per SIMD that the AMD compiler must make room for; 0: its own choice, and elsewhere
    dim_block:        columns of the equal blocks that a head dim is cut into; 0: it is one block
    max_registers:    registers of a thread that NVIDIA's compiler may take for whole rows; 0: its own choice
    programs_per_cu:  programs for each compute unit that share out the longest rows; 0: every row is one program's
    share_stages:     num_stages of those programs, which take more registers
    share_block:      key_block of those programs, if they are a launch of their own; 0: key_block
    one_launch:       whether a launch takes shares and whole rows, and not one for each
    merge_stages:     parts of a row whose loads are in flight as they are added up
    row_keys:         cost of starting a row in addition to its keys, in keys
    split_keys:       cost of sharing for a program, in keys
    heads_per_row:    KV heads that are read as one, next to each other; more than one only with dim_block 0, and if
                      their query heads fit a query block
    early:            see DecodeTiles; but a launch of shares alone begins when the one before it has ended
    alike_keys:       cost, in keys, of cutting all rows into parts of one size, each a program of its own, if there are
                      two programs or more for each row: these begin no second row, and those of a sequence's rows read
                      the same keys at a time; 0: rows are not cut so
    by_number:        whether a block's page numbers are loaded once per page on NVIDIA (key_rows.py)
    fills:            whether blocks have fewer query heads of a KV head if more rows of a query block then have one:
                      for long sequences, since each block reads K and V
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
    share_block: int = 0
    one_launch: bool = False
    merge_stages: int = 1
    row_keys: int = 256
    split_keys: int = 384
    heads_per_row: int = 1
    early: bool = False
    alike_keys: int = 0
    by_number: bool = False
    fills: bool = False

    def columns(self, dim: int) -> int:
        """Columns of a block of rows of dim elements; a power of two."""
        return equal_columns(dim * self.heads_per_row, self.dim_block)

    def heads_per_block(self, gqa_ratio: int) -> int:
        """Query heads of one KV head, or of those that are read as one, that share a query block."""
        heads = gqa_ratio * self.heads_per_row
        return _filling_part(heads, self.query_rows) if self.fills else min(heads, self.query_rows)

    def head_blocks(self, gqa_ratio: int) -> int:
        """Blocks that the query heads of a KV head, or of those that are read as one, are cut into."""
        return -(-gqa_ratio * self.heads_per_row // self.heads_per_block(gqa_ratio))

    def has_equal_blocks(self, gqa_ratio: int) -> bool:
        """True if such blocks have equally many query heads."""
        return gqa_ratio * self.heads_per_row % self.heads_per_block(gqa_ratio) == 0

    def tokens_per_block(self, gqa_ratio: int) -> int:
        """New tokens in a full query block."""
        return self.query_rows // self.heads_per_block(gqa_ratio)

    def tokens_of(self, blocks: int, num_q_heads: int) -> int:
        """New tokens whose rows fill this number of query blocks."""
        return blocks * self.query_rows // num_q_heads

    def options(self) -> dict[str, int]:
        """Launch options in addition to the warps; those of whole rows, if others are shared out."""
        named = {"waves_per_eu": self.waves_per_eu, "maxnreg": self.max_registers}
        return {name: value for name, value in named.items() if value}

    def of_masked_steps(self, gqa_ratio: int, codes: CodeKind = CodeKind.NONE) -> ExtendTiles:
        """Tiles for steps with packed masks: half the rows, at most 32 keys; bits take registers, and trees are small.

        Tiles of short sequences, of up to 64 rows, stay unchanged: otherwise each would read its keys twice, or
        those before the mask slower than in other steps. KV heads that are read as one keep room for their query heads.
        """
        least = max(16, next_power_of_2(gqa_ratio * self.heads_per_row)) if self.heads_per_row > 1 else 16
        # With all rows sm_90 spills 32 bytes at head_dim 128.
        tiles = replace(self, query_rows=max(least, self.query_rows // 2), key_block=min(32, self.key_block))
        # With scales of tokens and two stages up to 33 SGPRs spill on AMD.
        return replace(tiles, num_stages=1) if codes is CodeKind.BY_TOKEN else tiles


@dataclass(frozen=True, slots=True)
class TilesByRows:
    """Other tiles, of steps with `least` to `most` rows for each program of these that runs at a time.

    Layers with a window have only those of any number of rows from `least` on.
    """

    tiles: DecodeTiles
    least: float = 0.0
    most: float = math.inf


@dataclass(frozen=True, slots=True)
class DecodeTileChoice:
    """tiles serve an arch, an element size in bytes, head dims up to max_head_dim and rows of up to max_q_rows heads.

    The last row that fits in all but max_q_rows serves larger groups of query heads too, cut into blocks.

    codes:   allowed codes of K and V
    any_dim: whether several KV heads of a row may have a dim that is no power of two
    by_rows: other tiles for steps with few or many rows; the first that serve win
    """

    arch: str
    item_bytes: int
    max_head_dim: int
    max_q_rows: int
    tiles: DecodeTiles
    codes: tuple[CodeKind, ...] = tuple(CodeKind)
    any_dim: bool = False
    by_rows: tuple[TilesByRows, ...] = ()


# More rows than a sequence can have, and more keys.
ANY_ROWS = 1 << 62


@dataclass(frozen=True, slots=True)
class ExtendTileChoice:
    """tiles serve an arch, an element size in bytes and head dims up to max_head_dim.

    alike:    whether they serve only rows of K and of V whose blocks have equally many columns
    codes:    see DecodeTileChoice
    max_window: for layers whose tokens see at most this many keys, their own among them; ANY_ROWS: for all
    max_rows: for steps whose sequences have at most this many rows: new tokens times the query heads of one KV head,
              however many are read as one. ANY_ROWS: for all
    """

    arch: str
    item_bytes: int
    max_head_dim: int
    tiles: ExtendTiles
    alike: bool = False
    codes: tuple[CodeKind, ...] = tuple(CodeKind)
    max_rows: int = ANY_ROWS
    max_window: int = ANY_ROWS


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


def equal_columns(dim: int, dim_block: int) -> int:
    """Columns of the blocks that rows of dim elements are cut into, at most dim_block if it is not 0."""
    whole = max(16, next_power_of_2(dim))
    return min(dim_block, whole) if dim_block else whole


def names_of(arch: str) -> Iterator[str]:
    """The names under which rows of an arch are found, its own first."""
    yield arch
    if arch == "cpu":
        yield "interpreter"
    if arch.startswith("sm_"):
        yield "sm_"


@functools.cache
def _filling_part(heads: int, query_rows: int) -> int:
    """The largest divisor of heads of which whole multiples fill nearly as many rows as those of any other."""
    parts = [part for part in range(1, min(heads, query_rows) + 1) if heads % part == 0]
    filled = {part: query_rows // part * part for part in parts}
    return max(part for part in parts if filled[part] >= _FULL * max(filled.values()))


class _TileChoice(Protocol):
    """The properties that a row of any table has for the problems that it serves."""

    @property
    def arch(self) -> str: ...
    @property
    def item_bytes(self) -> int: ...
    @property
    def max_head_dim(self) -> int: ...
    @property
    def codes(self) -> tuple[CodeKind, ...]: ...


def no_tile_choice(
    what: str,
    rows: Iterable[_TileChoice],
    arch: str,
    dtype: torch.dtype,
    dims: tuple[int, int],
    codes: CodeKind = CodeKind.NONE,
) -> str:
    """Returns why no row of a table serves an arch, a dtype, head dims and codes: the nearest case that one serves."""
    given = str(dtype) if codes is CodeKind.NONE else f"{dtype} over {codes.value}"
    found = f"no {what} tiles for {arch} with {given} and head dims {dims[0]} and {dims[1]}; "
    for name in names_of(arch):
        of_kind = [row for row in rows if (row.arch, row.item_bytes) == (name, dtype.itemsize)]
        served = [row.max_head_dim for row in of_kind if codes in row.codes]
        if served:
            return f"{found}with {given} they may be up to {max(served)} there"
    names = dict.fromkeys(row.arch for row in rows)
    return f"{found}rows exist for {', '.join(f'{name}*' if name == 'sm_' else name for name in names)}"
