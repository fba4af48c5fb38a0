"""The attention geometry read from config.json, compared with transformers' reading of the same file."""

from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import sliding_window_causal_mask_function

from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.models.families import attention_geometry
from rocm_attn.models.geometry import window_left
from rocm_attn.problem import Problem

# architecture -> transformers' config class, and settings other than its defaults
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {"num_key_value_heads": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {}),
    "mistral_no_window": ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {"sliding_window": 512}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": 2047}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {}),
    "qwen2_window": ("Qwen2ForCausalLM", "Qwen2Config", {"use_sliding_window": True, "max_window_layers": 3}),
    "qwen2_layer_types": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 16},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"num_key_value_heads": 8}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {}),
    "qwen2_moe_window": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {"use_sliding_window": True, "max_window_layers": 5}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"head_dim": 128}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {}),
    "gemma2_27b": ("Gemma2ForCausalLM", "Gemma2Config", {"query_pre_attn_scalar": 144, "head_dim": 128}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"sliding_window": 1024, "num_hidden_layers": 34}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {}),
}


def hf_config(case: str) -> tuple[str, Any]:
    architecture, config_class, changes = CASES[case]
    return architecture, getattr(transformers, config_class)(**changes)


def expected_windows(config: Any) -> list[int]:
    """window_left of each layer: transformers gives layers types, or slides everywhere."""
    slides = getattr(config, "sliding_window", None) or 0
    if not slides or config.model_type == "llama":
        return [-1] * config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [slides - 1 if layer_type == "sliding_attention" else -1 for layer_type in types]


@pytest.mark.parametrize("case", CASES)
def test_problems_equal_what_transformers_reads(case: str) -> None:
    architecture, config = hf_config(case)
    geometry = attention_geometry({**config.to_dict(), "architectures": [architecture]})
    problems = geometry.problems(dtype=torch.bfloat16, page_size=16)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scalar = getattr(config, "query_pre_attn_scalar", head_dim)
    assert problems == tuple(
        Problem(
            num_q_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            v_head_dim=head_dim,
            dtype=torch.bfloat16,
            page_size=16,
            scale=scalar**-0.5,
            window_left=window,
            logits_soft_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            has_sinks=architecture.startswith("GptOss"),
        )
        for window in expected_windows(config)
    )


def test_a_window_counts_previous_keys_where_hugging_face_counts_the_own_one_too() -> None:
    window, index = 3, torch.arange(8)
    visible = sliding_window_causal_mask_function(window)
    for query in range(8):
        ours = [key for key in range(8) if 0 <= query - key <= window_left(window)]
        assert ours == [key for key in range(8) if visible(index[0], index[0], index[query], index[key])]


@pytest.mark.parametrize(
    ("num_shared", "sentence"),
    [
        (10, "num_kv_shared_layers is 10 and num_hidden_layers 10; it must be 0 or more, and fewer than all"),
        (-1, "num_kv_shared_layers is -1"),
        (6, "layer 4 reads K and V of an earlier layer of its type, but none of the first 4 layers"),
    ],
)
def test_layers_that_have_nothing_to_read_are_refused(num_shared: int, sentence: str) -> None:
    config = {"architectures": ["Gemma3nForCausalLM"], "num_hidden_layers": 10, "num_kv_shared_layers": num_shared}
    with pytest.raises(BadModel, match=sentence):
        attention_geometry(config)


@pytest.mark.parametrize(
    ("num_ranks", "heads"), [(1, (64, 8)), (8, (8, 1)), (16, (4, 1)), (3, (24, 3)), (12, (8, 1)), (128, (1, 1))]
)
def test_ranks_share_heads_that_are_filled_up_and_a_kv_head_is_never_cut(
    num_ranks: int, heads: tuple[int, int]
) -> None:
    config = {"num_attention_heads": 64, "hidden_size": 8192, "num_hidden_layers": 1, "num_key_value_heads": 8}
    (layer,) = attention_geometry({**config, "architectures": ["LlamaForCausalLM"]}).on_one_of(num_ranks).layers
    assert (layer.num_q_heads, layer.num_kv_heads) == heads


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"architectures": ["MambaForCausalLM"]}, Unsupported, "MambaForCausalLM is not known; .*LlamaForCausalLM"),
        (
            {"architectures": ["DeepseekV5ForCausalLM"], "kv_lora_rank": 512},
            Unsupported,
            "DeepseekV5ForCausalLM is not",
        ),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, BadModel, "does not say kv_lora_rank"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "kv_lora_rank": 64, "qk_rope_head_dim": -1},
            BadModel,
            "qk_rope_head_dim is -1; it must be at least 0",
        ),
        ({"use_bidirectional_attention": True}, Unsupported, "is known of Gemma 3 alone"),
        ({"layer_types": ["linear_attention"] * 2}, Unsupported, "'linear_attention' is not served"),
        ({"layer_types": ["full_attention"] * 3}, BadModel, "3 layer_types for num_hidden_layers 2"),
        ({"sliding_window": 0}, BadModel, "sliding_window is 0"),
        ({"query_pre_attn_scalar": 0}, BadModel, "query_pre_attn_scalar is 0"),
        ({"num_hidden_layers": None}, BadModel, "does not say num_hidden_layers"),
    ],
)
def test_attention_of_another_kind_is_refused_in_one_sentence(
    changes: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    config = {"architectures": ["Gemma2ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32}
    with pytest.raises(error, match=sentence):
        attention_geometry({**config, **changes})
