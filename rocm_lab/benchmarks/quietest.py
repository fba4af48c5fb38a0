"""Several passes of a benchmark of host times as one result: the smallest of each number, and a list of the passes.

python -m rocm_lab.benchmarks.quietest host_1.json host_2.json host_3.json --out RESULTS/host_time_h200.json

Other processes of a machine can only increase a time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    """Writes the result of some passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("passes", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    args.out.write_text(json.dumps(quietest([json.loads(path.read_text()) for path in args.passes]), indent=1) + "\n")


def quietest(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one result of passes on one machine, of the same rows; each row keeps the medians of all.

    Raises ValueError for passes of other machines, commits or rows.
    """
    first, *others = passes
    if any(_what(each) != _what(first) for each in others):
        raise ValueError("these passes are not of one machine, commit and benchmark: give those of one run")
    rows = []
    for of_row in zip(*(each["rows"] for each in passes), strict=True):
        row = {name: min(each[name] for each in of_row) for name in of_row[0]}
        rows.append(row | {"passes_us": [each["step_us_median"] for each in of_row]})
    return {**first, "rows": rows}


def _what(result: dict[str, Any]) -> object:
    """Identifies a pass: its machine and commit, and the fields of its rows."""
    rows = [({name: value for name, value in row.items() if "_us" not in name}, row.keys()) for row in result["rows"]]
    return result["machine"], rows


if __name__ == "__main__":
    main()
