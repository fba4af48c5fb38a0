"""The weights around a layer's attention, out of the tensors of a file: over heads, or over latent rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.models.config import HeadProjections, LatentProjections
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.shards import GroupedRows, Shard, ShardRange
from rocm_attn.models.tensors import TensorPart, TensorReader
from rocm_attn.problem import Indexer
from rocm_serve.models.mlp_weights import Named, with_bias


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
    absorbed_k: [num_q_heads, nope_dim, latent_dim]
    absorbed_v: [num_q_heads, latent_dim, v_dim]
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


def head_shapes(attention: AttentionLayer, projections: HeadProjections, hidden: int, *, keeps_kv: bool) -> Named:
    """Yields the name within a layer and the shape of every tensor around its heads, including norms."""
    q_size = attention.num_q_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    for name in _projected(projections, keeps_kv=keeps_kv):
        size = q_size * (1 + projections.gate) if name == "q" else kv_size
        yield from with_bias(f"self_attn.{name}_proj", (size, hidden), projections.qkv_bias)
    yield from with_bias("self_attn.o_proj", (hidden, q_size), projections.out_bias)
    if attention.has_sinks:
        yield "self_attn.sinks", (attention.num_q_heads,)
    indexer = attention.indexer
    if projections.indexer and isinstance(indexer, Indexer):
        yield "self_attn.indexer.q_proj.weight", (indexer.num_heads * indexer.head_dim, hidden)
        yield "self_attn.indexer.k_proj.weight", (indexer.head_dim, hidden)
    for norm in head_norms(projections, keeps_kv=keeps_kv):
        of_index = isinstance(indexer, Indexer) and norm.startswith("indexer.")
        dim = indexer.head_dim if of_index and isinstance(indexer, Indexer) else attention.head_dim
        yield f"self_attn.{norm}.weight", (dim,)


def head_norms(projections: HeadProjections, *, keeps_kv: bool) -> tuple[str, ...]:
    """The norms with weights that heads have."""
    of_index = ("indexer.q_norm", "indexer.k_norm") if projections.indexer else ()
    if not projections.qk_norm:
        return of_index
    return ("q_norm", "k_norm", *of_index) if keeps_kv else ("q_norm", *of_index)


def latent_shapes(attention: AttentionLayer, projections: LatentProjections, hidden: int) -> Named:
    """Like head_shapes, for a layer over latent rows. Norms are included."""
    heads, latent_dim = attention.num_q_heads, attention.latent_dim
    rope_dim, rank = attention.head_dim - latent_dim, projections.q_rank
    q_size = heads * (projections.nope_dim + rope_dim)
    if rank:
        yield from with_bias("self_attn.q_a_proj", (rank, hidden), projections.has_bias)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield "self_attn.q_b_proj.weight", (q_size, rank)
    else:
        yield "self_attn.q_proj.weight", (q_size, hidden)
    yield from with_bias("self_attn.kv_a_proj_with_mqa", (latent_dim + rope_dim, hidden), projections.has_bias)
    yield "self_attn.kv_a_layernorm.weight", (latent_dim,)
    yield "self_attn.kv_b_proj.weight", (heads * (projections.nope_dim + projections.v_dim), latent_dim)
    yield from with_bias("self_attn.o_proj", (hidden, heads * projections.v_dim), projections.has_bias)
    indexer = attention.indexer
    if projections.indexer and isinstance(indexer, Indexer):
        yield "self_attn.indexer.wq_b.weight", (indexer.num_heads * indexer.head_dim, rank)
        yield "self_attn.indexer.wk.weight", (indexer.head_dim, hidden)
        yield "self_attn.indexer.k_norm.weight", (indexer.head_dim,)
        yield "self_attn.indexer.k_norm.bias", (indexer.head_dim,)
        yield "self_attn.indexer.weights_proj.weight", (indexer.num_heads, hidden)


@dataclass(frozen=True, slots=True, eq=False)
class OfAttention:
    """The tensors around one layer's attention that a rank holds. prefix: the start of their names"""

    reader: TensorReader
    prefix: str
    shard: Shard

    def piece(self, name: str, *cut: ShardRange) -> TensorPart:
        """A tensor under its name within the layer's attention, or a part of it."""
        return TensorPart(self.prefix + name, cut)

    def out(self, span: ShardRange, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        """The output's matrix, with columns of a span, and its bias."""
        hidden = ShardRange.whole(self.reader.shapes[f"{self.prefix}o_proj.weight"][0])
        bias = self.reader.join(self.piece("o_proj.bias")) if has_bias else None
        return self.reader.join(self.piece("o_proj.weight", hidden, span)), bias


def read_heads(
    tensors: OfAttention,
    attention: AttentionLayer,
    projections: HeadProjections,
    norms: dict[str, Tensor],
    *,
    keeps_kv: bool,
) -> KVHeadWeights:
    """Reads the weights of a layer over heads. Raises BadModel.

    attention: of the whole model
    norms:     name -> weight, for the names of head_norms
    """
    reader, piece = tensors.reader, tensors.piece
    heads = tensors.shard.heads(attention.num_q_heads, attention.num_kv_heads)
    q, kv = (span.of_elements(attention.head_dim) for span in (heads.q, heads.kv))
    dim = attention.head_dim
    qkv = [(f"{name}_proj", kv) for name in _projected(projections, keeps_kv=keeps_kv) if name != "q"]
    if projections.gate:
        of_each = (heads.q.of_each(GroupedRows(1, 2 * dim, begin, dim)) for begin in (0, dim))
        queries, gates = ([("q_proj", span) for span in spans] for spans in of_each)
        qkv = [*queries, *qkv, *gates]
    else:
        qkv = [("q_proj", q), *qkv]
    out, out_bias = tensors.out(q, has_bias=projections.out_bias)
    return KVHeadWeights(
        qkv=reader.join(*(piece(f"{name}.weight", span) for name, span in qkv)),
        qkv_bias=reader.join(*(piece(f"{name}.bias", span) for name, span in qkv)) if projections.qkv_bias else None,
        q_norm=norms.get("q_norm"),
        k_norm=norms.get("k_norm"),
        sinks=reader.in_float32(piece("sinks", heads.q)) if attention.has_sinks else None,
        out=out,
        out_bias=out_bias,
        index=_read_block_index(tensors, attention, heads.kv, norms) if projections.indexer else None,
    )


def _read_block_index(
    tensors: OfAttention, attention: AttentionLayer, kv: ShardRange, norms: dict[str, Tensor]
) -> BlockIndexWeights:
    """kv: the KV heads of the rank"""
    indexer, piece = attention.indexer, tensors.piece
    assert isinstance(indexer, Indexer), "a layer with an indexer's weights has its geometry"
    rows = kv.of_elements(indexer.num_heads // indexer.indexing.sets * indexer.head_dim)
    return BlockIndexWeights(
        q=tensors.reader.join(piece("indexer.q_proj.weight", rows)),
        k=tensors.reader.join(piece("indexer.k_proj.weight")),
        q_norm=norms["indexer.q_norm"],
        k_norm=norms["indexer.k_norm"],
    )


def read_latent(tensors: OfAttention, attention: AttentionLayer, projections: LatentProjections) -> LatentWeights:
    """Reads the weights of a layer over latent rows, like read_heads."""
    reader, piece = tensors.reader, tensors.piece
    heads, nope_dim = tensors.shard.heads(attention.num_q_heads, 1).q, projections.nope_dim
    first, first_bias, q_norm, q = _before_rows(tensors, attention, projections, heads)
    kv_dim = nope_dim + projections.v_dim
    kv = reader.join(piece("kv_b_proj.weight", heads.of_elements(kv_dim))).view(heads.size, kv_dim, -1)
    out, out_bias = tensors.out(heads.of_elements(projections.v_dim), has_bias=projections.has_bias)
    return LatentWeights(
        first=first,
        first_bias=first_bias,
        q_norm=q_norm,
        q=q,
        row_norm=reader.join(piece("kv_a_layernorm.weight")),
        absorbed_k=kv[:, :nope_dim].contiguous(),
        absorbed_v=kv[:, nope_dim:].transpose(1, 2).contiguous(),
        out=out,
        out_bias=out_bias,
        index=_read_index(tensors, attention, projections) if projections.indexer else None,
    )


def _read_index(tensors: OfAttention, attention: AttentionLayer, projections: LatentProjections) -> IndexWeights:
    reader, piece, indexer = tensors.reader, tensors.piece, attention.indexer
    assert isinstance(indexer, Indexer), "a layer with an indexer's weights has its geometry"
    q = reader.join(piece("indexer.wq_b.weight"))
    names = ("wk.weight", "k_norm.weight", "k_norm.bias")
    k, k_norm, k_norm_bias = of_k = [reader.join(piece(f"indexer.{name}")) for name in names]
    if projections.index_interleaved:
        for rows in (q.view(indexer.num_heads, indexer.head_dim, -1).transpose(0, 1), *of_k):
            _put_in_halves(rows[: attention.rope_dim])
    return IndexWeights(q, k, k_norm, k_norm_bias, reader.join(piece("indexer.weights_proj.weight")))


def _before_rows(
    tensors: OfAttention, attention: AttentionLayer, projections: LatentProjections, heads: ShardRange
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """LatentWeights.first, first_bias, q_norm and q. heads: the rank's heads of q"""
    reader, piece, rope_dim = tensors.reader, tensors.piece, attention.head_dim - attention.latent_dim
    q_dim = projections.nope_dim + rope_dim
    q_span, row = heads.of_elements(q_dim), "kv_a_proj_with_mqa"
    if projections.q_rank:
        first = reader.join(piece("q_a_proj.weight"), piece(f"{row}.weight"))
        q_norm: Tensor | None = reader.join(piece("q_a_layernorm.weight"))
        of_heads = reader.join(piece("q_b_proj.weight", q_span))
    else:
        first = reader.join(piece("q_proj.weight", q_span), piece(f"{row}.weight"))
        q_norm = None
        of_heads = first[: q_span.size]
    bias = None
    if projections.has_bias:
        biases = [piece("q_a_proj.bias")] if projections.q_rank else []
        bias = reader.join(*biases, piece(f"{row}.bias"))
        bias = torch.cat((bias.new_zeros(len(first) - len(bias)), bias))
    if projections.interleaved:
        _put_in_halves(of_heads.view(heads.size, q_dim, -1)[:, projections.nope_dim :].transpose(0, 1))
        _put_in_halves(first[-rope_dim:])
        if bias is not None:
            _put_in_halves(bias[-rope_dim:])
    return first, bias, q_norm, of_heads if projections.q_rank else None


def _projected(projections: HeadProjections, *, keeps_kv: bool) -> Iterator[str]:
    yield "q"
    if keeps_kv:
        yield "k"
        if not projections.v_is_k:
            yield "v"


def _put_in_halves(rows: Tensor) -> None:
    """Reorders rows of adjacent pairs in place: the first of each pair, then the second of each."""
    rows.copy_(torch.cat((rows[0::2], rows[1::2])))
