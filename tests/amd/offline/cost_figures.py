"""Writes the static figures of the rows that serve, and the page that shows them.

    python -m tests.amd.offline.cost_figures docs

compiles them with the installed Triton, which must be the newest supported, and counts them with llvm-mca (see mca.py).
The result is rocm_lab/cost/static_figures.json, from which `rocm-attn cost` predicts times, and docs/cost.md. The one
command after a kernel or a row has changed. Prints a line for each layer.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from rocm_lab.cost.static_figures import PAGED, Busy, DecodeFigures, ExtendFigures, StaticFigures
from tests.amd.offline.cdna_decode import figures_of
from tests.amd.offline.cost_page import rewritten
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import find_llvm_mca
from tests.amd.offline.tile_candidates import Kind, chosen_tiles, estimate, layers
from tests.amd.offline.tile_cost import TileCost, loop_figures


def main(docs: Path) -> None:
    """Compiles, prints and writes."""
    decodes, extends = list[DecodeFigures](), list[ExtendFigures]()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for found in pool.map(_served, *zip(*layers(), strict=True)):
            print(*found, sep="\n", flush=True)
            decodes += [each for each in found if isinstance(each, DecodeFigures)]
            extends += [each for each in found if isinstance(each, ExtendFigures)]
    StaticFigures(
        triton=triton.__version__,
        llvm=str(find_llvm_mca()[1]),
        decodes=tuple(decodes),
        extends=tuple(extends),
    ).write()
    page = docs / "cost.md"
    page.write_text(rewritten(page.read_text()))


def _served(row: Row, kind: Kind) -> tuple[DecodeFigures | ExtendFigures, ...]:
    """Returns figures of the kernels that serve a layer, whose row must have a cost."""
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    tiles, (head_dim, _) = chosen_tiles(row, kind), row.dims
    cost = _cost_of(row, tiles)
    if isinstance(tiles, DecodeTiles):
        paged = DecodeFigures(PAGED, row.arch, head_dim, "plain", tiles, loop_figures(cost))
        return paged, *figures_of(row)
    busy = Busy(round(cost.cycles.matrix, 1), round(cost.cycles.vector, 1))
    return (ExtendFigures(row.arch, head_dim, tiles, busy),)


def _cost_of(row: Row, tiles: DecodeTiles | ExtendTiles) -> TileCost:
    found = estimate(row, tiles, whole=False, given_programs=True)
    if not found.cost:
        raise ValueError(f"{found.tiles} of {row} spills {found.spills} registers; choose other tiles")
    return found.cost


if __name__ == "__main__":
    main(Path(sys.argv[1]))
