"""The weights around a layer's attention, out of the tensors of a file: over heads, or over latent rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rocm_attn.models.config import HeadProjections, LatentProjections
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.shards import GroupedRows, ShardRange
from rocm_attn.problem import Indexer
from rocm_serve.models.layer_tensors import LayerTensors


@dataclass(frozen=True, slots=True, eq=False)
class KVHeadWeights:
    """Weights of a layer with K and V heads, or a rank's part of them: then the heads are the rank's.

    A matrix is [out, in]. A weight that the model lacks is None.

    qkv:   [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden]; rows of q, then of k and v as far as there are any,
           and then num_q_heads * head_dim of the gate, if there is one
    out:   [hidden, num_q_heads * head_dim]
    sinks: float32 [num_q_heads]
    q_norm, k_norm: [head_dim]
    """

    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    index: BlockIndexWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class BlockIndexWeights:
    """Indexer weights of a layer with K and V heads: a rank has the index heads of its KV heads, and the whole key.

    q:              [index_heads * index_dim, hidden]
    k:              [index_dim, hidden]
    q_norm, k_norm: [index_dim]
    """

    q: Tensor
    k: Tensor
    q_norm: Tensor
    k_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class IndexWeights:
    """Weights of a layer's indexer, whole on every rank. The first elements turn, the first half with the second.

    q:            [index_heads * index_dim, q_rank]
    k:            [index_dim, hidden]
    k_norm, k_norm_bias: [index_dim]; of a layer norm
    head_weights: [index_heads, hidden]
    """

    q: Tensor
    k: Tensor
    k_norm: Tensor
    k_norm_bias: Tensor
    head_weights: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """Weights of a layer that keeps latent rows, or a rank's part: then the heads are the rank's, and the row is whole.

    The projections of k and v are absorbed into those of q and of the output. In the elements that turn, the first half
    turns with the second.

    first:      [q_rank + latent_dim + rope_dim, hidden]; without a rank, rows of q take the place of the first q_rank
    q_norm:     [q_rank], with q: [num_q_heads * (nope_dim + rope_dim), q_rank]; None without a rank
    row_norm:   [latent_dim]
    absorbed_k: [num_q_heads, latent_dim, nope_dim]
    absorbed_v: [num_q_heads, v_dim, latent_dim]
    out:        [hidden, num_q_heads * v_dim]
    """

    first: Tensor
    first_bias: Tensor | None
    q_norm: Tensor | None
    q: Tensor | None
    row_norm: Tensor
    absorbed_k: Tensor
    absorbed_v: Tensor
    out: Tensor
    out_bias: Tensor | None
    index: IndexWeights | None


AttentionWeights = KVHeadWeights | LatentWeights


# Reads the weight of a norm. Arguments: its name within the layer's attention, its elements
ReadNorm = Callable[[str, int], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class OfAttention(LayerTensors):
    """The tensors around one layer's attention that a rank holds. width: elements of its input for a token"""

    width: int

    def output(self, size: int, span: ShardRange, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        """Reads out(), and its bias."""
        bias = self.join("o_proj.bias", (self.hidden,)) if has_bias else None
        return self.out("o_proj.weight", size, span), bias


def read_heads(
    tensors: OfAttention, attention: AttentionLayer, projections: HeadProjections, norm: ReadNorm, *, keeps_kv: bool
) -> KVHeadWeights:
    """Reads the weights of a layer over heads. attention: of the whole model. Raises BadModel."""
    reader, piece, dim = tensors.reader, tensors.piece, attention.head_dim
    q_size, kv_size = attention.num_q_heads * dim, attention.num_kv_heads * dim
    heads = tensors.shard.heads(attention.num_q_heads, attention.num_kv_heads)
    q, kv = (span.of_elements(dim) for span in (heads.q, heads.kv))
    rows = [(f"{name}_proj", kv_size, kv) for name in ("k" if projections.v_is_k else "kv") if keeps_kv]
    if projections.gate:
        of_each = (heads.q.of_each(GroupedRows(1, 2 * dim, begin, dim)) for begin in (0, dim))
        queries, gates = ([("q_proj", 2 * q_size, span) for span in spans] for spans in of_each)
        rows = [*queries, *rows, *gates]
    else:
        rows = [("q_proj", q_size, q), *rows]
    out, out_bias = tensors.output(q_size, q, has_bias=projections.out_bias)
    weights = [piece(f"{name}.weight", (size, tensors.width), span) for name, size, span in rows]
    biases = [piece(f"{name}.bias", (size,), span) for name, size, span in rows if projections.qkv_bias]
    return KVHeadWeights(
        qkv=reader.join(*weights),
        qkv_bias=reader.join(*biases) if biases else None,
        q_norm=norm("q_norm", dim) if projections.qk_norm else None,
        k_norm=norm("k_norm", dim) if projections.qk_norm and keeps_kv else None,
        sinks=tensors.in_float32("sinks", (attention.num_q_heads,), heads.q) if attention.has_sinks else None,
        out=out,
        out_bias=out_bias,
        index=_read_block_index(tensors, attention, heads.kv, norm) if projections.indexer else None,
    )


def _read_block_index(
    tensors: OfAttention, attention: AttentionLayer, kv: ShardRange, norm: ReadNorm
) -> BlockIndexWeights:
    """kv: the KV heads of the rank"""
    indexer = attention.indexer
    assert isinstance(indexer, Indexer), "a layer with an indexer's weights has its geometry"
    dim, width = indexer.head_dim, tensors.width
    rows = kv.of_elements(indexer.num_heads // indexer.indexing.sets * dim)
    return BlockIndexWeights(
        q=tensors.join("indexer.q_proj.weight", (indexer.num_heads * dim, width), rows),
        k=tensors.join("indexer.k_proj.weight", (dim, width)),
        q_norm=norm("indexer.q_norm", dim),
        k_norm=norm("indexer.k_norm", dim),
    )


def read_latent(tensors: OfAttention, attention: AttentionLayer, projections: LatentProjections) -> LatentWeights:
    """Reads the weights of a layer over latent rows, like read_heads."""
    num_heads, latent_dim = attention.num_q_heads, attention.latent_dim
    heads, nope_dim = tensors.shard.heads(num_heads, 1).q, projections.nope_dim
    first, first_bias, q_norm, q = _before_rows(tensors, attention, projections, heads)
    kv_dim = nope_dim + projections.v_dim
    kv = tensors.join("kv_b_proj.weight", (num_heads * kv_dim, latent_dim), heads.of_elements(kv_dim))
    kv = kv.view(heads.size, kv_dim, -1)
    size, span = num_heads * projections.v_dim, heads.of_elements(projections.v_dim)
    out, out_bias = tensors.output(size, span, has_bias=projections.has_bias)
    return LatentWeights(
        first=first,
        first_bias=first_bias,
        q_norm=q_norm,
        q=q,
        row_norm=tensors.join("kv_a_layernorm.weight", (latent_dim,)),
        absorbed_k=kv[:, :nope_dim].transpose(1, 2).contiguous(),
        absorbed_v=kv[:, nope_dim:].contiguous(),
        out=out,
        out_bias=out_bias,
        index=_read_index(tensors, attention, projections) if projections.indexer else None,
    )


def _read_index(tensors: OfAttention, attention: AttentionLayer, projections: LatentProjections) -> IndexWeights:
    indexer, width = attention.indexer, tensors.width
    assert isinstance(indexer, Indexer), "a layer with an indexer's weights has its geometry"
    dim = indexer.head_dim
    q = tensors.join("indexer.wq_b.weight", (indexer.num_heads * dim, projections.q_rank))
    shapes = {"wk.weight": (dim, width), "k_norm.weight": (dim,), "k_norm.bias": (dim,)}
    k, k_norm, k_norm_bias = of_k = [tensors.join(f"indexer.{name}", shape) for name, shape in shapes.items()]
    if projections.index_interleaved:
        for rows in (q.view(indexer.num_heads, dim, -1).transpose(0, 1), *of_k):
            _put_in_halves(rows[: attention.rope_dim])
    head_weights = tensors.join("indexer.weights_proj.weight", (indexer.num_heads, width))
    return IndexWeights(q, k, k_norm, k_norm_bias, head_weights)


def _before_rows(
    tensors: OfAttention, attention: AttentionLayer, projections: LatentProjections, heads: ShardRange
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """LatentWeights.first, first_bias, q_norm and q. heads: the rank's heads of q"""
    reader, piece, rank, width = tensors.reader, tensors.piece, projections.q_rank, tensors.width
    row_dim, rope_dim = attention.head_dim, attention.head_dim - attention.latent_dim
    q_dim = projections.nope_dim + rope_dim
    q_size, q_span = attention.num_q_heads * q_dim, heads.of_elements(q_dim)
    row = piece("kv_a_proj_with_mqa.weight", (row_dim, width))
    if rank:
        first = reader.join(piece("q_a_proj.weight", (rank, width)), row)
        q_norm: Tensor | None = tensors.join("q_a_layernorm.weight", (rank,))
        of_heads = tensors.join("q_b_proj.weight", (q_size, rank), q_span)
    else:
        first = reader.join(piece("q_proj.weight", (q_size, width), q_span), row)
        q_norm = None
        of_heads = first[: q_span.size]
    bias = None
    if projections.has_bias:
        biases = [piece("q_a_proj.bias", (rank,))] if rank else []
        bias = reader.join(*biases, piece("kv_a_proj_with_mqa.bias", (row_dim,)))
        of_rows = bias
        bias = bias.new_zeros(len(first))
        bias[-len(of_rows) :] = of_rows
    if projections.interleaved:
        _put_in_halves(of_heads.view(heads.size, q_dim, -1)[:, projections.nope_dim :].transpose(0, 1))
        turning = len(first) - rope_dim
        _put_in_halves(first[turning:])
        if bias is not None:
            _put_in_halves(bias[turning:])
    return first, bias, q_norm, of_heads if rank else None


def _put_in_halves(rows: Tensor) -> None:
    """Reorders rows of adjacent pairs in place: the first of each pair, then the second of each."""
    rows.copy_(rows.reshape(-1, 2, *rows.shape[1:]).transpose(0, 1).flatten(0, 1))
