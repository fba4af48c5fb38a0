"""The text part of MiniMax-M3, from its config.json.

Layers with an indexer attend to blocks of tokens. Each KV head has the same number of index queries, which score all
keys of the one index head. A block has the score of its best key, and each KV head's queries get the best blocks.
"""

from collections.abc import Mapping
from dataclasses import replace

from rocm_attn.errors import BadModel
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.models.config import HeadProjections
from rocm_attn.models.family_values import FIELD_NAMES
from rocm_attn.models.fields import MAX_LAYERS, Fields, shown
from rocm_attn.models.gates import ClampedSwiGLU
from rocm_attn.models.geometry import AttentionGeometry, AttentionLayer
from rocm_attn.models.hf_attention import GroupedAttention, no_window
from rocm_attn.models.hf_mlp import mlps_by_type
from rocm_attn.models.hf_projections import Projections
from rocm_attn.models.mlp_config import DenseMlp, ExpertMlp, ExpertTensors, Mlp
from rocm_attn.models.routing import ExpertScores, Routing
from rocm_attn.problem import Indexer

_SPARSE = "minimax_m3_sparse"


def block_indexed_layers(fields: Fields) -> AttentionGeometry:
    """Layers with K and V heads, some of which attend to blocks that an indexer selects. Raises BadModel."""
    dense = GroupedAttention(no_window)(fields)
    indexer, is_sparse = _indexer(fields, dense.layers[0]), sparse_layers(fields, len(dense.layers))
    return AttentionGeometry.of(
        [
            replace(layer, indexer=indexer) if sparse else layer
            for layer, sparse in zip(dense.layers, is_sparse, strict=True)
        ]
    )


def sparse_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """[layers] True if a layer has an indexer. Raises BadModel."""
    frequency = fields.inner("sparse_attention_config").values.get("sparse_attention_freq")
    if fields.has("layer_types"):
        types = fields.list("layer_types")
    elif isinstance(frequency, list):
        types = [_SPARSE if each else "full_attention" for each in frequency]
    else:
        types = ["full_attention"] * num_layers
    if len(types) != num_layers or any(each not in (_SPARSE, "full_attention") for each in types):
        raise BadModel(
            f"config.json: layer_types is {shown(types)}; it must hold {_SPARSE!r} or 'full_attention' for each of "
            f"{num_layers} layers"
        )
    return tuple(each == _SPARSE for each in types)


def _indexer(fields: Fields, layer: AttentionLayer) -> Indexer:
    older = fields.inner("sparse_attention_config")
    given = {name: older.values[old] for name, old in FIELD_NAMES["minimax_m3_indexer"].items() if older.has(old)}
    index = Fields({**fields.values, **given}, fields.source)
    heads, local, top = (index.count(f"index_{name}") for name in ("n_heads", "local_blocks", "topk_blocks"))
    if heads != layer.num_kv_heads:
        raise BadModel(
            f"config.json: {heads} index heads for num_key_value_heads {layer.num_kv_heads}; each KV head needs its own"
        )
    if local > top:
        raise BadModel(f"config.json: {local} local blocks of {top} selected blocks; it must be at most all of them")
    indexing = Indexing(
        scale=1.0, top=top, sets=heads, rectified=False, unit_keys=index.count("index_block_size"), last=local
    )
    return Indexer(heads, index.count("index_head_dim"), indexing)


def minimax_m3_mlp_types(fields: Fields) -> Mapping[str, object]:
    """mlp_layer_types by moe_layer_freq, its name in published files, or experts in all layers. Raises BadModel."""
    if fields.has("mlp_layer_types"):
        return {}
    in_all = [1] * fields.count("num_hidden_layers", most=MAX_LAYERS)
    has_experts = fields.list("moe_layer_freq") if fields.has("moe_layer_freq") else in_all
    return {"mlp_layer_types": ["sparse" if each else "dense" for each in has_experts]}


def minimax_m3_heads(fields: Fields, num_layers: int) -> tuple[Projections, ...]:
    """[layers] Norms on q and k, and indexers."""
    return tuple(HeadProjections(qk_norm=True, indexer=sparse) for sparse in sparse_layers(fields, num_layers))


def minimax_m3_mlps(fields: Fields, num_layers: int) -> tuple[Mlp, ...]:
    """[layers] Dense MLPs, or experts with a shared one, by mlp_layer_types; all have clamped gates."""
    gate = ClampedSwiGLU(limit=fields.positive("swiglu_limit"), alpha=fields.positive("swiglu_alpha"))
    routing = Routing(
        fields.count("num_local_experts"),
        fields.count("num_experts_per_tok"),
        normalised=True,
        scores=ExpertScores.SIGMOID,
        scale=fields.positive("routed_scaling_factor"),
        has_correction=True,
    )
    shared, inner = fields.count("shared_intermediate_size"), fields.count("intermediate_size")
    experts = ExpertMlp(routing, inner, gate, ExpertTensors.EACH, shared_size=shared)
    dense = DenseMlp(fields.count("dense_intermediate_size"), gate)
    return mlps_by_type(fields, dense, experts, num_layers)
