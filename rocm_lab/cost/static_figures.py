"""Figures of the compiler and llvm-mca for the hot loops of kernels that serve: static_figures.json.

`python -m tests.amd.offline.cost_figures docs` writes the file; cost.py predicts times from it.
Nothing in it was measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rocm_attn.kernels.tuning.tiles import CdnaTiles, DecodeTiles

FILE = Path(__file__).with_name("static_figures.json")
PAGED, CDNA = "triton.decode", "triton.cdna_decode"
_DECODE_TILES: dict[str, type[DecodeTiles]] = {PAGED: DecodeTiles, CDNA: CdnaTiles}


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Figures of a decode kernel's hot loop.

    programs:  that run on a CU at the same time
    own:       cycles of 4 clocks per iteration of a wave, if loads took no time
    latencies: dependent loads that add their latency to an iteration
    units:     clocks that a CU's busiest unit takes for a key of a KV head
    """

    programs: int
    own: float
    latencies: float
    units: float


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """A decode kernel in the tiles that serve a layer of an arch.

    kernel:   PAGED or CDNA
    head_dim: of K and of V
    kind:     "plain"; or "window" or "cap", whose loops do more work
    """

    kernel: str
    arch: str
    head_dim: int
    kind: str
    tiles: DecodeTiles
    figures: LoopFigures


@dataclass(frozen=True, slots=True)
class StaticFigures:
    """The whole file.

    triton, llvm: versions that compiled and counted, in one run
    """

    triton: str
    llvm: str
    decodes: tuple[DecodeFigures, ...]

    @classmethod
    def read(cls) -> StaticFigures:
        """Reads FILE."""
        given: dict[str, Any] = json.loads(FILE.read_text())
        decodes = (
            {
                **each,
                "tiles": _DECODE_TILES[each["kernel"]](**each["tiles"]),
                "figures": LoopFigures(**each["figures"]),
            }
            for each in given.pop("decodes")
        )
        return cls(decodes=tuple(DecodeFigures(**each) for each in decodes), **given)

    def write(self) -> None:
        """Writes FILE, one kernel per line."""
        lines = [f"{json.dumps(name)}: {_text(value)}" for name, value in _shallow(self).items()]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return json.dumps(value)
    rows = ({**_shallow(row), "tiles": _without_defaults(row.tiles)} for row in value)
    return "[\n" + ",\n".join(json.dumps(row, default=asdict) for row in rows) + "\n]"


def _shallow(data: Any) -> dict[str, Any]:
    return {field.name: getattr(data, field.name) for field in fields(data)}


def _without_defaults(tiles: DecodeTiles) -> dict[str, Any]:
    return {field.name: value for field in fields(tiles) if (value := getattr(tiles, field.name)) != field.default}
