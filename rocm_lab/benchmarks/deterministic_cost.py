"""The cost of deterministic mode: every case of the suites of `rocm-attn bench kernels`, in both modes, in turn.

    python -m rocm_lab.benchmarks.deterministic_cost [--out FILE]

One layer's launches in a CUDA graph over pages past the L2; both modes are checked first, and take turns. Exits with 1,
after writing the file, if a result is wrong or a step takes longer than TIMES_ALLOWED of the normal mode.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rocm_lab.bench.ceilings import measured_ceilings
from rocm_lab.bench.choices import SUITES
from rocm_lab.bench.clocks import clock_of
from rocm_lab.bench.contestants import OwnProvider
from rocm_lab.bench.energy import meter_of
from rocm_lab.bench.kernels import ContestantResult, KernelOptions, Race, compile_ahead
from rocm_lab.bench.suites import SuiteCase, suite
from rocm_lab.benchmarks.script import printed, write

TIMES_ALLOWED = 1.5
_OPTIONS = KernelOptions(rounds=9)
_MODES = {"normal": OwnProvider("triton"), "deterministic": OwnProvider("triton", deterministic=True)}


def main() -> None:
    """Measures, prints, and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("rocm_lab/benchmarks/results/deterministic_cost_h200.json"))
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    cases = [case for name in SUITES for case in suite(name)]
    compile_ahead(cases, _MODES, device, max(1, len(os.sched_getaffinity(0)) - 2))
    rows = printed(_measured(cases, device))
    write(options.out, times_allowed=TIMES_ALLOWED, rows=rows)
    sys.exit(any("times" not in row or row["times"] > TIMES_ALLOWED for row in rows))


def _measured(cases: Sequence[SuiteCase], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a row for each case; it has times if both modes are right."""
    ceilings = measured_ceilings(device, torch.bfloat16, clock_of(device, _OPTIONS.round_us))
    race = Race(_MODES, device, ceilings, _OPTIONS, meter_of(device))
    for normal, deterministic in race.rows(cases):
        yield _row(normal, deterministic)


def _row(normal: ContestantResult, deterministic: ContestantResult) -> dict[str, Any]:
    found: dict[str, Any] = {"suite": normal.case.suite, "case": normal.case.name}
    wrong = [f"{row.provider}: {row.reason}" for row in (normal, deterministic) if not row.samples.us]
    if wrong:
        return found | {"wrong": "; ".join(wrong)}
    return found | {
        "normal_us": round(normal.us, 1),
        "deterministic_us": round(deterministic.us, 1),
        "times": round(deterministic.us / normal.us, 3),
        "kernel": deterministic.kernel.partition(":")[0],
    }


if __name__ == "__main__":
    main()
