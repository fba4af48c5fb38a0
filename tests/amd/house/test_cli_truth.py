"""`rocm-attn truth`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, main
from rocm_attn.soak.shapes import SHAPES
from rocm_attn.soak.truth import TruthReport
from tests.amd.house.test_cli import GEMMA2, config_file

ON_CPU = ["--device", "cpu", "--dtype", "float32", "--lengths", "40,90", "--chunk", "60", "--page-size", "16"]


def test_a_models_layers_are_told_apart_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_file(tmp_path, {**GEMMA2, "sliding_window": 32, "head_dim": 64})
    assert main(["truth", config, *ON_CPU]) == DONE
    shown = capsys.readouterr().out
    assert "8 query heads over 4 KV heads of 64, a window of 32" in shown
    assert shown.count("torch.decode") == 2
    assert "every needle was found; 6 of 6 steps were replays" in shown


def test_every_encoding_is_run_that_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    encodings = ["--kv-encodings", "as-q,e4m3fnuz/layer", "--providers", "torch,aiter"]
    assert main(["truth", "latent", *ON_CPU, *encodings, "--eager", "--json"]) == DONE
    said = json.loads(capsys.readouterr().out)
    assert said["passed"]
    assert [run["way"] for run in said["runs"]][1].endswith("float8_e4m3fnuz, a scale for each layer")
    assert [each["way"].split(",")[0] for each in said["not_run"]] == ["provider aiter"] * 2
    sequence, _ = said["runs"][0]["layers"][0]["sequences"]
    assert sequence["tokens"] == 40
    assert sequence["asked"] > sequence["missed"] == 0


def test_what_is_missed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TruthReport, "passed", property(lambda report: False))
    assert main(["truth", "latent", *ON_CPU, "--eager"]) == FAILED
    captured = capsys.readouterr()
    assert "NEEDLES WERE MISSED; 0 of 6 steps were replays" in captured.out
    assert "needles were missed, or seen where they are hidden: provider auto, K and V as q" in captured.err


def test_nothing_that_can_be_run_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["truth", "latent", *ON_CPU, "--providers", "aiter"]) == FAILED
    captured = capsys.readouterr()
    assert "not run: provider aiter, K and V as q: no kernel of provider 'aiter' serves" in captured.out
    assert "nothing could be run" in captured.err


def test_bad_input_is_told_from_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["truth", "dense", "--device", "cpu", "--kv-encodings", "fp7"]) == BAD_INPUT
    assert "'fp7' is no encoding; write all, or one of as-q, e4m3fn" in capsys.readouterr().err
    assert main(["truth", "nowhere.json", "--device", "cpu"]) == BAD_INPUT
    with pytest.raises(SystemExit):
        main(["truth", "dense", "--providers", "torch,cuda"])


def test_the_help_names_every_shape(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["truth", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in SHAPES)
