"""ModelConfig from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping

from rocm_attn.errors import BadModel
from rocm_attn.runner.config import LayerConfig, ModelConfig
from rocm_attn.runner.families import (
    DECODERS,
    architecture_of,
    attention_geometry,
    refuse_latent_attention,
    text_fields,
)
from rocm_attn.runner.fields import Fields, shown


def config_from_json(config: Mapping[str, object]) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.json. Raises BadModel, or Unsupported for attention of another kind."""
    architecture = architecture_of(config)
    refuse_latent_attention(config)
    if architecture not in DECODERS:
        raise BadModel(f"the runner does not know {architecture}; it runs {', '.join(DECODERS)}")
    decoder, whole, fields = DECODERS[architecture], Fields(config, "config.json"), text_fields(config)
    _refuse_quantised(whole)
    attention = attention_geometry(config)
    mlps = decoder.mlps(fields, len(attention.layers))
    ropes = decoder.ropes(fields, attention)
    qkv_bias, out_bias = decoder.biases(fields)
    hidden_size = fields.count("hidden_size")
    return ModelConfig(
        architecture=architecture,
        layers=tuple(map(LayerConfig, attention.layers, ropes, mlps)),
        hidden_size=hidden_size,
        vocab_size=fields.count("vocab_size"),
        context_len=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        # a file with text_config has the ends of a text beside it
        eos_token_ids=whole.ids("eos_token_id") or fields.ids("eos_token_id"),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=decoder.qk_norm,
        out_norms=decoder.is_gemma,
        norm_offset=1.0 if decoder.is_gemma else 0.0,
        embedding_scale=hidden_size**0.5 if decoder.is_gemma else 1.0,
        logits_soft_cap=fields.positive("final_logit_softcapping") if fields.has("final_logit_softcapping") else 0.0,
    )


def _refuse_quantised(fields: Fields) -> None:
    if not fields.has("quantization_config"):
        return
    method = fields.inner("quantization_config").text("quant_method", "unknown")
    remedy = "use the unquantised model or a GGUF file"
    if method == "mxfp4":
        remedy = "let transformers load it with Mxfp4Config(dequantize=True) and save it in bfloat16"
    raise BadModel(f"config.json: weights quantised with {shown(method)} are not read; {remedy}")
