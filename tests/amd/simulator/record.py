"""Run the simulator's full grid with the Triton at hand and write the result into a document.

    python -m tests.amd.simulator.record rocm_lab/simulator/README.md

The document has a table between two marks, with a line for each Triton version; this version's is written anew. Exits
with 1, and leaves the document as it is, when a case fails.
"""

import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import triton

from rocm_lab.bench.machine import commit
from rocm_lab.page_parts import rows_of, with_rows
from rocm_lab.simulator.launcher import ARCHS
from tests.amd.simulator.case import Runs
from tests.amd.simulator.kernel_cases import GRID


def main(document: Path) -> int:
    """Run, print a line for each case, write; the exit status."""
    started = time.monotonic()
    passed, failures, instructions = dict.fromkeys(ARCHS, 0), 0, 0
    runs = Runs()
    for case in GRID:
        runs.start(case)
    for case in GRID:
        # An exception of a case is its result; the others still run.
        error = runs.start(case).exception()
        print(f"{'FAILED' if error else 'passed'} {case}" + (f": {error}" if error else ""), flush=True)
        if error:
            failures += 1
        else:
            passed[case.arch] += 1
            instructions += runs.result(case).instructions
    runs.close()
    print(f"{len(GRID) - failures} passed, {failures} failed")
    if failures or not GRID:
        return 1
    minutes = f"{(time.monotonic() - started) / 60:.0f} on {os.cpu_count()} cores"
    cells = [
        triton.__version__,
        datetime.now(timezone.utc).date().isoformat(),
        commit(),
        np.__version__,
        *(f"{count} cases" for count in passed.values()),
        f"{instructions / 1e6:.1f} million",
        minutes,
    ]
    document.write_text(with_choice(document.read_text(), cells))
    return 0


def with_choice(text: str, cells: list[str]) -> str:
    """The document with these cells as the line of the Triton version in the first one; lines are in order."""
    rows = [row for row in rows_of(text, "grid") if not row.startswith(f"| {cells[0]} |")]
    rows.append(f"| {' | '.join(cells)} |\n")
    rows.sort(key=lambda row: [int(part) for part in row.split("|")[1].strip().split(".")])
    return with_rows(text, "grid", rows)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
