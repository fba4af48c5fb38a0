"""The MLPs and the biases that a Hugging Face config.json describes."""

from __future__ import annotations

from rocm_attn.errors import BadModel
from rocm_attn.runner.config import DenseMlp, ExpertMlp, ExpertTensors
from rocm_attn.runner.fields import Fields, shown
from rocm_attn.runner.gates import ClampedSwiGLU, GeGLU, SwiGLU

Mlp = DenseMlp | ExpertMlp


def _activation(fields: Fields, name: str, known: str) -> None:
    if fields.text(name, known) != known:
        raise BadModel(f"config.json: {name} is {shown(fields.text(name))}; the runner knows {known!r}")


def swiglu(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Dense MLPs with SiLU gates and no bias."""
    _activation(fields, "hidden_act", "silu")
    return (DenseMlp(fields.count("intermediate_size"), SwiGLU()),) * num_layers


def swiglu_with_bias(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Dense MLPs with SiLU gates, and with biases if mlp_bias says so."""
    _activation(fields, "hidden_act", "silu")
    return (DenseMlp(fields.count("intermediate_size"), SwiGLU(), fields.flag("mlp_bias", False)),) * num_layers


def geglu(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Dense MLPs with GELU gates."""
    _activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    return (DenseMlp(fields.count("intermediate_size"), GeGLU()),) * num_layers


def qwen_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
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
    dense = swiglu(fields, 1)[0]
    period = fields.count("decoder_sparse_step", 1)
    is_dense = set(fields.ids("mlp_only_layers"))
    return tuple(dense if layer in is_dense or (layer + 1) % period else experts for layer in range(num_layers))


def gpt_oss_experts(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Experts with clamped gates in every layer."""
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


def bias_everywhere_if_said(fields: Fields) -> tuple[bool, bool]:
    """Whether q, k and v add a bias, and the output of attention: both where attention_bias says so."""
    return (fields.flag("attention_bias", False),) * 2


def bias_on_qkv(fields: Fields) -> tuple[bool, bool]:
    """As bias_everywhere_if_said: on q, k and v alone."""
    return True, False


def no_bias(fields: Fields) -> tuple[bool, bool]:
    """As bias_everywhere_if_said: on none of them."""
    return False, False
