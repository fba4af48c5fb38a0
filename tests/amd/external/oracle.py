"""Reference attention in NumPy and float64: one token and one query head after the other.

It shares no code with the project.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    window_left: int = -1,
    window_right: int = -1,
    causal: bool = True,
    shown: Array | None = None,
) -> tuple[Array, Array]:
    """Returns the output rows and log-sum-exps of a sequence's new tokens, which are its last ones.

    q: [new, q_heads, dim]; k: [tokens, kv_heads, dim]; v: [tokens, kv_heads, v_dim]
    window_right: later keys that a token sees without causality; -1: all
    shown: [new, tokens], not 0 where a token sees a key; in place of causality
    """
    new, q_heads, _ = q.shape
    tokens, kv_heads, v_dim = v.shape
    out, lse = np.zeros((new, q_heads, v_dim)), np.full((new, q_heads), -np.inf)
    for token in range(new):
        position = tokens - new + token
        last = position if causal else position + window_right if window_right >= 0 else tokens
        keys = [
            key
            for key in range(tokens)
            if (shown[token, key] if shown is not None else key <= last)
            and (window_left < 0 or key >= position - window_left)
        ]
        for head in range(q_heads if keys else 0):
            of_head = head // (q_heads // kv_heads)
            logits = k[keys, of_head] @ q[token, head] * scale
            most = logits.max()
            weights = np.exp(logits - most)
            out[token, head] = weights @ v[keys, of_head] / weights.sum()
            lse[token, head] = most + np.log(weights.sum())
    return out, lse
