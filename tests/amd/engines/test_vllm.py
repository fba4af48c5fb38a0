"""vLLM's whole engine with our backend gives the tokens of its own backend, and gets reports of faults in its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_serve.engine import Engine
from rocm_serve.models.loading import load_model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.engines.models import model
from tests.amd.engines.serving import MOST_STEPS_LATER, assert_equal_tokens, prompts
from tests.amd.engines.vllm_models import vllm_model
from tests.amd.engines.vllm_runs import VllmVenv, vllm_venv
from tests.amd.engines.vllm_text import FAULTS, Answer, Run

# The only block size that vLLM's own CPU backend reads.
STOCK_BLOCK = 32
# A model without windows has no fault of a window that is given back too early.
_FAULTS_OF_DRAFTS = ("wrong_slot", "lost_table", "stale_length")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> VllmVenv:
    return vllm_venv(tmp_path_factory.mktemp("plugin"))


def folder_of(name: str, cache: Path) -> Path:
    """Returns the folder of a model. name: vllm_... for those of vllm_models"""
    own = name.removeprefix("vllm_")
    return model(name, cache) if own == name else vllm_model(own, cache)


def run(vllm: VllmVenv, name: str, new_tokens: int = 16, fault: str = "", **args: Any) -> Run:
    """Returns a run of prompts in chunks next to decodes, then of the last ones again, whose prefixes are cached."""
    settings = {
        "model": str(folder_of(name, vllm.folder)),
        "block_size": STOCK_BLOCK,
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
        "enable_chunked_prefill": True,
        **args,
    }
    if fault:
        return Run(settings, [prompts()[2:6]], new_tokens, fault)
    return Run(settings, [prompts(), prompts()[-3:]], new_tokens)


def assert_equal(ours: Sequence[Answer], stock: Answer) -> None:
    """Checks that all requests have the tokens of vLLM's own backend."""
    assert_equal_tokens([answer.tokens for answer in ours], stock.tokens)


def test_a_model_with_windows_gives_vllms_own_tokens_and_faults_in_its_steps_are_reported(
    vllm: VllmVenv, tmp_path: Path
) -> None:
    """All runs share one vLLM process: its import takes longer than an engine."""
    (stock,) = vllm.stock([run(vllm, "gemma3")], tmp_path)
    faults = {name: run(vllm, "gemma3", fault=name, block_size=16) for name in FAULTS}
    ours, *reported = vllm.ours([run(vllm, "gemma3"), *faults.values()], tmp_path)
    assert_equal([ours], stock)
    assert all(ours.cached[1])
    for name, answer in zip(faults, reported, strict=True):
        assert answer.said.startswith(f"DeviceFault: step {answer.faulty_step}: "), (
            f"{name}: {answer.said or 'nothing was said'}"
        )
        assert 0 <= answer.steps_later <= MOST_STEPS_LATER, name


@pytest.mark.nightly
def test_smollm2_gives_vllms_own_tokens_at_every_block_size(vllm: VllmVenv, tmp_path: Path) -> None:
    (stock,) = vllm.stock([run(vllm, "smollm2", 24)], tmp_path)
    ours = vllm.ours([run(vllm, "smollm2", 24, block_size=size) for size in (STOCK_BLOCK, 16, 128)], tmp_path)
    assert_equal(ours, stock)
    # The longest common prefix has 40 tokens, and whole blocks are found again.
    assert [all(answer.cached[1]) for answer in ours] == [True, True, False]


@pytest.mark.nightly
def test_layers_with_local_chunks_give_vllms_own_tokens(vllm: VllmVenv, tmp_path: Path) -> None:
    """Three of four layers see chunks of 32 keys, so most prompts begin several."""
    (stock,) = vllm.stock([run(vllm, "vllm_chunks", 24)], tmp_path)
    ours = vllm.ours([run(vllm, "vllm_chunks", 24, block_size=size) for size in (STOCK_BLOCK, 16)], tmp_path)
    assert_equal(ours, stock)


@pytest.mark.nightly
def test_two_ranks_give_the_tokens_of_one(vllm: VllmVenv, tmp_path: Path) -> None:
    (stock,) = vllm.stock([run(vllm, "gemma3")], tmp_path)
    assert_equal(vllm.ours([run(vllm, "gemma3", tensor_parallel_size=2)], tmp_path), stock)


@pytest.mark.nightly
def test_two_ranks_that_share_contexts_give_the_tokens_of_one(vllm: VllmVenv, tmp_path: Path) -> None:
    """Each rank has every other token of a sequence's KV. vLLM has no such slots on a CPU; vllm_cpu_ranks adds them."""
    (stock,) = vllm.stock([run(vllm, "vllm_llama", 24)], tmp_path)
    shared = run(vllm, "vllm_llama", 24, tensor_parallel_size=2, decode_context_parallel_size=2)
    assert_equal(vllm.ours([shared], tmp_path), stock)


@pytest.mark.nightly
def test_latent_attention_gives_vllms_own_tokens(vllm: VllmVenv, tmp_path: Path) -> None:
    """On a CPU vLLM has neither chunks nor a prefix cache for MLA, and its own decode reads pages of 16."""
    args: dict[str, Any] = {"attention_backend": "CPU_MLA", "block_size": 16, "max_num_batched_tokens": 512}
    requested = [run(vllm, "deepseek_wide", **args)]
    (stock,) = vllm.stock(requested, tmp_path)
    assert_equal(vllm.ours(requested, tmp_path), stock)


@pytest.mark.nightly
@pytest.mark.parametrize("release", ["0.26.0", "0.33.0"])
def test_the_oldest_and_the_newest_release_give_the_same_tokens(release: str, vllm: VllmVenv, tmp_path: Path) -> None:
    """The releases' Python runs over the newest CPU wheel's compiled part; they ask for KV caches in different ways."""
    (stock,) = vllm.stock([run(vllm, "gemma3")], tmp_path)
    fault = run(vllm, "gemma3", fault="wrong_slot", block_size=16)
    ours, reported = vllm.ours([run(vllm, "gemma3"), fault], tmp_path, release=release)
    assert_equal([ours], stock)
    assert reported.said.startswith(f"DeviceFault: step {reported.faulty_step}: ")
    assert 0 <= reported.steps_later <= MOST_STEPS_LATER


@pytest.mark.nightly
def test_verified_drafts_give_the_tokens_of_single_steps(vllm: VllmVenv, tmp_path: Path) -> None:
    """Drafts are looked up in the prompt, so prompts repeat themselves."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    requested = [run(vllm, "gemma3", 24), run(vllm, "gemma3", 24, speculative_config=drafts)]
    for each in requested:
        each.rounds.append([(prompt[:6] * 12)[:length] for prompt in prompts()[3:6] for length in (30, 41, 52)])
    single, verified = vllm.ours(requested, tmp_path)
    assert verified.tokens == single.tokens


@pytest.mark.nightly
def test_eagles_drafts_give_vllms_own_tokens_and_faults_in_its_steps_are_reported(
    vllm: VllmVenv, tmp_path: Path
) -> None:
    """A head with attention of its own drafts three tokens per step, in a KV cache that it shares with the model."""
    drafts = {"method": "eagle", "model": str(vllm_model("eagle", vllm.folder)), "num_speculative_tokens": 3}
    requested = [run(vllm, "vllm_llama", 24), run(vllm, "vllm_llama", 24, speculative_config=drafts)]
    stock, stock_drafted = vllm.stock(requested, tmp_path)
    faults = [
        run(vllm, "vllm_llama", fault=name, block_size=16, speculative_config=drafts) for name in _FAULTS_OF_DRAFTS
    ]
    ours, drafted, *reported = vllm.ours([*requested, *faults], tmp_path)
    assert_equal([ours, drafted], stock)
    assert stock_drafted.tokens == stock.tokens
    assert drafted.steps == stock_drafted.steps < ours.steps
    assert drafted.cached == stock_drafted.cached
    for name, answer in zip(_FAULTS_OF_DRAFTS, reported, strict=True):
        assert answer.said.startswith(f"DeviceFault: step {answer.faulty_step}: "), (
            f"{name}: {answer.said or 'nothing was said'}"
        )
        assert 0 <= answer.steps_later <= MOST_STEPS_LATER, name


@pytest.mark.nightly
def test_sparse_attention_gives_our_runners_tokens(vllm: VllmVenv, tmp_path: Path) -> None:
    """vLLM refuses sparse layers on a CPU, so vllm_cpu_sparse chooses keys in its indexer's place.

    Torch rotates plain positions: vLLM's CPU kernel is wrong for queries of three dimensions.
    """
    args: dict[str, Any] = {"attention_backend": "ROCM_ATTN_RT_MLA_SPARSE", "max_num_batched_tokens": 512}
    in_torch = {"custom_ops": ["-rotary_embedding"]}
    scaled = run(vllm, "vllm_sparse", block_size=16, **args)
    plain = run(vllm, "vllm_sparse_plain", block_size=16, compilation_config=in_torch, **args)
    for name, found in zip(("sparse", "sparse_plain"), vllm.ours([scaled, plain], tmp_path), strict=True):
        assert_equal([found], Answer(tokens=_texts_of_our_runner(vllm_model(name, vllm.folder), 16)))


def _texts_of_our_runner(folder: Path, new_tokens: int) -> list[list[list[int]]]:
    """Returns our own runner's answers to the prompts of run()."""
    loaded = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    engine = Engine(loaded, EngineOptions(max_batch_size=16, max_kv_len=256, page_size=16))
    return [
        [
            list(done.token_ids)
            for done in engine.generate(
                [Request(tuple(prompt), max_new_tokens=new_tokens, ignore_eos=True) for prompt in requested]
            )
        ]
        for requested in (prompts(), prompts()[-3:])
    ]
