"""Falcon-H1: every layer has attention and Mamba2 on the same rows, and factors (muP) on the products of matrices.

The fields are those of transformers' FalconH1Config.
"""

from dataclasses import replace

from rocm_attn.errors import BadModel
from rocm_attn.models.config import GatedNorm, Multipliers, RecurrentProjections, RowFactors
from rocm_attn.models.fields import MAX_LAYERS, Fields, shown
from rocm_attn.models.hf_recurrent import Places, mamba, of_mamba


def attention_and_state_everywhere(fields: Fields) -> Places:
    """All layers have both."""
    every = tuple(range(fields.count("num_hidden_layers", most=MAX_LAYERS)))
    return Places(every, every)


def falcon_h1_mamba(fields: Fields) -> RecurrentProjections:
    """Mamba2's, with a norm before or after the gate, or none."""
    norm = GatedNorm.NONE
    if fields.flag("mamba_rms_norm", False):
        norm = GatedNorm.BEFORE_GATE if fields.flag("mamba_norm_before_gate", True) else GatedNorm.AFTER_GATE
    return replace(of_mamba(fields), out_bias=fields.flag("projectors_bias", False), norm=norm)


def falcon_h1_factors(fields: Fields) -> RowFactors:
    """Those of all matrices but the first and the last, which the embedding may be. Raises BadModel.

    A factor on the rows that go into a matrix is one on its weights alone, any other one also on its bias.
    """
    one = {
        name: fields.positive(f"{name}_multiplier", 1.0)
        for name in ("attention_in", "key", "attention_out", "ssm_in", "ssm_out")
    }
    gate, down = _listed(fields, "mlp_multipliers", 2)
    state = mamba(fields)
    values, keys = state.num_value_heads * state.value_dim, state.num_key_heads * state.key_dim
    first_rows = (0, values, 2 * values, 2 * values + keys, 2 * values + 2 * keys)  # of the gate, x, B, C, step sizes
    of_kinds = dict(zip(first_rows, _listed(fields, "ssm_multipliers", 5), strict=True))
    before, attention_in = one["ssm_in"], one["attention_in"]
    return {
        "q_proj.weight": {0: attention_in},
        "v_proj.weight": {0: attention_in},
        "k_proj.weight": {0: attention_in * one["key"]},
        "k_proj.bias": {0: one["key"]},
        "o_proj.weight": {0: one["attention_out"]},
        "o_proj.bias": {0: one["attention_out"]},
        "in_proj.weight": {first: before * factor for first, factor in of_kinds.items()},
        "in_proj.bias": of_kinds,
        "out_proj.weight": {0: one["ssm_out"]},
        "out_proj.bias": {0: one["ssm_out"]},
        "gate_proj.weight": {0: gate},
        "gate_proj.bias": {0: gate},
        "down_proj.weight": {0: down},
        "down_proj.bias": {0: down},
    }


def falcon_h1_multipliers(fields: Fields) -> Multipliers:
    """Those of embeddings and logits. Raises BadModel."""
    return Multipliers(
        embedding=fields.positive("embedding_multiplier", 1.0), head=fields.positive("lm_head_multiplier", 1.0)
    )


def _listed(fields: Fields, name: str, number: int) -> tuple[float, ...]:
    """A list of factors; 1 each if the file has none."""
    if not fields.has(name):
        return (1.0,) * number
    if len(given := fields.list(name)) != number:
        raise BadModel(f"config.json: {name} is {shown(given)}; it must hold {number} numbers")
    return fields.positives(name)
