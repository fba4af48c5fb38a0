"""Tiles of attention over latent pages: how programs walk latent rows, a literal row for each arch and count of rows.

"sm_90" rows with times in their comments were measured on one H200 (torch 2.11, Triton 3.6, CUDA-graph replays). AMD's
were chosen from what the compiler reports: no spills, registers, LDS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rocm_attn.kernels.tuning.tiles import NoTiles, names_of


@dataclass(frozen=True, slots=True)
class LatentTiles:
    """How a program walks latent rows.

    query_rows:      rows of a query block: new tokens times query heads
    key_block:       keys of a block of the loop
    num_warps:       warps (waves on AMD) of a program
    num_stages:      key blocks whose loads are in flight at the same time
    programs_per_cu: programs that a decode grid holds for each compute unit
    row_cost:        what starting a row costs beside its key blocks, in blocks; at least 1
    chains:          sums of products that a score is added up of, 1 or 2: two are shorter, and take registers
    waves_per_eu:    waves a SIMD that the AMD compiler shall make room for; 0: its own choice, and elsewhere
    """

    query_rows: int
    key_block: int
    num_warps: int
    num_stages: int
    programs_per_cu: int = 1
    row_cost: int = 2
    chains: int = 1
    waves_per_eu: int = 0

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
        """At most 32 rows and 32 keys, for steps with packed masks.

        A row's bits of one key block are a word of 32; they take registers, and trees are small.
        """
        return replace(self, query_rows=min(32, self.query_rows), key_block=min(32, self.key_block))

    def options(self) -> dict[str, int]:
        """Launch options beside the warps."""
        return {"waves_per_eu": self.waves_per_eu} if self.waves_per_eu else {}


@dataclass(frozen=True, slots=True)
class LatentRow:
    """tiles serve an arch, an element size in bytes, and rows of up to max_dims elements: of V, and after it."""

    arch: str
    item_bytes: int
    max_dims: tuple[int, int]
    tiles: LatentTiles


# Elements of V, and after it.
_LARGEST = (512, 64)

# Of the rows that serve, the first one whose query_rows hold all that are wanted is taken, else the last one.
DECODE_ROWS: tuple[LatentRow, ...] = (
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(16, 32, 4, 3, 2, chains=2)),
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(32, 32, 8, 3, 2)),
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(64, 64, 8, 2)),
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(16, 32, 4, 1, 2)),
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(32, 16, 8, 1, 1)),
    LatentRow("gfx942", 2, _LARGEST, LatentTiles(64, 16, 4, 1)),
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(16, 16, 4, 2, 2)),
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(32, 16, 8, 1, 1)),
    LatentRow("gfx950", 2, _LARGEST, LatentTiles(64, 16, 4, 1)),
    LatentRow("interpreter", 2, _LARGEST, LatentTiles(16, 16, 1, 1, 3)),
    LatentRow("interpreter", 2, _LARGEST, LatentTiles(64, 16, 1, 1, 3)),
    LatentRow("interpreter", 4, _LARGEST, LatentTiles(16, 16, 1, 1, 3)),
    LatentRow("interpreter", 4, _LARGEST, LatentTiles(64, 16, 1, 1, 3)),
)
EXTEND_ROWS: tuple[LatentRow, ...] = (
    LatentRow("sm_90", 2, _LARGEST, LatentTiles(64, 64, 8, 2)),
    LatentRow("interpreter", 2, _LARGEST, LatentTiles(32, 16, 1, 1)),
    LatentRow("interpreter", 4, _LARGEST, LatentTiles(32, 16, 1, 1)),
)


def latent_decode_tiles(arch: str, *, num_rows: int, dims: tuple[int, int], dtype: torch.dtype) -> LatentTiles:
    """The tiles of latent decode. Raises NoTiles.

    num_rows: query heads times new tokens of a sequence, at most
    dims:     head_dim, v_head_dim
    """
    return _tiles(DECODE_ROWS, arch, num_rows, dims, dtype)


def latent_extend_tiles(arch: str, *, dims: tuple[int, int], dtype: torch.dtype) -> LatentTiles:
    """The tiles of latent extend. dims: head_dim, v_head_dim. Raises NoTiles."""
    return _tiles(EXTEND_ROWS, arch, 1, dims, dtype)


def _tiles(
    rows: tuple[LatentRow, ...], arch: str, num_rows: int, dims: tuple[int, int], dtype: torch.dtype
) -> LatentTiles:
    v_dim, rest = dims[1], dims[0] - dims[1]
    for name in names_of(arch):
        serving = [
            row.tiles
            for row in rows
            if row.arch == name
            and row.item_bytes == dtype.itemsize
            and v_dim <= row.max_dims[0]
            and rest <= row.max_dims[1]
        ]
        for tiles in serving:
            if num_rows <= tiles.query_rows:
                return tiles
        if serving:
            return serving[-1]
    raise NoTiles(
        f"no latent tiles for {arch} with {dtype} and rows of {v_dim} + {rest} elements; "
        f"rows exist for {', '.join(dict.fromkeys(row.arch for row in rows))}, for up to {_LARGEST[0]} + {_LARGEST[1]}"
    )
