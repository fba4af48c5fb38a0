"""The indexers of sparse attention that a Hugging Face config.json describes (DeepSeek-V3.2, GLM-5, Qwen3.8-Next)."""

from dataclasses import replace

from rocm_attn.errors import BadModel
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.models.fields import Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.hf_attention import GroupedAttention, latent_layers, no_window
from rocm_attn.problem import EarlierSelection, Indexer, LastUnit

_FULL, _SHARED = "full", "shared"


def own_indexers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """[layers] True if a layer has an indexer; other layers use the keys selected by the last one before them.

    Read from indexer_types; or from index_topk_pattern, a letter F or S for each layer; or every index_topk_freq-th
    layer from index_skip_topk_offset on. Raises BadModel.
    """
    if fields.has("indexer_types"):
        types = fields.list("indexer_types")
    elif fields.has("index_topk_pattern"):
        letters = {"F": _FULL, "S": _SHARED}
        types = [letters.get(letter, letter) for letter in fields.text("index_topk_pattern")]
    else:
        period, offset = fields.count("index_topk_freq", 1), fields.whole("index_skip_topk_offset", 2)
        types = [_SHARED if max(layer - offset + 1, 0) % period else _FULL for layer in range(num_layers)]
    if len(types) != num_layers:
        raise BadModel(f"config.json: {len(types)} indexer_types for num_hidden_layers {num_layers}")
    for each in types:
        if each not in (_FULL, _SHARED):
            raise BadModel(f"config.json: indexer_types holds {shown(each)}; it may hold {_FULL!r} and {_SHARED!r}")
    if types[0] != _FULL:
        raise BadModel("config.json: the first of indexer_types is 'shared'; there is no layer before it")
    return tuple(each == _FULL for each in types)


def indexed_latent_layers(fields: Fields) -> AttentionGeometry:
    """Latent layers that attend to what an indexer selects, their own or an earlier layer's. Raises BadModel."""
    dense = latent_layers(fields)
    heads, dim = fields.count("index_n_heads"), fields.count("index_head_dim")
    rope_dim = dense.layers[0].rope_dim
    if dim < rope_dim:
        raise BadModel(f"config.json: index_head_dim is {dim}; it must hold the {rope_dim} rotated elements")
    last = LastUnit.ADDED if fields.flag("index_kpool_always_select_tail", True) else LastUnit.LEFT_OUT
    indexing = _indexing(dim, fields.count("index_topk"), fields.count("index_kpool", 1), last)
    own, earlier = Indexer(heads, dim, indexing), EarlierSelection(indexing)
    return AttentionGeometry.of(
        [
            replace(layer, indexer=own if is_own else earlier)
            for layer, is_own in zip(dense.layers, own_indexers(fields, len(dense.layers)), strict=True)
        ]
    )


def indexed_layers(fields: Fields) -> AttentionGeometry:
    """Layers with K and V heads that attend to pools of tokens, and to those in no pool. Raises BadModel."""
    dense = GroupedAttention(no_window)(fields)
    if not fields.has("indexer_n_heads"):
        return dense
    heads, dim, tokens = (fields.count(f"indexer_{name}") for name in ("n_heads", "head_dim", "compress_ratio"))
    indexer = Indexer(heads, dim, _indexing(dim, fields.count("indexer_budget"), tokens, LastUnit.ADDED))
    return AttentionGeometry.of([replace(layer, indexer=indexer) for layer in dense.layers])


def _indexing(dim: int, num_chosen: int, pool: int, last: LastUnit) -> Indexing:
    """A choice of num_chosen tokens, one by one or in pools. Raises BadModel."""
    if num_chosen % pool:
        raise BadModel(f"config.json: an indexer chooses {num_chosen} tokens in pools of {pool}; give a multiple")
    last_unit = LastUnit.SCORED if pool == 1 else last
    return Indexing(scale=dim**-0.5, top=num_chosen // pool, key_tokens=pool, last_unit=last_unit)
