"""The rotary embeddings of a model, from its config.json.

They are in rope_parameters (transformers 5), or in rope_theta and rope_scaling (before). Gemma 3 has one of them for
the layers with a window and one for the others.
"""

import math
from collections.abc import Mapping

from rocm_attn.errors import BadModel
from rocm_attn.models.fields import Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.rope import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    ProportionalScaling,
    Rope,
    Scaling,
    YarnScaling,
    yarn_attention_factor,
)
from rocm_attn.problem import UNLIMITED_WINDOW

# Gemma 3's defaults for absent fields.
_THETA_OF_FULL, _THETA_OF_WINDOWED = 1e6, 1e4
# Types of rope that scale the turns of a row's first elements like those of a whole row of this length.
_OF_FIRST_ELEMENTS = ("default", "linear", "llama3", "yarn")


def rope_fields(fields: Fields) -> Fields:
    """The parameters of a model with one rotary embedding. Raises BadModel if two differ, or each is of a kind."""
    parameters = _only_one(fields, fields.inner("rope_parameters"))
    if kinds := [name for name, value in parameters.values.items() if isinstance(value, Mapping)]:
        raise BadModel(
            f"{parameters.source} holds {shown(kinds)}, and all layers of this model have one rotary embedding; it "
            "must hold rope_theta and rope_type themselves"
        )
    original = fields.values.get("original_max_position_embeddings")
    if original is None:
        return parameters
    # Outside of the parameters it takes precedence.
    return Fields({**parameters.values, "original_max_position_embeddings": original}, parameters.source)


def rope_type(fields: Fields) -> str:
    """The kind of scaling. The key was "type" before it was "rope_type"; some files carry both. Raises BadModel."""
    return fields.text("rope_type", fields.text("type", "default"))


def _only_one(fields: Fields, parameters: Fields) -> Fields:
    """These parameters, or those in rope_scaling if there are none. Raises BadModel if both are there and differ.

    Readers of such files differ: transformers takes rope_scaling, and the base that is only in the other is lost.
    """
    scaling = fields.inner("rope_scaling")
    if not parameters.values:
        return scaling
    names = {"type": "rope_type"}
    for name, value in scaling.values.items():
        if parameters.values.get(names.get(name, name)) != value:
            raise BadModel(
                f"{fields.source} has rope_scaling with {name} {shown(value)}, and {parameters.source} has "
                f"{shown(parameters.values.get(names.get(name, name)))}; keep one of them, with rope_theta in it"
            )
    return parameters


def one_rope(fields: Fields, attention: AttentionGeometry) -> tuple[Rope, ...]:
    """[layers] One rotary embedding for the whole model. Raises BadModel."""
    scaling = rope_fields(fields)
    theta = scaling.positive("rope_theta", fields.positive("rope_theta", 1e4))
    for place in (fields, scaling):
        _refuse_partial(place)
    kind = _scaling(scaling, fields.count("max_position_embeddings"))
    return tuple(Rope(theta, layer.rope_dim, kind) for layer in attention.layers)


def no_rope(fields: Fields, attention: AttentionGeometry) -> tuple[Rope, ...]:
    """[layers] Rows that do not turn (Kimi-Linear). Raises BadModel."""
    if not fields.flag("mla_use_nope", True):
        raise BadModel("config.json: mla_use_nope is false; layers of this model are served if their rows do not turn")
    return (Rope(1.0, 0),) * len(attention.layers)


def rope_of_first_elements(fields: Fields, attention: AttentionGeometry) -> tuple[Rope, ...]:
    """[layers] One rotary embedding of the first partial_rotary_factor of every row. Raises BadModel."""
    scaling = rope_fields(fields)
    given = Fields({**fields.values, **scaling.values}, scaling.source)
    share, kind = given.positive("partial_rotary_factor", 1.0), rope_type(given)
    if share > 1.0 or kind not in _OF_FIRST_ELEMENTS:
        raise BadModel(
            f"{given.source}: rope type {kind!r} with partial_rotary_factor {share}; the type must be one of "
            f"{', '.join(_OF_FIRST_ELEMENTS)}, and the factor at most 1"
        )
    theta, scaled = given.positive("rope_theta", 5e6), _scaling(scaling, fields.count("max_position_embeddings"))
    return tuple(Rope(theta, int(layer.head_dim * share), scaled) for layer in attention.layers)


def rope_of_each_kind(fields: Fields, attention: AttentionGeometry) -> tuple[Rope, ...]:
    """[layers] One rotary embedding for the layers with a window and one for the others. Raises BadModel."""
    fields.count("sliding_window")  # without it, the two kinds of layer could not be distinguished
    context_len, parameters = fields.count("max_position_embeddings"), fields.inner("rope_parameters")
    if parameters.values:
        full, windowed = _both_kinds(parameters)
        full = _only_one(fields, full)
        # Defaults differ between Gemma 3 and 4, and a rope_theta next to rope_parameters stands for one kind or both.
        thetas = (full.positive("rope_theta"), windowed.positive("rope_theta"))
    else:
        full, windowed = fields.inner("rope_scaling"), Fields({}, fields.source)
        if full.has("type") and not full.has("rope_type"):  # transformers 5.24 then scales nothing
            raise BadModel(f"{full.source} has type and no rope_type, which readers of this model need; rename it")
        thetas = (
            full.positive("rope_theta", fields.positive("rope_theta", _THETA_OF_FULL)),
            fields.positive("rope_local_base_freq", _THETA_OF_WINDOWED),
        )
    for place in (fields, full, windowed):
        _refuse_partial(place)
    scalings = (_scaling(full, context_len), _scaling(windowed, context_len))
    kinds = ((layer, int(layer.window_left != UNLIMITED_WINDOW)) for layer in attention.layers)
    return tuple(Rope(thetas[kind], layer.head_dim, scalings[kind]) for layer, kind in kinds)


def _both_kinds(parameters: Fields) -> tuple[Fields, Fields]:
    """The parameters of layers without a window, and of those with one."""
    kinds = ("full_attention", "sliding_attention")
    if not set(parameters.values) <= set(kinds):
        raise BadModel(f"{parameters.source} holds {', '.join(parameters.values)}; it must hold {' and '.join(kinds)}")
    return parameters.inner(kinds[0]), parameters.inner(kinds[1])


def _refuse_partial(fields: Fields) -> None:
    is_proportional = fields.values.get("rope_type") == "proportional"
    if not is_proportional and fields.positive("partial_rotary_factor", 1.0) != 1.0:
        raise BadModel(f"{fields.source}: partial_rotary_factor is not 1; the runner rotates whole heads")


def _scaling(fields: Fields, context_len: int) -> Scaling:
    kind = rope_type(fields)
    if kind == "default":
        return NoScaling()
    if kind == "linear":
        return LinearScaling(fields.positive("factor"))
    if kind == "proportional":
        share = fields.positive("partial_rotary_factor", 1.0)
        if share > 1.0:
            raise BadModel(f"{fields.source}: partial_rotary_factor is {share}; it must be at most 1")
        return ProportionalScaling(share, fields.positive("factor", 1.0))
    original_context_len = fields.count("original_max_position_embeddings", context_len)
    if kind == "llama3":
        low, high = fields.positive("low_freq_factor"), fields.positive("high_freq_factor")
        if high <= low:
            raise BadModel(f"{fields.source}: high_freq_factor is {high} and low_freq_factor {low}; it must be larger")
        return Llama3Scaling(
            factor=fields.positive("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context_len=original_context_len,
        )
    if kind == "yarn":
        return _yarn(fields, context_len, original_context_len)
    if kind == "longrope":
        return _longrope(fields, context_len, original_context_len)
    raise BadModel(
        f"{fields.source}: rope type {kind!r} is not known; it must be default, linear, proportional, llama3, yarn "
        "or longrope"
    )


def _yarn(fields: Fields, context_len: int, original_context_len: int) -> YarnScaling:
    factor = fields.positive("factor", context_len / original_context_len)
    attention_factor = yarn_attention_factor(factor)
    # a factor of 0 counts as absent
    if fields.values.get("mscale") and fields.values.get("mscale_all_dim"):
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


def _longrope(fields: Fields, context_len: int, original_context_len: int) -> DivisorScaling:
    """LongRoPE with one table for every text: a text's table must not depend on other texts of the step."""
    short, long = fields.positives("short_factor"), fields.positives("long_factor")
    factor, attention_factor = fields.positive("factor", context_len / original_context_len), 1.0
    if factor > 1.0:
        if original_context_len == 1:
            raise BadModel(f"{fields.source}: original_max_position_embeddings is 1; it must be at least 2")
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_context_len))
    attention_factor = fields.positive("attention_factor", attention_factor)
    if short != long and context_len > original_context_len:
        raise BadModel(
            f"{fields.source}: long_factor differs from short_factor and replaces it in a step with a text of more "
            f"than {original_context_len} tokens, so keys would depend on when they were stored; to serve shorter "
            f"texts, set max_position_embeddings to {original_context_len} and attention_factor to "
            f"{attention_factor!r}"
        )
    return DivisorScaling(short, attention_factor)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 + mscale * (yarn_attention_factor(factor) - 1.0)
