"""Rotary embedding against its definition, and its frequencies against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rocm_attn.models.hf_config import config_from_json
from rocm_attn.models.rope import DivisorScaling, NoScaling, Rope, rotate
from tests.amd.runner.hf_models import LLAMA3, YARN, small_hf_config

FACTORS = [1.0 + place / 3 for place in range(8)]
OTHER_TABLE = {"long_factor": [4 * factor for factor in FACTORS]}


def rope_of(config: Any) -> Rope:
    return config_from_json({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).attending[0].rope


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 3.0},
        LLAMA3,
        {**LLAMA3, "high_freq_factor": 2.0, "original_max_position_embeddings": 8192},
        YARN,
        {**YARN, "beta_fast": 2.0, "beta_slow": 0.5},
        {**YARN, "original_max_position_embeddings": 4096, "truncate": False},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
        {**YARN, "factor": 1.0},
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.6, "factor": 8.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_equal_those_of_transformers(parameters: dict[str, Any], head_dim: int) -> None:
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


def test_rotation_multiplies_complex_pairs() -> None:
    rope, positions = Rope(theta=500.0, head_dim=12), torch.tensor([0, 1, 5, 63, 17])
    x = torch.randn(5, 3, 12)
    angle = positions[:, None, None].double() * rope.inv_freq().double()
    turned = torch.complex(x[..., :6].double(), x[..., 6:].double()) * torch.polar(torch.ones_like(angle), angle)
    table = rope.table(64, torch.float32, torch.device("cpu"))
    expected = torch.cat((turned.real, turned.imag), -1).float()
    torch.testing.assert_close(rotate(x, table[positions]), expected, atol=1e-5, rtol=1e-5)


def test_rotation_takes_a_slice_of_joined_heads() -> None:
    table = Rope(theta=100.0, head_dim=8).table(4, torch.float32, torch.device("cpu"))
    joined = torch.randn(4, 6, 8)
    torch.testing.assert_close(rotate(joined[:, 1:3], table), rotate(joined[:, 1:3].contiguous(), table))


def test_divisors_divide_the_frequencies() -> None:
    plain = Rope(1e4, 8, NoScaling()).inv_freq()
    divided = Rope(1e4, 8, DivisorScaling((1.0, 2.0, 4.0, 8.0))).inv_freq()
    torch.testing.assert_close(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))
