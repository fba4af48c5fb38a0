"""Layers that are read from a config.json see the keys that they see in transformers' model of the same file.

transformers builds the model and its masks, which a recorded attention function keeps. Our runtime serves the problems
that we read of the file, and its outputs are compared with float64 attention over transformers' masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from rocm_attn.batch.mask import TokenSpans
from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.models.families import attention_geometry
from rocm_attn.models.geometry import AttentionGeometry, AttentionLayer
from rocm_attn.models.hf_config import config_from_json
from rocm_attn.oracle.reference import attend_sequence
from rocm_attn.problem import UNLIMITED_WINDOW
from tests.amd.tolerances import assert_attention_close
from tests.amd.worlds.world import World

TOKENS = 29
_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_OF_IMAGES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION = {**_OF_IMAGES, "image_size": 16, "patch_size": 8}
_TYPES = ["full_attention", "sliding_attention"] * 2
_MODERN_BERT = {name: size for name, size in _SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
_MODERN_BERT["pad_token_id"] = 0


@dataclass(frozen=True, slots=True)
class Case:
    """A small model.

    architecture: in config.json
    config:       transformers' class of configs, and its settings
    spans:        first and end of each, in a prompt of TOKENS
    types:        the argument of the model that says which tokens are of spans, and its values inside and outside
    """

    architecture: str
    config: str
    settings: dict[str, Any]
    spans: Sequence[tuple[int, int]] = ()
    types: tuple[str, int, int] = ("token_type_ids", 1, 0)

    def file(self) -> dict[str, Any]:
        """The fields of config.json, as transformers writes them."""
        return {**self.hf_config().to_dict(), "architectures": [self.architecture]}

    def hf_config(self) -> Any:
        return getattr(transformers, self.config)(**self.settings)


# Spans that a window cuts, that begin and end at any place, and that are shorter than a window.
_SPANS = ((2, 15), (17, 20), (21, 28))


def _gemma4(**of_text: str) -> Case:
    types = {"sliding_window": 5, "layer_types": [*_TYPES[1:], "full_attention"], **of_text}
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 8}
    vision = {**_OF_IMAGES, "head_dim": 8, "num_key_value_heads": 2}
    settings = {"text_config": {**_SMALL, **types, **own}, "vision_config": vision}
    return Case("Gemma4ForConditionalGeneration", "Gemma4Config", settings, _SPANS, ("mm_token_type_ids", 1, 0))


CASES = {
    "Llama 4": Case("Llama4ForCausalLM", "Llama4TextConfig", {**_SMALL, "attention_chunk_size": 6}),
    "Llama 4, layers named": Case(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**_SMALL, "attention_chunk_size": 5, "layer_types": ["full_attention", *["chunked_attention"] * 3]},
    ),
    "Llama 4, layers that turn": Case(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**_SMALL, "attention_chunk_size": 7, "no_rope_layers": [0, 1, 0, 1]},
    ),
    "Llama 4 without chunks": Case("Llama4ForCausalLM", "Llama4TextConfig", {**_SMALL, "attention_chunk_size": None}),
    "Gemma 3": Case(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": {**_SMALL, "sliding_window": 5, "layer_types": _TYPES}, "vision_config": _VISION},
        _SPANS,
    ),
    "Gemma 4": _gemma4(use_bidirectional_attention="vision"),
    "Gemma 4 with causal images": _gemma4(),
    "PaliGemma": Case(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {"text_config": {**_SMALL, "model_type": "gemma"}, "vision_config": _VISION, "projection_dim": 32},
        ((0, 17),),
        ("token_type_ids", 0, 1),
    ),
    "PaliGemma 2": Case(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": {**_SMALL, "model_type": "gemma2", "sliding_window": 5},
            "vision_config": _VISION,
            "projection_dim": 32,
        },
        ((0, 17),),
        ("token_type_ids", 0, 1),
    ),
    "BERT": Case("BertModel", "BertConfig", {**_SMALL}),
    "BERT as a decoder": Case("BertModel", "BertConfig", {**_SMALL, "is_decoder": True}),
    "XLM-RoBERTa": Case("XLMRobertaModel", "XLMRobertaConfig", {**_SMALL}),
    "Llama as an encoder": Case("LlamaForCausalLM", "LlamaConfig", {**_SMALL, "is_causal": False}),
    "Gemma 3 as an encoder": Case(
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {**_SMALL, "layer_types": ["full_attention"] * 4, "use_bidirectional_attention": True},
    ),
    "EmbeddingGemma": Case(
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {**_SMALL, "layer_types": _TYPES, "sliding_window": 9, "use_bidirectional_attention": True},
    ),
    "EmbeddingGemma, said twice": Case(
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {**_SMALL, "layer_types": _TYPES, "sliding_window": 8, "use_bidirectional_attention": True, "is_causal": False},
    ),
    "Gemma 3 that is not causal": Case(
        "Gemma3TextModel",
        "Gemma3TextConfig",
        {**_SMALL, "layer_types": _TYPES, "sliding_window": 6, "is_causal": False},
    ),
    "Mistral as an encoder": Case(
        "MistralForCausalLM", "MistralConfig", {**_SMALL, "sliding_window": 5, "is_causal": False}
    ),
    "ModernBERT": Case("ModernBertModel", "ModernBertConfig", {**_MODERN_BERT, "local_attention": 9}),
    "ModernBERT, layers named": Case(
        "ModernBertModel", "ModernBertConfig", {**_MODERN_BERT, "local_attention": 6, "layer_types": _TYPES}
    ),
}


def masks_of_transformers(case: Case) -> list[Tensor]:
    """[layers] bool [TOKENS, TOKENS]: the keys that transformers lets each layer's queries see."""
    found: list[Tensor] = []

    def recorded(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        # Without a mask a query sees all keys, like in transformers' own eager attention.
        seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool) if attention_mask is None else attention_mask[0, 0] == 0
        assert seen.shape == (TOKENS, TOKENS)
        found.append(seen)
        return torch.zeros(*q.transpose(1, 2).shape[:3], v.shape[-1]), None

    transformers.AttentionInterface.register("recorded", recorded)
    AttentionMaskInterface.register("recorded", eager_mask)
    torch.manual_seed(5)
    model = getattr(transformers, case.architecture)(case.hf_config()).eval()
    model.set_attn_implementation("recorded")
    given: dict[str, Tensor] = {}
    if case.spans:
        name, inside, outside = case.types
        given[name] = torch.full((1, TOKENS), outside)
        for first, end in case.spans:
            given[name][0, first:end] = inside
    with torch.no_grad():
        model(input_ids=torch.randint(3, 60, (1, TOKENS)), **given)
    return found


def outputs_and_references(
    geometry: AttentionGeometry, case: Case, masks: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """[layers] The layer's outputs in our runtime, and float64 attention over a mask of the same keys and values."""
    # Masks are compared, so no layer has scores that its tolerance was not made for.
    problems = [replace(each, scale=0.3) for each in geometry.problems(dtype=torch.float32, page_size=4)]
    world = World.build(problems, torch.device("cpu"), "torch")
    requests, q_len = world.admit_all(1), [TOKENS]
    batch = world.batch(requests, q_len)
    if any(problem.custom_mask for problem in problems):
        batch = replace(batch, mask=TokenSpans([(0, *span) for span in case.spans], torch.device("cpu")))
    world.run_batch(requests, q_len, batch)
    (request,) = requests
    used = torch.from_numpy(world.places)
    results: list[tuple[Tensor, Tensor]] = []
    for layer, (problem, rows) in enumerate(zip(world.problems, world.rows, strict=True)):
        plain = replace(
            problem, window_left=UNLIMITED_WINDOW, window_right=0, chunk=0, custom_mask=False, spans_pass_window=False
        )
        k, v, weights = request.k[layer], request.v[layer], world.runtime.head_weights.of(layer)
        want, _ = attend_sequence(rows.q[used], k, v, plain, weights, masks[layer])
        results.append((rows.out[used], want))
    return results


@pytest.mark.parametrize("name", CASES)
def test_layers_of_a_config_see_what_transformers_lets_them_see(name: str) -> None:
    case = CASES[name]
    masks = masks_of_transformers(case)
    geometry = attention_geometry(case.file())
    assert len(masks) == len(geometry.layers)
    for out, want in outputs_and_references(geometry, case, masks):
        assert_attention_close(out, want, torch.float32)


def test_chunks_that_no_sequence_outgrows_are_no_chunks() -> None:
    geometry = attention_geometry(CASES["Llama 4"].file())
    assert {layer.chunk for layer in geometry.without_idle_windows(7).layers} == {0, 6}
    assert {layer.chunk for layer in geometry.without_idle_windows(6).layers} == {0}
    spans = attention_geometry(CASES["PaliGemma 2"].file()).without_idle_windows(5)
    assert not any(each.spans_pass_window for each in spans.problems(dtype=torch.float32, page_size=4))


def test_the_runner_serves_text_and_no_images() -> None:
    config = CASES["Gemma 3"].file()
    assert any(layer.sees_spans for layer in attention_geometry(config).layers)
    served = config_from_json(config)
    assert served.layers
    assert not any(layer.sees_spans for layer in served.attention.layers)


@pytest.mark.parametrize(
    ("name", "changes", "error", "sentence"),
    [
        ("Llama 4", {"attention_chunk_size": 0}, BadModel, "attention_chunk_size is 0; it must be at least 1"),
        ("Llama 4", {"layer_types": ["sliding_attention"] * 4}, Unsupported, "'sliding_attention' is not served"),
        (
            "Llama 4",
            {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": None},
            BadModel,
            "and there is no attention_chunk_size",
        ),
        ("Llama 4", {"layer_types": None, "no_rope_layers": [1, 0]}, BadModel, "no_rope_layers is .* one of 4"),
        ("BERT", {"position_embedding_type": "relative_key"}, Unsupported, "only 'absolute' is served"),
        ("PaliGemma", {"text_config": {"model_type": "llama"}}, Unsupported, "type 'llama' is not served"),
        ("BERT", {"is_causal": None}, BadModel, "is_causal is null; it must be true or false"),
        (
            "Llama 4",
            {"is_causal": False},
            Unsupported,
            "layer 0 is not causal and has chunks",
        ),
    ],
)
def test_visibility_of_another_kind_is_refused_in_one_sentence(
    name: str, changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        attention_geometry({**CASES[name].file(), **changes})


def test_files_of_modern_bert_may_name_a_period_instead_of_layers() -> None:
    """Those on the Hub do, and leave out what ModernBertConfig has."""
    file = CASES["ModernBERT"].file()
    del file["layer_types"]
    layers = attention_geometry(file | {"global_attn_every_n_layers": 2, "local_attention": 128}).layers
    assert [(each.window_left, each.window_right) for each in layers] == [(-1, -1), (64, 64)] * 2
    assert attention_geometry({"architectures": ["ModernBertForMaskedLM"]}).layers[3:5] == (
        AttentionLayer(12, 12, 64, 0.125, window_right=-1),
        AttentionLayer(12, 12, 64, 0.125, window_left=64, window_right=64),
    )


def test_a_window_that_no_sequence_outgrows_is_none_on_either_side() -> None:
    geometry = attention_geometry(CASES["ModernBERT"].file())
    assert {(layer.window_left, layer.window_right) for layer in geometry.without_idle_windows(6).layers} == {
        (-1, -1),
        (4, 4),
    }
    assert {(layer.window_left, layer.window_right) for layer in geometry.without_idle_windows(5).layers} == {(-1, -1)}
    causal = attention_geometry(CASES["Llama 4 without chunks"].file()).without_idle_windows(1)
    assert {layer.window_right for layer in causal.layers} == {0}


def test_the_runner_refuses_an_encoder() -> None:
    with pytest.raises(BadModel, match="LlamaForCausalLM is not causal here; the runner generates text"):
        config_from_json(CASES["Llama as an encoder"].file())
