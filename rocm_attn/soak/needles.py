"""Needles: keys that only the right token's query finds, and the queries that ask for them.

Every key is a needle: a random direction of length sqrt(D), which no other key is near to. A query in the direction of
key p, `sharpness` long once it is scaled, has these logits:

    of key p      a * sqrt(D)          a: sharpness, D: head_dim
    of another    about N(0, a * a)

so that all L other keys together weigh about L * exp(a * a / 2 - a * sqrt(D)) of key p: nothing, for the rows and lengths
of real models. The output is then v[p] and nothing else, in closed form: no attention has to be computed to know it. A
key that a query may not see is asked for too, and its value must not come back.

Positions that have been got wrong before are asked for more often than others: the first and the last key that a token
sees and those beside them, edges of pages, powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.errors import BadProblem
from rocm_attn.problem import UNLIMITED_WINDOW, PoolKind, Problem

# All other keys together weigh at most exp(-_LEAST_MARGIN) of the one that is asked for.
_LEAST_MARGIN = 5.0
_SHARPNESS = tuple(0.25 * step for step in range(2, 97))
# How many kinds of places a token's heads ask for in turn; see Asked.of.
_NUM_KINDS = 8


def sharpness_of(problem: Problem, kv_len: int) -> float:
    """By how much a query points to its key, so that kv_len keys are told apart with the most room on both sides.

    Raises BadProblem where rows are too short for that.
    """
    length, noise = math.sqrt(problem.head_dim), math.log(max(kv_len, 2))

    def margin(sharpness: float) -> float:
        """ln of how much more the key weighs than all others; a soft cap makes it less."""
        score, cap = sharpness * length, problem.logits_soft_cap
        return (cap * math.tanh(score / cap) if cap else score) - sharpness**2 / 2 - noise

    best = max(_SHARPNESS, key=margin)
    if margin(best) < _LEAST_MARGIN:
        raise BadProblem(
            f"rows of {problem.head_dim} elements{' with a soft cap' * bool(problem.logits_soft_cap)} do not tell "
            f"{kv_len} keys apart; test shorter lengths"
        )
    # Enough is enough: rounding of large logits costs more than the last of the margin gains.
    return next(sharpness for sharpness in _SHARPNESS if margin(sharpness) >= min(margin(best), 12.0))


@dataclass(frozen=True, slots=True)
class Haystack:
    """The keys and values of one sequence in one layer, all of them needles.

    k: [kv_len, kv_heads, head_dim], each row sqrt(head_dim) long
    v: [kv_len, kv_heads, v_head_dim]; of a latent layer the first part of k
    """

    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, problem: Problem, kv_len: int, generator: torch.Generator) -> Haystack:
        """Of the problem's dtype, on the generator's device."""
        dtype, device = problem.dtype, generator.device

        def rows(dim: int) -> Tensor:
            return torch.randn(kv_len, problem.num_kv_heads, dim, generator=generator, device=device)

        k = rows(problem.head_dim)
        k = (k * (math.sqrt(problem.head_dim) / k.norm(dim=-1, keepdim=True))).to(dtype)
        is_latent = problem.pool is PoolKind.LATENT
        return cls(k, k[..., : problem.v_head_dim] if is_latent else rows(problem.v_head_dim).to(dtype))

    @property
    def kv_len(self) -> int:
        """Tokens."""
        return self.k.shape[0]

    def queries(self, asked: Asked, problem: Problem, sharpness: float) -> Tensor:
        """[n, q_heads, head_dim] of the problem's dtype: each in the direction of the key that it asks for."""
        length = sharpness / (problem.scale * math.sqrt(problem.head_dim))
        return (self.k[asked.key, asked.kv_heads(problem)].float() * length).to(problem.dtype)

    def distance(self, asked: Asked, out: Tensor, problem: Problem) -> Tensor:
        """float32 [n, q_heads]: |out - v| / |v| for the value that belongs to the key; inf where out is no number.

        out: [n, q_heads, v_head_dim]
        """
        value = self.v[asked.key, asked.kv_heads(problem)].float()
        far = (out.float() - value).norm(dim=-1) / value.norm(dim=-1)
        return far.nan_to_num(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Asked:
    """What each query head of a sequence's new tokens asks for.

    key:     int64 [n, q_heads], a place in the sequence's KV
    visible: bool [n, q_heads], whether the head may see it; where it may not, its value must not come back
    """

    key: Tensor
    visible: Tensor

    def kv_heads(self, problem: Problem) -> Tensor:
        """int64 [q_heads]: the KV head that each query head reads."""
        return torch.arange(self.key.shape[1], device=self.key.device) // problem.gqa_ratio

    def part(self, tokens: slice) -> Asked:
        """Of some of the tokens."""
        return Asked(self.key[tokens], self.visible[tokens])

    @classmethod
    def of(cls, problem: Problem, first: int, end: int, generator: torch.Generator) -> Asked:
        """For the tokens first .. end - 1 of a sequence, all of which one step stores.

        In turn: the first key that the token sees, its own, the one after the first, the one before its own, one at an
        edge of a page, one at a power of two, any, and one that it may not see: the last one before its window, or the
        token after it; any other one where there are none.
        """
        device, heads = generator.device, problem.num_q_heads
        token = torch.arange(first, end, device=device)[:, None].expand(-1, heads)
        windowed = problem.window_left != UNLIMITED_WINDOW
        lowest = (token - problem.window_left).clamp(min=0) if windowed else torch.zeros_like(token)
        highest = token if problem.causal else torch.full_like(token, end - 1)
        share = torch.rand(token.shape, generator=generator, device=device)
        anywhere = lowest + (share * (highest - lowest + 1)).long()
        beside = torch.randint(-1, 1, token.shape, generator=generator, device=device)
        at_page = anywhere // problem.page_size * problem.page_size + beside
        at_power = (1 << (share * (end.bit_length() + 1)).long()) + beside
        before, after = lowest - 1, token + 1
        is_there = (before >= 0) | (problem.causal & (after < end))
        hidden = torch.where(before >= 0, before, after)
        turn = torch.arange(heads, device=device) + torch.arange(end - first, device=device)[:, None]
        turn = turn % _NUM_KINDS
        kinds = (lowest, token, lowest + 1, token - 1, at_page, at_power, anywhere, hidden)
        picked = torch.stack(kinds, -1).gather(-1, turn[..., None])[..., 0]
        is_hidden = (turn == _NUM_KINDS - 1) & is_there
        inside = (picked >= lowest) & (picked <= highest)
        return cls(torch.where(inside | is_hidden, picked, anywhere), ~is_hidden)
