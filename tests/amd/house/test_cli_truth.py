"""`rocm-attn truth`: its output and its exit codes."""

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.cli import DONE, FAILED, INTERRUPTED, main, truth
from rocm_attn.providers.torch_ref import TorchDecode
from rocm_attn.truth.check import TruthReport
from tests.amd.house.test_cli import GEMMA2, config_file

_LATENTS = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 24,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
# Fields of config.json files, the ranks, and the text about a layer.
SPARSE: dict[str, tuple[dict[str, Any], int, str]] = {
    "DeepSeek-V3.2": (
        {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **_LATENTS},
        8,
        "8 heads over latents of 512 in rows of 576, over 24 units of 1 tokens of its own indexer",
    ),
    "GLM-5": (
        {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            **_LATENTS,
            "indexer_types": ["full", "shared"],
        },
        4,
        "16 heads over latents of 512 in rows of 576, over 24 units of 1 tokens of an earlier layer's indexer",
    ),
}
ON_CPU = ["--device", "cpu", "--dtype", "float32", "--lengths", "40,90", "--chunk", "60", "--page-size", "16"]


def test_a_models_layers_are_reported_apart_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_file(tmp_path, {**GEMMA2, "sliding_window": 32, "head_dim": 64})
    assert main(["truth", config, *ON_CPU]) == DONE
    shown = capsys.readouterr().out
    assert "8 query heads over 4 KV heads of 64, a window of 32" in shown
    assert shown.count("torch.decode") == 2
    assert "every needle was found; 6 of 6 steps were replays" in shown


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["GLM-5", "DeepSeek-V3.2"])
def test_layers_of_a_model_that_selects_are_found_by_their_config(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The test runs the whole chain of a published model, on one of its ranks."""
    fields, ranks, words = SPARSE[model]
    config = config_file(tmp_path, fields)
    assert main(["truth", config, "--tp", str(ranks), *ON_CPU, "--kv-encodings", "e4m3fnuz/token"]) == DONE
    shown = capsys.readouterr().out
    assert words in shown
    assert "over a selection: torch.indexer" in shown
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
    assert sequence["requested"] > sequence["missed"] == 0


def test_what_is_missed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TruthReport, "passed", property(lambda report: False))
    assert main(["truth", "latent", *ON_CPU, "--eager"]) == FAILED
    captured = capsys.readouterr()
    assert "NEEDLES WERE MISSED; 0 of 6 steps were replays" in captured.out
    assert "needles were missed, or hidden ones were seen: provider auto, K and V as q" in captured.err


def test_a_result_that_is_no_number_is_null_in_the_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchDecode, "attend", lambda self, args, step, bounds: args.out.fill_(float("nan")))
    assert main(["truth", "dense", *ON_CPU, "--providers", "torch", "--eager", "--json"]) == FAILED
    (run,) = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))["runs"]
    assert not run["passed"]
    assert run["misses"][0]["distance"] is None


@pytest.mark.usefixtures("heard")
def test_what_was_found_before_an_interrupt_is_in_the_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = truth._report

    def reported(options: Any, way: truth.Way, *given: Any) -> TruthReport:
        if way.provider == "cpu":
            os.kill(os.getpid(), signal.SIGTERM)
        return report(options, way, *given)

    monkeypatch.setattr(truth, "_report", reported)
    assert main(["truth", "dense", *ON_CPU, "--providers", "torch,cpu", "--eager", "--json"]) == INTERRUPTED
    said = json.loads(capsys.readouterr().out)
    assert [run["passed"] for run in said["runs"]] == [True]
    assert said["not_run"] == [{"way": "provider cpu, K and V as q", "reason": "the command was ended before"}]
    assert not said["passed"]


def test_what_was_found_is_written_before_the_next_way_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or a pipe got it at the end of all, and nothing if SIGTERM came before."""
    written, report = io.BytesIO(), truth._report
    found_before = list[bytes]()

    def reported(*given: Any) -> TruthReport:
        found_before.append(written.getvalue())
        return report(*given)

    monkeypatch.setattr(truth, "_report", reported)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written))
    assert main(["truth", "dense", *ON_CPU, "--providers", "torch,cpu", "--eager"]) == DONE
    first, second = found_before
    assert first == b""
    assert b"provider torch" in second
