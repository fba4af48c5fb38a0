"""`rocm-attn doctor`: its output and its exit code, for machines given as data and for this one."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rocm_attn.cli import DONE, FAILED, main
from rocm_attn.cli.doctor.machine import Machine
from rocm_attn.cli.doctor.registry import CHECKS
from tests.amd.doctor.machines import BROKEN, CPU_ONLY, H200, MI300
from tests.amd.house.source_tree import ROOT


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, Machine]:
    """Makes the command read the machine that a test puts under "it"."""
    there: dict[str, Machine] = {}
    monkeypatch.setattr("rocm_attn.cli.doctor.command.read_machine", lambda environment: there["it"])
    return there


@pytest.mark.parametrize("machine", [MI300, CPU_ONLY, H200])
def test_a_healthy_machine_is_done_with(
    machine: Machine, pretend: dict[str, Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    pretend["it"] = machine
    assert main(["doctor"]) == DONE
    printed = capsys.readouterr()
    assert len([line for line in printed.out.splitlines() if " known-bad " not in line]) == len(CHECKS)
    assert printed.err == ""


def test_a_problem_is_printed_with_its_fix_and_fails(
    pretend: dict[str, Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = BROKEN["a user outside of the render group"]
    pretend["it"] = broken.machine
    assert main(["doctor"]) == FAILED
    printed = capsys.readouterr()
    problem, fix = (line for line in printed.out.splitlines() if line.startswith("PROBLEM") or "fix: " in line)
    assert broken.found in problem
    assert broken.fix in fix
    assert fix.endswith("(sglang#9603, aiter#4800)")
    assert printed.err == "rocm-attn: 1 problem found\n"


def test_warnings_alone_do_not_fail(pretend: dict[str, Machine], capsys: pytest.CaptureFixture[str]) -> None:
    pretend["it"] = BROKEN["NUMA balancing"].machine
    assert main(["doctor"]) == DONE
    assert "WARNING  numa-balancing" in capsys.readouterr().out


def test_json_is_a_list_of_objects_with_the_same_content(
    pretend: dict[str, Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    pretend["it"] = BROKEN["the stranger on PyPI"].machine
    assert main(["doctor", "--json"]) == FAILED
    listed = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in listed if entry["id"] != "known-bad"] == [check.id for check in CHECKS]
    (bad,) = (entry for entry in listed if entry["severity"] == "problem")
    assert bad["id"] == "aiter-package"
    assert bad["found"].startswith("the installed aiter 0.13.20191203 is another project")
    assert bad["fix"].startswith("pip uninstall aiter; ")


def test_at_build_leaves_the_host_out(pretend: dict[str, Machine], capsys: pytest.CaptureFixture[str]) -> None:
    pretend["it"] = BROKEN["no /dev/kfd in the container"].machine
    assert main(["doctor", "--at-build"]) == DONE
    assert "gpu-nodes" not in capsys.readouterr().out


DIAGNOSED = """
import sys
from rocm_attn.cli import main
code = main(["doctor", "--json"])
assert not {"torch", "triton", "aiter"} & set(sys.modules)
sys.exit(code)
"""


@pytest.mark.nightly  # its probes import torch and Triton
def test_this_machine_is_diagnosed_without_importing_torch_or_triton() -> None:
    command = [sys.executable, "-c", DIAGNOSED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (DONE, FAILED), done.stderr
    findings = {entry["id"]: entry for entry in json.loads(done.stdout)}
    assert torch.__version__ in findings["torch-import"]["found"]
    assert findings["torch-import"]["severity"] == "ok"
    if not torch.cuda.is_available():
        assert findings["torch-gpus"]["severity"] == "skipped"
        assert done.returncode == DONE
    else:
        assert findings["torch-gpus"]["severity"] == findings["gpu-count"]["severity"] == "ok"


def test_the_doctor_works_where_torch_and_aiter_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch", "triton", "aiter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", "rocm_attn.cli", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == FAILED, done.stderr
    findings = {entry["id"]: entry for entry in json.loads(done.stdout)}
    assert findings["torch-import"]["found"] == "torch cannot be imported: ImportError: torch is broken"
    assert findings["triton-import"]["severity"] == "problem"
    assert findings["aiter-package"]["found"].startswith("the installed aiter is another project")
