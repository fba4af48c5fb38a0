"""ModelConfig: everything about a model but its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocm_attn.errors import BadModel
from rocm_attn.runner.fields import Fields
from rocm_attn.runner.geometry import AttentionGeometry, architecture_of, attention_geometry, refuse_latent_attention
from rocm_attn.runner.rope import (
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    Rope,
    Scaling,
    YarnScaling,
    yarn_attention_factor,
)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family: RMS norm, rotary embedding, grouped-query attention, SwiGLU.

    attention:       heads, dims, scale, window per layer
    context_len:     tokens of a sequence's KV that the model was made for
    tied_embeddings: whether the embedding is also the output matrix
    qkv_bias, out_bias, mlp_bias: which projections add a bias (Qwen2 and Qwen3 differ from Llama here)
    qk_norm:         whether each head of q and k is RMS-normalised before it turns (Qwen3)
    eos_token_ids:   tokens that end a text
    """

    architecture: str
    attention: AttentionGeometry
    rope: Rope
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_len: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.attention.head_dim % 2:
            raise BadModel(f"head_dim {self.attention.head_dim} is odd; rotary embedding turns pairs")
        for token in self.eos_token_ids:
            if token >= self.vocab_size:
                raise BadModel(f"end token {token} is not below the vocabulary's size {self.vocab_size}")

    @property
    def num_layers(self) -> int:
        """Layers, each with one attention."""
        return len(self.attention.window_left)


def config_from_json(config: Mapping[str, object]) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.json. Raises BadModel, or Unsupported for attention of another kind."""
    architecture = architecture_of(config)
    refuse_latent_attention(config)
    if architecture not in ARCHITECTURES:
        raise BadModel(f"the runner does not know {architecture}; it runs {', '.join(ARCHITECTURES)}")
    fields = Fields(config, "config.json")
    _refuse_what_is_not_read(fields)
    attention = attention_geometry(config)
    context_len = fields.count("max_position_embeddings")
    bias = fields.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        attention=attention,
        rope=_rope(fields, attention.head_dim, context_len),
        hidden_size=fields.count("hidden_size"),
        intermediate_size=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        context_len=context_len,
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM" or (bias and architecture != "MistralForCausalLM"),
        out_bias=bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=architecture == "LlamaForCausalLM" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=fields.ids("eos_token_id"),
    )


def _refuse_what_is_not_read(fields: Fields) -> None:
    if fields.has("quantization_config"):
        method = fields.inner("quantization_config").text("quant_method", "unknown")
        raise BadModel(
            f"config.json: weights quantised with {method} are not read; use the unquantised model or a GGUF file"
        )
    if fields.text("hidden_act", "silu") != "silu":
        raise BadModel(f"config.json: hidden_act is {fields.text('hidden_act')!r}; the runner knows 'silu'")


def _rope(fields: Fields, head_dim: int, context_len: int) -> Rope:
    """Rotary parameters: in rope_parameters (transformers 5), or in rope_theta and rope_scaling (before)."""
    parameters = fields.inner("rope_parameters")
    scaling = parameters if parameters.values else fields.inner("rope_scaling")
    theta = parameters.positive("rope_theta") if parameters.has("rope_theta") else fields.positive("rope_theta", 1e4)
    for place in (fields, scaling):
        if place.positive("partial_rotary_factor", 1.0) != 1.0:
            raise BadModel(f"{place.source}: partial_rotary_factor is not 1; the runner turns whole heads")
    return Rope(theta, head_dim, _scaling(scaling, context_len))


def _scaling(fields: Fields, context_len: int) -> Scaling:
    # the key was "type" before it was "rope_type"; some files carry both
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return NoScaling()
    if kind == "linear":
        return LinearScaling(fields.positive("factor"))
    original_context_len = fields.count("original_max_position_embeddings", context_len)
    if kind == "llama3":
        return Llama3Scaling(
            factor=fields.positive("factor"),
            low_freq_factor=fields.positive("low_freq_factor"),
            high_freq_factor=fields.positive("high_freq_factor"),
            original_context_len=original_context_len,
        )
    if kind == "yarn":
        return _yarn(fields, context_len, original_context_len)
    raise BadModel(f"{fields.source}: rope type {kind!r} is not known; the runner knows default, linear, llama3, yarn")


def _yarn(fields: Fields, context_len: int, original_context_len: int) -> YarnScaling:
    factor = fields.positive("factor", context_len / original_context_len)
    attention_factor = yarn_attention_factor(factor)
    if fields.has("mscale") and fields.has("mscale_all_dim"):
        attention_factor = _mscale(factor, fields.positive("mscale")) / _mscale(
            factor, fields.positive("mscale_all_dim")
        )
    return YarnScaling(
        factor=factor,
        original_context_len=original_context_len,
        attention_factor=fields.positive("attention_factor", attention_factor),
        beta_fast=fields.positive("beta_fast", 32.0),
        beta_slow=fields.positive("beta_slow", 1.0),
        truncate=fields.flag("truncate", True),
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 + mscale * (yarn_attention_factor(factor) - 1.0)
