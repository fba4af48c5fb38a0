"""Models with recurrent layers among those with pages: Qwen3-Next to Qwen3.8, Kimi-Linear, Kimi-K3, GLM-5.3-Flash.

States are those of transformers' Qwen3_5GatedDeltaNet and KimiLinearDeltaAttention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.models.fields import MAX_LAYERS, Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.recurrent import RecurrentLayer, Rule
from rocm_attn.problem import EarlierSelection

_LINEAR = "linear_attention"
_TYPES = (_LINEAR, "full_attention", "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")


@dataclass(frozen=True, slots=True)
class HybridAttention:
    """Layers with pages, which `paged` reads as if all layers had them, and recurrent layers of one kind."""

    paged: Callable[[Fields], AttentionGeometry]
    recurrent: Callable[[Fields], RecurrentLayer]

    def __call__(self, fields: Fields) -> AttentionGeometry:
        """Like GroupedAttention's. Raises BadModel, Unsupported."""
        places, layer = _recurrent_places(fields), self.recurrent(fields)
        taken = set(places)
        layers = [each for place, each in enumerate(self.paged(fields).layers) if place not in taken]
        if not layers or isinstance(layers[0].indexer, EarlierSelection):
            raise BadModel("config.json: the first layer with pages is missing, or has no earlier indexer to share")
        return replace(AttentionGeometry.of(layers), recurrent=tuple((place, layer) for place in places))


def _recurrent_places(fields: Fields) -> tuple[int, ...]:
    """By layer_types, or Kimi's kda_layers (from 1), or all but every full_attention_interval-th. Raises BadModel."""
    num_layers, kimi = fields.count("num_hidden_layers", most=MAX_LAYERS), fields.inner("linear_attn_config")
    if fields.has("layer_types"):
        types = fields.list("layer_types")
        if unknown := [each for each in types if each not in _TYPES]:
            raise Unsupported(f"layer type {shown(unknown[0])} is not served; layer_types may hold {', '.join(_TYPES)}")
        if len(types) != num_layers:
            raise BadModel(f"config.json: {len(types)} layer_types for num_hidden_layers {num_layers}")
        return tuple(place for place, each in enumerate(types) if each == _LINEAR)
    if kimi.has("kda_layers"):
        numbers = set(kimi.ids("kda_layers"))
        return tuple(place for place in range(num_layers) if place + 1 in numbers)
    interval = fields.count("full_attention_interval")
    return tuple(place for place in range(num_layers) if (place + 1) % interval)


def gated_delta(fields: Fields) -> RecurrentLayer:
    """Qwen's recurrent layer."""
    key_heads, value_heads = fields.count("linear_num_key_heads"), fields.count("linear_num_value_heads")
    if value_heads % key_heads or fields.text("mamba_ssm_dtype", "float32") != "float32":
        raise BadModel(
            f"config.json: linear_num_value_heads is {value_heads}, linear_num_key_heads {key_heads}, mamba_ssm_dtype "
            f"{shown(fields.values.get('mamba_ssm_dtype'))}; give a multiple of the second, and float32 or nothing"
        )
    key_dim, value_dim = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    width = fields.count("linear_conv_kernel_dim")
    return RecurrentLayer(Rule.GATED_DELTA, key_heads, value_heads, key_dim, value_dim, width)


def kimi_delta(fields: Fields) -> RecurrentLayer:
    """Kimi's recurrent layer, whose sizes may be in linear_attn_config."""
    older = fields.inner("linear_attn_config")
    names = {"num_heads": "num_heads", "head_dim": "head_dim", "short_conv_kernel_size": "conv_kernel_dim"}
    heads, dim, width = (
        older.count(old) if older.has(old) else fields.count(f"linear_{name}") for old, name in names.items()
    )
    return RecurrentLayer(Rule.KIMI_DELTA, heads, heads, dim, dim, width)
