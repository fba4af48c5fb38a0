"""The command line on real weights, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.amd.house.source_tree import ROOT

PROMPT = "What is the capital of France?"


def test_generate_json_prints_one_object_with_coherent_text() -> None:
    arguments = ["generate", "--json", "--device", "cpu", "--max-new-tokens", "16", PROMPT]
    finished = subprocess.run(
        [sys.executable, "-m", "rocm_attn.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    printed = json.loads(finished.stdout)
    assert set(printed) == {"results", "report"}
    (france,) = printed["results"]
    assert france["prompt"] == PROMPT
    assert "Paris" in france["text"]
    assert france["finish_reason"] == "stop"
    assert printed["report"]["steps"] > 0
    assert printed["report"]["captures"] == 0, "so short a run does not pay for a graph on a CPU"
    assert "tokens/s" in finished.stderr
