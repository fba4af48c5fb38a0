"""`rocm-attn simulate`: runs a script whose Triton kernels are executed as AMD machine code, and reports on each."""

import argparse
import json
import runpy
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rocm_attn.cli.signals import sigterm_interrupts
from rocm_attn.errors import BadSetting, RocmAttnError
from rocm_lab.races.watch import RaceWatch
from rocm_lab.simulator.launcher import ARCHS, simulated, watched
from rocm_lab.simulator.report import KernelReport, reports_of

_INTERRUPTED = "interrupted"


class SimulationFailed(RocmAttnError):
    """A script failed under the simulator, or a check of its kernels' code found a fault."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """A script that was run.

    error:   what ended it early, as a line, or that it launched no kernel; empty if it ended well
    seconds: that it took, compiling included
    reports: of the kernels that it launched
    """

    arch: str
    error: str
    seconds: float
    reports: list[KernelReport]

    @property
    def passed(self) -> bool:
        """True if nothing ended it, and no check found a fault."""
        return not self.error and not any(report.faults for report in self.reports)

    def lines(self) -> list[str]:
        """Lines for people."""
        executed = sum(report.instructions for report in self.reports)
        return [
            *(line for report in self.reports for line in report.lines()),
            f"{self.arch}: {executed} instructions in {self.seconds:.1f} s with compiling; "
            + (self.error or "it ended well"),
        ]

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "arch": self.arch,
            "passed": self.passed,
            "error": self.error,
            "seconds": self.seconds,
            "kernels": [report.as_json() for report in self.reports],
        }


def run(options: argparse.Namespace) -> None:
    """Prints what the script's kernels took, so far at Ctrl-C. Raises SimulationFailed after that, and BadSetting."""
    path = Path(options.script)
    if not path.is_file():
        raise BadSetting(f"{path} is no file; give a Python script that launches Triton kernels on tensors of the CPU")
    runs: list[ScriptRun] = []
    with sigterm_interrupts():
        for arch in (options.arch,) if options.arch else ARCHS:
            runs.append(run_script(path, arch))
            if runs[-1].error == _INTERRUPTED:
                break
    if options.json:
        print(json.dumps({"script": str(path), "runs": [each.as_json() for each in runs]}, indent=2))
    else:
        print("\n".join(line for each in runs for line in each.lines()))
    if runs[-1].error == _INTERRUPTED:
        raise KeyboardInterrupt
    failed = [each.arch for each in runs if not each.passed]
    if failed:
        raise SimulationFailed(f"{path} did not pass on {' and '.join(failed)}")


def run_script(path: Path, arch: str) -> ScriptRun:
    """Runs a script as the main program, its folder first on the path; what it prints goes to the error stream."""
    error, started = "", time.monotonic()
    with (
        watched(RaceWatch(seed=0)) as watch,
        simulated(arch) as simulation,
        redirect_stdout(sys.stderr),
        mock.patch.object(sys, "argv", [str(path)]),
        mock.patch.object(sys, "path", [str(path.parent.resolve()), *sys.path]),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            error = "" if ended.code in (None, 0) else f"SystemExit: {ended.code}"
        except KeyboardInterrupt:
            error = _INTERRUPTED
        except Exception as caught:  # any exception is the script's result; the other arch still runs
            error = f"{type(caught).__name__}: {str(caught).partition(chr(10))[0]}"
    reports = reports_of(simulation.launches, watch.races)
    idle = "" if reports else "it launched no kernel; launch one as on a GPU, on tensors of the CPU"
    return ScriptRun(arch, error or idle, time.monotonic() - started, reports)
