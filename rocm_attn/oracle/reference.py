"""The reference: dense attention, one sequence at a time, written to be read.

out[t] = softmax(scale * q[t] . k[j] for visible j) . v[j]        over the keys j that token t may see

Token t of a sequence with q_len new tokens sits at kv_index i = kv_len - q_len + t and sees keys
i - window_left .. i + window_right of its sequence's; a window of -1 ends nowhere. In a layer with chunks it sees no
key of an earlier chunk. With a mask it sees the keys that the mask shows, with a window from p - window_left on: p is
the position that the mask gives it. A soft cap comes after the scale, ALiBi's slope * (j - i) after the cap; a sink is
one more logit without a value.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.problem import UNLIMITED_WINDOW, Problem
from rocm_attn.step.head_weights import NO_HEAD_WEIGHTS, HeadWeights


def attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    problem: Problem,
    weights: HeadWeights = NO_HEAD_WEIGHTS,
    visible: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence's new tokens over its whole KV, in float64.

    q: [q_len, q_heads, head_dim]; k: [kv_len, kv_heads, head_dim]; v: [kv_len, kv_heads, v_head_dim]
    visible:   bool [q_len, kv_len], the keys that a mask shows; None without one
    positions: integer [q_len], the positions from which the windows of new tokens under a mask are counted back; None:
               their kv_index
    Returns out [q_len, q_heads, v_head_dim] and lse [q_len, q_heads], natural log of the denominator, the sink in it; 0
    and -inf if no key is visible.
    """
    (q_len, _, head_dim), (kv_len, kv_heads, _), ratio = q.shape, k.shape, problem.gqa_ratio
    q = q.double().reshape(q_len, kv_heads, ratio, head_dim)
    scores = torch.einsum("qhrd,khd->hrqk", q, k.double()).flatten(0, 1) * problem.scale
    if problem.logits_soft_cap:
        scores = problem.logits_soft_cap * torch.tanh(scores / problem.logits_soft_cap)
    index = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
    key = torch.arange(kv_len, device=q.device)[None, :]
    if weights.alibi_slopes is not None:
        scores = scores + weights.alibi_slopes.double()[:, None, None] * (key - index)
    if visible is not None:
        hidden = ~visible
    else:
        hidden = (key - index > problem.window_right) & (problem.window_right != UNLIMITED_WINDOW)
    if problem.window_left != UNLIMITED_WINDOW:
        position = index if positions is None else positions[:, None]
        hidden = hidden | (key < position - problem.window_left)
        if problem.chunk:
            hidden = hidden | (key // problem.chunk < position // problem.chunk)
    scores = scores.masked_fill(hidden, float("-inf"))
    v = v.double().masked_fill(hidden.all(0)[:, None, None], 0.0)  # unseen rows may be NaN, and 0 * NaN is NaN
    lse = scores.logsumexp(-1)
    if weights.sinks is not None:
        lse = torch.where(hidden.all(-1), lse, torch.logaddexp(lse, weights.sinks.double()[:, None]))
    shares = (scores - lse[..., None]).exp().nan_to_num(0.0)  # a token without visible keys has shares exp(-inf + inf)
    out = torch.einsum("hrqk,khd->qhrd", shares.view(kv_heads, ratio, q_len, kv_len), v)
    return out.flatten(1, 2), lse.transpose(0, 1)


def attend_paged(
    q: Tensor,
    pages: LayerPages,
    pages_of_seq: Sequence[Sequence[int]],
    kv_len: Sequence[int],
    q_len: Sequence[int],
    problem: Problem,
    weights: HeadWeights = NO_HEAD_WEIGHTS,
) -> tuple[Tensor, Tensor]:
    """Calls attend_sequence for every sequence of a step, reading K and V from pages.

    q:            [tokens, q_heads, head_dim], sequence after sequence
    pages_of_seq: the pages of each sequence, in order
    Returns out [tokens, q_heads, v_head_dim] and lse [tokens, q_heads], float64.
    """
    outs, lses = [], []
    first = 0
    for ids, length, new in zip(pages_of_seq, kv_len, q_len, strict=True):
        held = torch.as_tensor(list(ids), dtype=torch.long, device=q.device)
        k, v = (side.flatten(0, 1)[:length] for side in pages.read(held))
        out, lse = attend_sequence(q[first : first + new], k, v, problem, weights)
        outs.append(out)
        lses.append(lse)
        first += new
    if not outs:
        return (
            q.new_zeros(0, problem.num_q_heads, problem.v_head_dim, dtype=torch.float64),
            q.new_zeros(0, problem.num_q_heads, dtype=torch.float64),
        )
    return torch.cat(outs), torch.cat(lses)
