"""The tiles of a layer's Triton kernels, and the row that each comes from: a measured one, or one of the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from rocm_attn.kernels.tuning.measured import Tiles, TileTable
from rocm_attn.kernels.tuning.tiles import ANY_ROWS, NoTiles
from rocm_attn.machine.target import Target
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.providers.select import Selection
from rocm_attn.providers.tiles import (
    cdna_tiles_of,
    decode_tiles_of,
    extend_choices_of,
    hopper_latent_tiles_of,
    hopper_tiles_of,
    latent_decode_tiles_of,
    latent_extend_tiles_of,
    measured_choice,
)

_FILES = {
    TileTable.DECODE: "kernels/tuning/decode.json",
    TileTable.CDNA_DECODE: "kernels/tuning/cdna.json",
    TileTable.EXTEND: "kernels/tuning/extend.json",
    TileTable.LATENT_DECODE: "kernels/tuning/latent.json",
    TileTable.LATENT_EXTEND: "kernels/tuning/latent.json",
    TileTable.HOPPER_EXTEND: "kernels/tuning/hopper.json",
    TileTable.HOPPER_LATENT_DECODE: "kernels/tuning/latent_tiles.py",
}
# The kernels of each table, by the ends of their names.
_KERNELS = {
    TileTable.DECODE: ("triton.decode",),
    TileTable.CDNA_DECODE: ("triton.cdna_decode",),
    TileTable.EXTEND: ("triton.extend", "triton.cdna_extend", "triton.hopper_extend"),
    TileTable.LATENT_DECODE: ("triton.latent_decode",),
    TileTable.LATENT_EXTEND: ("triton.latent_extend",),
    TileTable.HOPPER_EXTEND: ("triton.hopper_extend", "triton.hopper_decode"),
    TileTable.HOPPER_LATENT_DECODE: ("triton.hopper_latent_decode",),
}

_TILES: Mapping[TileTable, Callable[[Problem, Target], Tiles]] = {
    TileTable.DECODE: decode_tiles_of,
    TileTable.CDNA_DECODE: cdna_tiles_of,
    TileTable.LATENT_DECODE: latent_decode_tiles_of,
    TileTable.LATENT_EXTEND: latent_extend_tiles_of,
    TileTable.HOPPER_EXTEND: hopper_tiles_of,
    TileTable.HOPPER_LATENT_DECODE: hopper_latent_tiles_of,
}


@dataclass(frozen=True, slots=True)
class TileChoice:
    """Tiles, their table, and their origin. what: table, and the steps if the row is for some of them"""

    what: str
    tiles: Tiles
    origin: str
    is_measured: bool

    def line(self) -> str:
        """The row in one line, without fields that have their defaults."""
        return f"{self.what}: {', '.join(_given(self.tiles))}; {self.origin}"

    def as_json(self) -> dict[str, Any]:
        """The row for --json."""
        return {"what": self.what, "tiles": asdict(self.tiles), "origin": self.origin, "measured": self.is_measured}


def _given(tiles: Any) -> Iterator[str]:
    """Fields without their defaults, those of tiles within tiles first."""
    for field in fields(tiles):
        value = getattr(tiles, field.name)
        if is_dataclass(value):
            yield from _given(value)
        elif value != field.default:
            yield f"{field.name} {value}"


def tile_choices(selection: Selection) -> list[TileChoice]:
    """Rows of the searched kernels that serve a kind of layer; none if other kernels do."""
    names = {kernel.entry.name for kernel in selection.kernels.values()}
    problem, target = selection.problem, selection.target
    tables = [table for table, kernels in _KERNELS.items() if names.intersection(kernels)]
    try:
        return [choice for table in tables for choice in _choices(table, problem, target)]
    except NoTiles:
        return []


def _choices(table: TileTable, problem: Problem, target: Target) -> Iterator[TileChoice]:
    assert (problem.pool is PoolKind.LATENT) == ("latent" in table.value)
    if table is TileTable.EXTEND:
        for choice in extend_choices_of(problem, target):
            few = "" if choice.max_rows == ANY_ROWS else f", up to {choice.max_rows // problem.gqa_ratio} new tokens"
            yield _choice(table, few, choice.tiles, problem, target, choice.max_rows)
        return
    yield _choice(table, "", _TILES[table](problem, target), problem, target, ANY_ROWS)


def _choice(table: TileTable, few: str, tiles: Tiles, problem: Problem, target: Target, max_rows: int) -> TileChoice:
    choice = measured_choice(table, problem, target, max_rows)
    origin = f"the row of {_FILES[table]} for {target.arch}" if choice is None else choice.origin()
    return TileChoice(f"{table.value}{few}", tiles, origin, choice is not None)
