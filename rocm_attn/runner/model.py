"""Model: the forward pass of a Llama-family decoder, in plain torch around an attention runtime.

What an author of another model takes from here: forward() gets a Step whose tensors have padded sizes, hands every
layer's q, k and v to the runtime, never asks how long anything is and never waits for the device. So the same code
runs eagerly and is captured.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.runner.config import ModelConfig
from rocm_attn.runner.rope import rotate
from rocm_attn.runner.weights import LayerWeights, ModelWeights


class StepInputs(Protocol):
    """What forward() reads of a step; T tokens and S sequences, pads included.

    token_ids:         int32 [T], pads 0
    positions:         int32 [T], pads 0
    last_token_of_seq: int32 [S], pads 0
    """

    @property
    def token_ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...
    @property
    def last_token_of_seq(self) -> Tensor: ...


class Attention(Protocol):
    """What forward() asks of the attention runtime, once per layer."""

    def store_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Store k and v for the step's tokens, then attend.

        q, out: [T, num_q_heads, head_dim]; out is written
        k, v:   [T, num_kv_heads, head_dim]
        """


class Model:
    """A decoder. max_kv_len is the longest sequence that positions are prepared for."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, runtime: Attention, *, max_kv_len: int) -> None:
        self.config = config
        self.weights = weights
        self.runtime = runtime
        self._cos_sin = config.rope.table(max_kv_len, weights.dtype, weights.device)

    def forward(self, step: StepInputs) -> Tensor:
        """Logits [S, vocab] of each sequence's last new token, in the weights' dtype."""
        hidden = F.embedding(step.token_ids, self.weights.embedding)
        cos_sin = self._cos_sin.index_select(0, step.positions)
        for layer, weights in enumerate(self.weights.layers):
            attended = self._attend(layer, weights, self._norm(hidden, weights.attention_norm), cos_sin)
            hidden = _add_linear(hidden, attended, weights.out, weights.out_bias)
            mixed = _gated(F.linear(self._norm(hidden, weights.mlp_norm), weights.gate_up, weights.gate_up_bias))
            hidden = _add_linear(hidden, mixed, weights.down, weights.down_bias)
        last = hidden.index_select(0, step.last_token_of_seq)
        return F.linear(self._norm(last, self.weights.final_norm), self.weights.head)

    def _attend(self, layer: int, weights: LayerWeights, x: Tensor, cos_sin: Tensor) -> Tensor:
        """[T, num_q_heads * head_dim]: what the step's tokens see of their sequences."""
        heads = self.config.attention
        num_rotated = heads.num_q_heads + heads.num_kv_heads
        qkv = F.linear(x, weights.qkv, weights.qkv_bias).view(x.shape[0], -1, heads.head_dim)
        qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = qk[:, : heads.num_q_heads], qk[:, heads.num_q_heads :]
            qk = torch.cat((self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)), 1)
        qk = rotate(qk, cos_sin)
        q, k = qk[:, : heads.num_q_heads], qk[:, heads.num_q_heads :]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.runtime.store_and_attend(layer, q, k, v, out)
        return out.flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def _add_linear(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """residual + x @ weight.T + bias; the sum with the residual costs no pass of its own."""
    summed = torch.addmm(residual, x, weight.t())
    return summed if bias is None else summed.add_(bias)
