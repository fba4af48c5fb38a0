"""A pytest plugin that writes one file with everything about a run: `-p tests.amd.rocm.report --gpu-report FILE`.

The file is one JSON object: a summary to read first, versions, devices and variables, the doctor's findings, every
kernel that was launched, and every test with its outcome, its time, its measurements and, if it failed, the whole
message and the kernels that it launched. docs/rocm.md has the fields that `rocm-attn read-report` reads.
"""

import datetime
import json
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.cli.doctor.finding import Severity
from rocm_attn.cli.doctor.reading import read_machine
from rocm_attn.cli.doctor.registry import diagnose
from rocm_attn.cli.env import environment
from rocm_lab.bench.machine import commit
from tests.amd.rocm.kernel_notes import KernelNotes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --gpu-report."""
    parser.addoption("--gpu-report", metavar="FILE", help="write everything about this run to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Starts the report if one was requested."""
    path = config.getoption("--gpu-report")
    if path:
        config.pluginmanager.register(GpuReport(Path(path)))


class GpuReport:
    """Collects a run and writes it when it ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._started = datetime.datetime.now(datetime.timezone.utc)
        self._tests: dict[str, dict[str, Any]] = {}
        self._notes = KernelNotes()

    def pytest_sessionstart(self) -> None:
        """Begins to note launches."""
        self._notes.start()

    def pytest_runtest_logstart(self) -> None:
        """Forgets the launches of the test before."""
        self._notes.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds one phase of a test; a failure of its set-up or tear-down counts as its own."""
        test = self._tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0, "measured": {}})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        test["measured"].update(report.user_properties)
        if report.outcome != "passed":
            test["outcome"] = report.outcome
            test["message"] = report.longreprtext or str(report.longrepr)
        if report.outcome == "failed":
            test["kernels"] = sorted(self._notes.launched)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the file."""
        self._notes.stop()
        facts = environment()
        findings = diagnose(read_machine(os.environ))
        outcomes = Counter(test["outcome"] for test in self._tests.values())
        written = {
            "summary": self._summary(facts, outcomes, [f.check.id for f in findings if f.severity is Severity.PROBLEM]),
            "started": self._started.isoformat(timespec="seconds"),
            "host": os.environ.get("REPORT_HOST") or platform.node(),
            "commit": commit(),
            "environment": facts,
            "doctor": [finding.as_dict() for finding in findings],
            "kernels": list(self._notes.variants.values()),
            "tests": {name: self._tests[name] for name in sorted(self._tests)},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(written, indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the path of the file."""
        terminalreporter.write_line(f"the report to send is {self._path}")

    def _summary(self, facts: dict[str, Any], outcomes: Counter[str], problems: list[str]) -> list[str]:
        devices = [f"{device['device']}: {device['name']}, {device['arch']}" for device in facts["devices"]]
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        failed = [f"failed: {name}" for name, test in sorted(self._tests.items()) if test["outcome"] == "failed"]
        doctor = f"the doctor's problems: {', '.join(problems)}" if problems else "the doctor found no problem"
        return [*(devices or ["no GPU"]), versions, counts or "no test ran", doctor, *failed]
