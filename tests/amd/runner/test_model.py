"""The model's arithmetic against transformers, in float32, for every variant that the runner reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_serve.models.loading import load_model
from tests.amd.runner.dense_attention import dense_logits
from tests.amd.runner.hf_models import hf_logits, random_tokens, save, small_hf_model
from tests.amd.tolerances import assert_layers_close

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
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
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "qwen3_bias": ("Qwen3", {"attention_bias": True, "head_dim": 24}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "mistral": ("Mistral", {"sliding_window": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    reference = small_hf_model(family, **changes)
    loaded = load_model(save(reference, tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    token_ids = random_tokens(60)
    assert_layers_close(dense_logits(loaded, token_ids), hf_logits(reference, token_ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = small_hf_model("Llama")
    token_ids = random_tokens(40)
    loaded = load_model(save(reference, tmp_path), dtype=dtype, device=torch.device("cpu"))
    logits = dense_logits(loaded, token_ids)
    assert logits.dtype == dtype
    expected = hf_logits(reference, token_ids)
    error = (logits.float() - expected).norm() / expected.norm()
    # a few roundings per row, each of half a unit in the last place
    assert error < 8 * torch.finfo(dtype).eps
