"""The server as it starts by itself, measured next to what it expects of its steps; for the report."""

import json
from pathlib import Path

import pytest

from tests.amd.forked import run_python
from tests.amd.rocm.models import Measured

pytestmark = pytest.mark.gpu


def test_a_server_serves_its_loads_and_a_long_prompt(tmp_path: Path, measured: Measured) -> None:
    pytest.importorskip("uvicorn")
    out = tmp_path / "serving.json"
    run_python("-m", "rocm_lab.benchmarks.serving", "--random", str(tmp_path / "llama-1b"), "--out", str(out))
    found = json.loads(out.read_text())
    measured("server's lines", found["start"])
    measured("server", found["rows"])
    assert any(line.startswith("expected of") for line in found["start"])
    assert all(row.get("output_tokens", 0) == row.get("requested_tokens", 0) for row in found["rows"])
