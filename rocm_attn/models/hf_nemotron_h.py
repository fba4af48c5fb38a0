"""Nemotron-H: each layer is one of Mamba2, attention whose rows do not turn, an MLP without a gate, or such experts.

The fields are those of transformers' NemotronHConfig, and of the files that NVIDIA published before it.
"""

from collections.abc import Mapping, Sequence

from rocm_attn.errors import BadModel, Unsupported
from rocm_attn.models.fields import Fields, shown
from rocm_attn.models.gates import ReluSquared
from rocm_attn.models.hf_mlp import activation, sigmoid_routing
from rocm_attn.models.hf_recurrent import Places, mamba
from rocm_attn.models.mlp_config import DenseMlp, ExpertMlp, ExpertTensors, Mlp, NoMlp
from rocm_attn.models.recurrent import RecurrentLayer

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_KINDS = {"mamba": _MAMBA, "attention": _ATTENTION, **{kind: kind for kind in _LETTERS.values()}}
_LAYERS = "num_hidden_layers"


def kinds_of_layers(fields: Fields) -> Mapping[str, object]:
    """layer_types and num_hidden_layers by layers_block_type, or else by the letters of hybrid_override_pattern.

    Raises BadModel, Unsupported.
    """
    name, allowed = "hybrid_override_pattern", _LETTERS
    if fields.has("layers_block_type"):
        name, allowed = "layers_block_type", _KINDS
    given: Sequence[object] = fields.list(name) if name == "layers_block_type" else fields.text(name)
    if unknown := [each for each in given if not isinstance(each, str) or each not in allowed]:
        raise Unsupported(f"layer type {shown(unknown[0])} is not served; {name} may hold {', '.join(allowed)}")
    if not given or fields.whole(_LAYERS, len(given)) != len(given):
        raise BadModel(f"config.json: {len(given)} layers in {name} for num_hidden_layers {fields.whole(_LAYERS, 0)}")
    return {_LAYERS: len(given), "layer_types": [allowed[str(each)] for each in given]}


def nemotron_h_places(fields: Fields) -> Places:
    """By layer_types."""
    kinds = list(enumerate(fields.list("layer_types")))
    attending, recurrent = ([place for place, each in kinds if each == kind] for kind in (_ATTENTION, _MAMBA))
    return Places(tuple(attending), tuple(recurrent))


def nemotron_h_state(fields: Fields) -> RecurrentLayer:
    """Mamba2's layer. Raises BadModel."""
    activation(fields, "mamba_hidden_act", "silu")
    return mamba(fields)


def nemotron_h_mlps(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] By layer_types. Raises BadModel."""
    kinds = fields.list("layer_types")
    of_kind: dict[str, Mlp] = {}
    activation(fields, "mlp_hidden_act", "relu2")
    if _MLP in kinds:
        of_kind[_MLP] = DenseMlp(fields.count("intermediate_size"), ReluSquared(), fields.flag("mlp_bias", False))
    if _EXPERTS in kinds:
        of_kind[_EXPERTS] = _experts(fields)
    return tuple(of_kind.get(str(kind), NoMlp()) for kind in kinds)


def _experts(fields: Fields) -> ExpertMlp:
    num_shared = fields.whole("n_shared_experts", 1)
    if num_shared != 1 or fields.flag("mlp_bias", False):
        raise BadModel(
            f"config.json: n_shared_experts is {num_shared} and mlp_bias {fields.values.get('mlp_bias')}; with experts "
            "they must be 1 and false"
        )
    return ExpertMlp(
        sigmoid_routing(fields),
        fields.count("moe_intermediate_size"),
        ReluSquared(),
        ExpertTensors.EACH,
        shared_size=fields.count("moe_shared_expert_intermediate_size"),
        latent_size=fields.count("moe_latent_size") if fields.has("moe_latent_size") else 0,
    )
