"""One small model of each family that the runner serves, with every part of the family in it."""

from typing import Any

from tests.amd.runner.hf_models import small_hf_model

_PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]

# as the published models do: the layers with a window turn faster, the others are stretched by 8
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4,
}
_DEEPSEEK = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
}
# as the published model does: one set of factors for all lengths, and here cos and sin are longer than 1 too
_MINICPM3_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1, 1.5, 3.0, 7.0],
    "long_factor": [1.1, 1.5, 3.0, 7.0],
    "factor": 4.0,  # transformers 5.17 does not compute it from the lengths
    "original_max_position_embeddings": 32,
}
# so many heads that no two scores are 0
_INDEXED = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 5}
_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 101,
    "final_logit_softcapping": 5.0,
}
_QWEN3_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}

# so small and so fast to forget that a text of 20 tokens shows both
_GATED_DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
_QWEN_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}

# transformers 5.24 raises step sizes of prompts to time_step_min, and not those of single tokens; NVIDIA's own code
# raises none, and here it is so small that no step size is below it.
_NEMOTRON_H = {
    "num_hidden_layers": 7,
    "layers_block_type": [
        "linear_attention",
        "mlp",
        "full_attention",
        "linear_attention",
        "moe",
        "linear_attention",
        "moe",
    ],
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 1,
    "ssm_state_size": 12,
    "conv_kernel": 3,
    "chunk_size": 8,
    "time_step_min": 1e-30,
    "time_step_floor": 1e-30,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 28,
    "routed_scaling_factor": 1.5,
}

# name -> transformers' class (less "ForCausalLM") and the settings in addition to hf_models.SMALL
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "Bamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_indices": [1],
            "mamba_n_heads": 6,
            "mamba_n_groups": 1,
            "mamba_d_state": 12,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 8,
        },
    ),
    "deepseek_v2": ("DeepseekV2", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", _DEEPSEEK),
    "deepseek_v32": ("DeepseekV32", {**_DEEPSEEK, **_INDEXED, "n_shared_experts": 1}),
    "falcon_h1": (
        "FalconH1",
        {
            "num_hidden_layers": 3,
            "mamba_d_ssm": 60,
            "mamba_n_heads": 6,
            "mamba_d_head": 10,
            "mamba_n_groups": 1,
            "mamba_d_state": 12,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 8,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 5.656854249492381,
            "lm_head_multiplier": 0.35,
            "key_multiplier": 0.39,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.7,
            "ssm_multipliers": [0.6, 0.9, 0.8, 1.1, 0.7],
            "mlp_multipliers": [0.88, 0.6],
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "layer_types": _PATTERN,
            "rope_parameters": _GEMMA3_ROPE,
        },
    ),
    "gemma4": ("Gemma4", _GEMMA4),
    "gemma4_experts": (
        "Gemma4",
        {
            **_GEMMA4,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **_DEEPSEEK,
            **_INDEXED,
            "indexer_types": ["full", "shared", "full"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "sliding_window": 6,
            "swiglu_limit": 2.0,
            "rope_parameters": _GPT_OSS_ROPE,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_num_heads": 3,
            "linear_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "moe_intermediate_size": 20,
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_key_value_heads": 4,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 20,
            "rms_norm_eps": 0.05,
            "rope_parameters": _MINICPM3_ROPE,
        },
    ),
    "minimax_m3": (
        "MiniMaxM3VL",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "intermediate_size": 20,
            "dense_intermediate_size": 80,
            "shared_intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 2.0,
            "index_n_heads": 2,
            "index_head_dim": 12,
            "index_block_size": 4,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "nemotron_h": ("NemotronH", _NEMOTRON_H),
    "qwen3": ("Qwen3", {}),
    "qwen3_5": ("Qwen3_5", {**_GATED_DELTA, "linear_conv_kernel_dim": 4}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_GATED_DELTA, **_QWEN_EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", _QWEN3_MOE),
    # its shared MLP has the size of an expert
    "qwen3_next": (
        "Qwen3Next",
        {
            **_GATED_DELTA,
            **_QWEN_EXPERTS,
            "moe_intermediate_size": 28,
            "mlp_only_layers": [1],
            "attention_bias": True,
        },
    ),
}


def family_model(family: str, **changes: Any) -> Any:
    name, settings = FAMILIES[family]
    return small_hf_model(name, **{**settings, **changes})
