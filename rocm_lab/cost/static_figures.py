"""Figures of the compiler and llvm-mca for attention kernels and their hot loops: static_figures.json.

`python -m tests.amd.offline.every_figure docs` writes the file and, from it alone, the pages that show it; cost.py
predicts times from it. Nothing in it was measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from rocm_attn.kernels.tuning.tiles import CdnaTiles, DecodeTiles, ExtendTiles

FILE = Path(__file__).with_name("static_figures.json")
Tiles = DecodeTiles | ExtendTiles
_TILES: dict[str, type[Tiles]] = {"decode": DecodeTiles, "extend": ExtendTiles}


@dataclass(frozen=True, slots=True)
class KernelFigures:
    """Figures of the kernel of a layer without windows, caps or sinks.

    vgprs, spilled, lds_bytes: per lane, per lane, per program
    waves:                     that a SIMD has room for
    programs:                  that run on a CU at the same time
    own:                       cycles of 4 clocks per iteration of a wave, if loads took no time
    latencies:                 dependent loads that add their latency to an iteration
    issue, lds, loads, waits:  clocks of a CU for a unit of work, by each of four bounds
    break_even:                for decode: the latency in microseconds up to which HBM bounds it; 0 if a unit bounds it
    """

    vgprs: int
    spilled: int
    lds_bytes: int
    waves: int
    programs: int
    own: float
    latencies: float
    issue: float
    lds: float
    loads: float
    waits: float
    break_even: float

    @property
    def units(self) -> float:
        """Clocks that the busiest unit takes for a unit of work."""
        return max(self.issue, self.lds, self.loads)


class Busy(NamedTuple):
    """Cycles of 4 clocks that an iteration of a wave keeps the matrix and the vector unit busy."""

    matrix: float
    vector: float


@dataclass(frozen=True, slots=True)
class TileCandidate:
    """Tiles that a row of the tuning table was chosen from. serves: True if the row has these tiles"""

    tiles: Tiles
    serves: bool
    figures: KernelFigures


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """Another kernel for the same layer. name: includes its tiles"""

    name: str
    figures: KernelFigures
    busy: Busy


@dataclass(frozen=True, slots=True)
class CdnaFigures:
    """Figures of decode for CDNA (kernels/cdna).

    kind:   "plain"; or "window" or "cap", whose loops do more work
    serves: True if these tiles serve
    """

    kind: str
    tiles: CdnaTiles
    serves: bool
    figures: KernelFigures
    busy: Busy


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Figures of the kernels that decode or extend a layer of an arch.

    step:       "decode" or "extend"
    heads:      query heads and KV heads
    head_dim:   of K and of V
    lower_bound: fewest clocks of a CU for a unit of work, by data sheets
    ranked:     the Triton and the LLVM that candidates were ranked with; empty: there is only the row that serves
    candidates: the best first
    busy:       busy cycles of the row that serves
    peers:      AITER's kernels
    cdna:       decode for CDNA, in the tiles that serve and in others; none if its limits refuse the layer
    refused:    functions of AITER's that do not serve the layer, and why
    """

    arch: str
    step: str
    heads: tuple[int, int]
    head_dim: int
    dtype: str
    lower_bound: float
    ranked: str
    candidates: tuple[TileCandidate, ...]
    busy: Busy
    peers: tuple[PeerFigures, ...]
    cdna: tuple[CdnaFigures, ...]
    refused: dict[str, str]

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that tell layers apart."""
        return self.arch, self.step, self.heads, self.head_dim, self.dtype

    @property
    def serving(self) -> TileCandidate:
        """The tiles that the tuning table gives the layer."""
        return next(candidate for candidate in self.candidates if candidate.serves)

    def cdna_in(self, tiles: CdnaTiles, kind: str) -> CdnaFigures | None:
        """Figures of CDNA decode in these tiles: for this kind of layer, else for the plain one; None if none."""
        of_tiles = [each for each in self.cdna if each.tiles == tiles]
        return next((each for wanted in (kind, "plain") for each in of_tiles if each.kind == wanted), None)


@dataclass(frozen=True, slots=True)
class StaticFigures:
    """The whole file.

    triton, llvm: versions that compiled and counted the rows that serve and AITER's kernels, in one run
    aiter:        the checkout, and the date of its commit
    code_objects: arch -> AITER's forward kernel in assembly, for heads of 128 without a mask
    """

    triton: str
    llvm: str
    aiter: str
    aiter_date: str
    code_objects: dict[str, Busy]
    layers: tuple[LayerFigures, ...]

    @classmethod
    def read(cls) -> StaticFigures:
        """Reads FILE."""
        given: dict[str, Any] = json.loads(FILE.read_text())
        layers = tuple(map(_layer, given.pop("layers")))
        code_objects = {arch: Busy(*cycles) for arch, cycles in given.pop("code_objects").items()}
        return cls(**given, code_objects=code_objects, layers=layers)

    def write(self) -> None:
        """Writes FILE, one kernel per line."""
        head = {name: getattr(self, name) for name in ("triton", "llvm", "aiter", "aiter_date", "code_objects")}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
        layers = ",\n".join(_layer_text(layer) for layer in self.layers)
        FILE.write_text("{\n" + "\n".join(lines) + f'\n"layers": [\n{layers}\n]\n}}\n')


def _layer_text(layer: LayerFigures) -> str:
    head = json.dumps(
        {
            "arch": layer.arch,
            "step": layer.step,
            "heads": layer.heads,
            "head_dim": layer.head_dim,
            "dtype": layer.dtype,
            "lower_bound": layer.lower_bound,
            "ranked": layer.ranked,
            "busy": layer.busy,
            "refused": layer.refused,
        }
    )
    candidates = [
        {"tiles": _without_defaults(each.tiles), "serves": each.serves, "figures": asdict(each.figures)}
        for each in layer.candidates
    ]
    peers = _lines([{"name": peer.name, "busy": peer.busy, "figures": asdict(peer.figures)} for peer in layer.peers])
    cdna = [
        {
            "kind": each.kind,
            "tiles": _without_defaults(each.tiles),
            "serves": each.serves,
            "busy": each.busy,
            "figures": asdict(each.figures),
        }
        for each in layer.cdna
    ]
    return f'{head[:-1]},\n "candidates": {_lines(candidates)},\n "peers": {peers},\n "cdna": {_lines(cdna)}}}'


def _lines(entries: list[dict[str, Any]]) -> str:
    return "[\n  " + ",\n  ".join(map(json.dumps, entries)) + "]" if entries else "[]"


def _without_defaults(tiles: Tiles) -> dict[str, Any]:
    values = {field.name: (getattr(tiles, field.name), field.default) for field in fields(tiles)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _layer(given: dict[str, Any]) -> LayerFigures:
    kind = _TILES[given["step"]]
    candidates = tuple(
        TileCandidate(kind(**each["tiles"]), each["serves"], KernelFigures(**each["figures"]))
        for each in given.pop("candidates")
    )
    peers = tuple(
        PeerFigures(each["name"], KernelFigures(**each["figures"]), Busy(*each["busy"])) for each in given.pop("peers")
    )
    cdna = tuple(
        CdnaFigures(
            each["kind"],
            CdnaTiles(**each["tiles"]),
            each["serves"],
            KernelFigures(**each["figures"]),
            Busy(*each["busy"]),
        )
        for each in given.pop("cdna")
    )
    (q_heads, kv_heads), busy = given.pop("heads"), Busy(*given.pop("busy"))
    return LayerFigures(**given, heads=(q_heads, kv_heads), busy=busy, candidates=candidates, peers=peers, cdna=cdna)
