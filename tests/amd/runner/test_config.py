"""ModelConfig from config.json: one sentence for all that is not read, and the frequencies of transformers."""

import contextlib
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rocm_attn.errors import BadModel
from rocm_attn.models import family_values
from rocm_attn.models.families import DECODERS, attention_geometry
from rocm_attn.models.fields import Fields, read_json
from rocm_attn.models.hf_config import config_from_json
from rocm_attn.models.rope import Rope, YarnScaling
from rocm_serve.models.weights import expected_shapes
from tests.amd.runner.hf_models import YARN, published, small_hf_config

# the layout before transformers 5
LLAMA31 = published("llama-3.1-8b")

DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
}

# as Phi 3's are: other factors for long texts
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 64,
    "long_factor": [1.0] * 63 + [4.0],
    "original_max_position_embeddings": 4096,
}


def test_every_entry_of_families_json_is_read() -> None:
    folder = Path(family_values.__file__).parent
    code = "".join(path.read_text() for path in folder.glob("*.py"))
    named = [name for table in read_json(folder / "families.json").values() for name in cast(dict[str, object], table)]
    assert [name for name in named if f'"{name}"' not in code] == []


def test_yarn_without_a_scale_stretches_to_the_context() -> None:
    scaling = {"type": "yarn", "original_max_position_embeddings": 32768}
    config = config_from_json({**LLAMA31, "rope_scaling": scaling})
    rope = config.attending[0].rope
    assert config.context_len == 131_072
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.factor == 4.0


@pytest.mark.parametrize(("factor", "context_len"), [(4, 131_072), (1.0, 40_960), (0.5, 40_960)])
def test_yarn_alone_makes_the_context_longer(factor: float, context_len: int) -> None:
    """Qwen3's file has 40,960 positions, and its makers add these parameters, and no others, for longer texts."""
    scaling = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 32768}
    given = {**LLAMA31, "max_position_embeddings": 40_960, "rope_scaling": scaling}
    assert config_from_json(given).context_len == context_len
    with pytest.raises(
        BadModel, match=r"YaRN's factor makes the context .* tokens long; it must be at most 2147483647"
    ):
        config_from_json({**given, "rope_scaling": {**scaling, "factor": 1e307 * factor}})


# Two other files name end tokens too. If none does, that of the class is not taken: it may be a word of this model.
_NOT_BY_CLASS = ("architectures", "eos_token_id")


@pytest.mark.parametrize("architecture", sorted({*DECODERS} - {"BambaForCausalLM", "DeepseekV2ForCausalLM"}))
def test_a_field_that_is_left_out_has_the_value_of_transformers_class_or_is_refused(architecture: str) -> None:
    """The two classes that are missing here have no complete config by themselves."""
    config = getattr(transformers, architecture).config_class(architectures=[architecture])
    whole = json.loads(config.to_json_string(use_diff=False))
    expected, fields = config_from_json(whole), whole.get("text_config", whole)
    for name in [name for name in fields if name not in _NOT_BY_CLASS]:
        value = fields.pop(name)
        with contextlib.suppress(BadModel):
            assert config_from_json(whole) == expected, name
        fields[name] = value


@pytest.mark.parametrize(("original", "plain"), [(65_536, 65_536), (32_768, 32_768), (98_304, 65_536)])
def test_the_context_ends_where_dual_chunk_attention_would_differ(original: int, plain: int) -> None:
    """Qwen2.5-1M's file has a million positions, of which the model learned distances up to a chunk's size alone."""
    dual = {"chunk_size": 65_536, "local_size": 8_192, "original_max_position_embeddings": original}
    given = {**LLAMA31, "dual_chunk_attention_config": dual}
    assert config_from_json(given).context_len == plain
    assert config_from_json({**given, "max_position_embeddings": 1_024}).context_len == 1_024
    with pytest.raises(BadModel, match=r"dual_chunk_attention_config: chunk_size is 0; it must be at least 1"):
        config_from_json({**given, "dual_chunk_attention_config": {"chunk_size": 0}})


def test_an_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadModel) as refusal:
        config_from_json({**LLAMA31, "architectures": ["MixtralForCausalLM"]})
    assert all(name in str(refusal.value) for name in ("MixtralForCausalLM", *DECODERS))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": None}, "architectures is None"),
        ({"hidden_size": None}, "does not say hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({"num_key_value_heads": 5}, "32 is not a multiple of num_key_value_heads 5"),
        ({"num_attention_heads": 24}, "hidden_size 4096 is not a multiple of num_attention_heads 24"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be an id"),
        ({"eos_token_id": 128256}, "end token 128256 is not below the vocabulary's size"),
        ({"rope_scaling": [8.0]}, "rope_scaling is \\[8.0\\]; it must be an object"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not known"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling does not say short_factor"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0, 0.0]}}, "long_factor is 0.0; it must be a positive number"),
        ({"rope_scaling": {**LONGROPE, "long_factor": 2.0}}, "long_factor is 2.0; it must be a list"),
        (
            {"rope_scaling": {**LONGROPE, "short_factor": [2.0] * 63, "long_factor": [2.0] * 63}},
            "63 factors for 64 rotated pairs",
        ),
        (
            {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}},
            "original_max_position_embeddings is 1; it must be at least 2",
        ),
        (
            {"rope_scaling": LONGROPE},
            "long_factor differs from short_factor .* more than 4096 tokens, so keys would depend on when they were "
            "stored; .* set max_position_embeddings to 4096 and attention_factor to 1.1902380714238083",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling does not say factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with .gptq."),
    ],
)
def test_a_config_that_cannot_be_run_is_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadModel, match=sentence):
        config_from_json({**LLAMA31, **changes})


HUGE = (2**31, 2**63, 2**64, 10**400)


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(
    "name",
    ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings", "head_dim"],
)
def test_a_number_beyond_an_int32_is_refused_and_not_repeated_at_length(name: str, value: int) -> None:
    with pytest.raises(BadModel, match=rf"{name} is .*; it must be at most 2147483647") as refusal:
        config_from_json({**LLAMA31, name: value})
    assert len(str(refusal.value)) < 250


@pytest.mark.parametrize("value", [10_001, 2**31 - 1])
def test_more_layers_than_a_model_has_are_refused(value: int) -> None:
    for read, fields in (
        (config_from_json, LLAMA31),
        (attention_geometry, DEEPSEEK),
        (attention_geometry, published("falcon-h1-7b-instruct")),
    ):
        with pytest.raises(BadModel, match=f"num_hidden_layers is {value}; it must be at most 10000"):
            read({**fields, "num_hidden_layers": value})
    with pytest.raises(BadModel, match="num_hidden_layers is 10001; it must be at most 10000"):
        attention_geometry(
            {
                **published("nemotron-h-8b-base-8k"),
                "hybrid_override_pattern": "*" * 10_001,
                "num_hidden_layers": None,
            }
        )


@pytest.mark.parametrize("value", HUGE)
def test_huge_numbers_elsewhere_are_refused_too(value: int) -> None:
    with pytest.raises(BadModel, match=r"eos_token_id is .*; it must be an id or a list of them"):
        config_from_json({**LLAMA31, "eos_token_id": [2, value]})
    too_large = {**LLAMA31, "rope_theta": value if value > 2**64 else float("inf")}
    with pytest.raises(BadModel, match=r"rope_theta is .*; it must be a positive number"):
        config_from_json(too_large)


def test_a_scale_that_overflows_is_refused() -> None:
    with pytest.raises(BadModel, match=r"mscale_all_dim 1e\+308 is too large"):
        attention_geometry({**DEEPSEEK, "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1e308}})


@pytest.mark.parametrize("value", ["x" * 5000, [["x" * 5000] * 5000], {"a": [{}] * 5000}])
def test_a_message_shows_the_beginning_of_a_long_value(value: object) -> None:
    for name in ("hidden_size", "architectures", "hidden_act", "eos_token_id"):
        with pytest.raises(BadModel) as refusal:
            config_from_json({**LLAMA31, name: value})
        assert len(str(refusal.value)) < 400


def test_more_experts_than_a_model_has_are_refused_before_their_names_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_serve.models.weights._MOST_TENSORS", 3000)
    config = config_from_json(
        {
            **LLAMA31,
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 2**31 - 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        }
    )
    with pytest.raises(BadModel, match="asks for more than 3000 tensors"):
        expected_shapes(config)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, '{"a": ' + "9" * 5000 + "}", '{"a": "\\ud800"}'])
def test_json_that_python_cannot_take_in_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadModel, match=r"config\.json is not JSON") as refusal:
        read_json(path)
    assert len(str(refusal.value)) < 400


def test_a_file_too_large_for_a_config_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(BadModel, match="has 1099511627776 bytes"):
        read_json(path)


def test_every_message_names_its_file() -> None:
    with pytest.raises(BadModel, match=r"^some file: a: size is -1"):
        Fields({"a": {"size": -1}}, "some file").inner("a").count("size")


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


def test_a_kind_of_layers_has_the_yarn_of_a_model_with_its_parameters_alone() -> None:
    """transformers 5.24 looks for truncate next to the kinds, and all else in the kind's own parameters."""
    given = {**YARN, "original_max_position_embeddings": 4096, "truncate": False}
    of_kinds = {"full_attention": given, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    sizes = {"head_dim": 128, "max_position_embeddings": 32768}
    kinds = {"num_hidden_layers": 2, "layer_types": list(of_kinds), "rope_parameters": of_kinds}
    config = small_hf_config("Gemma3", **sizes, **kinds)
    read = config_from_json({**config.to_dict(), "architectures": ["Gemma3ForCausalLM"]})
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](small_hf_config("Llama", **sizes, rope_parameters=given))
    torch.testing.assert_close(read.attending[0].rope.inv_freq(), expected)


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
