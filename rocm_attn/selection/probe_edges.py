"""Rows of which a few keys decide the result: those at the edges of the keys that each query sees.

Among 4,096 random keys, one has a share of 0.02 %, far below rounding errors. Here each query has a direction of its
own. Four keys have a logit of -3 in that direction: the first key that the query sees, the one before it, the last one
and the one after it. All others have so much less that together they have a share of a few percent. So one key too few
or too many at either end changes the result by a large part. A row of zeros that is treated as a key, such as those of
page 0 and of the rest of a last page, has a logit of 0 and outweighs all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem
from rocm_attn.step.head_weights import HeadWeights

# New tokens of three sequences: a step of each kind, the first kind twice.
EDGE_STEPS: tuple[tuple[int, ...], ...] = ((1, 1, 1), (2, 3, 2), (2, 2, 5), (5, 1, 1), (1, 1, 1))
# The most new tokens that a sequence gets. This number of directions is enough, and fits every head_dim of a kernel.
NUM_EDGE_ROWS = 11

# Tokens in the cache before: the steps cross the end of a partition, of a large page and of several large pages.
LENGTHS = (254, 1022, 4094)
_PROMPT = 254

# Logits: of keys at an edge, and the distance from the sum of these to the sum of all others.
_EDGE, _APART = -3.0, 3.0
# Further differences between keys, in units of a logit; in a latent pool only they tell V of different keys apart.
_NOISE = 0.5


@dataclass(frozen=True, slots=True)
class EdgeRows:
    """One sequence: q [tokens, q_heads, head_dim], k [tokens, kv_heads, head_dim], v [tokens, kv_heads, v_head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, problem: Problem, stored: int, q_len: Sequence[int], seed: int) -> EdgeRows:
        """Rows for `stored` tokens and then steps of q_len new ones; the last few of each step have directions."""
        generator = torch.Generator().manual_seed(seed)
        num_tokens, num_rows = stored + sum(q_len), min(NUM_EDGE_ROWS, problem.head_dim)

        def random(num_heads: int, dim: int) -> Tensor:
            return torch.randn(num_tokens, num_heads, dim, generator=generator)

        directions = torch.linalg.qr(torch.randn(problem.head_dim, num_rows, generator=generator)).Q.t()
        low = -(math.log(num_tokens) + 2 * _APART)
        # Puts the edges on the other side of zero if the cap would flatten both.
        high = _EDGE if not 0 < problem.logits_soft_cap < -2 * low else -low
        logits = torch.full((num_tokens, num_rows), low)
        q = random(problem.num_q_heads, problem.head_dim)
        row, end = 0, stored
        for new in q_len:
            end += new
            for query in range(end - min(new, num_rows - row), end):
                for key in _edges(problem, query, end):
                    if 0 <= key < num_tokens:
                        logits[key, row] = high
                q[query] = directions[row] / problem.scale
                row += 1
        k = (logits @ directions)[:, None] + _NOISE * random(problem.num_kv_heads, problem.head_dim)
        v = random(problem.num_kv_heads, problem.v_head_dim)
        q, k, v = (rows.to(problem.dtype) for rows in (q, k, v))
        return cls(q, k, k[..., : problem.v_head_dim] if problem.pool is PoolKind.LATENT else v)

    def to(self, device: torch.device) -> EdgeRows:
        """The same rows on another device; in a latent pool, V stays a part of K."""
        k = self.k.to(device)
        is_part = self.v.data_ptr() == self.k.data_ptr()
        return EdgeRows(self.q.to(device), k, k[..., : self.v.shape[-1]] if is_part else self.v.to(device))


def _edges(problem: Problem, query: int, kv_len: int) -> tuple[int, ...]:
    """The first key that a query sees, the one before it, the last one and the one after it."""
    first = 0 if problem.window_left == UNLIMITED_WINDOW else max(0, query - problem.window_left)
    last = kv_len - 1 if problem.window_right == UNLIMITED_WINDOW else min(query + problem.window_right, kv_len - 1)
    return first, first - 1, last, last + 1


def cached_lengths(problem: Problem) -> tuple[int, ...]:
    """Tokens of each sequence before EDGE_STEPS: beyond a window, or just before it begins to hide keys."""
    if problem.window_left == UNLIMITED_WINDOW:
        return LENGTHS
    left = problem.window_left
    return max(1, left - 2), left + LENGTHS[1], max(left + LENGTHS[0], LENGTHS[2])


def prompt_lengths(problem: Problem) -> tuple[int, ...]:
    """New tokens of each sequence in a step with nothing in the cache: one beyond a window, and two short ones."""
    return max(_PROMPT, problem.window_left + NUM_EDGE_ROWS), 3, 2


def gentle_weights(problem: Problem, max_kv_len: int) -> HeadWeights:
    """Head weights that leave the edges visible: slopes of 2 at most over all keys, sinks below the edges."""
    weights = HeadWeights.random(problem, torch.Generator().manual_seed(0))
    sinks, slopes = weights.sinks, weights.alibi_slopes
    return HeadWeights(
        sinks=None if sinks is None else sinks + _EDGE - 1,
        alibi_slopes=None if slopes is None else slopes * (2 / max_kv_len),
    )
