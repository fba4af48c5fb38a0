"""Attention of one sequence from its formula, in float64, a query head at a time; it shares no code with the project.

    out[t] = sum_j e^(l_j - m) v_j / (sum_j e^(l_j - m) + e^(sink - m))        m: the largest of l and sink
    l_j = cap(scale * q[t] . k_j) + slope * (j - i)        cap(x) = c tanh(x / c)

Token t of q_len new ones is at place i = kv_len - q_len + t and sees places max(0, i - window_left) to i. Without a
sink, a cap, a slope or a window their terms are left out.
"""

import math

import torch
from torch import Tensor

from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.step.head_weights import HeadWeights


def dense_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, weights: HeadWeights) -> Tensor:
    """Returns the output, float64 [q_len, q_heads, v_dim].

    q: [q_len, q_heads, dim]; k: [kv_len, kv_heads, dim]; v: [kv_len, kv_heads, v_dim]
    """
    q, k, v = q.double(), k.double(), v.double()
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    heads_on_one = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        place = k.shape[0] - q.shape[0] + t
        first = 0 if problem.window_left == UNLIMITED_WINDOW else max(0, place - problem.window_left)
        for head in range(q.shape[1]):
            seen = slice(first, place + 1)
            keys, values = k[seen, head // heads_on_one], v[seen, head // heads_on_one]
            logits = problem.scale * (keys @ q[t, head])
            if problem.logits_soft_cap:
                logits = problem.logits_soft_cap * torch.tanh(logits / problem.logits_soft_cap)
            if weights.alibi_slopes is not None:
                distance = torch.arange(first - place, 1, dtype=torch.float64)
                logits = logits + float(weights.alibi_slopes[head]) * distance
            sink = -math.inf if weights.sinks is None else float(weights.sinks[head])
            largest = max(float(logits.max()), sink)
            terms = (logits - largest).exp()
            out[t, head] = terms @ values / (terms.sum() + math.exp(sink - largest))
    return out
