"""The script that compares lm-eval's log-likelihoods: its verdict, and lm-eval's own client where it is installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocm_lab.benchmarks.lm_eval_likelihoods import main
from tests.amd.server.load.model_folder import write_model
from tests.amd.server.load.served import served

GOOD = {"hf": [(-1.0, True), (-7.5, False)], "local-completions": [(-1.0004, True), (-7.5, False)]}
QUESTIONS = [
    {"query": "w9 w12 w33", "choices": ["w5 w6", "w7", "w8 w9 w10"], "gold": 0},
    {"query": "w4", "choices": ["w5", "w20 w21"], "gold": 1},
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    return file


def run(questions: Path, url: str = "http://127.0.0.1:8000/", model: str = "tiny") -> int:
    return main(["--url", url, "--model", model, "--questions", str(questions)])


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({}, 0),
        ({"local-completions": [(-1.0, True), (-7.502, False)]}, 1),
        ({"local-completions": [(-1.0, True), (float("nan"), False)]}, 1),
        ({"local-completions": [(-1.0, False), (-7.5, False)]}, 1),
    ],
    ids=["alike", "another log-likelihood", "no number", "another likeliest text"],
)
def test_the_verdict_is_that_of_the_worst_choice(
    found: dict[str, Any], status: int, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, str]] = {}

    def simple_evaluate(model: str, model_args: dict[str, str], tasks: list[dict[str, Any]], **_: Any) -> Any:
        asked[model] = model_args
        assert tasks[0]["dataset_kwargs"] == {"data_files": {"test": str(questions)}}
        sample = [{"doc_id": place, "resps": [[each]]} for place, each in enumerate({**GOOD, **found}[model])]
        return {"samples": {tasks[0]["task"]: sample[::-1]}}

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))
    assert run(questions) == status
    assert asked["local-completions"] == {"model": "tiny", "base_url": "http://127.0.0.1:8000/v1/completions"}
    assert asked["hf"]["pretrained"] == "tiny"


def test_without_lm_eval_one_sentence_says_so(
    questions: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit):
        run(questions)
    assert "error: lm-eval is not installed; install it with pip install" in capsys.readouterr().err


@pytest.mark.nightly
def test_lm_eval_reads_transformers_log_likelihoods_from_the_server(questions: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    model = write_model(tmp_path)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w62", "eos_token": "w61"}
    (model / "tokenizer_config.json").write_text(json.dumps(names))
    with served(model, "--served-model-name", str(model)) as server:
        assert run(questions, f"http://127.0.0.1:{server.port}", str(model)) == 0
