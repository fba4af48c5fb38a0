"""Ranks the tiles of gfx942 and gfx950, and writes the candidates of each row into the page.

    python -m tests.amd.offline.tuning_table docs [TITLE...]

compiles every candidate with the installed Triton, which must be the newest supported, and costs it with llvm-mca (see
mca.py). With TITLEs only sections whose own title contains one of them are ranked anew. The best candidates go into
rocm_lab/cost/static_figures.json, which cost_figures makes, and from that file into the page. Prints a line for each
layer. Exits with 1, and leaves both files unchanged, if a row spills or is worse than its best candidate by more than
the tolerance.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
import triton

from rocm_lab.cost.static_figures import LayerFigures, StaticFigures
from tests.amd.offline.figures_of_layers import candidate, layer_key
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import find_llvm_mca
from tests.amd.offline.pages import write_pages
from tests.amd.offline.tile_candidates import TOLERANCE, Kind, Ranking, layers, rank
from tests.amd.offline.tuning_page import title


def main(docs: Path, titles: Sequence[str] = ()) -> int:
    """Rank, print, write; the exit status."""
    known = StaticFigures.read()
    old = {layer.key: layer for layer in known.layers}
    work = [(row, kind, old[layer_key(row, kind)]) for row, kind in layers()]
    work = [each for each in work if not titles or any(wanted in title(each[2]) for wanted in titles)]
    tools = f"Triton {triton.__version__}, LLVM {find_llvm_mca()[1]}"
    worst = 0.0
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for layer, excess in pool.map(_ranked, *zip(*work, strict=True)):
            print(f"{title(layer)}: {excess:.1%} worse than the best, or above the lower bound", flush=True)
            old[layer.key] = replace(layer, ranked=tools)
            worst = max(worst, excess)
    if worst > TOLERANCE:
        return 1
    figures = replace(known, layers=tuple(old.values()))
    figures.write()
    write_pages(docs)
    return 0


def _ranked(row: Row, kind: Kind, old: LayerFigures) -> tuple[LayerFigures, float]:
    """A layer with its candidates, and how much worse the row that serves is than the best of them."""
    # Compiling touches no memory; filled with NaN, a cache above 2 GiB would be resident.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    ranking: Ranking = rank(row, kind)
    fitting = [found for found in ranking.candidates if found.cost]
    candidates = (candidate(found, serves=found is ranking.chosen) for found in fitting)
    return replace(old, candidates=tuple(candidates)), ranking.excess


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
