"""The pages that are made from static_figures.json; kernel_figures.py makes the last section of one of them."""

from __future__ import annotations

from pathlib import Path

from rocm_lab.cost.static_figures import StaticFigures
from tests.amd.offline.cost_page import rewritten
from tests.amd.offline.kernel_figures import kept
from tests.amd.offline.tuning_page import page


def pages(docs: Path) -> dict[Path, str]:
    """Path -> text, of the folder docs."""
    tuning, cost = docs / "amd_tuning.md", docs / "cost.md"
    return {tuning: page(StaticFigures.read()) + kept(tuning), cost: rewritten(cost.read_text())}


def write_pages(docs: Path) -> None:
    """Write them."""
    for path, text in pages(docs).items():
        path.write_text(text)
