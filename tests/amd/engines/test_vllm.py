"""vLLM's whole engine with our backend gives the tokens of its own backend, and gets reports of faults in its steps."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_serve.engine import Engine
from rocm_serve.models.loading import load_model
from rocm_serve.options import EngineOptions
from rocm_serve.request import Request
from tests.amd.engines.masked_text import texts_with_images
from tests.amd.engines.models import model
from tests.amd.engines.serving import MOST_STEPS_LATER, assert_equal_tokens, prompts
from tests.amd.engines.vllm_models import vllm_model
from tests.amd.engines.vllm_runs import VLLM, VllmVenv
from tests.amd.engines.vllm_text import CHANGED_HOST_MEMORY, EMBEDDINGS, SECOND_RUNNER, Answer, Run

# The only block size that vLLM's own CPU backend reads.
STOCK_BLOCK = 32
# A model without windows has no fault of a window that is given back too early.
_FAULTS_OF_DRAFTS = ("wrong_slot", "lost_table", "stale_length")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> VllmVenv:
    return VllmVenv(tmp_path_factory.mktemp("plugin"))


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
    assert_equal_tokens([answer.tokens for answer in ours], stock.tokens)


def assert_reported(faults: Iterable[str], answers: Sequence[Answer]) -> None:
    """Checks that each fault was reported by its step, and soon."""
    for name, answer in zip(faults, answers, strict=True):
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
@pytest.mark.parametrize("name", ["images", "wide_images"])
def test_tokens_of_images_see_each_other(name: str, vllm: VllmVenv, tmp_path: Path) -> None:
    """The reference is transformers' model under masks that are written out: vLLM's backend for CPUs ignores images.

    The prefix cache ends within an image, whose first tokens another request has stored. In small steps the rest of an
    image waits for one that has room for it.
    """
    requested = run(vllm, f"vllm_{name}", max_num_batched_tokens=1024)
    small = run(vllm, f"vllm_{name}", block_size=16, disable_chunked_mm_input=True)
    wanted = [
        texts_with_images(folder_of(f"vllm_{name}", vllm.folder), asked, requested.new_tokens)
        for asked in requested.rounds
    ]
    (stock,) = vllm.stock([requested], tmp_path)
    assert stock.tokens != wanted
    ours = vllm.ours([requested, small], tmp_path)
    assert_equal(ours, Answer(tokens=wanted))
    assert all(ours[0].cached[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("gemma3", ("tensor",)),
        # Each rank has every other token of a sequence's KV. vLLM has no such slots on a CPU; vllm_cpu_ranks adds them.
        ("vllm_llama", ("tensor", "decode_context")),
        # Each stage has half of the layers, and a KV cache of its own.
        ("vllm_llama", ("pipeline",)),
        ("gemma3", ("pipeline",)),
    ],
)
def test_two_processes_give_the_tokens_of_one(name: str, parts: Sequence[str], vllm: VllmVenv, tmp_path: Path) -> None:
    (stock,) = vllm.stock([run(vllm, name, 24)], tmp_path)
    both: dict[str, Any] = {f"{part}_parallel_size": 2 for part in parts}
    assert_equal(vllm.ours([run(vllm, name, 24, **both)], tmp_path), stock)


@pytest.mark.nightly
def test_what_one_process_has_prefilled_is_decoded_by_another_with_the_tokens_of_one(
    vllm: VllmVenv, tmp_path: Path
) -> None:
    """vLLM's connector over files (ExampleConnector) takes K and V from our pages, and puts them into ours.

    It needs whole prompts in one step, stores no part of the last block, and fails for a prompt of one token. The other
    process computes what was not stored.
    """
    longer = [prompt for prompt in prompts() if len(prompt) > 1]

    def part(new_tokens: int, **connects: Any) -> Run:
        args: dict[str, Any] = {"max_num_batched_tokens": 1024, "enable_prefix_caching": False, **connects}
        return replace(run(vllm, "vllm_llama", new_tokens, **args), rounds=[longer])

    def connected(role: str) -> dict[str, Any]:
        storage = {"shared_storage_path": str(tmp_path / "kv")}
        return {"kv_connector": "ExampleConnector", "kv_role": role, "kv_connector_extra_config": storage}

    (stock,) = vllm.stock([part(24)], tmp_path)
    (prefilled,) = vllm.ours([part(1, kv_transfer_config=connected("kv_producer"))], tmp_path)
    assert not any(prefilled.cached[0])
    assert [tokens[0] for tokens in prefilled.tokens[0]] == [tokens[0] for tokens in stock.tokens[0]]
    (decoded,) = vllm.ours([part(24, kv_transfer_config=connected("kv_consumer"))], tmp_path)
    assert_equal([decoded], stock)
    # A prompt of whole blocks and a token is looked up under another name than it was stored under.
    stored = [(len(prompt) - 1) // STOCK_BLOCK * (len(prompt) % STOCK_BLOCK != 1) for prompt in longer]
    assert [cached // STOCK_BLOCK for cached in decoded.cached[0]] == stored
    assert sum(stored) > 8


# vLLM keeps no block on the device for a later prompt: all that is cached comes from host memory.
_OFFLOADS: dict[str, Any] = {
    "kv_connector": "CheckedOffloadingConnector",
    "kv_connector_module_path": "rocm_attn.integrations.vllm_offloading",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def offloading(vllm: VllmVenv, name: str, blocks_per_chunk: int = 1, **more: Any) -> Run:
    """Returns a run of the same prompts twice, whose blocks go to host memory and come back."""
    chosen = {"cpu_bytes_to_use": 64 << 20, "blocks_per_chunk": blocks_per_chunk}
    connects = {**_OFFLOADS, "kv_connector_extra_config": chosen}
    args: dict[str, Any] = {"block_size": 16, "enable_prefix_caching": False, "kv_transfer_config": connects}
    return replace(run(vllm, name, 24, **args), rounds=[prompts(), prompts()], **more)


def twice(stock: Answer) -> Answer:
    """Returns the answers to the first round, for both."""
    return Answer(tokens=[stock.tokens[0]] * 2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "blocks_per_chunk", "release"),
    [("vllm_llama", 1, VLLM), ("vllm_llama", 2, VLLM), ("gemma3", 1, VLLM), ("vllm_llama", 1, "0.33.0")],
)
def test_blocks_that_were_in_host_memory_give_the_tokens_of_those_that_stayed(
    name: str, blocks_per_chunk: int, release: str, vllm: VllmVenv, tmp_path: Path
) -> None:
    (stock,) = vllm.stock([run(vllm, name, 24)], tmp_path)
    (ours,) = vllm.ours([offloading(vllm, name, blocks_per_chunk)], tmp_path, release=release)
    assert_equal([ours], twice(stock))
    size = 16 * blocks_per_chunk
    assert ours.cached[1] >= [(len(prompt) - 1) // size * size for prompt in prompts()]
    assert "do not hold the bytes that left" not in (tmp_path / "log").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["vllm_llama", "gemma3"])
def test_blocks_that_have_changed_in_host_memory_are_reported_and_computed_again(
    name: str, vllm: VllmVenv, tmp_path: Path
) -> None:
    (stock,) = vllm.stock([run(vllm, name, 24)], tmp_path)
    (ours,) = vllm.ours([offloading(vllm, name, fault=CHANGED_HOST_MEMORY)], tmp_path)
    assert_equal([ours], twice(stock))
    assert "do not hold the bytes that left" in (tmp_path / "log").read_text()
    # A refused block is not found again, and those before it are.
    assert 0 < sum(ours.cached[1]) < sum((len(prompt) - 1) // 16 * 16 for prompt in prompts())


@pytest.mark.nightly
def test_latent_attention_gives_vllms_own_tokens(vllm: VllmVenv, tmp_path: Path) -> None:
    """On a CPU vLLM has neither chunks nor a prefix cache for MLA, and its own decode reads pages of 16."""
    args: dict[str, Any] = {"attention_backend": "CPU_MLA", "block_size": 16, "max_num_batched_tokens": 512}
    requested = [run(vllm, "deepseek_wide", **args)]
    (stock,) = vllm.stock(requested, tmp_path)
    assert_equal(vllm.ours(requested, tmp_path), stock)


@pytest.mark.nightly
def test_in_batch_invariant_mode_prompts_of_latent_attention_are_ours_with_vllms_own_tokens(
    vllm: VllmVenv, tmp_path: Path
) -> None:
    """In the other mode vLLM computes prompts itself. A run fails where it does so here."""
    args: dict[str, Any] = {"attention_backend": "CPU_MLA", "block_size": 16, "max_num_batched_tokens": 512}
    requested = run(vllm, "deepseek_wide", **args)
    (stock,) = vllm.stock([requested], tmp_path)
    (ours,) = vllm.ours([requested], tmp_path, batch_invariant=True)
    assert_equal([ours], stock)
    said = (tmp_path / "log").read_text()
    assert "mixed by torch.segments" in said
    assert "the arithmetic of this attention is" in said


@pytest.mark.nightly
@pytest.mark.parametrize("release", ["0.26.0", "0.33.0"])
def test_the_oldest_and_the_newest_release_give_the_same_tokens(release: str, vllm: VllmVenv, tmp_path: Path) -> None:
    """The releases' Python runs over the newest CPU wheel's compiled part; they ask for KV caches in different ways."""
    (stock,) = vllm.stock([run(vllm, "gemma3")], tmp_path)
    fault = run(vllm, "gemma3", fault="wrong_slot", block_size=16)
    ours, *reported = vllm.ours([run(vllm, "gemma3"), fault], tmp_path, release=release)
    assert_equal([ours], stock)
    assert_reported([fault.fault], reported)


@pytest.mark.nightly
def test_requests_with_a_common_prefix_give_vllms_own_tokens(vllm: VllmVenv, tmp_path: Path) -> None:
    """In the second round all of them share a cached block. Release 0.26 still has cascades over such a prefix."""
    beginning = prompts()[-1]
    sharing = [beginning + prompt[:20] for prompt in prompts()[:-3]]
    requested = replace(run(vllm, "vllm_llama", 24, disable_cascade_attn=False), rounds=[sharing, sharing])
    (stock,) = vllm.stock([requested], tmp_path)
    (ours,) = vllm.ours([requested], tmp_path, release="0.26.0")
    assert_equal([ours], stock)
    assert min(ours.cached[1]) >= STOCK_BLOCK


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
    assert_reported(_FAULTS_OF_DRAFTS, reported)


@pytest.mark.nightly
def test_blocks_of_drafts_that_see_each_other_are_vllms_own(vllm: VllmVenv, tmp_path: Path) -> None:
    """DFlash: a head stores K and V of the model's hidden states, and then drafts four tokens in one step."""
    drafts = {"method": "dflash", "model": str(vllm_model("block_drafts", vllm.folder)), "num_speculative_tokens": 4}
    requested = [run(vllm, "vllm_llama", 24, speculative_config=drafts)]
    (stock,) = vllm.stock(requested, tmp_path)
    (ours,) = vllm.ours(requested, tmp_path)
    assert_equal([ours], stock)
    assert len({tuple(drafted) for step in stock.drafts for drafted in step}) > 50
    assert ours.drafts == stock.drafts


@pytest.mark.nightly
def test_the_second_runner_gives_the_tokens_of_the_first(vllm: VllmVenv, tmp_path: Path) -> None:
    """vLLM 0.33 takes runner V2 by default. A head that drafts blocks stores prompts there before it has had a step."""
    drafts = {"method": "dflash", "model": str(vllm_model("block_drafts", vllm.folder)), "num_speculative_tokens": 4}
    requested = [run(vllm, "gemma3", 6), run(vllm, "vllm_llama", 6, speculative_config=drafts)]
    ours = vllm.ours(requested, tmp_path, release="0.33.0", more=SECOND_RUNNER)
    assert "Using V2 Model Runner" in (tmp_path / "log").read_text()
    for answer, stock in zip(ours, vllm.stock(requested, tmp_path), strict=True):
        assert_equal([answer], stock)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["encoder", "local_encoder", "local_embeddings"])
def test_embeddings_of_an_encoder_are_vllms_own(name: str, vllm: VllmVenv, tmp_path: Path) -> None:
    """A BERT, whose tokens see all of their prompt; a ModernBERT and an EmbeddingGemma, with windows to both sides."""
    requested = run(vllm, f"vllm_{name}", runner="pooling", max_num_batched_tokens=512)
    requested = replace(requested, asked=EMBEDDINGS)
    (stock,) = vllm.stock([requested], tmp_path)
    (ours,) = vllm.ours([requested], tmp_path)
    wanted, found = (torch.tensor(answer.embeddings[0]) for answer in (stock, ours))
    assert torch.allclose(found, wanted, atol=1e-5)
    assert torch.pdist(wanted).min() > 0.01


@pytest.mark.nightly
def test_a_model_of_speech_gives_vllms_own_tokens(vllm: VllmVenv, tmp_path: Path) -> None:
    """A Whisper: its decoder attends to what an encoder has made of sound, and some prompts are longer than that."""
    args: dict[str, Any] = {"max_num_batched_tokens": 512, "max_model_len": 128}
    requested = replace(run(vllm, "vllm_speech", **args), asked="speech")
    (stock,) = vllm.stock([requested], tmp_path)
    assert_equal(vllm.ours([requested], tmp_path), stock)


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
