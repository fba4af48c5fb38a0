"""What a model does around a layer's attention: projections, norms and rope, over heads or over latent rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.problem import AllKeys, Indexer
from rocm_attn.runner.arithmetic import Arithmetic
from rocm_attn.runner.attention_weights import (
    AttentionWeights,
    BlockIndexWeights,
    HeadWeights,
    IndexWeights,
    LatentWeights,
)
from rocm_attn.runner.config import HeadProjections, LatentProjections, LayerConfig
from rocm_attn.runner.geometry import AttentionLayer
from rocm_attn.runner.rope import rotate

# transformers' DeepSeek-V3.2 and GLM-5, whatever the model's other norms have
_INDEX_NORM_EPS = 1e-6


class Attention(Protocol):
    """What a model asks of the attention runtime, in each layer of a step of T tokens.

    q, out: [T, num_q_heads, head_dim | v_head_dim]; out is written
    k, v:   [T, num_kv_heads, head_dim | v_head_dim]; of a latent layer, v is the first part of k
    """

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v for the step's tokens."""
        ...

    def attend(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Attend over what the layer has stored, in this step too."""
        ...

    def store_index(self, layer: int, k: Tensor) -> None:
        """Store index keys [T, index_dim] of a layer with an indexer."""
        ...

    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Choose keys by index queries [T, index_heads, index_dim] and float32 weights [T, index_heads], or all 1."""
        ...

    def attend_selected(self, layer: int, q: Tensor, out: Tensor) -> None:
        """As attend, over the keys that the layer, or the last one before it that has an indexer, has chosen."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class OverHeads:
    """A layer with K and V heads.

    number: of the layer whose K and V it reads, its own if it keeps some
    """

    number: int
    keeps_kv: bool
    heads: AttentionLayer
    projections: HeadProjections
    weights: HeadWeights
    arithmetic: Arithmetic

    def attended(self, attention: Attention, x: Tensor, cos_sin: Tensor) -> Tensor:
        """[T, num_q_heads * head_dim]: what the step's tokens see of their sequences; every layer has this method.

        x:       [T, hidden], normalised
        cos_sin: [T, 2, dim], see rotate
        """
        heads, weights = self.heads, self.weights
        if weights.index is not None:
            self._select(attention, weights.index, x, cos_sin)
        x = self.arithmetic.linears.linear(x, weights.qkv, weights.qkv_bias)
        x = x.view(x.shape[0], -1, heads.head_dim)
        num_rotated = heads.num_q_heads + (heads.num_kv_heads if self.keeps_kv else 0)
        qk, v = x[:, :num_rotated], x[:, num_rotated:]
        if self.projections.v_is_k:
            v = qk[:, heads.num_q_heads :]
        if self.projections.v_norm and self.keeps_kv:
            v = self.arithmetic.plain_norm(v)
        qk = rotate(self._normalised(qk), cos_sin)
        q, k = qk[:, : heads.num_q_heads], qk[:, heads.num_q_heads :]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self.keeps_kv:
            attention.store(self.number, k, v)
        if isinstance(heads.indexer, AllKeys):
            attention.attend(self.number, q, out)
        else:
            attention.attend_selected(self.number, q, out)
        return out.flatten(1)

    def _select(self, attention: Attention, weights: BlockIndexWeights, x: Tensor, cos_sin: Tensor) -> None:
        """Choose the step's keys. x: [T, hidden], normalised"""
        linears, norm, indexer = self.arithmetic.linears, self.arithmetic.norm, self.heads.indexer
        assert isinstance(indexer, Indexer), "a layer with an indexer's weights has its geometry"
        q = linears.linear(x, weights.q).view(x.shape[0], indexer.num_heads, indexer.head_dim)
        k = norm(linears.linear(x, weights.k), weights.k_norm)
        turned = rotate(torch.cat((norm(q, weights.q_norm), k[:, None]), 1), cos_sin)
        attention.store_index(self.number, turned[:, -1])
        attention.select(self.number, turned[:, :-1])

    def _normalised(self, qk: Tensor) -> Tensor:
        norm, weights = self.arithmetic.norm, self.weights
        if weights.q_norm is None:
            return qk
        if weights.k_norm is None:
            return norm(qk, weights.q_norm)
        q, k = qk[:, : self.heads.num_q_heads], qk[:, self.heads.num_q_heads :]
        return torch.cat((norm(q, weights.q_norm), norm(k, weights.k_norm)), 1)


@dataclass(frozen=True, slots=True, eq=False)
class OverLatentRows:
    """A layer that keeps one latent row a token, with the projections of k and v absorbed.

    For head h, with its q = (q_nope, q_rope) and a key's row (c, k_rope), c normalised and both ropes turned:

        q . k = (q_nope @ absorbed_k[h]) . c + q_rope . k_rope        out[h] = (sum of shares * c) @ absorbed_v[h]

    so attention is over rows as they are kept, with all heads on the one of a token.
    """

    number: int
    heads: AttentionLayer
    projections: LatentProjections
    weights: LatentWeights
    arithmetic: Arithmetic

    def attended(self, attention: Attention, x: Tensor, cos_sin: Tensor) -> Tensor:
        """[T, num_q_heads * v_dim]; see OverHeads."""
        heads, weights, linears = self.heads, self.weights, self.arithmetic.linears
        first = linears.linear(x, weights.first, weights.first_bias)
        row, q = first[:, -heads.head_dim :], first[:, : -heads.head_dim]
        if weights.q is not None and weights.q_norm is not None:
            q = self.arithmetic.norm(q, weights.q_norm)
            if weights.index is not None:
                self._select(attention, weights.index, x, q, cos_sin)
            q = linears.linear(q, weights.q)
        q = q.view(q.shape[0], heads.num_q_heads, -1)
        nope_dim, latent_dim = self.projections.nope_dim, heads.latent_dim
        latent = self.arithmetic.norm(row[:, :latent_dim], weights.row_norm)
        # one pass turns the row's part beside the heads'
        rope = rotate(torch.cat((q[..., nope_dim:], row[:, None, latent_dim:]), 1), cos_sin)
        q = torch.cat((linears.of_heads(q[..., :nope_dim], weights.absorbed_k), rope[:, :-1]), -1)
        k = torch.cat((latent[:, None], rope[:, -1:]), -1)
        out = torch.empty((*q.shape[:2], latent_dim), dtype=q.dtype, device=q.device)
        attention.store(self.number, k, k[..., :latent_dim])
        if isinstance(heads.indexer, AllKeys):
            attention.attend(self.number, q, out)
        else:
            attention.attend_selected(self.number, q, out)
        return linears.of_heads(out, weights.absorbed_v).flatten(1)

    def _select(self, attention: Attention, weights: IndexWeights, x: Tensor, q_row: Tensor, cos_sin: Tensor) -> None:
        """Choose the step's keys. x: [T, hidden], normalised; q_row: [T, q_rank], what queries are made of"""
        linears, indexer = self.arithmetic.linears, self.heads.indexer
        assert isinstance(indexer, Indexer), "a layer with an indexer's weights has its geometry"
        k = linears.linear(x, weights.k)
        k = F.layer_norm(k, k.shape[-1:], weights.k_norm, weights.k_norm_bias, _INDEX_NORM_EPS)
        q = linears.linear(q_row, weights.q).view(x.shape[0], indexer.num_heads, indexer.head_dim)
        turned = rotate(torch.cat((q, k[:, None]), 1), cos_sin)
        attention.store_index(self.number, turned[:, -1])
        of_heads = linears.linear(x, weights.head_weights).float() * indexer.num_heads**-0.5
        attention.select(self.number, turned[:, :-1], of_heads)


LayerAttention = OverHeads | OverLatentRows


def layer_attention(
    number: int, reads: int, layer: LayerConfig, weights: AttentionWeights, arithmetic: Arithmetic
) -> LayerAttention:
    """The attention of layer `number`, which reads K and V of layer `reads`."""
    if isinstance(weights, LatentWeights):
        assert isinstance(layer.projections, LatentProjections), "weights are read by their config"
        return OverLatentRows(number, layer.attention, layer.projections, weights, arithmetic)
    assert isinstance(layer.projections, HeadProjections), "weights are read by their config"
    return OverHeads(reads, reads == number, layer.attention, layer.projections, weights, arithmetic)
