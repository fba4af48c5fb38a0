"""The report of a run on a user's GPU: one file with all information, whatever happened."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.cli.doctor.registry import CHECKS
from tests.amd.house.source_tree import ROOT

TESTS = """
import pytest

def test_measures(record_property):
    record_property("us", 12.5)

def test_fails():
    assert 1 + 1 == 3, "arithmetic"

@pytest.fixture
def broken():
    raise OSError("no such device")

def test_is_not_set_up(broken):
    pass

def test_is_skipped():
    pytest.skip("not here")
"""


def report_of(folder: Path, *arguments: str) -> dict[str, Any]:
    """Returns the plugin's report on TESTS."""
    (folder / "test_some.py").write_text(TESTS)
    path = folder / "reports" / "report.json"
    command = [sys.executable, "-m", "pytest", "-p", "tests.amd.rocm.report", "--gpu-report", str(path), "-p"]
    command += [
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        *arguments,
        str(folder / "test_some.py"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPORT_HOST": "mi300-7"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 5), done.stdout + done.stderr
    assert f"the report to send is {path}" in done.stdout
    written: dict[str, Any] = json.loads(path.read_text())
    return written


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return report_of(tmp_path_factory.mktemp("run"))


@pytest.mark.nightly
def test_the_report_says_everything_about_a_run(report: dict[str, Any]) -> None:
    tests = {name.rpartition("::")[2]: test for name, test in report["tests"].items()}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_measures": "passed",
        "test_fails": "failed",
        "test_is_not_set_up": "failed",
        "test_is_skipped": "skipped",
    }
    assert tests["test_measures"]["measured"] == {"us": 12.5}
    assert "AssertionError: arithmetic" in tests["test_fails"]["message"]
    assert "no such device" in tests["test_is_not_set_up"]["message"]
    assert "not here" in tests["test_is_skipped"]["message"]
    assert [finding["id"] for finding in report["doctor"]] == [check.id for check in CHECKS]
    assert report["environment"]["versions"]["torch"] == torch.__version__
    assert report["host"] == "mi300-7"
    assert report["commit"]


@pytest.mark.nightly
def test_the_summary_comes_first_and_names_what_failed(report: dict[str, Any]) -> None:
    assert next(iter(report)) == "summary"
    summary = report["summary"]
    assert f"torch {torch.__version__}" in "\n".join(summary)
    assert "2 failed, 1 passed, 1 skipped" in summary
    assert [line.rpartition("::")[2] for line in summary if line.startswith("failed: ")] == [
        "test_fails",
        "test_is_not_set_up",
    ]


@pytest.mark.nightly
def test_a_run_without_tests_says_so(tmp_path: Path) -> None:
    assert "no test ran" in report_of(tmp_path, "-k", "nothing")["summary"]
