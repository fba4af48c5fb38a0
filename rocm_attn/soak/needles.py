"""Needles: keys that only the right token's query finds, and the queries that ask for them.

Every key is a needle: a random direction of length sqrt(D), which no other key is near to. A query in the direction of
key p, `sharpness` long once it is scaled, has these logits:

    of key p      a * sqrt(D)          a: sharpness, D: head_dim
    of another    about N(0, a * a)

so that all L other keys together weigh about L * exp(a * a / 2 - a * sqrt(D)) of key p: nothing, for rows and lengths
of real models. The output is then v[p] and nothing else, in closed form: no attention has to be computed to know it. A
key that a query may not see is asked for too, and its value must not come back.

Index keys are needles too: the heads of an indexer point to a few keys, which are chosen among noise, and may turn away
from one, which is not. Queries then ask for what was pointed to, and for what was turned away from.

Positions that have been got wrong before are asked for more often than others: the first and the last key that a token
sees and those beside them, edges of pages, powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from rocm_attn.errors import BadProblem
from rocm_attn.problem import UNLIMITED_WINDOW, Indexer, Indexing, LastUnit, Pooling, PoolKind, Problem

# All other keys together weigh at most exp(-_LEAST_MARGIN) of the one that is asked for.
_LEAST_MARGIN = 5.0
_SHARPNESS = tuple(0.25 * step for step in range(2, 97))
# How many kinds of places are asked for in turn, the last of which is hidden; see Asked.of and _places.
_NUM_KINDS = 8
# Keys that each set of an indexer's heads points to, at most: the others of its choice are noise.
_MOST_POINTED = 2
# What a query for which noise may outdo what an indexer's heads point to is allowed to happen to, of all queries.
_OUTDONE = 1e-6
# What pointing keeps of sqrt(dim) where heads weigh unequally.
_LEAST_POINTING = 0.85


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


def check_indexer(indexer: Indexer, kv_len: int) -> None:
    """Raises BadProblem where noise may be chosen in the place of what the heads of an indexer point to.

    A key that heads point to scores sqrt(dim) for each direction that points to it. Another one scores noise for all
    of them, which share what they turn away from: N(0, 6) for two directions, N(0, 2) for one. As many of those as
    there is room for may score more.
    """
    indexing = indexer.indexing
    num_pointed = _num_pointed(indexer)
    room = indexing.top - indexing.first - indexing.last - num_pointed
    # Of a Poisson distribution with this mean, more than `room` come up with a probability of less than _OUTDONE.
    mean = math.exp((math.log(_OUTDONE) + math.lgamma(room + 2)) / (room + 1))
    keys, units = kv_len // indexing.key_tokens, kv_len // indexing.unit_tokens
    directions = (6 if num_pointed > 1 else 2) if units > _too_few(indexing) else num_pointed
    noise = math.sqrt(directions) * NormalDist().inv_cdf(1 - mean / keys) if keys > mean else 0.0
    if units > indexing.top and noise > _LEAST_POINTING * math.sqrt(indexer.head_dim):
        raise BadProblem(
            f"index rows of {indexer.head_dim} elements, of which {indexing.top} units are chosen, do not tell "
            f"{keys} keys apart; test shorter lengths"
        )


def _num_pointed(indexer: Indexer) -> int:
    """Keys that each set of heads points to. Raises BadProblem where too few units are chosen."""
    indexing = indexer.indexing
    room = indexing.top - indexing.first - indexing.last
    if room < 1:
        raise BadProblem(f"an indexer that chooses by {indexing} chooses nothing but what is forced; raise top")
    return min(indexer.num_heads // indexing.sets, _MOST_POINTED, room)


def _too_few(indexing: Indexing) -> float:
    """Units of which there are too few to turn away from one: nearly as many as are chosen.

    A unit's score must be that of one key; of several keys' largest none can be turned away from.
    """
    is_one = indexing.unit_keys == 1 or indexing.pooling is Pooling.MEAN
    return 4 * indexing.top + 4 if is_one else math.inf


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
        far: Tensor = (out.float() - value).norm(dim=-1) / value.norm(dim=-1)
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
        """For the tokens first .. end - 1 of a sequence, all of which one step stores and which attend to all keys.

        In turn one of _places, and one that the token may not see: the last one before its window, or the token after
        it; any other one where there are none.
        """
        token, turn = _turns(first, end, problem.num_q_heads, generator.device)
        windowed = problem.window_left != UNLIMITED_WINDOW
        lowest = (token - problem.window_left).clamp(min=0) if windowed else torch.zeros_like(token)
        highest = token if problem.causal else torch.full_like(token, end - 1)
        before, after = lowest - 1, token + 1
        is_hidden = (before >= 0) | (problem.causal & (after < end))
        is_hidden &= turn == _NUM_KINDS - 1
        hidden = torch.where(before >= 0, before, after)
        places = _places(lowest, highest, turn, problem.page_size, generator)
        return cls(torch.where(is_hidden, hidden, places), ~is_hidden)

    @classmethod
    def of_selection(cls, problem: Problem, pointed: Pointed, first: int, end: int) -> Asked:
        """For tokens that attend to what an indexer has chosen: what it pointed to, and what it has turned away from.

        In every other turn of the last kind the token after is asked for, which may lie in a unit that was chosen.
        """
        device = pointed.key.device
        token, turn = _turns(first, end, problem.num_q_heads, device)
        head = torch.arange(problem.num_q_heads, device=device)
        kv_head = head // problem.gqa_ratio
        of_set = kv_head if pointed.key.shape[1] > 1 else torch.zeros_like(kv_head)
        key = pointed.key[:, of_set, head % pointed.key.shape[2]]
        away = pointed.away[:, of_set]
        asks_after = (turn == _NUM_KINDS - 1) & (token + 1 < end) & (token % 2 == 0)
        asks_away = (turn == _NUM_KINDS - 1) & (away >= 0) & ~asks_after
        key = torch.where(asks_after, token + 1, torch.where(asks_away, away, key))
        sees_none = pointed.sees_none[:, None]
        return cls(key, ~(asks_after | asks_away | sees_none))


@dataclass(frozen=True, slots=True)
class Pointed:
    """What each set of an indexer's heads points to, and what it turns away from, for a sequence's new tokens.

    key:       int64 [n, sets, m], places in the sequence's KV; head h of a set points to key h % m
    away:      int64 [n, sets], a place that is not to be chosen; -1: there is none
    sees_none: bool [n], whether the token sees no whole unit, and so nothing
    """

    key: Tensor
    away: Tensor
    sees_none: Tensor

    @classmethod
    def of(cls, problem: Problem, indexer: Indexer, first: int, end: int, generator: torch.Generator) -> Pointed:
        """For the tokens first .. end - 1 of a sequence. Raises BadProblem where too few units are chosen."""
        indexing, device = indexer.indexing, generator.device
        num_pointed = _num_pointed(indexer)
        token, turn = _turns(first, end, indexing.sets * num_pointed, device)
        whole = (token + 1) // indexing.unit_tokens * indexing.unit_tokens
        highest = (whole if indexing.last_unit is LastUnit.LEFT_OUT else token + 1) - 1
        sees_none = highest[:, 0] < 0
        highest = highest.clamp(min=0)
        key = _places(torch.zeros_like(token), highest, turn, problem.page_size, generator)
        key = key.view(-1, indexing.sets, num_pointed)
        return cls(key, _turned_away(indexing, key, token[:, : indexing.sets], generator), sees_none)


def _turned_away(indexing: Indexing, key: Tensor, token: Tensor, generator: torch.Generator) -> Tensor:
    """int64 [n, sets]: a key whose unit is not chosen, where units are many times more than are chosen; else -1."""
    units = (token + 1) // indexing.unit_tokens
    share = torch.rand(token.shape, generator=generator, device=token.device)
    unit = indexing.first + (share * (units - indexing.first - indexing.last - 1).clamp(min=1)).long()
    away = unit * indexing.unit_tokens + indexing.unit_tokens - 1
    is_pointed_to = (key // indexing.unit_tokens == unit[..., None]).any(-1)
    usable = (units > _too_few(indexing)) & ~is_pointed_to
    return torch.where(usable, away, -1)


def _turns(first: int, end: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [n, columns]: each token's place, and which kind of key its columns ask for."""
    token = torch.arange(first, end, device=device)[:, None].expand(-1, columns)
    turn = torch.arange(columns, device=device) + torch.arange(end - first, device=device)[:, None]
    return token, turn % _NUM_KINDS


def _places(lowest: Tensor, highest: Tensor, turn: Tensor, page_size: int, generator: torch.Generator) -> Tensor:
    """Keys from lowest to highest, both included, int64 as these are; which, says the turn.

    The first, the last, the one after the first, the one before the last, one at an edge of a page, one at a power of
    two, and any; any where that is outside.
    """
    device = turn.device
    share = torch.rand(turn.shape, generator=generator, device=device)
    anywhere = lowest + (share * (highest - lowest + 1)).long()
    beside = torch.randint(-1, 1, turn.shape, generator=generator, device=device)
    at_page = anywhere // page_size * page_size + beside
    at_power = (1 << (share * 18).long()) + beside
    kinds = (lowest, highest, lowest + 1, highest - 1, at_page, at_power, anywhere, anywhere)
    picked = torch.stack(kinds, -1).gather(-1, turn[..., None])[..., 0]
    return torch.where((picked >= lowest) & (picked <= highest), picked, anywhere)


@dataclass(frozen=True, slots=True)
class IndexHaystack:
    """The index keys of one sequence in one layer.

    k: [kv_len, dim], each row sqrt(dim) long; of pooled keys the row of a pool's last token is its key, and others are
       NaN. The keys of a unit that is scored by their mean are alike
    """

    k: Tensor

    @classmethod
    def random(cls, problem: Problem, indexer: Indexer, kv_len: int, generator: torch.Generator) -> IndexHaystack:
        """Of the problem's dtype, on the generator's device."""
        indexing, dim = indexer.indexing, indexer.head_dim
        alike = indexing.unit_tokens if indexing.pooling is Pooling.MEAN else indexing.key_tokens
        rows = torch.randn(-(-kv_len // alike), dim, generator=generator, device=generator.device)
        rows = rows * (math.sqrt(dim) / rows.norm(dim=-1, keepdim=True))
        return cls(rows.repeat_interleave(alike, 0)[:kv_len].to(problem.dtype))

    def stored(self, tokens: slice, indexing: Indexing) -> Tensor:
        """What a step that has these tokens stores for them, [n, dim]."""
        place = torch.arange(tokens.start, tokens.stop, device=self.k.device)
        ends_pool = (place + 1) % indexing.key_tokens == 0
        return self.k[tokens].masked_fill(~ends_pool[:, None], float("nan"))

    def queries(self, pointed: Pointed, problem: Problem, indexer: Indexer) -> Tensor:
        """[n, index heads, dim] of the problem's dtype."""
        num_pointed, heads = pointed.key.shape[2], indexer.num_heads // indexer.indexing.sets
        head = torch.arange(heads, device=self.k.device) % num_pointed
        towards = self.k[pointed.key[:, :, head]].float()
        away = self.k[pointed.away.clamp(min=0)].float() * (pointed.away >= 0)[..., None]
        q = (towards - away[:, :, None]).flatten(1, 2)
        return (q / (indexer.indexing.scale * math.sqrt(indexer.head_dim))).to(problem.dtype)
