"""The tiles of a layer's Triton kernels, and the row that each comes from: a measured one, or one of the tables."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, NamedTuple

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


class _Row(NamedTuple):
    """Where a table's row is, the kernels that have its tiles, and what finds the row; extend has several."""

    file: str
    kernels: tuple[str, ...]
    tiles_of: Callable[[Problem, Target], Tiles] | None = None


_ROWS = {
    TileTable.DECODE: _Row("decode.json", ("decode",), decode_tiles_of),
    TileTable.CDNA_DECODE: _Row("cdna.json", ("cdna_decode",), cdna_tiles_of),
    TileTable.EXTEND: _Row("extend.json", ("extend", "cdna_extend", "hopper_extend")),
    TileTable.LATENT_DECODE: _Row("latent.json", ("latent_decode",), latent_decode_tiles_of),
    TileTable.LATENT_EXTEND: _Row("latent.json", ("latent_extend",), latent_extend_tiles_of),
    TileTable.HOPPER_EXTEND: _Row("hopper.json", ("hopper_extend", "hopper_decode"), hopper_tiles_of),
    TileTable.HOPPER_LATENT_DECODE: _Row("latent_tiles.py", ("hopper_latent_decode",), hopper_latent_tiles_of),
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
    tables = [table for table, row in _ROWS.items() if names & {f"triton.{kernel}" for kernel in row.kernels}]
    try:
        return [choice for table in tables for choice in _choices(table, problem, target)]
    except NoTiles:
        return []


def _choices(table: TileTable, problem: Problem, target: Target) -> Iterator[TileChoice]:
    assert (problem.pool is PoolKind.LATENT) == ("latent" in table.value)
    tiles_of = _ROWS[table].tiles_of
    if tiles_of is None:
        for choice in extend_choices_of(problem, target):
            few = "" if choice.max_rows == ANY_ROWS else f", up to {choice.max_rows // problem.gqa_ratio} new tokens"
            yield _choice(table, few, choice.tiles, problem, target, choice.max_rows)
        return
    yield _choice(table, "", tiles_of(problem, target), problem, target, ANY_ROWS)


def _choice(table: TileTable, few: str, tiles: Tiles, problem: Problem, target: Target, max_rows: int) -> TileChoice:
    choice = measured_choice(table, problem, target, max_rows)
    origin = f"the row of kernels/tuning/{_ROWS[table].file} for {target.arch}" if choice is None else choice.origin()
    return TileChoice(f"{table.value}{few}", tiles, origin, choice is not None)
