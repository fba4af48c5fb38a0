"""What the H200's counters say of one layer, for the shapes whose times are compared in benchmarks/README.md.

    python -m benchmarks.counters --out benchmarks/results/counters_h200.json

Nsight Compute (ncu) runs each launch by itself, with clocks left alone, and reads how busy memory and the units of the
multiprocessors were. Its times are of launches apart: longer than in a graph.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.named_shapes import PAGE_SIZE, named_shapes
from benchmarks.random_shapes import cases_of, check_all
from benchmarks.shape_sweep import Shape, Work
from rocm_attn.bench.machine import describe_machine
from rocm_attn.problem import UNLIMITED_WINDOW

SECTIONS = "SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "SchedulerStats", "ComputeWorkloadAnalysis"
# ncu's names of what is kept, and ours.
KEPT = {
    "Duration": "us",
    "Grid Size": "programs",
    "Registers Per Thread": "registers",
    "Achieved Occupancy": "occupancy_percent",
    "DRAM Throughput": "dram_percent",
    "L2 Cache Throughput": "l2_percent",
    "Compute (SM) Throughput": "compute_percent",
    "Issue Slots Busy": "issue_percent",
    "Warp Cycles Per Issued Instruction": "cycles_per_instruction",
}
MOST_STALLS = 3
STALL = "Stall "
# In the name of the kernel that fills a tensor.
MARK = "FillFunctor"


def _decode(heads: tuple[int, int, int], num_seqs: int, kv_len: int) -> Shape:
    return Shape(*heads, PAGE_SIZE, UNLIMITED_WINDOW, Work.DECODE, (kv_len,) * num_seqs, (1,) * num_seqs)


SHAPES = {
    "decode, 64/8 x 128, 16 x 4,096": _decode((64, 8, 128), 16, 4096),
    "decode, 64/8 x 128, 64 x 4,096": _decode((64, 8, 128), 64, 4096),
    "decode, 8/1 x 128, 256 x 2,048": _decode((8, 1, 128), 256, 2048),
    **{
        f"{layout}, {step}": shape
        for step, layout, shape in named_shapes()
        if layout in {"32/8 x 128", "40/4 x 128", "64/8 x 192"} and step.startswith(("one chunk", "8 chunks"))
    },
}


def main() -> None:
    """Measure all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--launch", action="store_true", help="launch the shapes' layers for ncu, and measure nothing")
    args = parser.parse_args()
    if args.launch:
        for shape in SHAPES.values():
            launch(shape)
        return
    if args.out is None:
        parser.error("give --out")
    # Kernels are compiled by many processes here, and found in Triton's cache by the one that ncu looks at.
    errors = check_all(list(SHAPES.values()), args.processes, time.monotonic() + 3600)
    if wrong := {name: errors[shape] for name, shape in SHAPES.items() if isinstance(errors[shape], str)}:
        sys.exit(f"wrong: {wrong}")
    sections = [part for section in SECTIONS for part in ("--section", section)]
    how = "--profile-from-start", "off", "--clock-control", "none", "--print-details", "all"
    child = [sys.executable, "-m", "benchmarks.counters", "--launch"]
    command = ["ncu", "--csv", "--page", "details", *how, *sections, *child]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = rows_of(printed)
    args.out.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


def launch(shape: Shape) -> None:
    """The layer's launches, once to load them and once for the profiler, after a mark."""
    (case,) = cases_of(shape, 1)
    mark = torch.empty(1, device="cuda")
    case.prepared.attend()
    torch.cuda.synchronize()
    profiler = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    profiler.cudaProfilerStart()
    mark.fill_(0.0)
    case.prepared.attend()
    torch.cuda.synchronize()
    profiler.cudaProfilerStop()


def rows_of(printed: str) -> list[dict[str, Any]]:
    """What ncu printed of the shapes' launches, a row for each; marks tell where a shape begins."""
    lines = printed.splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith('"ID"')) :]
    launches: dict[str, dict[str, Any]] = {}
    stalls: dict[str, dict[str, float]] = defaultdict(dict)
    for line in csv.DictReader(table):
        row = launches.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
        metric, value = line["Metric Name"], line["Metric Value"].replace(",", "")
        if metric in KEPT:
            row[KEPT[metric]] = _microseconds(value, line["Metric Unit"]) if metric == "Duration" else float(value)
        elif metric.startswith(STALL):
            stalls[line["ID"]][metric.removeprefix(STALL)] = float(value)
    names, rows = iter(SHAPES), []
    for number, row in launches.items():
        if MARK in row["kernel"]:
            name = next(names)
            continue
        most = sorted(stalls[number].items(), key=lambda stall: -stall[1])[:MOST_STALLS]
        rows.append({"shape": name, **row, "stalls": {reason: round(cycles, 2) for reason, cycles in most}})
    return rows


def _microseconds(value: str, unit: str) -> float:
    factors = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
    return round(float(value) * factors[unit], 1)


if __name__ == "__main__":
    main()
