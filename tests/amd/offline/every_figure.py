"""Makes every static figure anew, and the pages that show them: the one command after a kernel or a row has changed.

    AITER_SOURCE=CHECKOUT python -m tests.amd.offline.every_figure docs [TITLE...]

cost_figures compiles and counts the rows that serve, decode for CDNA, other tried kernels and AITER's kernels;
tuning_table ranks the candidates of the rows, which takes an hour or more. With TITLEs only layers whose title contains
one of them are ranked; "none" ranks none. Candidates of an unchanged row stay. Compiled kernels are in Triton's cache,
so that the same command continues where it was stopped. Exits like tuning_table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tests.amd.offline import cost_figures, tuning_table
from tests.amd.offline.pages import write_pages

NO_LAYER = "none"


def main(docs: Path, titles: Sequence[str]) -> int:
    """Compile, rank, write; the exit status."""
    cost_figures.main(docs)
    status = 0 if list(titles) == [NO_LAYER] else tuning_table.main(docs, titles)
    write_pages(docs)
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
