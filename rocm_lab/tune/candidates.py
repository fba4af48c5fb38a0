"""The tiles that are tried in place of a table's choice: those that differ from it in one field, then those in two.

The effect of two changes together follows mostly from the effects of each alone. So pairs come later, and are left out
if one of the two changes was bad, unless the pair leaves a block of keys its size (keeps_block). Tiles that no kernel
takes, or whose loads in flight do not fit LDS, are not listed. Those of Hopper's kernels follow from a description of
the kernels (hopper.py), and some change several fields at once.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rocm_attn.kernels.tuning.cdna_tiles import key_blocks
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles
from rocm_attn.kernels.tuning.latent_tiles import HopperLatentTiles, LatentTiles
from rocm_attn.kernels.tuning.measured import Tiles, TileTable, refusal
from rocm_attn.kernels.tuning.tiles import CdnaTiles, CodeKind, DecodeTiles, ExtendTiles, next_power_of_2
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.tiles import codes_of, layer_of
from rocm_lab.tune import hopper
from rocm_lab.tune.jobs import TuneJob

Change = tuple[str, object]
Values = Mapping[str, tuple[object, ...]]

# Takes the place of changes for the row that serves without a search.
IN_USE: Change = ("the row", "in use")
_WARPS, _STAGES, _KEYS = (1, 2, 4, 8), (1, 2, 3, 4), (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class CandidateTiles:
    """Tiles, and their differences from the tiles of the table's choice."""

    tiles: Tiles
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.changes) or "the table's choice"


@functools.cache
def candidates(job: TuneJob, target: Target) -> tuple[CandidateTiles, ...]:
    """All candidates of a job, in order, without the choice in use.

    If the choice in use is another kernel's, the table's own choice is the first candidate.
    """
    values = _values(job, target)
    single: list[Change] = [
        (name, value) for name, each in values.items() for value in each if value != _present(job.tiles, name)
    ]
    pairs = ((one, other) for one, other in itertools.combinations(single, 2) if one[0] != other[0])
    none: tuple[tuple[Change, ...], ...] = () if job.tiles == job.in_use else ((),)
    return tuple(_taken(job, target, itertools.chain(none, ((one,) for one in single), pairs)))


def together(job: TuneJob, target: Target, gains: Sequence[Change]) -> list[CandidateTiles]:
    """Candidates with the first three gains, the first four, and so on: of each field its first one. Most last."""
    of_fields = list({change[0]: change for change in reversed(gains)}.values())[::-1]
    return list(_taken(job, target, (tuple(of_fields[:many]) for many in range(3, len(of_fields) + 1))))


def keeps_block(candidate: CandidateTiles, tiles: Tiles) -> bool:
    """True if two changes to these tiles leave a key block its size: more keys of fewer heads, or the reverse.

    Each alone changes the bytes in flight, so its ratio does not tell what both do.
    """
    new = candidate.tiles
    if not (isinstance(tiles, DecodeTiles) and isinstance(new, DecodeTiles)):
        return False
    is_as_large = new.key_block * new.heads_per_row == tiles.key_block * tiles.heads_per_row
    return is_as_large and {name for name, _ in candidate.changes} == {"key_block", "heads_per_row"}


def _taken(job: TuneJob, target: Target, changes: Iterable[tuple[Change, ...]]) -> Iterator[CandidateTiles]:
    """The candidates that a kernel takes."""
    layer = layer_of(job.problem)
    for each in changes:
        try:
            tiles = _changed(job.tiles, each)
        except ValueError:
            continue  # fields that exclude each other
        if not refusal(job.table, tiles, layer) and _fits(tiles, job.problem, target.lds_bytes):
            yield CandidateTiles(tiles, each)


def _present(tiles: Tiles, name: str) -> object:
    """The value of a field, or of one of the tiles within these."""
    if isinstance(tiles, HopperTiles):
        return hopper.layout_of(tiles) if name == "layout" else getattr(tiles, name, getattr(tiles.extend, name, None))
    return getattr(
        tiles.latent if isinstance(tiles, HopperLatentTiles) and hasattr(tiles.latent, name) else tiles, name
    )


def _changed(tiles: Tiles, changes: tuple[Change, ...]) -> Tiles:
    """Tiles with other values of fields, their own and of the tiles within them."""
    given: dict[str, Any] = dict(changes)
    if isinstance(tiles, HopperTiles) and "layout" in given:
        tiles = hopper.with_layout(tiles, given.pop("layout"))
    if isinstance(tiles, HopperTiles):
        within, given = _parted(given, tiles.extend)
        return replace(tiles, extend=replace(tiles.extend, **within), **given)
    if isinstance(tiles, HopperLatentTiles):
        within, given = _parted(given, tiles.latent)
        return replace(tiles, latent=replace(tiles.latent, **within), **given)
    return replace(tiles, **given)


def _parted(given: dict[str, Any], within: ExtendTiles | LatentTiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of fields of the tiles within, and the others."""
    names = {field.name for field in fields(within)}
    return {n: v for n, v in given.items() if n in names}, {n: v for n, v in given.items() if n not in names}


def _values(job: TuneJob, target: Target) -> Values:
    """The values of each field that may be tried: only fields that change a kernel's time and not its results."""
    if isinstance(job.tiles, HopperTiles):
        return dict(hopper.extend_values(job.tiles, job.problem, target.lds_bytes))
    if isinstance(job.tiles, HopperLatentTiles):
        return dict(hopper.latent_values())
    values = dict(_values_of(job))
    if isinstance(job.tiles, CdnaTiles):
        values["key_block"] = key_blocks(target.arch, job.problem.page_format.encoding)
    if target.is_amd:
        values["waves_per_eu"] = (0, 1, 2, 3)
    elif isinstance(job.tiles, ExtendTiles):
        values["max_registers"] = (0, 128, 168)
    elif isinstance(job.tiles, DecodeTiles):
        values["max_registers"] = (0, 168, 200)
    known = {field.name for field in fields(job.tiles)}
    return {name: each for name, each in values.items() if name in known}


def _values_of(job: TuneJob) -> Iterator[tuple[str, tuple[object, ...]]]:
    tiles, problem = job.tiles, job.problem
    if isinstance(tiles, CdnaTiles):
        yield "programs_per_cu", (4, 6, 8, 12, 16)
        yield "row_cost", (1, 2, 4)
        return
    yield "key_block", _KEYS
    yield "num_warps", _WARPS if job.kind.decodes else (2, 4, 8)
    yield "num_stages", _STAGES
    if isinstance(tiles, DecodeTiles):
        yield "programs_per_cu", (1, 2, 3, 4, 6, 8, 12, 16)
        yield "dim_block", (0, *_dim_blocks(problem, max(_heads_at_once(problem))))
        yield "transposed", (False, True)
        yield "heads_per_row", _heads_at_once(problem)
        yield "row_cost", (1, 2, 4)
        yield "row_end", (0, 1)
        yield "side_by_side", (False, True)
        if codes_of(problem) is not CodeKind.NONE:
            yield "paired", (False, True)
    elif isinstance(tiles, ExtendTiles):
        least = max(16, min(128, next_power_of_2(job.max_rows) // 2)) if job.max_rows <= 128 else 32
        yield "query_rows", tuple(rows for rows in (16, 32, 64, 128, 256) if least <= rows)
        yield "dim_block", (0, *_dim_blocks(problem, 1))
        yield "diagonal_stages", (1, 2)
        yield "share_stages", (1, 2, 3)
        yield "share_block", (0, 16, 32)
        yield "programs_per_cu", (0, 1, 2)
        yield "one_launch", (False, True)
    elif isinstance(tiles, LatentTiles):
        yield "query_rows", (16, 32, 64, 128)
        yield "wide", (False, True)
        yield "chains", (1, 2)
        if job.table is TileTable.LATENT_DECODE:
            yield "programs_per_cu", (1, 2, 3, 4)
            yield "row_cost", (1, 2, 4)


def _heads_at_once(problem: Problem) -> tuple[int, ...]:
    """Numbers of KV heads that can be read as one: divisors of all heads, with up to 256 columns."""
    heads = range(1, min(16, problem.num_kv_heads) + 1)
    return tuple(n for n in heads if problem.num_kv_heads % n == 0 and (n == 1 or n * problem.head_dim <= 256))


def _dim_blocks(problem: Problem, heads: int) -> tuple[int, ...]:
    """Columns per block that cut the elements of `heads` heads, read as one, into several blocks."""
    columns = max(problem.head_dim, problem.v_head_dim) * heads
    return tuple(block for block in (32, 64, 128) if block < columns)


def _fits(tiles: Tiles, problem: Problem, lds_bytes: int) -> bool:
    """True if the key blocks whose loads are in flight fit LDS; other data of the compiler in LDS is not known."""
    if isinstance(tiles, CdnaTiles):
        return True  # its blocks are in registers
    if isinstance(tiles, HopperTiles | HopperLatentTiles):
        return hopper.fits(tiles, problem, lds_bytes)
    heads = 1 if isinstance(tiles, LatentTiles) else tiles.heads_per_row
    # In a latent pool V is a part of K.
    dims = problem.head_dim + (0 if isinstance(tiles, LatentTiles) else problem.v_head_dim)
    in_flight = (tiles.num_stages - 1) * tiles.key_block * dims * heads * problem.page_format.encoding.dtype.itemsize
    return not lds_bytes or in_flight <= lds_bytes
