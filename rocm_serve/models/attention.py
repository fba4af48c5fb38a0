"""A model's attention layers: projections, norms, rope and the calls of the runtime, for MHA, GQA and MLA."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.cache.row_work import QkvWork, RopeTable, RowNorm
from rocm_attn.models.config import AttentionConfig, HeadProjections, LatentProjections
from rocm_attn.models.geometry import AttentionLayer
from rocm_attn.models.rope import Rope, rotate
from rocm_attn.problem import AllKeys, Indexer
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.step import Part
from rocm_serve.models.arithmetic import Arithmetic, CosSin
from rocm_serve.models.attention_weights import BlockIndexWeights, IndexWeights, KVHeadWeights, LatentWeights
from rocm_serve.models.layer_input import LayerInput
from rocm_serve.models.weights import MixerWeights

# The epsilon of norms on rows that q is made of, on latent rows and on index keys. transformers' DeepSeek, GLM-5 and
# MiniCPM3 use this value, whatever the epsilon of the model's other norms is.
_LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class OverHeads:
    """A layer with K and V heads.

    number: of the layer whose K and V it reads, its own if it keeps some
    num_gates: heads whose output is multiplied by a gate: all or none
    rope:   of its index keys
    work:   norms and rope of q, k and v
    """

    number: int
    keeps_kv: bool
    num_gates: int
    heads: AttentionLayer
    weights: KVHeadWeights
    arithmetic: Arithmetic
    rope: Rope
    work: QkvWork

    def attended(self, step: Part, given: LayerInput, cos_sin: CosSin) -> Tensor:
        """[T, num_q_heads * head_dim]: the attention output of the step's tokens; every layer has this method."""
        heads, weights, attention = self.heads, self.weights, step.layers
        if weights.index is not None:
            self._select(attention, weights.index, given, cos_sin[self.rope])
        x = given.linear(weights.qkv, weights.qkv_bias)
        x = x.view(x.shape[0], -1, heads.head_dim)
        gates = x[:, x.shape[1] - self.num_gates :] if self.num_gates else None
        if gates is not None:
            x = x[:, : -self.num_gates]
        q = x[:, : heads.num_q_heads]
        if self.keeps_kv:
            # If V is K, V has no rows of its own: the last rows are those of K.
            k = x[:, heads.num_q_heads : heads.num_q_heads + heads.num_kv_heads]
            attention.rope_and_store(self.number, q, k, x[:, -heads.num_kv_heads :], q, self.work)
        else:
            attention.rope_queries(self.number, q, q, self.work)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attend = attention.attend if isinstance(heads.indexer, AllKeys) else attention.attend_selected
        attend(self.number, q, out)
        if gates is not None:
            attention.finish(self.number, out, gate=gates)
        return out.flatten(1)

    def _select(self, attention: LayerCalls, weights: BlockIndexWeights, given: LayerInput, cos_sin: Tensor) -> None:
        """Selects the step's keys."""
        norm, indexer = self.arithmetic.norm, self.heads.indexer
        assert isinstance(indexer, Indexer), "a layer with an indexer's weights has its geometry"
        q = given.linear(weights.q)
        q = q.view(q.shape[0], indexer.num_heads, indexer.head_dim)
        k = norm(given.linear(weights.k), weights.k_norm)
        turned = rotate(torch.cat((norm(q, weights.q_norm), k[:, None]), 1), cos_sin)
        attention.store_index(self.number, turned[:, -1])
        attention.select(self.number, turned[:, :-1])


@dataclass(frozen=True, slots=True, eq=False)
class OverLatentRows:
    """A layer that keeps one latent row per token, with the projections of k and v absorbed.

    For head h, with its q = (q_nope, q_rope) and a key's row (c, k_rope), c normalised and both ropes turned:

        q . k = (absorbed_k[h] @ q_nope) . c + q_rope . k_rope        out[h] = absorbed_v[h] @ (sum of shares * c)

    so attention reads rows as they are stored, and all heads share the one row of a token.

    rope: of its index keys
    work: the norm of c, and how q_rope and k_rope turn
    """

    number: int
    heads: AttentionLayer
    projections: LatentProjections
    weights: LatentWeights
    arithmetic: Arithmetic
    rope: Rope
    work: QkvWork

    def attended(self, step: Part, given: LayerInput, cos_sin: CosSin) -> Tensor:
        """[T, num_q_heads * v_dim]; see OverHeads."""
        attention = step.layers
        heads, weights, linears = self.heads, self.weights, self.arithmetic.linears
        first = given.linear(weights.first, weights.first_bias)
        row, q = first[:, None, -heads.head_dim :], first[:, : -heads.head_dim]
        if weights.q is not None and weights.q_norm is not None:
            q = self.arithmetic.norm(q, weights.q_norm)
            if weights.index is not None:
                self._select(attention, weights.index, given, q, cos_sin[self.rope])
            q = linears.linear(q, weights.q)
        q = q.view(q.shape[0], heads.num_q_heads, -1)
        nope_dim, latent_dim = self.projections.nope_dim, heads.latent_dim
        rows = torch.empty((*q.shape[:2], heads.head_dim), dtype=q.dtype, device=q.device)
        rows[..., :latent_dim] = linears.of_heads(q[..., :nope_dim], weights.absorbed_k)
        q_rope, latent = q[..., nope_dim:], row[..., :latent_dim]
        if self.work.rope is not None:
            attention.rope_and_store(self.number, q_rope, row, latent, rows[..., latent_dim:], self.work)
        else:
            rows[..., latent_dim:] = q_rope
            attention.rope_and_store(self.number, rows, row, latent, rows, self.work)
        q, out = rows, torch.empty((*q.shape[:2], latent_dim), dtype=q.dtype, device=q.device)
        attend = attention.attend if isinstance(heads.indexer, AllKeys) else attention.attend_selected
        attend(self.number, q, out)
        return linears.of_heads(out, weights.absorbed_v).flatten(1)

    def _select(
        self, attention: LayerCalls, weights: IndexWeights, given: LayerInput, q_row: Tensor, cos_sin: Tensor
    ) -> None:
        """Selects the step's keys. q_row: [T, q_rank], the row that queries are made of"""
        linears, indexer = self.arithmetic.linears, self.heads.indexer
        assert isinstance(indexer, Indexer), "a layer with an indexer's weights has its geometry"
        k = given.linear(weights.k)
        k = F.layer_norm(k, k.shape[-1:], weights.k_norm, weights.k_norm_bias, _LATENT_NORM_EPS)
        q = linears.linear(q_row, weights.q).view(q_row.shape[0], indexer.num_heads, indexer.head_dim)
        turned = rotate(torch.cat((q, k[:, None]), 1), cos_sin)
        attention.store_index(self.number, turned[:, -1])
        of_heads = given.linear(weights.head_weights).float() * indexer.num_heads**-0.5
        attention.select(self.number, turned[:, :-1], of_heads)


LayerAttention = OverHeads | OverLatentRows


def layer_attention(
    number: int,
    reads: int,
    layer: AttentionConfig,
    weights: MixerWeights,
    arithmetic: Arithmetic,
    rope: RopeTable | None,
) -> LayerAttention:
    """The attention of layer `number`, which reads K and V of layer `reads`. rope: the layer's"""
    if isinstance(weights, LatentWeights):
        assert isinstance(layer.projections, LatentProjections), "weights are read by their config"
        at_end = None if rope is None else RopeTable(rope.cos_sin, at_end=True)
        arithmetic = replace(arithmetic, eps=_LATENT_NORM_EPS)
        work = QkvWork(at_end, k_norm=RowNorm(weights.row_norm, _LATENT_NORM_EPS))
        return OverLatentRows(number, layer.attention, layer.projections, weights, arithmetic, layer.rope, work)
    assert isinstance(layer.projections, HeadProjections), "weights are read by their config"
    assert isinstance(weights, KVHeadWeights), "weights are read by their config"
    eps = arithmetic.eps
    plain = torch.ones(layer.attention.head_dim, device=weights.qkv.device) if layer.projections.v_norm else None
    work = QkvWork(rope, _row_norm(weights.q_norm, eps), _row_norm(weights.k_norm, eps), _row_norm(plain, eps))
    num_gates = layer.attention.num_q_heads if layer.projections.gate else 0
    return OverHeads(reads, reads == number, num_gates, layer.attention, weights, arithmetic, layer.rope, work)


def _row_norm(weight: Tensor | None, eps: float) -> RowNorm | None:
    return None if weight is None else RowNorm(weight, eps)
