"""Logits of the tiny Llama by float64 and numpy alone: no page, no cache, no chunk, and no code of the project.

For each layer: h += attention(norm(h)) W_out; h += (silu(gate) * up) W_down, with gate, up = norm(h) W_gate_up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rocm_serve.models.attention_weights import KVHeadWeights
from rocm_serve.models.loading import LoadedModel
from rocm_serve.models.mlp_weights import DenseWeights
from rocm_serve.models.weights import LayerWeights

Float64Array = npt.NDArray[np.float64]


class Float64Llama:
    """A model without biases, scaled rope, sinks or experts, as tests.amd.runner.tiny_model makes them."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._config, weights = loaded.config, loaded.weights
        self._embedding, self._head = _array(weights.embedding), _array(weights.head)
        self._final_norm = _array(weights.final_norm)
        self._layers = [
            {
                "attention_norm": _array(layer.attention_norm),
                "qkv": _array(_of_heads(layer).qkv),
                "out": _array(layer.attention.out),
                "mlp_norm": _array(layer.mlp_norm),
                "gate_up": _array(_of_dense(layer).gate_up),
                "down": _array(_of_dense(layer).down),
            }
            for layer in weights.layers
        ]

    def logits(self, token_ids: Sequence[int]) -> Float64Array:
        """[tokens, vocab]: at every position of one sequence."""
        hidden = self._embedding[np.array(token_ids)]
        for number, layer in enumerate(self._layers):
            hidden = hidden + self._attended(number, self._norm(hidden, layer["attention_norm"])) @ layer["out"].T
            gate, up = np.split(self._norm(hidden, layer["mlp_norm"]) @ layer["gate_up"].T, 2, axis=1)
            hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ layer["down"].T
        logits: Float64Array = self._norm(hidden, self._final_norm) @ self._head.T
        return logits

    def _attended(self, number: int, x: Float64Array) -> Float64Array:
        attention = self._config.layers[number].attention
        num_q, num_kv, dim = attention.num_q_heads, attention.num_kv_heads, attention.head_dim
        heads = (x @ self._layers[number]["qkv"].T).reshape(len(x), num_q + 2 * num_kv, dim)
        theta = self._config.layers[number].rope.theta
        q, k = self._turned(heads[:, :num_q], theta), self._turned(heads[:, num_q : num_q + num_kv], theta)
        v = heads[:, num_q + num_kv :]
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        is_seen = distance >= 0
        if attention.window_left >= 0:
            is_seen &= distance <= attention.window_left
        out = np.empty_like(q)
        for head in range(num_q):
            of_kv = head // (num_q // num_kv)
            scores = np.where(is_seen, q[:, head] @ k[:, of_kv].T * attention.scale, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out[:, head] = weights / weights.sum(1, keepdims=True) @ v[:, of_kv]
        return out.reshape(len(x), -1)

    @staticmethod
    def _turned(x: Float64Array, theta: float) -> Float64Array:
        """Each head by its token's position: element j with element j + dim / 2."""
        half = x.shape[-1] // 2
        angle = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
        one, other = x[..., :half], x[..., half:]
        return np.concatenate(
            (one * np.cos(angle) - other * np.sin(angle), other * np.cos(angle) + one * np.sin(angle)), -1
        )

    def _norm(self, x: Float64Array, weight: Float64Array) -> Float64Array:
        scaled: Float64Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + self._config.rms_norm_eps) * weight
        return scaled


def _array(tensor: object) -> Float64Array:
    return np.asarray(tensor, np.float64)


def assert_greedy(model: Float64Llama, prompt: Sequence[int], token_ids: Sequence[int], margin: float = 1e-3) -> None:
    """Each of token_ids is the likeliest after those before it, or as likely as that within float32's rounding."""
    if token_ids:
        logits = model.logits((*prompt, *token_ids[:-1]))[len(prompt) - 1 :]
        short = logits.max(1) - logits[np.arange(len(token_ids)), np.array(token_ids)]
        assert short.max() <= margin, f"token {int(short.argmax())} of {list(token_ids)} after {list(prompt)}"


def _of_heads(layer: LayerWeights) -> KVHeadWeights:
    assert isinstance(layer.attention, KVHeadWeights)
    return layer.attention


def _of_dense(layer: LayerWeights) -> DenseWeights:
    assert isinstance(layer.mlp, DenseWeights)
    return layer.mlp
