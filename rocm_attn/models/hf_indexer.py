"""The indexers of sparse attention that a Hugging Face config.json describes (DeepSeek-V3.2, GLM-5)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from rocm_attn.errors import BadModel
from rocm_attn.kernels.sparse.arguments import Indexing
from rocm_attn.models.fields import Fields, shown
from rocm_attn.models.geometry import AttentionGeometry
from rocm_attn.models.hf_attention import LatentAttention
from rocm_attn.problem import EarlierSelection, Indexer

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


class IndexedLatentAttention:
    """Latent layers that attend to the tokens selected by an indexer, their own or an earlier layer's."""

    is_latent: ClassVar[bool] = True

    def geometry(self, fields: Fields) -> AttentionGeometry:
        """Like AttentionOfFamily.geometry."""
        dense = LatentAttention().geometry(fields)
        heads, dim = fields.count("index_n_heads"), fields.count("index_head_dim")
        rope_dim = dense.layers[0].rope_dim
        if dim < rope_dim:
            raise BadModel(f"config.json: index_head_dim is {dim}; it must hold the {rope_dim} rotated elements")
        indexing = Indexing(scale=dim**-0.5, top=fields.count("index_topk"))
        own, earlier = Indexer(heads, dim, indexing), EarlierSelection(indexing)
        return AttentionGeometry.of(
            [
                replace(layer, indexer=own if is_own else earlier)
                for layer, is_own in zip(dense.layers, own_indexers(fields, len(dense.layers)), strict=True)
            ]
        )
