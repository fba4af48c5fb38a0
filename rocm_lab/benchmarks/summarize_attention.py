"""Turn a benchmark harness's raw results into a result file with lower bounds and limits, and every peer's times.

python -m rocm_lab.benchmarks.summarize_attention --harness DIR --raw pass1.jsonl pass2.jsonl \\
    --out rocm_lab/benchmarks/results/attention_h200.json

DIR holds the harness's cases.py; each raw file is a pass. "bound": streaming read of the same bytes in a graph, or the
matrix-unit bound if that is larger. "limit": the same bytes at copy bandwidth, or the matrix-unit bound. Ceilings come
from the same pass, and numbers of a row are means over passes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rocm_lab.bench.machine import commit

# Names of the harness's adapters.
OURS, WITHOUT_PAGES = "own", "-contig"
# Relative to float32; beyond it the harness itself rejects the time.
MOST_ERROR = 2e-2
CEILINGS = ("copy_GBs", "read_GBs", "mma_TFs", "graph_launch_us")


@dataclass(frozen=True, slots=True)
class Pass:
    """The contents of one raw file.

    ceilings: of the GPU, measured in it
    timed:    (case, adapter) -> the record of a correct result with a time
    missing:  adapters that could not be loaded, and why; None if the file does not say
    """

    ceilings: dict[str, Any]
    timed: dict[tuple[str, str], dict[str, Any]]
    missing: dict[str, str] | None

    @classmethod
    def of(cls, text: str) -> Pass:
        """Reads a file's lines. Raises SystemExit if this library was wrong."""
        records = [json.loads(line) for line in text.splitlines()]
        # A case that an adapter refuses has a result without a time.
        timed = {(each["case"], each["ad"]): each for each in records if each["t"] == "res" and "us" in each}
        right = {key: each for key, each in timed.items() if is_right(each)}
        if wrong := [case for case, name in timed.keys() - right.keys() if name == OURS]:
            raise SystemExit(f"{OURS} was wrong on {', '.join(sorted(wrong))}; a time of it is none")
        ceilings = next(each for each in records if each["t"] == "ceil")
        missing: dict[str, str] | None = next((each["missing"] for each in records if each["t"] == "missing"), None)
        return cls(ceilings, right, missing)


def is_right(record: dict[str, Any]) -> bool:
    """True if a result is near enough to float32, eagerly and after the graph; NaN is not."""
    return bool(record["err"] < MOST_ERROR and record["err_graph_path"] < MOST_ERROR)


def main() -> None:
    """Reads, combines and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", required=True, type=Path)
    parser.add_argument("--raw", required=True, type=Path, nargs="+")
    parser.add_argument("--cases", default="", help="only those whose names begin so")
    parser.add_argument("--out", required=True, type=Path)
    args = parser.parse_args()
    passes = [Pass.of(path.read_text()) for path in args.raw]
    cases = {case.name: case for case in load_cases(args.harness).all_cases() if case.name.startswith(args.cases)}
    result = summary(passes, cases)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def summary(passes: Sequence[Pass], cases: dict[str, Any]) -> dict[str, Any]:
    """Returns the result file. cases: by name"""
    first = passes[0].ceilings
    ours = [name for name in cases if all((name, OURS) in each.timed for each in passes)]
    return {
        "machine": {key: first[key] for key in ("gpu", "torch", "triton")} | {"commit": commit(), "date": today()},
        "passes": len(passes),
        "missing": missing_of(passes),
        "ceilings": {key: mean(each.ceilings[key] for each in passes) for key in CEILINGS},
        "rows": [row(cases[name], passes) for name in ours],
    }


def row(case: Any, passes: Sequence[Pass]) -> dict[str, Any]:
    """One case: time, bounds, errors against float32 before and after the graph, and the peers of the same passes."""
    num_bytes = case.min_bytes()
    ours = [each.timed[case.name, OURS] for each in passes]
    us = mean(record["us"] for record in ours)
    matrix = [case.flops() / each.ceilings["mma_TFs"] / 1e6 for each in passes]
    reads = [read_us(num_bytes, each.ceilings["read_curve"]) for each in passes]
    copies = [num_bytes / each.ceilings["copy_GBs"] / 1e3 for each in passes]
    lower_bound_us = mean(max(pair) for pair in zip(reads, matrix, strict=True))
    limit_us = mean(max(pair) for pair in zip(copies, matrix, strict=True))
    peers = peers_of(case.name, passes)
    paged = {name: peer_us for name, peer_us in peers.items() if not name.endswith(WITHOUT_PAGES)}
    if not paged:
        raise SystemExit(f"no peer has served {case.name}; measure beside one")
    fastest = min(paged, key=lambda name: paged[name])
    return {
        "case": case.name,
        "bytes": num_bytes,
        "us": round(us, 1),
        "passes_us": [round(record["us"], 1) for record in ours],
        "lower_bound_us": round(lower_bound_us, 1),
        "limit_us": round(limit_us, 1),
        "times_bound": round(us / lower_bound_us, 3),
        "times_limit": round(us / limit_us, 3),
        "error": float(f"{max(record['err'] for record in ours):.2g}"),
        "error_in_graph": float(f"{max(record['err_graph_path'] for record in ours):.2g}"),
        "peer": fastest,
        "peer_us": paged[fastest],
        "peers": peers,
    }


def missing_of(passes: Sequence[Pass]) -> list[str] | None:
    """Returns the adapters that a pass lacked; None if one does not say."""
    found = [each.missing for each in passes if each.missing is not None]
    return sorted({name for each in found for name in each}) if len(found) == len(passes) else None


def peers_of(case: str, passes: Sequence[Pass]) -> dict[str, float]:
    """Returns microseconds of every other adapter that was right in each pass."""
    names = sorted({name for each in passes for timed, name in each.timed if timed == case and name != OURS})
    return {
        name: round(mean(each.timed[case, name]["us"] for each in passes), 1)
        for name in names
        if all((case, name) in each.timed for each in passes)
    }


def read_us(num_bytes: int, curve: list[tuple[int, float]]) -> float:
    """Returns microseconds of a streaming read, interpolated between measured sizes."""
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
