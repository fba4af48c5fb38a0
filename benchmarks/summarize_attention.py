"""Turn a benchmark harness's raw results into a result file: this library, with floors and limits, beside its peers.

python -m benchmarks.summarize_attention --harness DIR --raw PASS.jsonl... --out benchmarks/results/attention_h200.json

DIR holds the harness's cases.py; each PASS is one run of it, with this library and its peers in one process. "floor":
streaming read of the same bytes in a graph, or the matrix-unit bound if that is larger. "limit": the same bytes at copy
bandwidth, or the matrix-unit bound. Ceilings come from the first pass.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.machine import commit

# The harness's name of this library. Names with "contig" read K and V that are not in pages: no peer of ours.
OWN = "own"
NOT_PAGED = "contig"
# What the harness takes for wrong: relative to float32.
MOST_ERROR = 2e-2

Record = dict[str, Any]


def main() -> None:
    """Read, combine, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--harness", required=True, type=Path)
    parser.add_argument("--raw", required=True, type=Path, nargs="+")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    passes = [[json.loads(line) for line in raw.read_text().splitlines()] for raw in args.raw]
    ceilings = next(record for record in passes[0] if record["t"] == "ceil")
    cases = {case.name: case for case in load_cases(args.harness).all_cases()}
    rows = [row(cases[name], timed, ceilings) for name, timed in of_cases(passes).items() if OWN in timed]
    machine = {key: ceilings[key] for key in ("gpu", "torch", "triton")} | {"commit": commit(), "date": today()}
    kept = ("copy_GBs", "read_GBs", "mma_TFs", "graph_launch_us", "read_curve")
    result = {
        "machine": machine,
        "passes": len(passes),
        "ceilings": {key: ceilings[key] for key in kept},
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def of_cases(passes: Iterable[list[Record]]) -> dict[str, dict[str, list[Record]]]:
    """Case -> implementation -> a record of each pass in which it was timed and right."""
    found: dict[str, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for records in passes:
        for record in records:
            # A case that an implementation refuses has a record without a time.
            is_right = record.get("err", 1) < MOST_ERROR and record.get("err_graph_path", 1) < MOST_ERROR
            if record["t"] == "res" and "us" in record and (is_right or record["ad"] == OWN):
                found[record["case"]][record["ad"]].append(record)
    return found


def row(case: Any, timed: dict[str, list[Record]], ceilings: Record) -> Record:
    """One case: time, bounds and errors against float32, before and after the graph, and the peers' times."""
    num_bytes, matrix_us = case.min_bytes(), case.flops() / ceilings["mma_TFs"] / 1e6
    floor_us = max(read_us(num_bytes, ceilings["read_curve"]), matrix_us)
    limit_us = max(num_bytes / ceilings["copy_GBs"] / 1e3, matrix_us)
    own = [record["us"] for record in timed[OWN]]
    us = sum(own) / len(own)
    return {
        "case": case.name,
        "us": round(us, 1),
        "us_of_passes": [round(each, 1) for each in own],
        "floor_us": round(floor_us, 1),
        "limit_us": round(limit_us, 1),
        "times_floor": round(us / floor_us, 3),
        "times_limit": round(us / limit_us, 3),
        "error": float(f"{max(record['err'] for record in timed[OWN]):.2g}"),
        "error_in_graph": float(f"{max(record['err_graph_path'] for record in timed[OWN]):.2g}"),
        "peers_us": {
            name: round(sum(record["us"] for record in records) / len(records), 1)
            for name, records in sorted(timed.items())
            if name != OWN and NOT_PAGED not in name
        },
    }


def read_us(num_bytes: int, curve: list[tuple[int, float]]) -> float:
    """Microseconds of a streaming read, interpolated between measured sizes."""
    if num_bytes <= curve[0][0]:
        return curve[0][1]
    for (small, fast), (large, slow) in pairwise(curve):
        if num_bytes <= large:
            return fast + (slow - fast) * (num_bytes - small) / (large - small)
    return curve[-1][1] * num_bytes / curve[-1][0]


def load_cases(harness: Path) -> Any:
    """The harness's cases module."""
    spec = importlib.util.spec_from_file_location("harness_cases", harness / "cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def today() -> str:
    """The date of the run."""
    return datetime.date.today().isoformat()


if __name__ == "__main__":
    main()
