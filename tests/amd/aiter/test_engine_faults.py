"""`rocm-attn explain --engine`: the faults that are known of an engine's release, for a model."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, main
from rocm_attn.cli.engine_faults import named_engine
from tests.amd.aiter.explained import config_of


def run(capsys: pytest.CaptureFixture[str], place: Path, *options: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr of `rocm-attn explain`."""
    code = main(["explain", str(place), *options])
    return code, *capsys.readouterr()


def known(capsys: pytest.CaptureFixture[str], model: str, *options: str) -> dict[str, Sequence[str]]:
    """Returns the threads that are named for a published config, with what each still needs."""
    code, printed, _ = run(capsys, config_of(model), *options, "--json")
    assert code == DONE
    return {entry["thread"]: entry["needs"] for entry in json.loads(printed)["known_bad"]}


def test_faults_that_the_model_the_gpu_and_the_release_decide_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--arch", "gfx950", "--engine", "sglang@0.5.12")
    code, printed, _ = run(capsys, config_of("qwen3-30b-a3b"), *options)
    assert code == DONE
    first, fault, fix = printed.splitlines()[:3]
    assert first == "these faults are known of sglang@0.5.12 with this model (docs/known_bad.md)"
    assert fault == (
        "- this will fail later (wrong output) with AITER as the attention backend, because sgl-project/sglang#24992 "
        'says of sglang from 0.5.11: "produces nonsensical outputs when running on Instinct MI350X"'
    )
    assert fix == "  fix: --attention-backend triton"
    assert "on gfx950, provider auto" in printed
    assert "sglang#24992" not in run(capsys, config_of("qwen3-30b-a3b"), "--arch", "gfx942", *options[2:])[1]
    assert "sglang#24992" not in run(capsys, config_of("llama-3-8b"), *options)[1]


def test_heads_and_latents_and_kv_are_those_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    thread, aiter = "ROCm/aiter#4365", ("--aiter-release", "0.1.19", "--engine", "vllm@0.33")
    fp8 = ("--kv-dtype", "fp8")
    assert known(capsys, "deepseek-v3", "--arch", "gfx942", "--tp", "2", *fp8, *aiter)[thread] == []
    assert thread not in known(capsys, "deepseek-v3", "--arch", "gfx942", "--tp", "2", *aiter)
    assert thread not in known(capsys, "deepseek-v3", "--arch", "gfx942", "--tp", "4", *fp8, *aiter)
    assert thread not in known(capsys, "deepseek-v3", "--arch", "gfx950", "--tp", "2", *fp8, *aiter)
    assert thread not in known(capsys, "llama-3-70b", "--arch", "gfx942", *fp8, *aiter)
    assert thread not in known(capsys, "deepseek-v3", "--arch", "gfx942", "--tp", "2", *fp8, *aiter[2:])


def test_ranks_are_tensor_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    thread, options = "sgl-project/sglang#35079", ("--arch", "gfx950", "--engine", "sglang@0.5.22")
    assert known(capsys, "llama-3-70b", "--tp", "8", *options)[thread] == ["speculative decoding"]
    assert thread not in known(capsys, "llama-3-70b", *options)


def test_a_row_of_latents_is_no_wide_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3's row has 576 elements."""
    thread, options = "sgl-project/sglang#38757", ("--arch", "gfx942", "--engine", "sglang@0.5.19")
    assert thread not in known(capsys, "deepseek-v3", *options)
    wide = {**json.loads(config_of("llama-3-8b").read_text()), "head_dim": 512}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    assert thread in run(capsys, tmp_path, *options)[1]


def test_windows_of_a_model_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    gemma = known(capsys, "gemma-3-27b", "--arch", "gfx942", "--engine", "vllm@0.28.0")
    assert gemma["vllm-project/vllm#46754"] == ["image tokens"]
    assert "vllm-project/vllm#47276" not in gemma


def test_recurrent_layers_of_a_model_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    thread, options = "vllm-project/vllm#53912", ("--arch", "gfx942", "--engine", "vllm@0.33")
    assert known(capsys, "qwen3.8-27b", *options)[thread] == ["prefix caching", "speculative decoding"]
    assert thread not in known(capsys, "llama-3-8b", *options)


def test_a_model_that_is_not_served_is_told_of_its_faults_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["KimiK25ForConditionalGeneration"]}))
    code, printed, error = run(capsys, tmp_path, "--arch", "gfx950", "--engine", "vllm@0.33")
    assert code == FAILED
    assert "because ROCm/aiter#2343 says of vllm from 0.16.0: " in printed
    assert "the attention of KimiK25ForConditionalGeneration is not known" in error


def test_no_known_fault_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The first release that the plug-in serves is after every fault of ATOM's."""
    place = config_of("llama-3-8b")
    _, printed, _ = run(capsys, place, "--arch", "gfx942", "--engine", "atom@0.1.6")
    assert printed.startswith("no fault is known of atom@0.1.6 with this model (docs/known_bad.md)\n\n")
    _, printed, _ = run(capsys, place, "--arch", "gfx942")
    assert "known_bad" not in printed
    assert known(capsys, "llama-3-8b", "--arch", "gfx942") == {}


def kernels(capsys: pytest.CaptureFixture[str], model: str, *options: str) -> tuple[str, Sequence[str]]:
    """Returns the kernel of decode steps on gfx942, and all refusals."""
    _, printed, _ = run(capsys, config_of(model), "--arch", "gfx942", *options, "--json")
    (kind,) = json.loads(printed)["layer_kinds"]
    return kind["kernels"]["decode"], kind["refusals"]


def test_kernels_are_chosen_for_the_engines_pages(capsys: pytest.CaptureFixture[str]) -> None:
    """In engines the rest of a last page may be in use, and a page of one token has none.

    In vLLM pages of K and V have gaps, and those of latent rows have none.
    """
    sglang, vllm = ("--engine", "sglang@0.5.23"), ("--engine", "vllm@0.33")
    tail = "aiter.paged_attention_ragged: the tail of a sequence's last page must be zeroed for it, and these pages are"
    gaps = "it needs contiguous pages, and these may have other strides"
    assert kernels(capsys, "llama-3-8b", "--page-size", "16")[0] == "aiter.paged_attention_ragged"
    name, refusals = kernels(capsys, "llama-3-8b", *sglang)
    assert name.startswith("triton.")
    assert any(tail in each for each in refusals)
    assert not any(gaps in each for each in refusals)
    one = "--page-size", "1"
    for engine in (sglang, vllm):
        assert kernels(capsys, "deepseek-v3", "--tp", "8", *one, *engine)[0].startswith("aiter.mla_decode_fwd")
    name, refusals = kernels(capsys, "llama-3-8b", "--page-size", "16", *vllm)
    assert name.startswith("triton.")
    assert any(f"aiter.paged_attention_ragged: {gaps}" in each for each in refusals)


def test_an_engine_without_a_plug_in_has_our_own_pages(capsys: pytest.CaptureFixture[str]) -> None:
    own = kernels(capsys, "llama-3-8b", "--page-size", "16")
    assert kernels(capsys, "llama-3-8b", "--page-size", "16", "--engine", "atom@0.1.6") == own


@pytest.mark.parametrize("text", ["vllm", "vllm@", "vllm@new", "@0.33", "torch@2.9.0", "vllm@33"])
def test_an_engine_without_a_release_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, config_of("llama-3-8b"), "--arch", "gfx942", "--engine", text)
    assert code == BAD_INPUT
    assert (
        f"--engine is {text!r}; give an engine and its release, as in vllm@0.33; engines are vllm, sglang, atom"
        in error
    )


@pytest.mark.parametrize(
    ("text", "release"),
    [("vllm@0.33", "0.33.0"), ("vllm@0.33.0", "0.33.0"), ("sglang@0.5.22.post1", "0.5.22.post1")],
)
def test_a_release_of_two_numbers_is_the_first_of_them(text: str, release: str) -> None:
    engine, named = named_engine(text)
    assert (engine, str(named), len(named.numbers)) == (text.partition("@")[0], release, 4)
