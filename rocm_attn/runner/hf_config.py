"""ModelConfig from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rocm_attn.errors import BadModel
from rocm_attn.runner.config import DenseMlp, ExpertMlp, ExpertTensors, LayerConfig, ModelConfig
from rocm_attn.runner.fields import Fields, shown
from rocm_attn.runner.gates import ClampedSwiGLU, GeGLU, SwiGLU
from rocm_attn.runner.geometry import (
    AttentionGeometry,
    architecture_of,
    attention_geometry,
    refuse_latent_attention,
    text_fields,
)
from rocm_attn.runner.hf_rope import one_rope, rope_of_each_kind
from rocm_attn.runner.rope import Rope

Mlp = DenseMlp | ExpertMlp


def config_from_json(config: Mapping[str, object]) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.json. Raises BadModel, or Unsupported for attention of another kind."""
    architecture = architecture_of(config)
    refuse_latent_attention(config)
    if architecture not in _FAMILIES:
        raise BadModel(f"the runner does not know {architecture}; it runs {', '.join(_FAMILIES)}")
    family, whole, fields = _FAMILIES[architecture], Fields(config, "config.json"), text_fields(config)
    _refuse_quantised(whole)
    attention = attention_geometry(config)
    mlps = family.mlps(fields, len(attention.layers))
    ropes = family.ropes(fields, attention)
    qkv_bias, out_bias = family.biases(fields)
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
        qk_norm=family.qk_norm,
        out_norms=family.is_gemma,
        norm_offset=1.0 if family.is_gemma else 0.0,
        embedding_scale=hidden_size**0.5 if family.is_gemma else 1.0,
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


def _activation(fields: Fields, name: str, known: str) -> None:
    if fields.text(name, known) != known:
        raise BadModel(f"config.json: {name} is {shown(fields.text(name))}; the runner knows {known!r}")


def _swiglu(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    _activation(fields, "hidden_act", "silu")
    return (DenseMlp(fields.count("intermediate_size"), SwiGLU()),) * num_layers


def _swiglu_with_bias(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    _activation(fields, "hidden_act", "silu")
    return (DenseMlp(fields.count("intermediate_size"), SwiGLU(), fields.flag("mlp_bias", False)),) * num_layers


def _geglu(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    _activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    return (DenseMlp(fields.count("intermediate_size"), GeGLU()),) * num_layers


def _qwen_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers does not name."""
    experts = ExpertMlp(
        # transformers 5 writes the second name
        num_experts=fields.count("num_experts" if fields.has("num_experts") else "num_local_experts"),
        num_chosen=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("moe_intermediate_size"),
        gate=SwiGLU(),
        has_bias=False,
        normalised=fields.flag("norm_topk_prob", False),
        tensors=ExpertTensors.EACH,
    )
    dense = _swiglu(fields, 1)[0]
    period = fields.count("decoder_sparse_step", 1)
    is_dense = set(fields.ids("mlp_only_layers"))
    return tuple(dense if layer in is_dense or (layer + 1) % period else experts for layer in range(num_layers))


def _gpt_oss_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    _activation(fields, "hidden_act", "silu")
    experts = ExpertMlp(
        num_experts=fields.count("num_local_experts"),
        num_chosen=fields.count("num_experts_per_tok"),
        intermediate_size=fields.count("intermediate_size"),
        gate=ClampedSwiGLU(limit=fields.positive("swiglu_limit", 7.0), alpha=fields.positive("swiglu_alpha", 1.702)),
        has_bias=True,
        normalised=True,
        tensors=ExpertTensors.STACKED,
    )
    return (experts,) * num_layers


def _bias_everywhere_if_said(fields: Fields) -> tuple[bool, bool]:
    return (fields.flag("attention_bias", False),) * 2


def _bias_on_qkv(fields: Fields) -> tuple[bool, bool]:
    return True, False


def _no_bias(fields: Fields) -> tuple[bool, bool]:
    return False, False


@dataclass(frozen=True, slots=True)
class _Family:
    """What the class of a model fixes, and how its config.json is to be read.

    mlps:     the MLP of each layer
    biases:   whether q, k and v add a bias, and whether the output of attention does
    ropes:    the rotary embedding of each layer
    is_gemma: norms around attention and MLP with weights counted from 1, embeddings scaled by hidden_size ** 0.5
    """

    mlps: Callable[[Fields, int], tuple[Mlp, ...]]
    biases: Callable[[Fields], tuple[bool, bool]] = _bias_everywhere_if_said
    ropes: Callable[[Fields, AttentionGeometry], tuple[Rope, ...]] = one_rope
    qk_norm: bool = False
    is_gemma: bool = False


_GEMMA3 = _Family(_geglu, ropes=rope_of_each_kind, qk_norm=True, is_gemma=True)

_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(_swiglu_with_bias),
    "MistralForCausalLM": _Family(_swiglu, _no_bias),
    "Qwen2ForCausalLM": _Family(_swiglu, _bias_on_qkv),
    "Qwen3ForCausalLM": _Family(_swiglu, qk_norm=True),
    "Qwen3MoeForCausalLM": _Family(_qwen_experts, qk_norm=True),
    "Gemma2ForCausalLM": _Family(_geglu, is_gemma=True),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "GptOssForCausalLM": _Family(_gpt_oss_experts),
}
ARCHITECTURES = tuple(_FAMILIES)
