"""Models with recurrences next to attention: Qwen3-Next to 3.8, Kimi-Linear and K3, GLM-5.3-Flash, those of Mamba2.

States are those of transformers' Qwen3_5GatedDeltaNet, KimiLinearDeltaAttention and BambaMixer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from rocm_attn.errors import BadModel
from rocm_attn.kernels.states.arguments import Update
from rocm_attn.models.config import RecurrentProjections
from rocm_attn.models.fields import MAX_LAYERS, Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.recurrent import RecurrentLayer, Rule
from rocm_attn.problem import EarlierSelection

GATED_DELTA = Rule("gated delta rule", Update.DELTA)
KIMI_DELTA = Rule("Kimi delta attention", Update.DELTA, channel_decay=True)
STATE_SPACE = Rule("Mamba2", Update.SUM, scale=1.0, normalises=False, norms_groups=True)

_LEAST_WIDTH = 2  # of a convolution: the kernels keep the inputs before a token's own
_LINEAR = "linear_attention"
_TYPES = (_LINEAR, "full_attention", "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention")


class Places(NamedTuple):
    """Places among all layers of a model: of those with pages, and of recurrent ones. A layer may be both, or none."""

    paged: tuple[int, ...]
    recurrent: tuple[int, ...]


def paged_or_recurrent(fields: Fields) -> Places:
    """Each layer has pages or is recurrent. Raises BadModel, Unsupported."""
    recurrent, num_layers = _recurrent_places(fields), fields.count("num_hidden_layers", most=MAX_LAYERS)
    taken = set(recurrent)
    return Places(tuple(place for place in range(num_layers) if place not in taken), recurrent)


@dataclass(frozen=True, slots=True)
class HybridAttention:
    """Layers with pages, which `paged` reads as if all layers had them, and recurrent layers of one kind."""

    paged: Callable[[Fields], AttentionGeometry]
    recurrent: Callable[[Fields], RecurrentLayer]
    places: Callable[[Fields], Places] = paged_or_recurrent

    def __call__(self, fields: Fields) -> AttentionGeometry:
        """Like GroupedAttention's. Raises BadModel, Unsupported."""
        places, state, every = self.places(fields), self.recurrent(fields), self.paged(fields).layers
        layers = [every[place] for place in places.paged]
        if not layers or isinstance(layers[0].indexer, EarlierSelection):
            raise BadModel("config.json: the first layer with pages is missing, or has no earlier indexer to share")
        recurrent = tuple((place, state) for place in places.recurrent)
        return replace(AttentionGeometry.of(layers), places=places.paged, recurrent=recurrent)


def _recurrent_places(fields: Fields) -> tuple[int, ...]:
    """By layer_types, Kimi's kda_layers (from 1), Bamba's attn_layer_indices, or full_attention_interval.

    Raises BadModel, Unsupported.
    """
    num_layers, kimi = fields.count("num_hidden_layers", most=MAX_LAYERS), fields.inner("linear_attn_config")
    if fields.has("layer_types"):
        types = fields.layer_types(num_layers, _TYPES)
        return tuple(place for place, each in enumerate(types) if each == _LINEAR)
    if kimi.has("kda_layers"):
        numbers = set(kimi.ids("kda_layers"))
        return tuple(place for place in range(num_layers) if place + 1 in numbers)
    if fields.has("attn_layer_indices"):
        attending = set(fields.ids("attn_layer_indices"))
        return tuple(place for place in range(num_layers) if place not in attending)
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
    width = fields.count("linear_conv_kernel_dim", least=_LEAST_WIDTH)
    return RecurrentLayer(GATED_DELTA, key_heads, value_heads, key_dim, value_dim, width)


def by_key_head(fields: Fields) -> RecurrentProjections:
    """The projections of Qwen3-Next's recurrent layers."""
    return RecurrentProjections(by_key_head=True)


def kimi_delta(fields: Fields) -> RecurrentLayer:
    """Kimi's recurrent layer, whose sizes may be in linear_attn_config."""
    older = fields.inner("linear_attn_config")

    def count(old: str, name: str, least: int = 1) -> int:
        return older.count(old, least=least) if older.has(old) else fields.count(f"linear_{name}", least=least)

    heads, dim = count("num_heads", "num_heads"), count("head_dim", "head_dim")
    width = count("short_conv_kernel_size", "conv_kernel_dim", _LEAST_WIDTH)
    return RecurrentLayer(KIMI_DELTA, heads, heads, dim, dim, width)


def mamba(fields: Fields) -> RecurrentLayer:
    """Mamba2's layer, whose groups are heads of k, and whose state has mamba_d_state rows."""
    heads, groups = (fields.count(f"mamba_{name}") for name in ("n_heads", "n_groups"))
    inner = 0  # if the heads' own size is all that the file says
    if fields.has("mamba_d_ssm"):
        inner = fields.count("mamba_d_ssm")
    elif fields.has("mamba_expand"):
        inner = fields.count("mamba_expand") * fields.count("hidden_size")
    follows = inner > 0 and fields.values.get("mamba_d_head", "auto") == "auto"
    dim = inner // heads if follows else fields.count("mamba_d_head")
    inner = inner or dim * heads
    if heads % groups or dim * heads != inner:
        raise BadModel(
            f"config.json: mamba_n_heads is {heads}, mamba_d_head {dim} and mamba_n_groups {groups}; the heads must be "
            f"a multiple of the groups, and have {inner} elements together: mamba_d_ssm, or else mamba_expand times "
            "hidden_size"
        )
    if fields.values.get("time_step_limit") not in _NO_LIMIT:
        raise BadModel(
            f"config.json: time_step_limit is {shown(fields.values['time_step_limit'])}; it must be 0 and infinity"
        )
    rows, width = fields.count("mamba_d_state"), fields.count("mamba_d_conv", least=_LEAST_WIDTH)
    return RecurrentLayer(STATE_SPACE, groups, heads, rows, dim, width)


def of_mamba(fields: Fields) -> RecurrentProjections:
    """The projections of Mamba2's layers, which add a bias as mamba_proj_bias and mamba_conv_bias say."""
    has_bias = fields.flag("mamba_proj_bias", False)
    return RecurrentProjections(
        in_bias=has_bias, convolved_bias=fields.flag("mamba_conv_bias", True), out_bias=has_bias
    )


# transformers writes infinity as an object.
_NO_LIMIT = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
