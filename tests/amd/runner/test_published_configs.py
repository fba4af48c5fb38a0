"""The fields of published models' config.json, written down from memory of their repositories, are read completely."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.models.families import DECODERS, attention_geometry
from rocm_attn.models.hf_config import config_from_json
from tests.amd.runner.families import FAMILIES
from tests.amd.runner.hf_models import small_hf_config
from tests.amd.runner.test_config import LLAMA31

# almost everything is left to the class
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}

GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


# the 20b, less its quantization_config
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


# E4B; only some of the fields that are not about attention
GEMMA3N_E4B: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3n",
    "text_config": {
        "altup_num_inputs": 4,
        "attention_bias": False,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": [16384] * 35,
        "laurel_rank": 64,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "max_position_embeddings": 32768,
        "model_type": "gemma3n_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "vocab_size": 262400,
    },
}


DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}

DEEPSEEK_V3: dict[str, Any] = {
    **DEEPSEEK_V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "eos_token_id": 1,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**DEEPSEEK_V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def test_gemma_3n_needs_more_than_the_runner_has() -> None:
    with pytest.raises(BadModel, match="the runner does not serve Gemma3nForConditionalGeneration; it serves Llama"):
        config_from_json(GEMMA3N_E4B)


GEMMA4_E2B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma4",
    "text_config": {
        "attention_k_eq_v": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_size": 1536,
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "model_type": "gemma4_text",
        "num_attention_heads": 8,
        "num_global_key_value_heads": None,
        "num_hidden_layers": 35,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": True,
    },
}


MINICPM3_FACTORS = [
    *(1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725, 2.093982484148734),
    *(3.1446935121267696, 4.937952647693647, 7.524541999994549, 10.475458000005451, 13.062047352306353),
    *(14.85530648787323, 15.906017515851266, 16.461961959767827, 16.740306425132907, 16.87581087164081),
    16.940876586213285,
]
# no v_head_dim, and the class knows that the embedding is the output matrix too
MINICPM3_4B: dict[str, Any] = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "bos_token_id": 1,
    "dim_model_base": 256,
    "eos_token_id": [2, 73440],
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 6400,
    "kv_lora_rank": 256,
    "max_position_embeddings": 32768,
    "model_type": "minicpm3",
    "num_attention_heads": 40,
    "num_hidden_layers": 62,
    "num_key_value_heads": 40,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": MINICPM3_FACTORS,
        "original_max_position_embeddings": 32768,
        "short_factor": MINICPM3_FACTORS,
        "type": "longrope",
    },
    "scale_depth": 1.4,
    "scale_emb": 12,
    "vocab_size": 73448,
}


# Fields that MiniCPM3's class knows.
OF_MINICPM3 = ("scale_emb", "scale_depth", "dim_model_base", "kv_lora_rank", "hidden_size", "vocab_size")
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama 3.1 8b": LLAMA31,
    "gemma 3 4b": GEMMA3_4B,
    "gemma 3 1b": GEMMA3_1B,
    "gemma 3n e4b": GEMMA3N_E4B,
    "gemma 4 e2b": GEMMA4_E2B,
    "gpt-oss 20b": GPT_OSS,
    "deepseek v2 lite": DEEPSEEK_V2_LITE,
    "deepseek v3": DEEPSEEK_V3,
    "minicpm3 4b": MINICPM3_4B,
    "minicpm3 4b, by its class": {name: value for name, value in MINICPM3_4B.items() if name not in OF_MINICPM3},
    "minicpm3 without factors": {**MINICPM3_4B, "scale_depth": None, "dim_model_base": None},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_as_transformers_reads_it(name: str) -> None:
    """Transformers writes each of its fields, in today's layout; test_families.py holds that layout to the logits."""
    published = PUBLISHED[name]
    (architecture,) = published["architectures"]
    fields = {name: value for name, value in published.items() if name not in ("architectures", "model_type")}
    whole = {**getattr(transformers, architecture).config_class(**fields).to_dict(), "architectures": [architecture]}
    read: Any = config_from_json if architecture in DECODERS else attention_geometry
    assert read(published) == read(whole)


def test_scores_of_deepseek_without_mscale_are_not_sharpened() -> None:
    flat = {**DEEPSEEK_V3, "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "mscale_all_dim": 0}}
    assert attention_geometry(flat).layers[0].scale == 192**-0.5


def small(family: str) -> dict[str, Any]:
    """Returns config.json of a small model, as transformers writes it."""
    name, settings = FAMILIES[family]
    return {**small_hf_config(name, **settings).to_dict(), "architectures": [f"{name}ForCausalLM"]}


@pytest.mark.parametrize(
    ("published", "changes", "sentence"),
    [
        (
            small("gemma2"),
            {"hidden_activation": "relu"},
            "hidden_activation is 'relu'; it must be 'gelu_pytorch_tanh'",
        ),
        (small("gemma2"), {"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0; it must be a positive"),
        (GEMMA3_1B, {"sliding_window": None}, "does not say sliding_window"),
        (
            GEMMA3_1B,
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_parameters holds rope_theta; it must hold full_attention and sliding_attention",
        ),
        (GPT_OSS, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        (GPT_OSS, {"num_local_experts": 3}, "4 of 3 experts"),
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit is 0; it must be a positive number"),
        (
            GPT_OSS,
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantised with .mxfp4. are not supported; .*bfloat16",
        ),
        (small("qwen3_moe"), {"num_experts": None, "num_local_experts": None}, "does not say num_local_experts"),
        (small("qwen3_moe"), {"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        (DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; it must be 'greedy'"),
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is true"),
        (DEEPSEEK_V2_LITE, {"n_shared_experts": -1}, "n_shared_experts is -1"),
        (MINICPM3_4B, {"scale_emb": 0}, "scale_emb is 0; it must be a positive number"),
        (MINICPM3_4B, {"scale_depth": "1.4"}, "scale_depth is '1.4'; it must be a positive number"),
        (MINICPM3_4B, {"dim_model_base": -256}, "dim_model_base is -256; it must be a positive number"),
        (GEMMA4_E2B, {"use_bidirectional_attention": "all"}, "only causal attention over text"),
        (GEMMA4_E2B, {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input is 100"),
        (GEMMA4_E2B, {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        (GEMMA4_E2B, {"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35"),
        (GEMMA4_E2B, {"num_key_value_heads": 3}, "not a multiple of the 3 KV heads of layer 0"),
        (
            GEMMA4_E2B,
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            "partial_rotary_factor is 1.5; it must be at most 1",
        ),
        (small("qwen3_moe"), {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
    ],
)
def test_what_a_family_does_not_allow_is_refused_in_one_sentence(
    published: dict[str, Any], changes: dict[str, Any], sentence: str
) -> None:
    if "text_config" in published:
        changes = {"text_config": {**published["text_config"], **changes}}
    with pytest.raises((BadModel, Unsupported), match=sentence):
        config_from_json({**published, **changes})
