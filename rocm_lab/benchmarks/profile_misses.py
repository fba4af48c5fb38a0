"""The bounds of the kernels of missed goals (goals.py), read by Nsight Compute:

python -m rocm_lab.benchmarks.profile_misses --fa3 fa3.so --out rocm_lab/benchmarks/results/profile_misses_h200.json

Each case of `rocm-attn bench kernels` that a missed goal names is launched once under ncu with each of its providers,
with a cold L2 and unchanged clocks. Processes in parallel compile first. ncu launches a kernel again for each group of
counters, and lets kernels wait for each other: times are of kernels alone, not of the layer.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rocm_lab.bench.choices import ALL_SUITES
from rocm_lab.bench.contestant import LayerLaunch
from rocm_lab.bench.contestants import contestants
from rocm_lab.bench.step_data import random_steps
from rocm_lab.bench.suites import suite
from rocm_lab.benchmarks.goals import GOALS, Profiled
from rocm_lab.benchmarks.script import write

SECTIONS = (
    "SpeedOfLight",
    "LaunchStats",
    "Occupancy",
    "SchedulerStats",
    "WarpStateStats",
    "MemoryWorkloadAnalysis",
    "ComputeWorkloadAnalysis",
)
# Separates kernels of one case from those of the next in ncu's list.
_BETWEEN = "erfinv"
_STALL = re.compile(r"issue_stalled_(\w+?)_per_warp_active|warps_issue_stalled_(\w+?)_per_issue_active")
_BUSY = ".avg.pct_of_peak_sustained_elapsed"
_MOST_STALLS = 3
_NAME_LENGTH = 60


def main() -> None:
    """Compiles, profiles and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fa3", default="", help="shared library of FlashAttention-3")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--launch", help="internal: launch these cases, a JSON list")
    args = parser.parse_args()
    if args.launch:
        _launch([Profiled(*each) for each in json.loads(args.launch)], args.fa3)
        return
    if args.out is None:
        parser.error("--out is missing")
    wanted = profiled()
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(12, len(wanted), len(os.sched_getaffinity(0)))) as pool:
        failures = pool.starmap(_compiled, [(each, args.fa3) for each in wanted])
    for each, failure in zip(wanted, failures, strict=True):
        if failure:
            print(f"{each.case} by {each.provider}: {failure}", file=sys.stderr)
    served = [each for each, failure in zip(wanted, failures, strict=True) if not failure]
    table = _counters(served, args.fa3)
    rows = [
        {"case": each.case, "provider": each.provider, "kernels": kernels}
        for each, kernels in zip(served, kernels_of(table), strict=True)
    ]
    write(args.out, rows=rows)


def profiled() -> list[Profiled]:
    """Returns every case that a goal names, once."""
    return list(dict.fromkeys(each for goal in GOALS for each in goal.profiled))


def _prepared(each: Profiled, fa3: str) -> LayerLaunch:
    case = next(case for case in suite(ALL_SUITES) if case.name == each.case)
    (data,) = random_steps(case.problem, case.batch, 1, torch.device("cuda", 0), seed=0)
    return contestants((each.provider,), fa3)[each.provider].prepare(data)


def _compiled(each: Profiled, fa3: str) -> str:
    """Launches once, so that kernels are compiled. Returns the error, or an empty text."""
    try:
        _prepared(each, fa3).run()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _launch(cases: Sequence[Profiled], fa3: str) -> None:
    """Makes the launches of each case that ncu sees, after one that it does not see."""
    between = torch.zeros(1, device="cuda")
    between.erfinv()
    for each in cases:
        launch = _prepared(each, fa3)
        launch.run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        launch.run()
        between.erfinv()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        del launch
        torch.cuda.empty_cache()


def _counters(cases: Sequence[Profiled], fa3: str) -> str:
    """Returns ncu's table of a process that launches them. Raises SystemExit if there is no ncu."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("ncu (Nsight Compute) is not installed")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
        command += ["--print-units", "base", "--log-file", str(log)]
        command += [word for section in SECTIONS for word in ("--section", section)]
        command += [sys.executable, "-m", "rocm_lab.benchmarks.profile_misses", "--fa3", fa3]
        command += ["--launch", json.dumps([(each.case, each.provider) for each in cases])]
        done = subprocess.run(command, check=False)
        table = log.read_text() if log.exists() else ""
    if done.returncode:
        raise SystemExit(f"ncu ended with {done.returncode}; it says:\n{table[-2000:]}")
    return table


def kernels_of(table: str) -> Iterator[list[dict[str, Any]]]:
    """Yields the kernels of each case. table: ncu's, as CSV in base units, with a kernel after those of each case"""
    lines = [line for line in table.splitlines() if line.startswith('"')]
    rows = csv.DictReader(lines)
    mine: list[dict[str, Any]] = []
    for row in rows:
        if not row["ID"]:  # the units
            continue
        if _BETWEEN in row["Kernel Name"]:
            yield mine
            mine = []
        else:
            mine.append(kernel_of(row))


def kernel_of(row: Mapping[str, str]) -> dict[str, Any]:
    """Returns the counters of a launch from a row of ncu's table; percents are of the peak.

    issue: cycles of a scheduler in which it issued; stalls: of the cycles between two instructions of a warp
    """
    number = {name: float(value.replace(",", "")) for name, value in row.items() if _is_number(value)}
    tensor = [value for name, value in number.items() if "pipe_tensor" in name and name.endswith(_BUSY)]
    stalls = stalls_of(number)
    microseconds = number["gpu__time_duration.sum"] / 1e3
    return {
        "kernel": row["Kernel Name"][:_NAME_LENGTH],
        "programs": round(number["launch__grid_size"]),
        "threads": round(number["launch__block_size"]),
        "registers": round(number["launch__registers_per_thread"]),
        "waves": round(number["launch__waves_per_multiprocessor"], 2),
        "us": round(microseconds, 2),
        "dram_gb_s": round(number.get("dram__bytes.sum.per_second", float("nan")) / 1e9),
        "dram_percent": round(number["gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"], 1),
        "l2_hit_percent": round(number.get("lts__t_sector_hit_rate.pct", float("nan")), 1),
        "tensor_percent": round(max(tensor, default=0.0), 1),
        "issue_percent": round(100 * number["smsp__issue_active.avg.per_cycle_active"], 1),
        "occupancy_percent": round(number["sm__warps_active.avg.pct_of_peak_sustained_active"], 1),
        "stalls": stalls,
    }


def stalls_of(number: Mapping[str, float]) -> dict[str, float]:
    """Returns the largest reasons for which warps wait, in percent of all; "selected" is no wait."""
    found: dict[str, float] = {}
    for name, value in number.items():
        match = _STALL.search(name)
        reason = next(filter(None, match.groups()), "") if match else ""
        if reason and not reason.endswith("not_issued"):
            found[reason] = max(value, found.get(reason, 0.0))
    whole = sum(found.values()) or 1.0
    largest = sorted((name for name in found if name != "selected"), key=lambda name: -found[name])[:_MOST_STALLS]
    return {name: round(100 * found[name] / whole, 1) for name in largest}


def _is_number(value: str | None) -> bool:
    try:
        float((value or "").replace(",", ""))
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
