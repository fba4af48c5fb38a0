"""The stage of whole engines reports engines that it could not run, and does not count as passed then."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.amd.house.source_tree import ROOT

SCRIPT = (ROOT / "scripts" / "test.sh").read_text()


def ran(venvs: Path, engines: tuple[str, ...]) -> tuple[int, str, str]:
    """Runs the stage with environments for these engines. Returns the exit code, its calls, and the summary's end."""
    for engine in engines:
        python = venvs / engine / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    verdicts = venvs / "verdicts"
    functions = re.findall(r"^run_engines\(\) \{$.*?^\}$", SCRIPT, re.MULTILINE | re.DOTALL)
    (code,) = re.findall(r"^readonly NOT_RUN=(\d+)$", SCRIPT, re.MULTILINE)
    shell = (
        f'set -euo pipefail\nNOT_RUN={code}\nrun_pytest() {{ echo "pytest $*"; }}\n{functions[0]}\nrun_engines -m short'
    )
    done = subprocess.run(
        ["bash", "-c", shell],
        env={"PATH": "/usr/bin:/bin", "ENGINE_VENVS": str(venvs), "verdicts": str(verdicts)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == int(code)) == (not engines)
    return done.returncode, done.stdout, verdicts.read_text() if verdicts.exists() else ""


@pytest.mark.parametrize("engines", [(), ("sglang",), ("vllm",), ("sglang", "vllm")])
def test_an_engine_without_an_environment_is_named_at_the_end_with_the_remedy(
    engines: tuple[str, ...], tmp_path: Path
) -> None:
    code, called, said = ran(tmp_path, engines)
    for engine in ("sglang", "vllm"):
        assert (f"tests/amd/engines/test_{engine}.py" in called) == (engine in engines)
        missing = f"NOT RUN: engines: {engine} has no environment in ENGINE_VENVS='{tmp_path}'"
        assert (missing in said) == (engine not in engines)
        remedy = f"bash scripts/engine_venv.sh {engine}"
        assert (remedy in said) == (engine not in engines)
    assert (code == 0) == bool(engines)


def test_a_stage_that_did_not_run_is_not_called_passed() -> None:
    assert re.search(r"\"\$NOT_RUN\"\) verdict='NOT RUN' ;;", SCRIPT)
