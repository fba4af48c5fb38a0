"""Each family's model in small, from the files that transformers writes, against transformers itself, in float32."""

import json
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rocm_attn.errors import BadModel
from rocm_serve.engine import Engine
from rocm_serve.request import Completion, Request
from tests.amd.runner.dense_attention import dense_logits, dense_model
from tests.amd.runner.families import FAMILIES, family_model
from tests.amd.runner.hf_models import (
    LLAMA3,
    YARN,
    changed_tensors,
    hf_logits,
    load,
    random_tokens,
    save,
    small_hf_config,
    small_hf_model,
)
from tests.amd.runner.scripted_drafts import ScriptedDrafter, with_drafter
from tests.amd.runner.served_logits import served_logits
from tests.amd.runner.serving import BASE as PAGES_OF_4
from tests.amd.tolerances import assert_layers_close

# if transformers' two best logits lie closer together than this, rounding may decide
NARROW = 1e-3

PROMPT_LEN, LENGTHS = 21, (30, 23, 9)
BASE = replace(PAGES_OF_4, page_size=16, chunk=64)


class Served:
    """A family's reference, and the same model loaded from the reference's files."""

    def __init__(self, family: str, directory: Path) -> None:
        self.reference = family_model(family)
        self.loaded = load(save(self.reference, directory))
        self.texts = [random_tokens(length) for length in LENGTHS]
        self.logits = [hf_logits(self.reference, text) for text in self.texts]

    @cached_property
    def completions(self) -> list[Completion]:
        """The completions of requests_of(self), served in the plainest way."""
        return Engine(self.loaded, BASE).generate(requests_of(self))


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    torch.manual_seed(3)
    return Served(request.param, tmp_path_factory.mktemp(request.param))


def requests_of(served: Served) -> list[Request]:
    lengths = (3, 18, 9, 30, 1, 25)
    return [Request(tuple(served.texts[0].roll(length)[:length].tolist()), 14) for length in lengths]


# A family's kind of attention could make serving depend on order: every run has one family of each kind, the night all.
ONE_OF_EACH_KIND = (
    "qwen3",
    "gemma3",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v32",
    "qwen3_next",
    "falcon_h1",
    "nemotron_h",
)
of_some_families = pytest.mark.parametrize(
    "served",
    [pytest.param(family, marks=[pytest.mark.nightly] * (family not in ONE_OF_EACH_KIND)) for family in FAMILIES],
    indirect=True,
    scope="module",
)

# chunk, page size, graphs
WAYS = list(product((1, 7, 64), (1, 16), (False, True)))


@pytest.mark.parametrize(
    ("served", "chunk", "page_size", "graphs"),
    [
        # Every run has the way that differs most from BASE, which greedy tokens use; graphs for one family per kind.
        pytest.param(family, *way, marks=[pytest.mark.nightly] * (way != (7, 1, family in ONE_OF_EACH_KIND)))
        for family in FAMILIES
        for way in WAYS
    ],
    indirect=["served"],
    scope="module",
)
def test_served_logits_equal_those_of_transformers(chunk: int, page_size: int, graphs: bool, served: Served) -> None:
    logits, replays = served_logits(
        served.loaded, served.texts, [PROMPT_LEN] * len(LENGTHS), chunk=chunk, page_size=page_size, graphs=graphs
    )
    assert (replays > 5) == graphs
    for rows, expected, length in zip(logits, served.logits, LENGTHS, strict=True):
        assert set(range(PROMPT_LEN, length)) <= set(rows)
        for place, row in rows.items():
            assert_layers_close(row, expected[place])


@pytest.mark.fast(2)
@of_some_families
def test_greedy_tokens_are_those_of_transformers(served: Served) -> None:
    requests = requests_of(served)
    for request, completion in zip(requests, served.completions, strict=True):
        whole = torch.tensor((*request.prompt_token_ids, *completion.token_ids))
        best = hf_logits(served.reference, whole)[len(request.prompt_token_ids) - 1 : -1].topk(2, -1)
        is_clear = best.values[:, 0] - best.values[:, 1] > NARROW
        assert int(is_clear.sum()) > len(is_clear) // 2
        is_best = best.indices == torch.tensor(completion.token_ids)[:, None]
        # Where two tokens are nearly as likely, either may be taken.
        assert bool(torch.where(is_clear, is_best[:, 0], is_best.any(1)).all())


@pytest.mark.fast(2)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"max_batch_size": 1}, marks=pytest.mark.nightly),
        pytest.param({"max_batch_size": 3, "chunk": 7, "page_size": 1, "graphs": True}, marks=pytest.mark.nightly),
        {"num_pages": 9, "max_batch_size": 4, "chunk": 7},
    ],
    ids=str,
)
@of_some_families
def test_neither_order_nor_the_way_of_serving_changes_a_token(changes: dict[str, Any], served: Served) -> None:
    requests = requests_of(served)
    expected = served.completions
    assert Engine(served.loaded, replace(BASE, **changes)).generate(requests[::-1]) == expected[::-1]


@pytest.mark.fast(1)  # other tests have each family by day
@pytest.mark.parametrize("served", ["bamba", "falcon_h1", "nemotron_h"], indirect=True, scope="module")
def test_mamba_states_follow_drafts_prefixes_and_requests_that_give_way(served: Served) -> None:
    """With few pages requests give way; with many they come twice, and begin at kept states. Drafts are often wrong."""
    requests, wanted = requests_of(served), [each.token_ids for each in served.completions]
    texts = [(*each.prompt_token_ids, *each.token_ids) for each in served.completions]
    options = replace(BASE, page_size=4, chunk=8, speculative="ngram", draft_tokens=3, state_checkpoints=30)
    few, many = (
        with_drafter(
            Engine(served.loaded, replace(options, num_pages=num)), ScriptedDrafter([*texts, *texts], vocabulary=101)
        )
        for num in (13, 200)
    )
    for engine in (few, many, many):
        assert [each.token_ids for each in engine.generate(requests)] == wanted
    of_few, of_many = few.report().metrics, many.report().metrics
    assert of_few.preemptions > 0
    assert of_many.prefix_hits > 0
    assert 0 < of_many.accepted_drafts < of_many.drafts


# name -> a family, or transformers' class, and the settings that differ
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_multi_head": ("Llama", {"num_key_value_heads": 4}),
    "llama_multi_query": ("Llama", {"num_key_value_heads": 1}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_large_heads": ("Llama", {"head_dim": 32}),
    "llama_rms_eps": ("Llama", {"rms_norm_eps": 0.3}),
    "llama_linear_rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}),
    "llama_llama3_rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_yarn_rope": ("Llama", {"rope_parameters": YARN}),
    "llama_yarn_rope_details": ("Llama", {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 9.0}}),
    "llama_yarn_attention_factor": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.7}}),
    # Fields of other families, which transformers does not read here.
    "llama_unread": ("Llama", {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 100}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3_bias": ("Qwen3", {"attention_bias": True, "head_dim": 24}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma2_odd_scale": ("gemma2", {"query_pre_attn_scalar": 7, "head_dim": 32}),
    "gemma2_bias": ("gemma2", {"attention_bias": True}),
    "gemma2_uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2_own_head": ("gemma2", {"tie_word_embeddings": False}),
    "glm_moe_dsa_rms_eps": ("glm_moe_dsa", {"rms_norm_eps": 0.05}),
    "minicpm3_bias": ("minicpm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "minicpm3_plain": (
        "minicpm3",
        {"q_lora_rank": None, "v_head_dim": None, "scale_emb": 1, "scale_depth": None, "dim_model_base": None},
    ),
    "minicpm3_yarn": (
        "minicpm3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "gemma3_one_kind": ("gemma3", {"layer_types": ["full_attention"] * 3}),
    "gemma3_final_cap": ("gemma3", {"final_logit_softcapping": 3.0}),
    # Gemma 3 has the field, and transformers does not read it.
    "gemma3_unread_cap": ("gemma3", {"attn_logit_softcapping": 0.5}),
    "gemma3_yarn": (
        "gemma3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 2e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            }
        },
    ),
    "gpt_oss_one_expert": ("gpt_oss", {"num_experts_per_tok": 1}),
    "gpt_oss_all_experts": ("gpt_oss", {"num_experts_per_tok": 6}),
    "gpt_oss_no_bias": ("gpt_oss", {"attention_bias": False}),
    "gpt_oss_alpha": ("gpt_oss", {"swiglu_alpha": 0.8, "swiglu_limit": 0.5}),
    "bamba_groups": ("bamba", {"mamba_n_groups": 3, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    "bamba_biases": ("bamba", {"attention_bias": True, "mlp_bias": True, "mamba_d_head": 16, "rms_norm_eps": 0.05}),
    "minimax_m3_shared_expert": ("minimax_m3", {"shared_intermediate_size": 20}),
    "nemotron_h_groups": ("nemotron_h", {"n_groups": 3, "use_bias": True, "use_conv_bias": False}),
    "nemotron_h_biases": (
        "nemotron_h",
        {
            "layers_block_type": ["full_attention", "mlp", "linear_attention"],
            "mlp_bias": True,
            "layer_norm_epsilon": 0.05,
        },
    ),
    "nemotron_h_latent_experts": (
        "nemotron_h",
        {"moe_latent_size": 20, "norm_topk_prob": False, "n_group": 3, "topk_group": 2},
    ),
    "falcon_h1_norm_before_gate": (
        "falcon_h1",
        {"mamba_norm_before_gate": True, "mamba_n_groups": 3, "mamba_conv_bias": False, "rms_norm_eps": 0.05},
    ),
    "falcon_h1_biases": (
        "falcon_h1",
        {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
    ),
    "falcon_h1_without_norm_and_lists": (
        "falcon_h1",
        {
            "mamba_rms_norm": False,
            "ssm_multipliers": None,
            "mlp_multipliers": None,
            "mamba_d_ssm": None,
            "mamba_d_head": "auto",
            "tie_word_embeddings": True,
        },
    ),
    "falcon_h1_bias_of_the_input": ("falcon_h1", {"mamba_proj_bias": True}),
    "kimi_linear_unread": ("kimi_linear", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}),
    "kimi_linear_own_head": ("kimi_linear", {"tie_word_embeddings": True}),
    "nemotron_h_own_head": ("nemotron_h", {"tie_word_embeddings": True}),
    "qwen3_5_one_interval": ("qwen3_5", {"layer_types": None, "full_attention_interval": 2, "rms_norm_eps": 0.05}),
    "qwen3_5_moe_unread": ("qwen3_5_moe", {"norm_topk_prob": False, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    "qwen3_next_shares_of_all": ("qwen3_next", {"norm_topk_prob": False, "attention_bias": False}),
    "qwen3_next_yarn": (
        "qwen3_next",
        {"head_dim": 32, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    ),
    "qwen3_next_sparse_step": ("qwen3_next", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    "qwen3_moe_shares_of_all": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3_moe_dense_layers": ("qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True}),
    "qwen3_moe_sparse_step": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe_window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "deepseek_v2_nothing_turns": ("deepseek_v2", {"qk_rope_head_dim": 0, "attention_bias": True}),
    "deepseek_v2_unread": ("deepseek_v2", {"rope_interleave": False}),
    "deepseek_v3_halves_turn": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v32_nothing_turns": ("deepseek_v32", {"qk_rope_head_dim": 0}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_a_config_may_change_changes_the_logits_as_in_transformers(variant: str, tmp_path: Path) -> None:
    name, changes = VARIANTS[variant]
    reference = family_model(name, **changes) if name in FAMILIES else small_hf_model(name, **changes)
    loaded, token_ids = load(save(reference, tmp_path)), random_tokens(60)
    expected = hf_logits(reference, token_ids)
    assert_layers_close(dense_logits(loaded, token_ids), expected)


@pytest.mark.parametrize("inside", [{}, {"partial_rotary_factor": 1.0}], ids=str)
def test_bambas_rows_turn_by_the_share_in_rope_parameters_alone(inside: dict[str, float], tmp_path: Path) -> None:
    path = save(family_model("bamba"), tmp_path) / "config.json"
    parameters = {"rope_type": "default", "rope_theta": 1e4, **inside}
    fields = {**json.loads(path.read_text()), "rope_parameters": parameters, "partial_rotary_factor": 0.25}
    path.write_text(json.dumps(fields))
    reference, token_ids = transformers.AutoModelForCausalLM.from_pretrained(tmp_path), random_tokens(20)
    assert_layers_close(dense_logits(load(tmp_path), token_ids), hf_logits(reference, token_ids))


@pytest.mark.fast(5)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)])
def test_narrow_dtypes_stay_near_float32(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    # an indexer that chooses all keys has no other choice
    changes = {"index_topk": 64} if "index_topk" in FAMILIES[family][1] else {}
    reference, token_ids = family_model(family, **changes), random_tokens(40)
    logits = dense_logits(load(save(reference, tmp_path), dtype), token_ids)
    expected = hf_logits(reference, token_ids)
    assert logits.dtype == dtype
    # the median token: a router may choose otherwise if two experts are nearly equal
    errors = (logits.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 24 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_embeddings_are_scaled_by_what_the_dtype_makes_of_gemmas_scale(dtype: torch.dtype, tmp_path: Path) -> None:
    reference, token_ids = family_model("gemma3"), random_tokens(20)
    model, _ = dense_model(load(save(reference, tmp_path), dtype), max_kv_len=20)
    with torch.no_grad():
        assert torch.equal(model.embed(token_ids), reference.to(dtype).model.embed_tokens(token_ids))


def test_embeddings_are_scaled_by_a_factor_that_no_dtype_rounds(tmp_path: Path) -> None:
    reference, token_ids = family_model("falcon_h1"), random_tokens(20)
    model, _ = dense_model(load(save(reference, tmp_path), torch.bfloat16), max_kv_len=20)
    rows = reference.to(torch.bfloat16).model.embed_tokens(token_ids)
    with torch.no_grad():
        assert torch.equal(model.embed(token_ids), rows * 5.656854249492381)
        assert not torch.equal(model.embed(token_ids), rows * torch.tensor(5.656854249492381).bfloat16())


def gemma3_with_images() -> tuple[Any, Any]:
    """Returns a small Gemma 3 that also takes images, and the text model that has its decoder's weights.

    transformers does not read final_logit_softcapping of the former.
    """
    text = small_hf_config("Gemma3", **FAMILIES["gemma3"][1], final_logit_softcapping=0.5)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    model: Any = transformers.Gemma3ForConditionalGeneration(config)
    text_model = family_model("gemma3")
    model.model.language_model.load_state_dict(text_model.model.state_dict())
    return model, text_model


@pytest.mark.parametrize(
    ("old", "new"),
    [("", ""), ("language_model.model.", "model.language_model.")],
    ids=["as written today", "as older releases wrote"],
)
def test_the_decoder_of_a_model_that_takes_images_is_served(old: str, new: str, tmp_path: Path) -> None:
    whole, text_model = gemma3_with_images()
    with changed_tensors(save(whole, tmp_path)) as tensors:
        assert any("vision" in name for name in tensors)
        for name in [name for name in tensors if old and old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)
    token_ids = random_tokens(30)
    assert_layers_close(dense_logits(load(tmp_path), token_ids), hf_logits(text_model, token_ids))


def test_a_missing_tensor_of_the_decoder_is_named(tmp_path: Path) -> None:
    with changed_tensors(save(gemma3_with_images()[0], tmp_path)) as tensors:
        del tensors["language_model.model.layers.1.post_feedforward_layernorm.weight"]
    with pytest.raises(BadModel, match=r"lacks model\.layers\.1\.post_feedforward_layernorm\.weight"):
        load(tmp_path)


def test_a_weight_under_two_names_is_refused(tmp_path: Path) -> None:
    with changed_tensors(save(gemma3_with_images()[0], tmp_path)) as tensors:
        tensors["model.language_model.norm.weight"] = torch.ones(48)
    with pytest.raises(BadModel, match=r"one weight twice, as 'language_model.model.norm.weight' and as 'model.langua"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_the_decoder_of_qwen3_5_is_served_without_its_images_and_its_layers_for_speculation(
    tied: bool, tmp_path: Path
) -> None:
    settings = FAMILIES["qwen3_5_moe"][1]
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 48, "intermediate_size": 16}
    config = transformers.Qwen3_5MoeConfig(
        text_config=small_hf_config("Qwen3_5Moe", **settings).to_dict(), vision_config=vision, tie_word_embeddings=tied
    )
    whole: Any = transformers.Qwen3_5MoeForConditionalGeneration(config)
    text_model = family_model("qwen3_5_moe", tie_word_embeddings=tied)
    whole.model.language_model.load_state_dict(text_model.model.state_dict())
    whole.lm_head.load_state_dict(text_model.lm_head.state_dict())
    with changed_tensors(save(whole, tmp_path)) as tensors:
        assert any("visual" in name for name in tensors)
        tensors["mtp.norm.weight"] = torch.ones(48)
    token_ids = random_tokens(30)
    assert_layers_close(dense_logits(load(tmp_path), token_ids), hf_logits(text_model, token_ids))


@pytest.mark.parametrize(("family", "num_layers"), [("qwen3_next", 4), ("qwen3_5", 4), ("nemotron_h", 7)])
def test_layers_for_speculation_are_not_read(family: str, num_layers: int, tmp_path: Path) -> None:
    with changed_tensors(save(family_model(family), tmp_path)) as tensors:
        tensors["mtp.layers.0.input_layernorm.weight"] = torch.ones(48)
    assert load(tmp_path).config.num_layers == num_layers


@pytest.mark.parametrize("family", ["qwen3", "bamba", "deepseek_v3"])
def test_a_family_without_them_has_no_place_for_such_names(family: str, tmp_path: Path) -> None:
    with changed_tensors(save(family_model(family), tmp_path)) as tensors:
        tensors["mtp.layers.0.input_layernorm.weight"] = torch.ones(48)
    with pytest.raises(BadModel, match=r"has mtp\.layers\.0\.input_layernorm\.weight, which \w+ does not use"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "prefix"), [("qwen3_next", "model.layers.0.self_attn"), ("nemotron_h", "backbone.layers.1.mixer")]
)
def test_a_layer_without_attention_has_no_place_for_its_tensors(family: str, prefix: str, tmp_path: Path) -> None:
    with changed_tensors(save(family_model(family), tmp_path)) as tensors:
        tensors[f"{prefix}.k_proj.weight"] = torch.ones(32, 48)
    with pytest.raises(BadModel, match=r"has model\.layers\.\d\.self_attn\.k_proj\.weight, which \w+ does not use"):
        load(tmp_path)


def test_experts_of_qwen3_5_are_read_in_one_tensor_or_in_many(tmp_path: Path) -> None:
    """Its makers publish one tensor for a layer's experts; transformers writes three for each of them."""
    reference, token_ids = family_model("qwen3_5_moe"), random_tokens(20)
    joined = {name: tensor for name, tensor in reference.state_dict().items() if ".experts." in name}
    assert len(joined) == 8
    with changed_tensors(save(reference, tmp_path)) as tensors:
        for name in [name for name in tensors if ".experts." in name]:
            del tensors[name]
        tensors |= joined
    assert_layers_close(dense_logits(load(tmp_path), token_ids), hf_logits(reference, token_ids))


def test_minimax_m3_is_read_from_the_names_of_its_makers(tmp_path: Path) -> None:
    """transformers writes them for the model with images; its text model has other names, and joins gate and up."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small_hf_config("MiniMaxM3VL", **FAMILIES["minimax_m3"][1]).to_dict()
    whole: Any = transformers.MiniMaxM3SparseForConditionalGeneration(
        transformers.MiniMaxM3VLConfig(text_config=text, vision_config=vision)
    )
    text_model = family_model("minimax_m3")
    whole.model.language_model.load_state_dict(text_model.model.state_dict())
    whole.lm_head.load_state_dict(text_model.lm_head.state_dict())
    with changed_tensors(save(whole, tmp_path)) as tensors:
        assert "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight" in tensors
    token_ids = random_tokens(30)
    assert_layers_close(dense_logits(load(tmp_path), token_ids), hf_logits(text_model, token_ids))


def test_experts_in_mxfp4_are_refused_with_the_way_out(tmp_path: Path) -> None:
    directory = save(family_model("gpt_oss"), tmp_path)
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config))
    with pytest.raises(
        BadModel, match=r"quantised with .mxfp4. are not supported; .*dequantize=True.* save it in bfloat16"
    ):
        load(directory)


def test_experts_of_another_shape_are_named(tmp_path: Path) -> None:
    with changed_tensors(save(family_model("gpt_oss"), tmp_path)) as tensors:
        name = "model.layers.0.mlp.experts.gate_up_proj"
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    with pytest.raises(BadModel, match=r"experts\.gate_up_proj has shape \[6, 160, 48\]; .* for \[6, 48, 160\]"):
        load(tmp_path)


def test_an_indexer_whose_keys_are_shorter_than_what_turns_is_refused(tmp_path: Path) -> None:
    directory = save(family_model("minimax_m3", index_head_dim=6), tmp_path)
    with pytest.raises(BadModel, match="index_head_dim is 6; it must hold the 8 rotated elements"):
        load(directory)
