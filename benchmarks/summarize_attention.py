"""Turn a benchmark harness's raw results for this library into a result file with floors and limits.

python -m benchmarks.summarize_attention --harness DIR --raw results.jsonl --out benchmarks/results/attention_h200.json

DIR holds the harness's cases.py. "floor": streaming read of the same bytes in a graph, or the matrix-unit bound if
that is larger. "limit": the same bytes at copy bandwidth, or the matrix-unit bound. Ceilings come from the same run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from rocm_attn.bench.machine import commit

# Of the harness's adapters.
OURS, WITHOUT_PAGES = "own", "-contig"
# Relative to float32; beyond it the harness itself lets no time count.
MOST_ERROR = 2e-2


def main() -> None:
    """Read, combine, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--harness", required=True, type=Path)
    parser.add_argument("--raw", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    records = [json.loads(line) for line in args.raw.read_text().splitlines()]
    ceilings = next(record for record in records if record["t"] == "ceil")
    cases = {case.name: case for case in load_cases(args.harness).all_cases()}
    # A case that this library or a peer refuses has a result without a time.
    timed = [record for record in records if record["t"] == "res" and "us" in record]
    rows = [
        row(record, cases[record["case"]], ceilings) | fastest_peer(record["case"], timed)
        for record in timed
        if record["ad"] == OURS
    ]
    machine = {key: ceilings[key] for key in ("gpu", "torch", "triton")} | {"commit": commit(), "date": today()}
    kept = ("copy_GBs", "read_GBs", "mma_TFs", "graph_launch_us", "read_curve")
    result = {"machine": machine, "ceilings": {key: ceilings[key] for key in kept}, "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def row(record: dict[str, Any], case: Any, ceilings: dict[str, Any]) -> dict[str, Any]:
    """One case: time, bounds and errors against float32, before and after the graph."""
    num_bytes, matrix_us = case.min_bytes(), case.flops() / ceilings["mma_TFs"] / 1e6
    floor_us = max(read_us(num_bytes, ceilings["read_curve"]), matrix_us)
    limit_us = max(num_bytes / ceilings["copy_GBs"] / 1e3, matrix_us)
    return {
        "case": record["case"],
        "us": round(record["us"], 1),
        "floor_us": round(floor_us, 1),
        "limit_us": round(limit_us, 1),
        "times_floor": round(record["us"] / floor_us, 3),
        "times_limit": round(record["us"] / limit_us, 3),
        "error": float(f"{record['err']:.2g}"),
        "error_in_graph": float(f"{record['err_graph_path']:.2g}"),
    }


def fastest_peer(case: str, timed: list[dict[str, Any]]) -> dict[str, Any]:
    """Of those of the same run that read pages and were right."""
    peers = [
        (record["us"], record["ad"])
        for record in timed
        if record["case"] == case
        and record["ad"] != OURS
        and not record["ad"].endswith(WITHOUT_PAGES)
        and record["err_graph_path"] < MOST_ERROR
    ]
    us, name = min(peers, default=(None, None))
    if us is None:
        raise SystemExit(f"no peer has served {case}; measure beside one")
    return {"peer": name, "peer_us": round(us, 1)}


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
