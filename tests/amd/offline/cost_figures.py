"""Writes the static figures of the rows that serve and of AITER's kernels, and the pages that show them.

    AITER_SOURCE=CHECKOUT python -m tests.amd.offline.cost_figures docs

compiles both with the installed Triton, which must be the newest supported, and counts them with llvm-mca (see mca.py).
The result is rocm_lab/cost/static_figures.json. `rocm-attn explain --cost` predicts times from it, and the pages are
made from that file alone. A layer keeps its candidates as long as the row that serves is the one that they were ranked
with: tuning_table ranks. Prints a line for each layer.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import triton

from rocm_lab.cost.static_figures import LayerFigures, StaticFigures
from tests.amd.aiter_source.checkout import Checkout
from tests.amd.offline.code_objects import FORWARD, forward_loop
from tests.amd.offline.figures_of_layers import among, serving_layer
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import find_llvm_mca
from tests.amd.offline.pages import write_pages
from tests.amd.offline.tile_candidates import Kind, layers
from tests.amd.offline.tuning_page import title


def main(docs: Path) -> None:
    """Compiles, prints and writes."""
    known, checkout = StaticFigures.read(), Checkout.named()
    old = {layer.key: layer for layer in known.layers}
    found = []
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        for layer in pool.map(_served, *zip(*layers(), strict=True)):
            found.append(among(layer, old[layer.key]) if layer.key in old else layer)
            print(title(layer), flush=True)
    figures = replace(
        known,
        triton=triton.__version__,
        llvm=str(find_llvm_mca()[1]),
        aiter=checkout.commit(),
        aiter_date=checkout.date(),
        code_objects={arch: forward_loop(checkout.root, arch) for arch in FORWARD},
        layers=tuple(found),
    )
    figures.write()
    write_pages(docs)


def _served(row: Row, kind: Kind) -> LayerFigures:
    return serving_layer(Checkout.named(), row, kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
