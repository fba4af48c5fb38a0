"""The server as it starts by itself, measured next to what it expects of its steps; for the report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.amd.house.source_tree import ROOT
from tests.amd.rocm.models import Measured

pytestmark = pytest.mark.gpu


def test_a_server_serves_its_loads_and_a_long_prompt(tmp_path: Path, measured: Measured) -> None:
    pytest.importorskip("uvicorn")
    out = tmp_path / "serving.json"
    command = ["-m", "rocm_lab.benchmarks.serving", "--random", str(tmp_path / "llama-1b"), "--out", str(out)]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    measured("server's lines", found["start"])
    measured("server", found["rows"])
    assert any(line.startswith("expected of") for line in found["start"])
    assert all(row.get("output_tokens", 0) == row.get("requested_tokens", 0) for row in found["rows"])
