"""Frequencies of YaRN and LongRoPE against transformers. test_families.py compares logits with each kind of them."""

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rocm_attn.models.hf_config import config_from_json
from rocm_attn.models.rope import Rope
from tests.amd.runner.hf_models import YARN, small_hf_config

FACTORS = [1.0 + place / 3 for place in range(8)]
OTHER_TABLE = {"long_factor": [4 * factor for factor in FACTORS]}


def rope_of(config: Any) -> Rope:
    return config_from_json({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).attending[0].rope


@pytest.mark.parametrize(
    "parameters",
    [
        YARN,
        {**YARN, "beta_fast": 2.0, "beta_slow": 0.5},
        {**YARN, "original_max_position_embeddings": 4096, "truncate": False},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
        {**YARN, "factor": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_of_yarn_equal_those_of_transformers(parameters: dict[str, Any], head_dim: int) -> None:
    config = small_hf_config("Llama", head_dim=head_dim, max_position_embeddings=32768, rope_parameters=parameters)
    expected, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    rope = rope_of(config)
    torch.testing.assert_close(rope.inv_freq(), expected)
    assert rope.scaling.attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize(
    ("parameters", "beside", "context_len"),
    [
        ({"original_max_position_embeddings": 32}, {}, 128),
        ({"original_max_position_embeddings": 32, "factor": 3.0}, {}, 32),
        ({"original_max_position_embeddings": 32, "attention_factor": 1.25}, {}, 128),
        ({}, {}, 128),
        ({"original_max_position_embeddings": 128}, {"original_max_position_embeddings": 64}, 128),
        # No text is so long that the other table is used.
        ({**OTHER_TABLE, "original_max_position_embeddings": 64, "attention_factor": 1.3}, {}, 64),
    ],
    ids=str,
)
def test_longrope_equals_that_of_transformers_at_every_length_that_one_table_serves(
    parameters: dict[str, Any], beside: dict[str, Any], context_len: int
) -> None:
    tables = {"short_factor": FACTORS, "long_factor": FACTORS}
    parameters = {"rope_type": "longrope", "rope_theta": 3e4, **tables, **parameters}
    config = small_hf_config("Llama", max_position_embeddings=context_len, rope_parameters=parameters, **beside)
    rope = rope_of(config)
    for length in (1, context_len):
        expected, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
        torch.testing.assert_close(rope.inv_freq(), expected)
        assert rope.scaling.attention_factor == pytest.approx(attention_factor)
