"""The fields of published models' config.json, written down from memory of their repositories, are read completely."""

import re
from typing import Any

import pytest
import transformers

from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.models.families import DECODERS, attention_geometry
from rocm_attn.models.hf_config import config_from_json
from tests.amd.runner.families import FAMILIES
from tests.amd.runner.hf_models import PUBLISHED, published, small_hf_config

# Fields that MiniCPM3's class knows. Gemma 3's class knows almost all fields.
OF_MINICPM3 = ("scale_emb", "scale_depth", "dim_model_base", "kv_lora_rank", "hidden_size", "vocab_size")
MINICPM3 = published("minicpm3-4b")
OF_STATES = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
LLAMA = published("llama-3.1-8b")
# The others are by its class.
MINIMAX_M3: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "text_config": {
        "hidden_size": 6144,
        "num_hidden_layers": 3,
        "vocab_size": 200064,
        "max_position_embeddings": 524288,
        "partial_rotary_factor": 0.5,
        "eos_token_id": 200020,
    },
}
PALIGEMMA2 = published("paligemma2-3b-pt-224")
OF_GEMMA2 = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
CONFIGS = {
    **{path.stem: published(path.stem) for path in sorted(PUBLISHED.glob("*.json"))},
    "minicpm3-4b, by its class": {name: value for name, value in MINICPM3.items() if name not in OF_MINICPM3},
    "minicpm3-4b, without factors": {**MINICPM3, "scale_depth": None, "dim_model_base": None},
    "gpt-oss-20b, by its class": {
        name: value for name, value in published("gpt-oss-20b").items() if name not in ("rope_scaling", "rope_theta")
    },
    "gpt-oss-20b, with an empty scaling": {**published("gpt-oss-20b"), "rope_scaling": {}},
    "llama-3.1-8b, its base with the rest": {
        **{name: value for name, value in LLAMA.items() if name != "rope_theta"},
        "rope_scaling": {**LLAMA["rope_scaling"], "rope_theta": LLAMA["rope_theta"]},
    },
    "minimax-m3, by its class": MINIMAX_M3,
    "minimax-m3, in its makers' words": {
        **MINIMAX_M3,
        "text_config": {
            **MINIMAX_M3["text_config"],
            "hidden_act": "swigluoai",
            "moe_layer_freq": [0, 1, 1],
            "sparse_attention_config": {
                "sparse_num_index_heads": 4,
                "sparse_index_dim": 64,
                "sparse_block_size": 64,
                "sparse_topk_blocks": 8,
                "sparse_local_block": 2,
                "sparse_attention_freq": [0, 0, 1],
            },
        },
    },
    "paligemma2-3b, by its class": {
        **PALIGEMMA2,
        "text_config": {name: value for name, value in PALIGEMMA2["text_config"].items() if name not in OF_GEMMA2},
    },
    "paligemma-3b, by its class": {**PALIGEMMA2, "text_config": {"model_type": "gemma", "hidden_size": 2048}},
    "nemotron-h-8b, by its class": {
        name: value for name, value in published("nemotron-h-8b-base-8k").items() if name not in OF_STATES
    },
}


def test_gemma_3n_needs_more_than_the_runner_has() -> None:
    with pytest.raises(BadModel, match="the engine does not serve Gemma3nForConditionalGeneration; try vLLM"):
        config_from_json(published("gemma-3n-e4b"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_file_is_read_as_transformers_reads_it(name: str) -> None:
    """Transformers writes each of its fields, in today's layout; test_families.py holds that layout to the logits."""
    config = CONFIGS[name]
    (architecture,) = config["architectures"]
    fields = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    whole = {**getattr(transformers, architecture).config_class(**fields).to_dict(), "architectures": [architecture]}
    read: Any = config_from_json if architecture in DECODERS else attention_geometry
    assert read(config) == read(whole)


@pytest.mark.parametrize(
    ("family", "name"),
    [("gpt_oss", "layer_types"), ("minimax_m3", "layer_types"), ("minimax_m3", "mlp_layer_types")],
)
@pytest.mark.parametrize("kind", [["sparse"], {"sparse": 1}, "other"], ids=str)
def test_a_layer_of_no_known_kind_is_named_as_the_file_has_it(family: str, name: str, kind: object) -> None:
    class_name, settings = FAMILIES[family]
    config = small_hf_config(class_name, **settings).to_dict() | {"architectures": [f"{class_name}ForCausalLM"]}
    with pytest.raises((BadModel, Unsupported), match=re.escape(repr(kind))):
        config_from_json(config | {name: [*config[name][:-1], kind]})


def test_glm_5_has_the_epsilon_of_its_class() -> None:
    config = config_of("glm_moe_dsa")
    del config["rms_norm_eps"]
    assert config_from_json(config).rms_norm_eps == 1e-5


@pytest.mark.parametrize("change", [{"mscale_all_dim": 0}, {"type": "default"}], ids=str)
def test_scores_of_deepseek_without_mscale_or_scaling_are_not_sharpened(change: dict[str, object]) -> None:
    config = published("deepseek-v3")
    flat = {**config, "rope_scaling": {**config["rope_scaling"], **change}}
    assert attention_geometry(flat).layers[0].scale == 192**-0.5


def test_gemma_4_without_rotary_parameters_has_those_of_its_class() -> None:
    absent = config_of("gemma4")
    said = absent.pop("rope_parameters")
    assert said["full_attention"]["rope_type"] == "proportional"
    for fields in (absent, {**absent, "rope_parameters": None}):
        assert config_from_json(fields) == config_from_json({**absent, "rope_parameters": said})


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("Glm5NextForConditionalGeneration", ("index_kpool",)),
        ("MiniMaxM2ForCausalLM", ("head_dim", "num_key_value_heads")),
        ("Qwen4ExpForCausalLM", ("head_dim", "num_key_value_heads")),
    ],
)
def test_fields_that_a_file_leaves_out_are_those_of_its_class(architecture: str, names: tuple[str, ...]) -> None:
    whole = getattr(transformers, architecture).config_class().to_dict() | {"architectures": [architecture]}
    geometry, of_text = attention_geometry(whole), whole.get("text_config", whole)
    for name in names:
        del of_text[name]
        assert attention_geometry(whole) == geometry


def test_a_first_context_next_to_the_scaling_replaces_that_in_it() -> None:
    """Transformers replaces it when it builds the model."""
    config, yarn = published("qwen3-next-80b-a3b"), {"rope_type": "yarn", "factor": 4.0}
    inside, other = ({**yarn, "original_max_position_embeddings": length} for length in (32768, 262144))
    outside = {**config, "original_max_position_embeddings": 32768, "rope_scaling": other}
    assert config_from_json(outside) == config_from_json({**config, "rope_scaling": inside})


def config_of(model: str) -> dict[str, Any]:
    """Returns a published config.json, or that of a small model of a family, as transformers writes it."""
    if model not in FAMILIES:
        return published(model)
    name, settings = FAMILIES[model]
    return {**small_hf_config(name, **settings).to_dict(), "architectures": [f"{name}ForCausalLM"]}


@pytest.mark.parametrize(
    ("model", "changes", "sentence"),
    [
        (
            "gemma2",
            {"hidden_activation": "relu"},
            "hidden_activation is 'relu'; it must be 'gelu_pytorch_tanh'",
        ),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0; it must be a positive"),
        (
            "gemma4",
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "KV heads of 24 and 16 elements; per_",
        ),
        # transformers takes both nulls for false, and absent fields for true.
        ("deepseek_v3", {"rope_interleave": None}, "rope_interleave is null; it must be true or false"),
        ("deepseek_v3", {"norm_topk_prob": None}, "norm_topk_prob is null; it must be true or false"),
        ("gemma-3-1b", {"sliding_window": None}, "does not say sliding_window"),
        ("gemma-3-4b", {"quantization_config": {"quant_method": "fp8"}}, "weights quantised with 'fp8' are not"),
        (
            "gemma-3-1b",
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters holds rope_theta; it must hold full_attention and sliding_attention",
        ),
        (
            "llama-3.1-8b",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "config.json has rope_scaling with factor 8.0, and config.json: rope_parameters has 4.0; keep one of them",
        ),
        ("gemma3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "full_attention has 'linear'; keep one of"),
        ("gemma-3-4b", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling has type and no rope_type"),
        ("deepseek-v3", {"routed_scaling_factor": None}, "does not say routed_scaling_factor; the file is not comp"),
        ("deepseek-v3", {"n_group": None}, "does not say n_group; the file is not complete"),
        ("deepseek-v3", {"topk_group": None}, "does not say topk_group; the file is not complete"),
        # transformers refuses these nulls, and the value of an absent field is not meant.
        ("nemotron_h", {"layer_norm_epsilon": None}, "does not say rms_norm_eps; the file is not complete"),
        ("qwen3", {"rms_norm_eps": None}, "does not say rms_norm_eps; the file is not complete"),
        ("gpt-oss-20b", {"swiglu_limit": None}, "does not say swiglu_limit; the file is not complete"),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ("gpt-oss-20b", {"num_local_experts": 3}, "4 of 3 experts"),
        (
            "gpt-oss-20b",
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantised with .mxfp4. are not supported; .*bfloat16",
        ),
        ("qwen3_moe", {"num_experts": None, "num_local_experts": None}, "does not say num_local_experts"),
        ("deepseek-v2-lite", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; it must be 'greedy'"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("minicpm3-4b", {"scale_emb": 0}, "scale_emb is 0; it must be a positive number"),
        ("gemma-4-e2b", {"use_bidirectional_attention": "all"}, "only causal attention over text"),
        ("gemma-4-e2b", {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input is 100"),
        ("gemma-4-e2b", {"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35"),
        ("gemma-4-e2b", {"num_key_value_heads": 3}, "not a multiple of the 3 KV heads of layer 0"),
        (
            "gemma-4-e2b",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5, "rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            "partial_rotary_factor is 1.5; it must be at most 1",
        ),
        # transformers takes rope_theta for one kind in Gemma 3, for both in Gemma 4, and has a default for each family.
        (
            "gemma3",
            {
                "rope_theta": 1e5,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_theta": 1e4},
                },
            },
            "rope_parameters: full_attention does not say rope_theta",
        ),
        (
            "gemma-4-e2b",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {}}},
            "rope_parameters: sliding_attention does not say rope_theta",
        ),
        (
            "qwen3",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
            r"rope_parameters holds \['full_attention'\], and all layers of this model have one rotary embedding",
        ),
        (
            "llama-3.1-8b",
            {"rope_scaling": {**LLAMA["rope_scaling"], "high_freq_factor": 1.0}},
            r"high_freq_factor is 1\.0 and low_freq_factor 1\.0; it must be larger",
        ),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func is 'softmax'"),
        (
            "kimi_linear",
            {"mla_use_nope": False},
            "mla_use_nope is false; layers of this model are served if their rows",
        ),
        ("kimi_linear", {"moe_layer_freq": 2}, "moe_layer_freq 2; they must be 'sigmoid' and 1"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is .*; it must hold 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers is 0.0; it must be a positive number"),
        (
            "falcon_h1",
            {"mamba_d_head": 16},
            "mamba_d_head 16 and mamba_n_groups 1; .* have 60 elements together: mamba_d",
        ),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; it must be 'relu2'"),
        (
            "nemotron_h",
            {"layers_block_type": ["mamba", "rnn"]},
            "'rnn' is not served; layers_block_type may hold mamba, ",
        ),
        ("nemotron_h", {"mlp_bias": True}, "n_shared_experts is 1 and mlp_bias True; with experts they must be 1 and"),
        ("nemotron-h-8b-base-8k", {"hybrid_override_pattern": "M-X"}, "'X' is not served; hybrid_override_pattern may"),
        (
            "nemotron-h-8b-base-8k",
            {"hybrid_override_pattern": "M-*"},
            "3 layers in hybrid_override_pattern for num_hidd",
        ),
        (
            "nemotron-h-8b-base-8k",
            {"hybrid_override_pattern": None},
            "does not say hybrid_override_pattern; the file is not complete",
        ),
        ("nemotron-h-8b-base-8k", {"n_groups": 7}, "mamba_n_groups 7; .* have 8192 elements together"),
        ("nemotron-h-8b-base-8k", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is .*; it must be 0 and infinity"),
        ("qwen3-next-80b-a3b", {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' with partial"),
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
    ],
)
def test_what_a_family_does_not_allow_is_refused_in_one_sentence(
    model: str, changes: dict[str, Any], sentence: str
) -> None:
    config = config_of(model)
    if "text_config" in config:
        changes = {"text_config": {**config["text_config"], **changes}}
    with pytest.raises((BadModel, Unsupported), match=sentence):
        config_from_json({**config, **changes})
