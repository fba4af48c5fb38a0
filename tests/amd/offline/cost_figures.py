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

from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_lab.cost.static_figures import PAGED, DecodeFigures, StaticFigures
from tests.amd.offline.cdna_decode import figures_of
from tests.amd.offline.cost_page import rewritten
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import find_llvm_mca
from tests.amd.offline.tile_candidates import chosen_tiles, estimate, layers
from tests.amd.offline.tile_cost import loop_figures


def main(docs: Path) -> None:
    """Compiles, prints and writes."""
    decodes = list[DecodeFigures]()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for found in pool.map(_served, [row for row, kind in layers() if kind is DecodeTiles]):
            print(*found, sep="\n", flush=True)
            decodes += found
    StaticFigures(triton.__version__, str(find_llvm_mca()[1]), tuple(decodes)).write()
    page = docs / "cost.md"
    page.write_text(rewritten(page.read_text()))


def _served(row: Row) -> tuple[DecodeFigures, ...]:
    """Returns figures of the kernels that serve decodes of a layer, whose row must have a cost."""
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    tiles = chosen_tiles(row, DecodeTiles)
    assert isinstance(tiles, DecodeTiles)
    found = estimate(row, tiles, whole=False, given_programs=True)
    if not found.cost:
        raise ValueError(f"{found.tiles} of {row} spills {found.spills} registers; choose other tiles")
    paged = DecodeFigures(PAGED, row.arch, row.dims[0], "plain", tiles, loop_figures(found.cost))
    return paged, *figures_of(row)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
