"""Model: the forward pass of a decoder, in plain torch around an attention runtime.

What an author of another model takes from here: forward() gets a Step whose tensors have padded sizes, hands every
layer's q, k and v to the step's layers, never asks how long anything is and never waits for the device. So the same
code runs eagerly, is captured, and runs the halves of a split step. Of tensor parallelism it knows the places where
ranks sum, in its linear layers, and gather: the sizes of a rank's part are in its config and weights.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.runner.config import ModelConfig
from rocm_attn.runner.linears import Linears, linears_over
from rocm_attn.runner.mlp import inner_and_bias
from rocm_attn.runner.ranks import ONE_RANK, Ranks
from rocm_attn.runner.rope import rotate
from rocm_attn.runner.weights import LayerWeights, ModelWeights
from rocm_attn.step.head_weights import HeadWeights, LayerHeadWeights


class StepInputs(Protocol):
    """What forward() reads of a step; T tokens and S sequences, pads included.

    token_ids:         int32 [T], pads 0
    positions:         int32 [T], pads 0
    last_token_of_seq: int32 [S], 0 where there is no new token
    layers:            attention of the step's tokens
    """

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def last_token_of_seq(self) -> Tensor: ...
    @property
    def layers(self) -> Attention: ...


class Attention(Protocol):
    """What a model asks of the attention runtime, once in each layer of a step."""

    def store_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store k and v for the step's tokens, then attend.

        q, out: [T, num_q_heads, head_dim]; out is written
        k, v:   [T, num_kv_heads, head_dim]
        """


class Model:
    """A decoder.

    config:       of a tensor-parallel rank's part, where ranks share the model; the weights are that part too
    head_weights: the runtime's, which get what the weights hold of them
    max_kv_len:   the longest sequence that positions are prepared for
    ranks:        that share the model
    linears:      how linear layers are computed; not given: all rows in one product
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        head_weights: LayerHeadWeights,
        *,
        max_kv_len: int,
        ranks: Ranks = ONE_RANK,
        linears: Linears | None = None,
    ) -> None:
        self.config = config
        self.weights = weights
        self._ranks = ranks
        self._linears = linears if linears is not None else linears_over(ranks, deterministic=False)
        dtype = weights.dtype
        self._cos_sin = {layer.rope: layer.rope.table(max_kv_len, dtype, weights.device) for layer in config.layers}
        # rounded as the embeddings are: models with a scale were trained so
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        for layer, layer_weights in enumerate(weights.layers):
            if layer_weights.sinks is not None:
                head_weights.set(layer, HeadWeights(sinks=layer_weights.sinks))

    def forward(self, step: StepInputs) -> Tensor:
        """Logits [S, vocab] of each sequence's last new token, in the weights' dtype."""
        hidden = self.embed(step.token_ids)
        cos_sin = {rope: table.index_select(0, step.positions) for rope, table in self._cos_sin.items()}
        for number, (layer, weights) in enumerate(zip(self.config.layers, self.weights.layers, strict=True)):
            x = self._norm(hidden, weights.attention_norm)
            attended = self._attend(step.layers, number, weights, x, cos_sin[layer.rope])
            hidden = self._add(hidden, attended, weights.out, weights.out_bias, weights.attention_out_norm)
            inner, bias = inner_and_bias(self._norm(hidden, weights.mlp_norm), layer.mlp, weights.mlp, self._linears)
            hidden = self._add(hidden, inner, weights.mlp.down, bias, weights.mlp_out_norm)
        last = hidden.index_select(0, step.last_token_of_seq)
        own = self._capped(self._linears.linear(self._norm(last, self.weights.final_norm), self.weights.head))
        return self._ranks.gathered(own)[:, : self.config.vocab_size]  # all ranks pick from the same bits

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T, hidden]: what the first layer gets. token_ids: integer [T]"""
        rows = F.embedding(token_ids, self.weights.embedding)
        return rows if self._embedding_scale == 1.0 else rows * self._embedding_scale

    def _attend(self, attention: Attention, layer: int, weights: LayerWeights, x: Tensor, cos_sin: Tensor) -> Tensor:
        """[T, num_q_heads * head_dim]: what the step's tokens see of their sequences."""
        heads = self.config.layers[layer].attention
        num_rotated = heads.num_q_heads + heads.num_kv_heads
        qkv = self._linears.linear(x, weights.qkv, weights.qkv_bias).view(x.shape[0], -1, heads.head_dim)
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = qk[:, : heads.num_q_heads], qk[:, heads.num_q_heads :]
            qk = torch.cat((self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)), 1)
        qk = rotate(qk, cos_sin)
        q, k = qk[:, : heads.num_q_heads], qk[:, heads.num_q_heads :]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        attention.store_and_attend(layer, q, k, v, out)
        return out.flatten(1)

    def _add(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
        """residual + x @ weight.T + bias, the latter two normalised where there is a norm for them."""
        if norm is not None:
            return residual + self._norm(self._linears.summed_linear(x, weight, bias), norm)
        return self._linears.add_summed_linear(residual, x, weight, bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Over the last dimension, in the dtype of the weight if that is the wider one."""
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.config.rms_norm_eps).to(x.dtype)

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.logits_soft_cap
        return (logits / cap).tanh() * cap if cap else logits
