"""Two checkouts in turn: runs the same benchmark scripts of each, to measure the cost of a change on one machine.

python -m rocm_lab.benchmarks.in_turn --before FOLDER --out rocm_lab/benchmarks/results/in_turn.json host_time fill_time

FOLDER is a checkout of the commit to compare with; the other one is the folder where this runs. Every script runs
ROUNDS times in each, in turn. For each number in its result file the smallest over the rounds counts: other processes
can only increase a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rocm_lab.bench.machine import describe_machine

ROUNDS = 4


def main() -> None:
    """Runs the scripts, and writes the smallest numbers of both checkouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", required=True, type=Path)
    parser.add_argument("--before-commit", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("scripts", nargs="+")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for script in args.scripts:
        found: dict[str, dict[str, list[float]]] = {"before": {}, "after": {}}
        for _ in range(ROUNDS):
            for name, folder in (("before", args.before), ("after", Path.cwd())):
                for what, number in _times(_run(script, folder)):
                    found[name].setdefault(what, []).append(number)
        for what in found["before"].keys() & found["after"].keys():
            before, after = min(found["before"][what]), min(found["after"][what])
            rows.append({"script": script, "what": what, "before": before, "after": after})
    rows.sort(key=lambda row: (row["script"], row["what"]))
    for row in rows:
        print(f"{row['script']} {row['what']}: {row['before']} -> {row['after']}")
    result = {"machine": describe_machine(), "before": args.before_commit, "rounds": ROUNDS, "rows": rows}
    Path(args.out).write_text(json.dumps(result, indent=1))


def _run(script: str, folder: Path) -> Any:
    """Returns the result file of a script of a checkout."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        command = [sys.executable, "-m", f"rocm_lab.benchmarks.{script}", "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def _times(result: Any) -> Iterator[tuple[str, float]]:
    """Yields numbers in microseconds of a result's rows, each with the fields that distinguish its row from others."""
    for row in result["rows"]:
        label = ", ".join(f"{key} {value}" for key, value in row.items() if "us" not in key.split("_"))
        for key, value in row.items():
            if "us" in key.split("_") and isinstance(value, (int, float)):
                yield f"{label}: {key}", float(value)


if __name__ == "__main__":
    main()
