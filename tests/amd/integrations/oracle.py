"""FlashInfer's definition of attention, in NumPy and float64: one token and one head after the other.

It shares no code with the project.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """The computation of weights from logits. slopes, sinks: [q_heads]; shown: [tokens, keys], in place of causality

    window_right: later keys that a token sees without causality; -1: all
    chunk: keys of a chunk, of which a token sees none before its own; 0: there are none
    spans: first and last places of tokens that see each other
    spans_pass: whether they do so outside of their windows, too
    """

    scale: float
    causal: bool = True
    window_left: int = -1
    window_right: int = -1
    cap: float = 0.0
    slopes: Array | None = None
    sinks: Array | None = None
    shown: Array | None = None
    chunk: int = 0
    spans: Sequence[tuple[int, int]] = ()
    spans_pass: bool = False

    def sees(self, token: int, key: int, tokens: int, keys: int) -> bool:
        """True if the token sees the key. Tokens are a sequence's last ones, even if they outnumber the keys."""
        position = keys - tokens + token
        is_hidden = self.window_left >= 0 and key < position - self.window_left
        is_hidden |= self.chunk > 0 and key // self.chunk < position // self.chunk
        if any(first <= min(position, key) and max(position, key) <= last for first, last in self.spans):
            return self.spans_pass or not is_hidden
        if is_hidden:
            return False
        if self.shown is not None:
            return bool(self.shown[token, key])
        is_near = self.window_right < 0 or key <= position + self.window_right
        return key <= position or (is_near and not self.causal)


def attention(q: Array, k: Array, v: Array, scores: Scores) -> tuple[Array, Array]:
    """Returns the output [tokens, q_heads, v_dim] and the log-sum-exp to base 2 [tokens, q_heads].

    They are 0 and -inf if nothing is seen.
    q: [tokens, q_heads, dim]; k: [keys, kv_heads, dim]; v: [keys, kv_heads, v_dim]
    """
    tokens, q_heads, _ = q.shape
    keys, kv_heads, v_dim = v.shape
    out, lse = np.zeros((tokens, q_heads, v_dim)), np.full((tokens, q_heads), -np.inf)
    for token in range(tokens):
        seen = [key for key in range(keys) if scores.sees(token, key, tokens, keys)]
        for head in range(q_heads):
            logits = k[seen, head // (q_heads // kv_heads)] @ q[token, head] * scores.scale
            if scores.slopes is not None:
                logits = logits + scores.slopes[head] * (np.array(seen, np.float64) - token)
            if scores.cap:
                logits = scores.cap * np.tanh(logits / scores.cap)
            total = np.exp(logits).sum()
            if scores.sinks is not None:
                total += math.exp(scores.sinks[head])
            if total > 0:
                out[token, head] = np.exp(logits) @ v[seen, head // (q_heads // kv_heads)] / total
                lse[token, head] = math.log2(total)
    return out, lse
