"""The pages that are made only from static_figures.json and the budgets."""

from __future__ import annotations

from pathlib import Path

from rocm_lab.cost.static_figures import StaticFigures
from tests.amd.offline.cost_page import rewritten
from tests.amd.offline.tuning_page import page


def pages(docs: Path) -> dict[Path, str]:
    """Path -> text, of the folder docs."""
    cost = docs / "cost.md"
    return {docs / "amd_tuning.md": page(StaticFigures.read()), cost: rewritten(cost.read_text())}


def write_pages(docs: Path) -> None:
    """Write them."""
    for path, text in pages(docs).items():
        path.write_text(text)
