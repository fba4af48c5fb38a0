"""Tiles of the product of rows with the matrices of their experts. expert.json has the rows.

Rows of "sm_90" with 2 bytes were measured on an H200: 128 experts of 2048 x 768, 8 of a token, 1 to 8,192 tokens. No
other row was. Those of "gfx942" and "gfx950" have no spills. For more than 16 rows their hot loops were counted, as
docs/cycles.md says: they reach 79 and 90 % of the matrix units' ceiling with many rows, and 68 and 80 % with up to 192.
Tiles of 128 x 128 reach 87 % on gfx942, but take half as many bytes more from memory that all dies share.

Rows of "one_order" have one matrix instruction, so that all of an arch's give the same bits. With many rows they reach
75 and 80 %.
"""

from dataclasses import dataclass

import torch

from rocm_attn.kernels.tuning.tile_choices import TableFile, choices_of
from rocm_attn.kernels.tuning.tiles import NoTiles


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The cut of an expert's product by programs.

    rows, columns: of the result
    step:          elements of a row that are multiplied at a time
    num_warps:     warps (waves on AMD) of a program
    num_stages:    steps whose loads are in flight at the same time
    matrix_dim:    rows and columns of a matrix instruction on AMD; 0: Triton chooses
    """

    rows: int
    columns: int
    step: int
    num_warps: int
    num_stages: int
    matrix_dim: int = 0

    def options(self) -> dict[str, int]:
        """Launch options in addition to warps and stages."""
        return {"matrix_instr_nonkdim": self.matrix_dim} if self.matrix_dim else {}


@dataclass(frozen=True, slots=True)
class ExpertTileChoice:
    """tiles serve an arch, an element size in bytes and groups of up to max_rows rows."""

    arch: str
    item_bytes: int
    tiles: ExpertTiles
    max_rows: int = 2**31


# If the tiles for other numbers of rows may give other bits, those for so few serve any: 16 fill a matrix instruction.
_ROWS_OF_ANY = 16
# The first row that serves wins.
EXPERT_CHOICES = TableFile(ExpertTileChoice, "expert.json", "expert")
ONE_ORDER_CHOICES = TableFile(ExpertTileChoice, "expert.json", "one_order")


def expert_tiles(
    arch: str, dtype: torch.dtype, rows: int, table: TableFile[ExpertTileChoice] = EXPERT_CHOICES
) -> ExpertTiles:
    """The tiles for groups of `rows` rows on average. Raises NoTiles."""
    for of_arch in choices_of(table, arch, dtype):
        for row in of_arch:
            if rows <= row.max_rows:
                return row.tiles
    archs = ", ".join(dict.fromkeys(row.arch for row in table))
    raise NoTiles(f"no tiles of experts for {arch} with {dtype}; rows exist for {archs}")


def tiles_of_fixed_bits(arch: str, dtype: torch.dtype, rows: int) -> ExpertTiles:
    """The tiles for groups of `rows` rows on average, whose bits are the same for any. Raises NoTiles."""
    if any(choices_of(ONE_ORDER_CHOICES, arch, dtype)):
        return expert_tiles(arch, dtype, rows, ONE_ORDER_CHOICES)
    return expert_tiles(arch, dtype, _ROWS_OF_ANY)
