"""The tiles of a layer's Triton kernels, and the row that each comes from: a measured one, or one of the tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from rocm_attn.kernels.tuning.measured import Table, Tiles
from rocm_attn.kernels.tuning.tiles import ANY_ROWS, NoTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.select import Selection
from rocm_attn.providers.tiles import (
    cdna_tiles_of,
    decode_tiles_of,
    extend_rows_of,
    latent_decode_tiles_of,
    latent_extend_tiles_of,
    measured_row,
)

_FILES = {
    Table.DECODE: "kernels/tuning/decode.json",
    Table.CDNA_DECODE: "kernels/tuning/cdna.json",
    Table.EXTEND: "kernels/tuning/extend.json",
    Table.LATENT_DECODE: "kernels/tuning/latent.json",
    Table.LATENT_EXTEND: "kernels/tuning/latent.json",
}
# The kernels of each table, by the ends of their names.
_KERNELS = {
    Table.DECODE: ("triton.decode",),
    Table.CDNA_DECODE: ("triton.cdna_decode",),
    Table.EXTEND: ("triton.extend", "triton.hopper_extend"),
    Table.LATENT_DECODE: ("triton.latent_decode",),
    Table.LATENT_EXTEND: ("triton.latent_extend",),
}


@dataclass(frozen=True, slots=True)
class TileRow:
    """Tiles, their table, and their origin. what: table, and the steps if the row is for some of them"""

    what: str
    tiles: Tiles
    origin: str
    is_measured: bool

    def line(self) -> str:
        """The row in one line, without fields that have their defaults."""
        given = [
            f"{field.name} {getattr(self.tiles, field.name)}"
            for field in fields(self.tiles)
            if getattr(self.tiles, field.name) != field.default
        ]
        return f"{self.what}: {', '.join(given)}; {self.origin}"

    def as_json(self) -> dict[str, Any]:
        """The row for --json."""
        tiles = {field.name: getattr(self.tiles, field.name) for field in fields(self.tiles)}
        return {"what": self.what, "tiles": tiles, "origin": self.origin, "measured": self.is_measured}


def tile_rows(selection: Selection) -> list[TileRow]:
    """Rows of the searched kernels that serve a kind of layer; none if other kernels do."""
    names = {kernel.row.name for kernel in selection.kernels.values()}
    problem, target = selection.problem, selection.target
    tables = [table for table, kernels in _KERNELS.items() if names.intersection(kernels)]
    try:
        return [row for table in tables for row in _rows(table, problem, target)]
    except NoTiles:
        return []


def _rows(table: Table, problem: Problem, target: Target) -> Iterator[TileRow]:
    assert (problem.pool is PoolKind.LATENT) == (table in (Table.LATENT_DECODE, Table.LATENT_EXTEND))
    if table is Table.EXTEND:
        for row in extend_rows_of(problem, target):
            few = "" if row.max_rows == ANY_ROWS else f", up to {row.max_rows // problem.gqa_ratio} new tokens"
            yield _row(table, few, row.tiles, problem, target, row.max_rows)
        return
    if table is Table.DECODE:
        tiles: Tiles = decode_tiles_of(problem, target)
    elif table is Table.CDNA_DECODE:
        tiles = cdna_tiles_of(problem, target)
    elif table is Table.LATENT_DECODE:
        tiles = latent_decode_tiles_of(problem, target)
    else:
        tiles = latent_extend_tiles_of(problem, target)
    yield _row(table, "", tiles, problem, target, ANY_ROWS)


def _row(table: Table, few: str, tiles: Tiles, problem: Problem, target: Target, max_rows: int) -> TileRow:
    row = measured_row(table, problem, target, max_rows)
    origin = f"the row of {_FILES[table]} for {target.arch}" if row is None else row.origin()
    return TileRow(f"{table.value}{few}", tiles, origin, row is not None)
