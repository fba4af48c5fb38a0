"""The file of measured tiles that `rocm-attn tune` writes and runtimes read: JSON, with a version and a digest per row.

A file is accepted whole or refused with a sentence. Each row has a digest of its content: a row that was changed by
hand or damaged was not measured, and is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.measured import MeasuredLayer, MeasuredTileChoice, Provenance, Tiles, TileTable, refusal
from rocm_attn.machine.values_json import from_json
from rocm_attn.machine.whole_files import whole_file

# The version of the format; files of other versions are refused.
VERSION = 2
_REMEDY = "run `rocm-attn tune` again into another file, or remove this one"


@dataclass(frozen=True, slots=True)
class TuningFile:
    """The rows of a file, in order."""

    rows: tuple[MeasuredTileChoice, ...] = ()

    @classmethod
    def read(cls, place: Path) -> TuningFile:
        """Reads a file. Raises BadSetting with a sentence if it cannot be read, or is no such file."""
        try:
            text = place.read_bytes().decode()
        except FileNotFoundError as error:
            raise BadSetting(
                f"there is no tuning file {place}; name one that `rocm-attn tune` wrote, or off"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise BadSetting(f"the tuning file {place} cannot be read ({error}); {_REMEDY}") from error
        try:
            return cls(_choices(json.loads(text)))
        # Content that is nested too deeply is damaged like any other.
        except (ValueError, RecursionError) as error:
            raise BadSetting(f"the tuning file {place} is refused: {error}; {_REMEDY}") from error

    def with_choice(self, choice: MeasuredTileChoice) -> TuningFile:
        """A copy with a row, which replaces an earlier one for its layer's steps, arch, units and Triton."""
        return TuningFile((*(other for other in self.rows if _key(other) != _key(choice)), choice))

    def write(self, place: Path) -> None:
        """Writes the file, whole or not at all. Raises BadSetting if it cannot be written."""
        content = {"version": VERSION, "rows": [as_json(choice) for choice in self.rows]}
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(place) as part:
                part.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise BadSetting(f"the tuning file {place} cannot be written ({error}); choose another one") from error


def as_json(choice: MeasuredTileChoice) -> dict[str, Any]:
    """A row in the form of the file."""
    said = {
        "table": choice.table.value,
        "layer": dataclasses.asdict(choice.layer),
        "max_rows": choice.max_rows,
        "tiles": dataclasses.asdict(choice.tiles),
        "measured": dataclasses.asdict(choice.measured),
    }
    plain: dict[str, Any] = json.loads(json.dumps(said))  # turns tuples into lists, as they are read back
    return {**plain, "digest": _digest(plain)}


def _key(choice: MeasuredTileChoice) -> tuple[object, ...]:
    of = choice.measured
    return choice.table.rivals, choice.layer, choice.max_rows, of.arch, of.compute_units, of.triton


def _digest(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _choices(content: object) -> tuple[MeasuredTileChoice, ...]:
    """The rows of a parsed file. Raises ValueError that says what is wrong."""
    if not isinstance(content, dict) or "version" not in content:
        raise ValueError("it is not a JSON object with a version")
    if content["version"] != VERSION or isinstance(content["version"], bool):
        raise ValueError(f"its version is {content['version']!r}, and this release reads {VERSION}")
    given = _fields(content, ("version", "rows"), "the file")
    if not isinstance(given["rows"], list):
        raise ValueError("rows is not a list")
    return tuple(_choice(choice, f"row {number}") for number, choice in enumerate(given["rows"]))


def _choice(content: object, where: str) -> MeasuredTileChoice:
    given = _fields(content, ("table", "layer", "max_rows", "tiles", "measured", "digest"), where)
    names = [table.value for table in TileTable]
    if given["table"] not in names:
        raise ValueError(f"{where}: table is {given['table']!r}, not one of {', '.join(names)}")
    table = TileTable(given["table"])
    layer = from_json(MeasuredLayer, given["layer"], f"{where}, layer")
    tiles: Tiles = from_json(table.tiles, given["tiles"], f"{where}, tiles")
    measured = from_json(Provenance, given["measured"], f"{where}, measured")
    max_rows = from_json(int, given["max_rows"], f"{where}, max_rows")
    if min(layer.num_q_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, max_rows) < 1:
        raise ValueError(f"{where}: heads, dims and rows must be at least 1")
    if layer.num_q_heads % layer.num_kv_heads:
        raise ValueError(f"{where}: query heads must be a multiple of KV heads")
    reason = refusal(table, tiles, layer)
    if reason:
        raise ValueError(f"{where}: no kernel takes its tiles: {reason}")
    if given["digest"] != _digest({name: value for name, value in given.items() if name != "digest"}):
        raise ValueError(f"{where} was changed after it was measured: its digest differs")
    return MeasuredTileChoice(table, layer, max_rows, tiles, measured)


def _fields(content: object, names: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{where} is not a JSON object")
    unknown, missing = sorted(content.keys() - set(names)), sorted(set(names) - content.keys())
    if unknown or missing:
        said = [f"unknown fields {', '.join(unknown)}"] * bool(unknown)
        said += [f"no {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"{where} has {' and '.join(said)}")
    return content
