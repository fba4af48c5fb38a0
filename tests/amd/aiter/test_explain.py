"""The kernels that real models get on MI300X and MI355X, checked against golden files."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_attn.cli import explain, main
from rocm_attn.cli.arguments import requested_target
from rocm_attn.machine.aiter_marks import MARKS
from rocm_attn.machine.settings import Settings
from rocm_attn.providers.select import ENTRIES
from rocm_attn.selection import table
from rocm_attn.selection.table import markdown
from tests.amd.aiter.explained import GOLDEN, MODELS, PAGE, config_of, explained, page_with_table, place
from tests.amd.house.source_tree import ROOT
from tests.amd.runner.hf_models import PUBLISHED, published


@pytest.mark.fast
@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_explained_as_in_its_golden_file(model: str) -> None:
    assert explained(model) == place(model).read_text(), "python -m tests.amd.aiter.explained writes it anew"


# Model -> its recurrent layers, and the bytes of one on a rank: 4 * heads * 128 * 128 and 2 * 3 * channels.
RECURRENT = {
    "deepseek-v4.1-flash": [],
    "glm-5.3-flash": [(34, 4 * 8 * 128 * 128 + 6 * 24 * 128)],
    "kimi-k3": [(69, 4 * 12 * 128 * 128 + 6 * 36 * 128)],
    "qwen3.5-397b-a17b": [(45, 4 * 8 * 128 * 128 + 6 * 12 * 128)],
    "qwen3.8-27b": [(48, 4 * 48 * 128 * 128 + 6 * 80 * 128)],
    "qwen3.8-flash-next": [(36, 4 * 48 * 128 * 128 + 6 * 80 * 128)],
}


@pytest.mark.parametrize("model", RECURRENT)
def test_every_layer_is_listed_once_and_recurrent_ones_with_their_state(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--arch", "gfx942", "--page-size", "auto", "--pool", "auto", *MODELS[model], "--json")
    said = json.loads(run(capsys, model, *options)[1])
    recurrent = [(len(kind["layers"]), kind["bytes_per_slot"]) for kind in said["recurrent_layers"]]
    assert recurrent == RECURRENT[model]
    layers = [layer for kind in said["layer_kinds"] + said["recurrent_layers"] for layer in kind["layers"]]
    assert sorted(layers) == list(range(len(layers)))
    assert all(kind["kernels"]["decode"] and kind["kernels"]["extend"] for kind in said["layer_kinds"])


def test_no_golden_file_is_left_over() -> None:
    assert set(GOLDEN.iterdir()) == set(map(place, MODELS))


def run(capsys: pytest.CaptureFixture[str], model: str, *options: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr of `rocm-attn explain` on a published config."""
    code = main(["explain", str(config_of(model)), *options])
    return code, *capsys.readouterr()


def test_a_file_of_tiles_that_the_environment_names_and_that_is_missing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain, "settings", lambda: Settings(tuning=str(tmp_path / "missing.json")))
    code, said, _ = run(capsys, "llama-3-8b", "--arch", "gfx942")
    assert code == 0
    assert "missing.json; name one that `rocm-attn tune` wrote, or off; the built-in tiles are used" in said


# Phi-3-medium-128k: its window is as long as its context.
PHI3_MEDIUM = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 4096,
    "sliding_window": 131072,
}


@pytest.mark.parametrize(("window", "is_window"), [(131071, True), (131072, False), (262144, False)])
def test_a_window_that_is_no_shorter_than_the_context_is_no_window(
    window: int, is_window: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**PHI3_MEDIUM, "sliding_window": window}))
    assert main(["explain", str(tmp_path), "--arch", "gfx942"]) == 0
    text = capsys.readouterr().out
    assert ("it has no sliding window" in text) == is_window
    assert ("  decode: aiter.paged_attention_ragged\n" in text) != is_window
    assert ("  shared: triton.shared_prefix\n" in text) != is_window


def test_releases_may_be_named_and_decide(capsys: pytest.CaptureFixture[str]) -> None:
    on_7_0 = ("llama-3-8b", "--arch", "gfx950", "--rocm-release", "7.0")
    _, printed, _ = run(capsys, *on_7_0)
    assert "for AITER 0.1.21 in development and ROCm 7.0; " in printed
    assert "  extend: aiter.mha_batch_prefill_func\n" in printed
    code, printed, _ = run(capsys, *on_7_0[:-1], "7.2", "--aiter-release", "0.1.16", "--json")
    assert code == 0
    explained = json.loads(printed)
    assert (explained["aiter"], explained["rocm"]) == ("0.1.16", "7.2")
    assert explained["layer_kinds"][0]["kernels"]["extend"] == "aiter.unified_attention"
    refusal = "causal attention without a soft cap is miscompiled for gfx950 (ROCm from 7.2 and before 7.3; here 7.2)"
    assert f"extend: aiter.mha_batch_prefill_func: {refusal}" in explained["layer_kinds"][0]["refusals"]


def test_a_build_that_is_named_has_no_marks_of_the_image() -> None:
    """The image's AITER is a build between releases too, and its marks say nothing about another one."""
    options = argparse.Namespace(arch="gfx942", aiter_release=None, rocm_release="7.2.4", triton_release=None)
    assert requested_target(options).releases.marks == set(MARKS)
    options.aiter_release = "0.1.20.dev12"
    assert requested_target(options).releases.marks == set()


def test_the_page_of_kernels_is_current() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert page == markdown(), "rocm-attn kernels > docs/kernels.md"


def test_a_new_provider_has_its_part_of_the_page_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(ENTRIES["cpu"][0], name="toy.decode")
    monkeypatch.setattr(table, "ENTRIES", {**ENTRIES, "toy": (row,)})
    assert "## toy\n" in markdown()


def test_the_table_of_models_is_current() -> None:
    assert PAGE.read_text() == page_with_table(), "python -m tests.amd.aiter.explained writes it anew"


def test_a_plan_says_the_bytes_of_states(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ("--arch", "gfx942", "--max-kv-len", "4096", "--max-batch-size", "8")
    # Two states, each with the last inputs of the convolution, and k, change and decay of one token that is kept.
    state = 4 * 48 * 128 * 128 + 2 * (3 + 1) * 80 * 128 + (2 * 16 + 4 * 48) * 128 + 256
    states = 2 * 48 * state
    assert main(["capture-plan", str(config_of("qwen3.8-27b")), *plan, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state_bytes_per_request"] == states
    assert main(["capture-plan", str(config_of("qwen3.8-27b")), *plan]) == 0
    printed = capsys.readouterr().out
    assert f"states take {states / 2**20:.1f} MiB a request" in printed
    rows = 9  # with the reserved one
    assert f"states of requests {rows * states / 2**30:.1f} GiB" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("model", "tp", "sizes"),
    [
        ("falcon-h1-7b-instruct", 1, (44, 24, 1, 256, 128)),
        ("nemotron-h-8b-base-8k", 1, (24, 128, 8, 128, 64)),
        ("nemotron-h-8b-base-8k", 8, (24, 16, 1, 128, 64)),
    ],
)
def test_a_plan_counts_the_states_of_mamba_on_a_rank(
    model: str, tp: int, sizes: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """sizes: recurrent layers, heads, groups, rows of a state, elements of a head"""
    layers, heads, groups, rows, dim = sizes
    inputs = 2 * (3 + 1) * (heads * dim + 2 * groups * rows)
    kept = 2 * groups * rows + 4 * heads * dim + max(256, 4 * heads)  # k, change and decay of one token
    state = layers * (4 * heads * rows * dim + inputs + kept)
    command = ["capture-plan", str(PUBLISHED / f"{model}.json"), "--arch", "gfx942", "--tp", str(tp)]
    assert main([*command, "--max-kv-len", "4096", "--max-batch-size", "8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    parts = {part["name"]: part["bytes"] for part in plan["parts"]}
    # Two states a request and for the reserved row, and some in the prefix cache.
    assert plan["state_bytes_per_request"] == 2 * state
    assert parts["states of requests"] == 9 * 2 * state
    assert parts["kept states"] % state == 0 < parts["kept states"]


def test_the_tokens_that_fit_leave_room_for_as_many_bytes_of_kept_states(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["capture-plan", str(config_of("qwen3.8-27b")), "--gpu", "mi300x", "--weights-gib", "54"]
    command += ["--max-kv-len", "32768", "--max-batch-size", "32", "--json"]

    def fit(*more: str) -> dict[str, int]:
        assert main([*command, *more]) == 0
        plan = json.loads(capsys.readouterr().out)
        of_parts = {part["name"]: part["bytes"] for part in plan["parts"]}
        # The same number of bytes, but for the last state, which lies on no whole number of pages.
        last = plan["state_bytes_per_request"] // 2
        assert of_parts["KV pool"] - last < of_parts["kept states"] <= of_parts["KV pool"]
        found: dict[str, int] = plan["fit"]
        return found

    pages = 1 + fit()["room"] // 16
    assert fit("--num-pages", str(pages))["fits"]
    of_a_state = 149  # pages, of 1 MiB
    assert not fit("--num-pages", str(pages + of_a_state))["fits"]


def test_a_plan_counts_windows_rows_and_states_of_deepseek_v4(capsys: pytest.CaptureFixture[str]) -> None:
    """43 windows; 21 layers with 32 rows and index keys in a page of 128 tokens, 20 with one row; float32 states."""
    plan = ("--arch", "gfx942", "--max-kv-len", "4096", "--max-batch-size", "8", "--tp", "8", "--swa-pages", "40")
    assert main(["capture-plan", str(config_of("deepseek-v4-flash")), *plan, "--page-size", "128", "--json"]) == 0
    parts = {part["name"]: part["bytes"] for part in json.loads(capsys.readouterr().out)["parts"]}
    assert parts["KV pool"] == 257 * (21 * 32 * (512 + 128) * 2 + 20 * 512 * 2)
    state = 21 * 2 * 2 * (512 + 128) * 4 + 20 * 2 * 512 * 4
    assert parts["SWA KV pool"] == 40 * 128 * (43 * 512 * 2 + state)
    assert main(["capture-plan", str(config_of("deepseek-v4-flash")), *plan, "--page-size", "16"]) == 2
    assert "rows of 128 tokens in pages of 16; the page size must be a multiple" in capsys.readouterr().err


# The runner reads more fields of a config.json than those of attention.
WHOLE = {**published("llama-3.1-8b"), "num_hidden_layers": 2, "max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("changes", "options", "server", "line"),
    [
        ({}, (), "serve", "served by rocm-attn serve, and by the plug-ins for vLLM and SGLang"),
        (
            {"architectures": ["MixtralForCausalLM"]},
            (),
            "plugins",
            "served by the plug-ins for vLLM and SGLang, not by rocm-attn serve: the engine does not serve "
            "MixtralForCausalLM",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            (),
            "plugins",
            "served by the plug-ins for vLLM and SGLang, not by rocm-attn serve: ",
        ),
        (
            {"head_dim": 640},
            (),
            "nothing",
            "not served: 1 of 1 kinds of layer have no kernel on gfx942",
        ),
    ],
)
def test_the_first_line_says_what_serves_the_model(
    changes: dict[str, object],
    options: Sequence[str],
    server: str,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**WHOLE, **changes}))
    command = ["explain", str(tmp_path), "--arch", "gfx942", *options]
    code = main(command)
    assert code == (server == "nothing")
    assert capsys.readouterr().out.startswith(line)
    assert main([*command, "--json"]) == code
    said = json.loads(capsys.readouterr().out)
    assert said["served_by"] == server
    assert (said["not_served_by_serve"] == "") == (server == "serve")


def test_pages_are_those_with_the_best_kernels_unless_an_engine_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latent = ("deepseek-v3", "--arch", "gfx942", "--tp", "8")
    _, printed, _ = run(capsys, *latent)
    assert "pages of 1 tokens were chosen: serve and capture-plan take them with --page-size 1\n" in printed
    assert "  decode: aiter.mla_decode_fwd+get_mla_metadata_v1\n" in printed
    assert len(printed.splitlines()) < 40
    _, with_all, _ = run(capsys, *latent, "--page-size", "auto")
    assert "pages of 64: triton serves 244 of 244 kinds of step over 61 layers" in with_all
    _, of_engine, _ = run(capsys, *latent, "--engine", "vllm@0.33")
    assert "pages of 16, latent pages\n" in of_engine
    assert "contiguous pages" not in of_engine  # latent rows lie one after the other; K and V of heads do not
    _, of_heads, _ = run(capsys, "llama-3-8b", "--arch", "gfx942", "--engine", "vllm@0.33")
    assert "contiguous pages" in of_heads
    _, printed, _ = run(capsys, "llama-3-8b", "--arch", "gfx942")
    assert "were chosen" not in printed
