"""`rocm-attn capture-plan`: a runtime then allocates and captures what it predicts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, main
from rocm_attn.paging.kv_pool import page_bytes
from tests.amd.graphs.small_models import Tiny
from tests.amd.worlds.problems import deterministic_providers, providers

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
}


@pytest.mark.fast(1)
@pytest.mark.parametrize(
    ("provider", "mode"),
    [(name, mode) for name in providers() for mode in ({}, {"shared_prefixes": True})]
    + [(name, {"deterministic": True}) for name in deterministic_providers()],
)
def test_what_is_predicted_is_what_is_allocated_and_captured(
    provider: str, mode: dict[str, bool], device: torch.device
) -> None:
    tiny = Tiny.build(device, provider, [1, 4], tokens=(4, 8), **mode)  # type: ignore[arg-type]
    report = tiny.runner().capture_all()
    plan = tiny.planned()
    assert [bucket.shape for bucket in plan.buckets] == [bucket.key.shape for bucket in report.buckets]
    assert plan.lengths == (provider == "torch")
    assert {part.name: part.num_bytes for part in plan.parts} == tiny.held()
    assert plan.num_bytes == sum(tiny.held().values())


def test_a_setting_changes_what_it_is_named_for(device: torch.device) -> None:
    tiny = Tiny.build(device, "torch", None)

    def parts(**changes: int | list[int]) -> dict[str, tuple[int, str]]:
        return {part.name: (part.num_bytes, part.knob) for part in tiny.planned(**changes).parts}

    plain = parts()
    for name, changes, knob in (
        ("kv_len", {"capture_sizes": [64]}, "capture_sizes up to 64"),
        ("token_ids", {"capture_tokens": [512]}, "capture_tokens up to 512"),
        ("group_indptr", {"shared_prefixes": True}, "shared_prefixes, capture_sizes up to 8"),
        ("request table", {"max_num_seqs": 20}, "max_num_seqs 20"),
        ("request table", {"max_kv_len": 512}, "max_kv_len 512 / page_size 4"),
        ("KV pool", {"num_pages": 300}, f"num_pages 300 of {page_bytes(tiny.problems)} bytes"),
    ):
        changed = parts(**changes)
        assert changed[name][0] > plain[name][0]
        assert knob in changed[name][1]


def config_file(folder: Path, **changes: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Returns the plan that the command prints as JSON."""
    assert main([*arguments, "--json"]) == DONE
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    return plan


def test_the_command_lists_graphs_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arch", "cpu", "--max-batch-size", "4", "--max-kv-len", "1024", "--capture-tokens", "64"]
    assert main(["capture-plan", config_file(tmp_path), *arguments]) == DONE
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("on cpu, up to 4 sequences of 1024 tokens")
    assert printed[2] == "8 graphs, made in this order:"
    assert printed[3].startswith("  extend of 4 sequences with 64 tokens")
    (pool,) = [line for line in printed if "KV pool" in line]
    # 256 pages and the reserved one, 16 tokens, 32 layers, 8 heads, 128 + 128 elements of 2 bytes
    assert pool.split() == ["KV", "pool", "514.0", "MiB", "num_pages", "257", "of", "2097152", "bytes"]


@pytest.mark.parametrize("page_size", [*(pytest.param(size, marks=pytest.mark.nightly) for size in (1, 64)), 16])
def test_drafts_of_many_branches_take_little_at_long_contexts(
    page_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """512 sequences of 128k tokens, 8 branches, 4 steps: page lists per branch and step would take 17 GB."""
    sizes = ["--max-batch-size", "512", "--capture-sizes", "512"]
    arguments = ["--arch", "gfx942", *sizes, "--page-size", str(page_size), "--drafts", "8x4"]
    plan = planned(capsys, "capture-plan", config_file(tmp_path), *arguments)
    assert 0 < plan["draft_bytes"] < 100 << 20
    (largest,) = [b for b in plan["buckets"] if b["branches"] and b["num_seqs"] == 512]
    assert (largest["branches"], largest["draft_steps"], largest["num_tokens"]) == (8, 4, 512 * 8 * 4)
    assert main(["capture-plan", config_file(tmp_path), *arguments]) == DONE
    printed = capsys.readouterr().out
    assert "4 draft steps of 512 sequences with 8 branches" in printed
    assert "total for drafts" in printed


def test_layers_that_read_anothers_k_and_v_have_no_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 9 layers keep K and V, the fifth one without a window; 6 read them.
    gemma3n = {"architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 15, "num_kv_shared_layers": 6}
    arguments = ["--arch", "gfx942", "--max-batch-size", "4", "--num-pages", "100", "--swa-pages", "40"]
    plan = planned(capsys, "capture-plan", config_file(tmp_path, **gemma3n, head_dim=256), *arguments)
    parts = {part["name"]: part["bytes"] for part in plan["parts"]}
    layer_page_bytes = 16 * 8 * (256 + 256) * 2
    assert parts["KV pool"] == 100 * layer_page_bytes
    assert parts["SWA KV pool"] == 40 * 8 * layer_page_bytes


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--arch", "cpu", "--max-batch-size", "2", "--page-size", "64"]
    plan = planned(capsys, "capture-plan", config_file(tmp_path), *arguments)
    assert plan["max_kv_len"] == 131072
    assert [(bucket["kind"], bucket["num_seqs"]) for bucket in plan["buckets"]] == [("decode", 2), ("decode", 1)]
    assert plan["total_bytes"] == sum(part["bytes"] for part in plan["parts"])
    assert all(part["knob"] for part in plan["parts"])


def test_a_plan_reaches_as_far_as_the_models_context_which_yarn_stretches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 131072, "rope_theta": 5e5}
    arguments = ["--arch", "cpu", "--max-batch-size", "2", "--max-kv-len"]
    plain = ["capture-plan", config_file(tmp_path), *arguments]
    assert main([*plain, "131073"]) == BAD_INPUT
    assert "max_kv_len is 131073; it must be at most the model's context, 131072" in capsys.readouterr().err
    stretched = ["capture-plan", config_file(tmp_path, rope_scaling=yarn), *arguments]
    assert planned(capsys, *stretched, "524288")["max_kv_len"] == 524288
    unknown = ["capture-plan", config_file(tmp_path, rope_scaling={"rope_type": "later"}), *arguments]
    assert planned(capsys, *unknown, "131072")["max_kv_len"] == 131072
    chunked = ["capture-plan", config_file(tmp_path, dual_chunk_attention_config={"chunk_size": 65536}), *arguments]
    assert main([*chunked, "65537"]) == BAD_INPUT  # beyond it keys are seen in another way


def test_deterministic_kernels_are_planned_with_their_workspace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["capture-plan", config_file(tmp_path), "--arch", "gfx942", "--max-batch-size", "64"]
    workspaces = []
    for more in ([], ["--deterministic"]):
        parts = planned(capsys, *arguments, *more)["parts"]
        workspaces.append({part["name"]: part["bytes"] for part in parts}["workspace"])
    # docs/deterministic.md: a slot for every segment of every row, with 4 query heads x 130 words.
    assert workspaces[1] == 64 * 8 * (131072 // 1024) * 4 * 130 * 4
    assert workspaces[0] < workspaces[1]


@pytest.mark.parametrize(("triton", "served"), [("3.6.0", (45e6, 160e6)), ("3.9.0", (0, 45e6))])
def test_the_workspace_of_deterministic_extend_on_hopper_is_reported_before_there_is_one(
    triton: str, served: tuple[float, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its kernel needs one release of Triton; the plan does not depend on the installed one."""
    command = ["capture-plan", config_file(tmp_path), "--arch", "sm_90", "--provider", "triton", "--deterministic"]
    sizes = ["--max-batch-size", "8", "--max-kv-len", "4096", "--capture-tokens", "2048"]
    parts = planned(capsys, *command, *sizes, "--triton-release", triton)["parts"]
    (workspace,) = (part for part in parts if part["name"] == "workspace")
    assert served[0] < workspace["bytes"] < served[1]
    assert "max_kv_len 4096 / page_size" in workspace["knob"]
    assert main([*command, *sizes, "--triton-release", "later"]) == BAD_INPUT
    assert "--triton-release is 'later'; give a release number" in capsys.readouterr().err


@pytest.mark.parametrize(("pool", "chosen"), [("linear", "linear"), ("auto", "linear"), ("vectorized", "vectorized")])
def test_the_command_chooses_the_pages_that_are_left_open(
    pool: str, chosen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["capture-plan", config_file(tmp_path), "--arch", "gfx942", "--max-batch-size", "2", "--pool", pool]
    plan = planned(capsys, *command, "--page-size", "auto")
    assert (plan["page_size"], plan["pool"]) == (16, chosen)
    assert main([*command, "--page-size", "auto"]) == DONE
    layout = "vectorised " if chosen == "vectorized" else ""
    assert f"{layout}pages of 16 tokens were chosen" in capsys.readouterr().out.splitlines()


# The rest of Llama-3.1-8B's config.json.
WHOLE = {"intermediate_size": 14336, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}


@pytest.mark.parametrize(
    ("arguments", "verdict"),
    [
        (["--max-kv-len", "8192"], r"fits: 93\.\d GiB remain for activations"),
        ([], r"fits with fewer pages, as serve allocates: for every sequence at full length, 866\.\d GiB are missing"),
        (["--num-pages", "524289"], r"does not fit: 866\.\d GiB are missing before activations"),
        (["--weights-gib", "190"], r"does not fit: the rest leaves no room for a token of K and V"),
        (["--tp", "8"], r"fits: 41\.\d GiB remain for activations"),
    ],
)
def test_the_command_says_whether_it_fits_a_gpu_and_how_many_tokens_would(
    arguments: list[str], verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["capture-plan", config_file(tmp_path, **WHOLE), "--gpu", "mi300x", "--max-batch-size", "64", *arguments]
    assert main(command) == DONE
    assert re.search(verdict, capsys.readouterr().out)
    plan = planned(capsys, *command)
    fit = plan["fit"]
    assert fit["fits"] == verdict.startswith("fits:")
    assert fit["kv"] + fit["buffers"] == plan["total_bytes"]
    # All pages that there is room for fit, and one more does not.
    if fit["room"]:
        for more, fits in ((0, True), (1, False)):
            pages = str(1 + fit["room"] // 16 + more)
            assert planned(capsys, *command, "--num-pages", pages)["fit"]["fits"] == fits


def test_the_command_says_how_fast_a_gpu_should_be_and_how_steps_are_sized(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["capture-plan", config_file(tmp_path, **WHOLE), "--gpu", "mi300x", "--max-kv-len", "8192"]
    plan = planned(capsys, *command)
    assert list(plan["decode_ms"]) == list(plan["lower_bound_ms"]) == ["1", "32", "256"]
    # All weights but the embedding, and 512 tokens of 128 KiB, at 5.3 TB/s.
    read = plan["weights_bytes"] - 2 * 128256 * 4096 + 512 * (128 << 10)
    assert plan["lower_bound_ms"]["1"] == pytest.approx(1e3 * read / 5.3e12, rel=1e-3)
    assert plan["decode_ms"]["1"] == pytest.approx(1.5 * plan["lower_bound_ms"]["1"])
    for num, ms in plan["budget"]["latency_ms"].items():
        assert 2.4 * plan["decode_ms"][num] < ms <= 2.5 * plan["decode_ms"][num]
    assert main(command) == DONE
    printed = capsys.readouterr().out
    assert f"while    1 decode, prompts get up to {plan['budget']['beside']['1']} of them" in printed
    assert f"   1 sequences of 512 tokens decode in {plan['decode_ms']['1']:.3g} ms" in printed
    assert f"has its first token in {plan['first_token_ms']:.3g} ms" in printed
    # In less memory fewer sequences run, each with room for 1024 tokens.
    little = planned(capsys, *command, "--gpu-memory-share", "0.2")
    assert little["budget"]["max_batch_size"] == little["fit"]["room"] // 1024 < 256
    # Published rates are of 16-bit matrices, and weights of another size are not those that were counted.
    for others in (["--dtype", "float32"], ["--weights-gib", "8"]):
        assert main([*command, *others]) == DONE
        assert "expected of" not in capsys.readouterr().out


def test_ranks_share_heads_and_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 KV heads over 8 ranks: an eighth of the pool, and of all weights but the embedding and the norms."""
    command = ["capture-plan", config_file(tmp_path, **WHOLE), "--gpu", "mi300x", "--max-batch-size", "4"]
    one, eighth = plans = [planned(capsys, *command, "--tp", tp) for tp in ("1", "8")]
    pools = [next(part["bytes"] for part in plan["parts"] if part["name"] == "KV pool") for plan in plans]
    assert pools[0] == 8 * pools[1]
    everywhere = 2 * (128256 * 4096 + 65 * 4096)
    assert one["weights_bytes"] == 2 * 8_030_261_248  # Llama-3.1-8B's parameters
    assert eighth["weights_bytes"] == (one["weights_bytes"] - everywhere) // 8 + everywhere


def test_weights_that_the_runner_cannot_count_are_those_of_the_files_or_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixtral = config_file(tmp_path, architectures=["MixtralForCausalLM"])
    command = ["capture-plan", mixtral, "--gpu", "mi355x", "--max-batch-size", "1", "--max-kv-len", "64"]
    assert main(command) == DONE
    said = capsys.readouterr().out
    assert "weights are not known: the engine does not serve MixtralForCausalLM; try vLLM" in said
    assert "; give --weights-gib" in said
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(bytes(3 << 20))
    assert main([*command, "--tp", "2"]) == DONE
    assert f"weights on each rank take 1.5 MiB (the files in {tmp_path}, over 2 ranks)" in capsys.readouterr().out


def test_a_pool_of_more_slots_than_an_int32_counts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("capture-plan", "explain"):
        assert main([command, config_file(tmp_path), "--arch", "cpu", "--num-pages", "2147483647"]) == FAILED
        printed = capsys.readouterr()
        assert "tokens overflow an int32 slot id" in printed.err
        assert (len(printed.err.splitlines()), printed.out) == (1, "")
