"""SGLang's whole engine with our backend gives the tokens of its own one and gets reports of faults; its kit passes."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rocm_attn.integrations.plugins import SGLANG as SGLANG_PLUGIN
from tests.amd.engines.models import IMAGE_PLACES, model
from tests.amd.engines.serving import LONG_LENGTHS, MOST_STEPS_LATER, assert_equal_tokens, prompts
from tests.amd.engines.sglang_kit import GROUPS
from tests.amd.engines.sglang_plugin import FAULTS
from tests.amd.engines.sglang_runs import SGLANG, SglangVenv
from tests.amd.engines.sglang_text import Answer, Run
from tests.amd.engines.vllm_models import vllm_model


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> SglangVenv:
    return SglangVenv(tmp_path_factory.mktemp("plugin"))


def run(sglang: SglangVenv, name: str, new_tokens: int = 12, *, faults: bool = False, **engine: Any) -> Run:
    """Returns a run of prompts in chunks, then of the last ones again, whose prefixes the radix cache has."""
    arguments = {
        "model_path": str(model(name, sglang.folder)),
        "dtype": "float32",
        "page_size": 16,
        "chunked_prefill_size": 48,
        "max_total_tokens": 4096,
        "max_running_requests": 16,
        "context_length": 256,
        "mem_fraction_static": 0.5,
        "log_level": "info",
        **engine,
    }
    return Run(arguments, [prompts(), prompts()[-3:]], new_tokens, faults)


def assert_equal(ours: Sequence[Answer], stock: Answer) -> None:
    """Checks that all requests have the tokens of SGLang's own backend, and that later rounds found their prefixes."""
    assert_equal_tokens([answer.tokens for answer in ours], stock.tokens)
    for answer in ours:
        assert all(cached >= 16 for cached in answer.cached[1])


def test_the_kit_passes_and_reports_tokens_that_are_scattered_in_a_page(sglang: SglangVenv, tmp_path: Path) -> None:
    """A block table does not record the order of tokens within a page; a check of slots does."""
    tallies = sglang.kit([*GROUPS], tmp_path)
    assert {name: tally.failed for name, tally in tallies.items()} == {name: {} for name in GROUPS}
    counts = {name: (len(tally.passed), len(tally.reported)) for name, tally in tallies.items()}
    assert counts == {
        "dense": (43, 5),
        "window": (6, 2),
        "verify": (24, 0),
        "latent": (60, 0),
        "graphs": (5, 0),
        "graphs of drafts": (12, 0),
    }
    assert all(name.startswith("non_monotonic") for tally in tallies.values() for name in tally.reported)


def assert_reported(ours: Answer, faults: Sequence[Callable[..., object]]) -> None:
    """Checks that each fault was planted, and reported before more than two further steps had begun."""
    planted = {line["planted"]: line["step"] for line in ours.faults if "planted" in line}
    assert [*planted] == [fault.__name__ for fault in faults]
    for name, step in planted.items():
        reported = [line for line in ours.faults if f"step {step}: " in line.get("reported", "")]
        assert reported, f"{name} in step {step} was not reported: {ours.faults}"
        assert reported[0]["begun"] - step <= MOST_STEPS_LATER, name


def test_smollm2_gives_sglangs_own_tokens(sglang: SglangVenv, tmp_path: Path) -> None:
    (stock,) = sglang.stock([run(sglang, "smollm2", 6)], tmp_path)
    assert_equal(sglang.ours([run(sglang, "smollm2", 6)], tmp_path), stock)


@pytest.mark.nightly
def test_smollm2_gives_sglangs_own_tokens_at_both_page_sizes_and_in_small_chunks(
    sglang: SglangVenv, tmp_path: Path
) -> None:
    requested = [run(sglang, "smollm2", 24, page_size=size, chunked_prefill_size=16) for size in (1, 16)]
    for ours, stock in zip(sglang.ours(requested, tmp_path), sglang.stock(requested, tmp_path), strict=True):
        assert_equal([ours], stock)


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [1, 16])
def test_windows_give_sglangs_own_tokens_in_one_pool_and_in_two(
    page_size: int, sglang: SglangVenv, tmp_path: Path
) -> None:
    requested = [run(sglang, "gemma3", 40, page_size=page_size)]
    (stock,) = sglang.stock(requested, tmp_path)
    assert_equal(sglang.ours(requested, tmp_path), stock)
    assert_equal(sglang.ours(requested, tmp_path, window_pool=True), stock)


def drafts(sglang: SglangVenv, algorithm: str, name: str, branches: int = 0) -> dict[str, Any]:
    """Returns arguments of an engine for which a model drafts four tokens: three steps of branches, or a block."""
    steps = {"speculative_num_steps": 3, "speculative_eagle_topk": branches} if branches else {}
    model_path = str(model(name, sglang.folder))
    drafting = {"speculative_algorithm": algorithm, "speculative_draft_model_path": model_path}
    return {**drafting, **steps, "speculative_num_draft_tokens": 4}


@pytest.mark.nightly
@pytest.mark.parametrize(("branches", "page_size"), [(1, 16), (2, 1)])
def test_drafts_of_another_model_change_no_token(
    branches: int, page_size: int, sglang: SglangVenv, tmp_path: Path
) -> None:
    """Covers steps of a draft model, of verification in a chain or by a tree's mask, and the draft model's extend."""
    (stock,) = sglang.stock([run(sglang, "gemma3")], tmp_path)
    drafting = run(sglang, "gemma3", page_size=page_size, **drafts(sglang, "STANDALONE", "gemma3_draft", branches))
    (ours,) = sglang.ours([drafting], tmp_path)
    assert ours.tokens == stock.tokens
    assert_some_drafts_accepted(ours)


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts_of_a_block_that_see_each_other_change_no_token(
    page_size: int, sglang: SglangVenv, tmp_path: Path
) -> None:
    """DFlash: SGLang runs each block as a step that verifies drafts, in layers of the encoder's kind."""
    (stock,) = sglang.stock([run(sglang, "eagle_target")], tmp_path)
    drafting = run(sglang, "eagle_target", page_size=page_size, **drafts(sglang, "DFLASH", "block_drafts"))
    # SGLang's list of backends for such drafts refuses a name that it does not know.
    (ours,) = sglang.ours([drafting], tmp_path, name="triton")
    assert ours.tokens == stock.tokens
    assert all(count > 0 for counts in ours.verified for count in counts)
    assert "TARGET_VERIFY" in ours.modes


def assert_some_drafts_accepted(ours: Answer) -> None:
    """Checks that some drafts were accepted, but not all: a verification step gives between one token and four."""
    tokens, steps = (sum(map(sum, each)) for each in ([[len(t) for t in r] for r in ours.tokens], ours.verified))
    assert tokens / 3.5 < steps < tokens / 1.2


@pytest.mark.nightly
@pytest.mark.parametrize(("branches", "page_size"), [(1, 1), (1, 16), (2, 1), (2, 16)])
def test_an_eagle_head_changes_no_token_and_faults_where_its_drafts_are_verified_are_reported(
    branches: int, page_size: int, sglang: SglangVenv, tmp_path: Path
) -> None:
    (stock,) = sglang.stock([run(sglang, "eagle_target")], tmp_path)
    by_head = drafts(sglang, "EAGLE", "eagle_head", branches)
    drafting = run(sglang, "eagle_target", faults=True, page_size=page_size, **by_head)
    # SGLang's list of backends with branches on larger pages refuses a name that it does not know.
    name = "triton" if branches > 1 and page_size > 1 else "rocm_attn"
    (ours,) = sglang.ours([drafting], tmp_path, name=name)
    assert ours.tokens == stock.tokens
    assert_some_drafts_accepted(ours)
    assert_reported(ours, FAULTS)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "window_pool"), [("gemma3", False), ("gemma3", True), ("smollm2", False)])
def test_the_oldest_release_that_is_served_gives_the_newest_ones_tokens(
    name: str, window_pool: bool, sglang: SglangVenv, tmp_path: Path
) -> None:
    oldest = SGLANG_PLUGIN.checked[0].version
    assert oldest != SGLANG
    requested = [run(sglang, name)]
    (stock,) = sglang.stock(requested, tmp_path)
    assert_equal(sglang.ours(requested, tmp_path, window_pool=window_pool, release=oldest), stock)


@pytest.mark.nightly
def test_two_ranks_give_the_tokens_of_one(sglang: SglangVenv, tmp_path: Path) -> None:
    (stock,) = sglang.stock([run(sglang, "gemma3")], tmp_path)
    assert_equal(sglang.ours([run(sglang, "gemma3", tp_size=2)], tmp_path), stock)


@pytest.mark.nightly
def test_prompts_that_share_steps_with_decodes_change_no_token(sglang: SglangVenv, tmp_path: Path) -> None:
    (stock,) = sglang.stock([run(sglang, "gemma3")], tmp_path)
    (mixed,) = sglang.ours([run(sglang, "gemma3", enable_mixed_chunk=True)], tmp_path)
    assert_equal([mixed], stock)
    assert {"DECODE", "EXTEND", "MIXED"} <= {*mixed.modes}


@pytest.mark.nightly
def test_with_the_deterministic_flag_a_request_has_the_same_bits_alone_and_among_others(
    sglang: SglangVenv, tmp_path: Path
) -> None:
    """Four requests run alone: a prompt of up to 16 tokens is one chunk; the radix cache has a longer one's prefix."""
    requested = run(sglang, "gemma3", enable_deterministic_inference=True)
    single = (0, 8, 11, 12)
    requested.rounds, requested.chances = [prompts(), *([prompts()[each]] for each in single)], True
    (ours,) = sglang.ours([requested], tmp_path)
    said = (tmp_path / "log").read_text()
    assert "mixed by torch.segments" in said
    assert "a sequence's result may depend on the batch" in said
    whole = ours.chances[0]
    for each, alone, cached in zip(single, ours.chances[1:], ours.cached[1:], strict=True):
        assert alone == [whole[each]], f"request {each}"
        assert (cached[0] >= 16) == (len(prompts()[each]) > 16)
    (stock,) = sglang.stock([run(sglang, "gemma3")], tmp_path)
    assert ours.tokens[0] == stock.tokens[0]


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [1, 16])
def test_two_halves_of_a_batch_that_overlap_give_the_tokens_of_whole_ones(
    page_size: int, sglang: SglangVenv, tmp_path: Path
) -> None:
    """SGLang cuts a prompt in two if that makes the halves even, and runs the layers of both in turns."""
    (stock,) = sglang.stock([run(sglang, "qwen3_experts")], tmp_path)
    # SGLang's scheduler splits batches if ranks have to agree, and with this size it treats one rank as such.
    overlap: dict[str, Any] = {"enable_two_batch_overlap": True, "moe_dense_tp_size": 1}
    (ours,) = sglang.ours([run(sglang, "qwen3_experts", faults=True, page_size=page_size, **overlap)], tmp_path)
    assert_equal([ours], stock)
    assert_reported(ours, FAULTS)
    assert {mode for mode, *_ in ours.halves} == {"EXTEND", "DECODE"}
    assert any(left + right > whole for _, whole, left, right in ours.halves), "no prompt was in both halves"


@pytest.mark.nightly
@pytest.mark.parametrize("asks", [True, False], ids=["by name", "by default"])
def test_our_backend_serves_under_the_name_of_one_whose_place_it_takes(
    asks: bool, sglang: SglangVenv, tmp_path: Path
) -> None:
    """If the server names no backend, SGLang chooses this one on such a CPU; on ROCm it would be aiter."""
    requested = [run(sglang, "gemma3")]
    (stock,) = sglang.stock(requested, tmp_path)
    assert_equal(sglang.ours(requested, tmp_path, name="torch_native", asks=asks), stock)


@pytest.mark.nightly
def test_latent_attention_gives_the_tokens_of_transformers_with_dp_attention_too(
    sglang: SglangVenv, tmp_path: Path
) -> None:
    """SGLang's own backend for a CPU cannot serve it."""
    from transformers import DeepseekV3ForCausalLM

    requested = [run(sglang, "deepseek", page_size=size) for size in (1, 16)]
    reference: Any = DeepseekV3ForCausalLM.from_pretrained(model("deepseek", sglang.folder), dtype=torch.float32)
    stock = said_by(reference, requested[0])
    assert_equal(sglang.ours(requested, tmp_path), stock)
    # Two ranks that share out requests, pad their batches to one size, and are idle at times.
    ranks: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "chunked_prefill_size": 96}
    assert_equal(sglang.ours([run(sglang, "deepseek", **ranks)], tmp_path), stock)


@pytest.mark.nightly
def test_sparse_attention_gives_the_tokens_of_transformers_with_keys_of_eight_bits(
    sglang: SglangVenv, tmp_path: Path
) -> None:
    """SGLang's own indexer and kernels need a GPU.

    Scores of index keys are often exactly 0, because the scores of all heads are rectified. Among equal scores the
    first keys are chosen.
    """
    from transformers import DeepseekV32ForCausalLM

    requested = run(sglang, "deepseek_sparse", page_size=64, chunked_prefill_size=64)
    requested.rounds = [prompts(LONG_LENGTHS, 130), prompts(LONG_LENGTHS, 130)[-3:]]
    reference: Any = DeepseekV32ForCausalLM.from_pretrained(
        model("deepseek_sparse", sglang.folder), dtype=torch.float32
    )
    (ours,) = sglang.ours([requested], tmp_path)
    assert all(cached >= 64 for cached in ours.cached[1])
    with index_keys_in_eight_bits(reference), first_of_equals():
        assert_equal_tokens([ours.tokens], said_by(reference, requested).tokens)


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [1, 16])
def test_an_encoder_gives_the_embeddings_of_sglangs_own_backend(
    page_size: int, sglang: SglangVenv, tmp_path: Path
) -> None:
    whole: dict[str, Any] = {"is_embedding": True, "chunked_prefill_size": -1, "disable_radix_cache": True}
    requested = replace(run(sglang, "bert", 0, page_size=page_size, **whole), embeds=True)
    (stock,) = sglang.stock([requested], tmp_path)
    (ours,) = sglang.ours([requested], tmp_path)
    assert [len(rows) for rows in ours.rows] == [len(prompts) for prompts in requested.rounds]
    rows, expected = (torch.tensor([row for of in answer.rows for row in of]) for answer in (ours, stock))
    assert len({tuple(row) for row in rows.tolist()}) > len(rows) // 2
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.nightly
def test_windows_to_both_sides_give_the_embeddings_of_transformers(sglang: SglangVenv, tmp_path: Path) -> None:
    """An EmbeddingGemma embeds the mean of all tokens. SGLang's own backend for a CPU has causal windows alone."""
    from transformers import Gemma3TextModel

    whole: dict[str, Any] = {"is_embedding": True, "chunked_prefill_size": -1, "disable_radix_cache": True}
    requested = replace(run(sglang, "embedding_gemma", 0, page_size=16, **whole), embeds=True)
    (ours,) = sglang.ours([requested], tmp_path)
    reference: Any = Gemma3TextModel.from_pretrained(model("embedding_gemma", sglang.folder), dtype=torch.float32)
    with torch.inference_mode():
        means = [
            reference(torch.tensor([prompt])).last_hidden_state[0].mean(0)
            for of_round in requested.rounds
            for prompt in of_round
        ]
    rows = torch.tensor([row for of_round in ours.rows for row in of_round])
    torch.testing.assert_close(rows, torch.nn.functional.normalize(torch.stack(means), dim=1), atol=1e-5, rtol=1e-4)
    assert torch.pdist(rows[: len(requested.rounds[0])]).min() > 0.01


@pytest.mark.nightly
@pytest.mark.parametrize("one_pool", [False, True])
def test_chunks_of_llama_4_give_the_tokens_of_transformers(one_pool: bool, sglang: SglangVenv, tmp_path: Path) -> None:
    """SGLang's own backend for a CPU sees all keys there; those for GPUs have chunks."""
    from transformers import Llama4ForConditionalGeneration

    page_size = 1 if one_pool else 16
    requested = run(sglang, "llama4", 30, page_size=page_size, disable_hybrid_swa_memory=one_pool)
    folder = model("llama4", sglang.folder)
    # The text model alone: with images, this release of transformers needs a field that its own output lacks.
    reference: Any = Llama4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).language_model
    stock, text = said_by(reference, requested), reference.config
    with patch.object(text, "layer_types", ["full_attention"] * len(text.layer_types)):
        assert said_by(reference, requested).tokens != stock.tokens, "no token depends on the chunks"
    assert_equal(sglang.ours([requested], tmp_path), stock)
    assert ("SWAKVPool mem usage" in (tmp_path / "log").read_text()) is not one_pool


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", [1, 16])
def test_images_of_gemma_3_give_the_tokens_of_transformers(page_size: int, sglang: SglangVenv, tmp_path: Path) -> None:
    """SGLang's own backend for a CPU has no such images. Spans stand for them, without pixels."""
    from transformers import Gemma3ForConditionalGeneration

    requested = run(sglang, "gemma3_images", 20, page_size=1, chunked_prefill_size=-1)
    folder = model("gemma3_images", sglang.folder)
    reference: Any = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    places = json.loads((folder / "config.json").read_text())[IMAGE_PLACES]

    def types(prompt: Sequence[int]) -> torch.Tensor:
        found = torch.zeros(1, len(prompt), dtype=torch.int64)
        for first, last in places:
            if last < len(prompt):
                found[:, first : last + 1] = 1
        return found

    stock = said_by(reference, requested, lambda prompt: {"token_type_ids": types(prompt)})
    causal = said_by(reference, requested, lambda prompt: {"token_type_ids": types(prompt) * 0})
    assert sum(map(sum, texts_that_differ(stock, causal))) >= 4, "hardly a text depends on the images"
    (ours,) = sglang.ours([requested], tmp_path)
    assert_equal([ours], stock)


@pytest.mark.nightly
def test_a_model_of_speech_gives_sglangs_own_tokens_and_faults_in_its_steps_are_reported(
    sglang: SglangVenv, tmp_path: Path
) -> None:
    """A Whisper: 100 rows of its encoder lie before each text, and some prompts are longer than that.

    SGLang takes such prompts whole, over pages of one token: a chunk that ends within an encoder's rows ends its
    scheduler, and with larger pages new tokens get slots of others.
    """
    requested = Run(
        {
            **run(sglang, "gemma3", page_size=1, chunked_prefill_size=-1).engine,
            "model_path": str(vllm_model("speech", sglang.folder)),
        },
        [prompts(), prompts()[-3:]],
        12,
    )
    (stock,) = sglang.stock([requested], tmp_path)
    (ours,) = sglang.ours([replace(requested, faults=True)], tmp_path)
    assert_equal_tokens([ours.tokens], stock.tokens)
    assert_reported(ours, FAULTS)


def texts_that_differ(one: Answer, other: Answer) -> list[list[bool]]:
    return [[a != b for a, b in zip(*rounds, strict=True)] for rounds in zip(one.tokens, other.tokens, strict=True)]


@contextmanager
def first_of_equals() -> Iterator[None]:
    """Makes torch's topk take the first of equal elements; by itself it takes any."""

    def topk(of: torch.Tensor, k: int, dim: int = -1) -> Any:
        values, indices = of.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    with patch.object(torch.Tensor, "topk", topk):
        yield


@contextmanager
def index_keys_in_eight_bits(reference: Any) -> Iterator[None]:
    """Stores index keys as SGLang's pool does: E4M3, with a power of two as scale per layer."""
    from transformers.cache_utils import Cache

    norms = [layer.self_attn.indexer.k_norm for layer in reference.model.layers]
    bounds = [(norm.weight.detach(), norm.bias.detach()) for norm in norms]
    longest = [float(weight.abs().max() * len(weight) ** 0.5 + bias.abs().max()) for weight, bias in bounds]
    factors = [2.0 ** math.ceil(math.log2(each * 2**0.5 / 448)) for each in longest]
    keep: Any = Cache.update_indexer

    def coded(cache: Any, keys: torch.Tensor, layer: int, *more: Any, **named: Any) -> Any:
        codes = (keys / factors[layer]).to(torch.float8_e4m3fn)
        return keep(cache, codes.to(keys.dtype) * factors[layer], layer, *more, **named)

    with patch.object(Cache, "update_indexer", coded):
        yield


def no_more(prompt: Sequence[int]) -> dict[str, Any]:
    """Nothing is given to a model in addition to a prompt."""
    return {}


def said_by(reference: Any, requested: Run, more: Callable[[Sequence[int]], dict[str, Any]] = no_more) -> Answer:
    """Returns the answers of a model of transformers. more: what is given to it with a prompt"""
    stock = Answer()
    for prompts_of_round in requested.rounds:
        tokens = []
        for prompt in prompts_of_round:
            out = reference.generate(
                torch.tensor([prompt]),
                max_new_tokens=requested.new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **more(prompt),
            )
            tokens.append(out[0, len(prompt) :].tolist())
        stock.tokens.append(tokens)
    return stock
