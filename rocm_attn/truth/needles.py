"""Needles: keys that only the right token's query finds, and the queries that ask for them.

Every key is a needle: a random direction of length sqrt(D), with no other key near it. A query in the direction of key
p, of length `sharpness` after scaling, has these logits:

    of key p      a * sqrt(D)          a: sharpness, D: head_dim
    of another    about N(0, a * a)

So all L other keys together have about L * exp(a * a / 2 - a * sqrt(D)) of the weight of key p. This is negligible for
rows and lengths of real models. The output is then v[p], so it is known without computing attention. Keys that a query
may not see are asked for too. Their values must not come back.

Index keys are needles too. The heads of an indexer point to a few keys, which are selected among noise. They may also
turn away from one key, which is not selected. Queries then ask for keys of both kinds.

Positions that were wrong before are asked for more often than others: the first and the last key that a token sees and
their neighbours, edges of pages, powers of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.errors import BadProblem
from rocm_attn.problem import UNLIMITED_WINDOW, Indexer, Indexing, LastUnit, Pooling, PoolKind, Problem

# All other keys together weigh at most exp(-_LEAST_MARGIN) of the one that is asked for.
_LEAST_MARGIN = 5.0
_SHARPNESS = tuple(0.25 * step for step in range(2, 97))
# The number of kinds of places that are asked for in turn. The last kind is hidden; see NeedleQueries.of and _places.
_NUM_KINDS = 8
# The most keys that each set of an indexer's heads points to. The rest of its selection is noise.
_MOST_POINTED = 2
# The allowed fraction of queries in which noise scores more than the keys that an indexer's heads point to.
_OUTDONE = 1e-6
# The part of sqrt(dim) that remains of a pointed key's score if heads have unequal weights.
_LEAST_POINTING = 0.85


def sharpness_of(problem: Problem, kv_len: int) -> float:
    """Returns the length of scaled queries that tells kv_len keys apart with the largest margin on both sides.

    Raises BadProblem if rows are too short for that.
    """

    def margin(sharpness: float) -> float:
        return margin_of(problem, kv_len, sharpness)

    best = max(_SHARPNESS, key=margin)
    if margin(best) < _LEAST_MARGIN:
        raise BadProblem(
            f"rows of {problem.head_dim} elements{' with a soft cap' * bool(problem.logits_soft_cap)} do not tell "
            f"{kv_len} keys apart; test shorter lengths"
        )
    # A margin of 12 is enough: rounding of larger logits costs more than a larger margin gains.
    return next(sharpness for sharpness in _SHARPNESS if margin(sharpness) >= min(margin(best), 12.0))


def margin_of(problem: Problem, kv_len: int, sharpness: float) -> float:
    """Returns ln(weight of the key / weight of all others) of the mean query. A soft cap lowers it."""
    score, cap = sharpness * math.sqrt(problem.head_dim), problem.logits_soft_cap
    return (cap * math.tanh(score / cap) if cap else score) - sharpness**2 / 2 - math.log(max(kv_len, 2))


def check_indexer(indexer: Indexer, kv_len: int) -> None:
    """Raises BadProblem if noise may be selected in place of the keys that the heads of an indexer point to.

    A key that heads point to scores sqrt(dim) for each direction that points to it. Any other key scores noise for all
    directions, which share the key that they turn away from: N(0, 6) for two directions, N(0, 2) for one. Up to as
    many of these keys as there is room for may score more.
    """
    indexing = indexer.indexing
    num_pointed = _num_pointed(indexer)
    room = indexing.top - indexing.first - indexing.last - num_pointed
    # With this mean, a Poisson variable exceeds `room` with a probability of less than _OUTDONE.
    mean = math.exp((math.log(_OUTDONE) + math.lgamma(room + 2)) / (room + 1))
    keys, units = kv_len // indexing.key_tokens, kv_len // indexing.unit_tokens
    directions = (6 if num_pointed > 1 else 2) if units > _too_few(indexing) else num_pointed
    noise = math.sqrt(directions) * NormalDist().inv_cdf(1 - mean / keys) if keys > mean else 0.0
    if units > indexing.top and noise > _LEAST_POINTING * math.sqrt(indexer.head_dim):
        raise BadProblem(
            f"index rows of {indexer.head_dim} elements with {indexing.top} selected units do not tell {keys} keys "
            "apart; test shorter lengths"
        )


def _num_pointed(indexer: Indexer) -> int:
    """Returns the number of keys that each set of heads points to. Raises BadProblem if too few units are selected."""
    indexing = indexer.indexing
    room = indexing.top - indexing.first - indexing.last
    if room < 1:
        raise BadProblem(f"an indexer that selects by {indexing} selects only the forced units; raise top")
    return min(indexer.num_heads // indexing.sets, _MOST_POINTED, room)


def _too_few(indexing: Indexing) -> float:
    """Returns the number of units up to which none is turned away from, because too many of them are selected.

    A unit's score must be that of one key. No unit can be turned away from by the largest of several keys' scores.
    """
    is_one = indexing.unit_keys == 1 or indexing.pooling is Pooling.MEAN
    return 4 * indexing.top + 4 if is_one else math.inf


class Sizes(NamedTuple):
    """How large the elements of keys and values are, float32 [kv_heads, 1] each.

    Pages of eight bits with a fixed scale hold only elements that are not much larger than it.
    """

    k: Tensor
    v: Tensor

    @classmethod
    def ones(cls, problem: Problem, device: torch.device) -> Sizes:
        one = torch.ones(problem.num_kv_heads, 1, device=device)
        return cls(one, one)


@dataclass(frozen=True, slots=True)
class Haystack:
    """The keys and values of one sequence in one layer, all of them needles.

    k: [kv_len, kv_heads, head_dim], each row sqrt(head_dim) times its head's size long
    v: [kv_len, kv_heads, v_head_dim]; in a latent layer the first part of k
    k_size: float32 [kv_heads, 1]
    """

    k: Tensor
    v: Tensor
    k_size: Tensor

    @classmethod
    def random(cls, problem: Problem, kv_len: int, generator: torch.Generator, sizes: Sizes | None = None) -> Haystack:
        """Makes keys and values of the problem's dtype, on the generator's device. sizes: 1 if they are not given"""
        dtype, device = problem.dtype, generator.device

        def rows(dim: int) -> Tensor:
            return torch.randn(kv_len, problem.num_kv_heads, dim, generator=generator, device=device)

        k = rows(problem.head_dim)
        k_size, v_size = sizes or Sizes.ones(problem, device)
        k = (k * (k_size * math.sqrt(problem.head_dim) / k.norm(dim=-1, keepdim=True))).to(dtype)
        is_latent = problem.pool is PoolKind.LATENT
        v = k[..., : problem.v_head_dim] if is_latent else (rows(problem.v_head_dim) * v_size).to(dtype)
        return cls(k, v, k_size)

    @property
    def kv_len(self) -> int:
        return self.k.shape[0]

    def queries(self, requested: NeedleQueries, problem: Problem, sharpness: float) -> Tensor:
        """Returns [n, q_heads, head_dim] of the problem's dtype: each query has the direction of its key."""
        length = sharpness / (problem.scale * math.sqrt(problem.head_dim))
        heads = requested.kv_heads(problem)
        return (self.k[requested.key, heads].float() * (length / self.k_size[heads] ** 2)).to(problem.dtype)

    def distance(self, requested: NeedleQueries, out: Tensor, problem: Problem) -> Tensor:
        """Returns float32 [n, q_heads]: |out - v| / |v|, v being the value of the key; inf if out is NaN or infinite.

        out: [n, q_heads, v_head_dim]
        """
        value = self.v[requested.key, requested.kv_heads(problem)].float()
        far: Tensor = (out.float() - value).norm(dim=-1) / value.norm(dim=-1)
        return far.nan_to_num(math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class NeedleQueries:
    """The keys that the query heads of a sequence's new tokens ask for.

    key:     int64 [n, q_heads], a place in the sequence's KV
    visible: bool [n, q_heads], whether the head may see it; if not, its value must not come back
    """

    key: Tensor
    visible: Tensor

    def kv_heads(self, problem: Problem) -> Tensor:
        """Returns int64 [q_heads]: the KV head that each query head reads."""
        return torch.arange(self.key.shape[1], device=self.key.device) // problem.gqa_ratio

    def part(self, tokens: slice) -> NeedleQueries:
        """Returns the keys of some of the tokens."""
        return NeedleQueries(self.key[tokens], self.visible[tokens])

    @classmethod
    def of(cls, problem: Problem, first: int, end: int, generator: torch.Generator) -> NeedleQueries:
        """Returns keys for tokens first .. end - 1 of a sequence, which one step stores and which attend to all keys.

        They are keys of _places in turn, and sometimes a hidden one: the last one before the token's window or chunk,
        or the token after it; a visible one if neither exists. A row of several tokens has the place of its last one.
        """
        token, turn = _turns(first, end, problem.num_q_heads, generator.device)
        windowed, of_row = problem.window_left != UNLIMITED_WINDOW, problem.row.tokens
        lowest = (token - problem.window_left).clamp(min=0) if windowed else torch.full_like(token, of_row - 1)
        if problem.chunk:
            lowest = torch.maximum(lowest, token - token % problem.chunk)
        right = end if problem.window_right == UNLIMITED_WINDOW else problem.window_right
        highest = ((token + 1 + right) // of_row * of_row - 1).clamp(max=end - 1)
        before, after, sees_none = lowest - of_row, highest + of_row, highest < lowest
        is_hidden = (before >= 0) | (after < end)
        is_hidden &= turn == _NUM_KINDS - 1
        hidden = torch.where(before >= 0, before, after)
        places = _row_end(_places(lowest, highest.clamp(min=0), turn, problem.page_size, generator), problem)
        return cls(torch.where(is_hidden, hidden, places.clamp(max=end - 1)), ~(is_hidden | sees_none))

    @classmethod
    def of_selection(cls, problem: Problem, pointed: Pointed, first: int, end: int) -> NeedleQueries:
        """Returns keys for tokens that attend to a selection: those that an indexer points to, or turns away from.

        Every other time in the last kind's turn it is the next token instead, which may be in a selected unit.
        """
        device = pointed.key.device
        token, turn = _turns(first, end, problem.num_q_heads, device)
        head = torch.arange(problem.num_q_heads, device=device)
        kv_head = head // problem.gqa_ratio
        of_set = kv_head if pointed.key.shape[1] > 1 else torch.zeros_like(kv_head)
        key = _row_end(pointed.key[:, of_set, head % pointed.key.shape[2]], problem).clamp(max=end - 1)
        away, of_row = pointed.away[:, of_set], problem.row.tokens
        after = (token + 1) // of_row * of_row + of_row - 1
        queries_after = (turn == _NUM_KINDS - 1) & (after < end) & (token % 2 == 0)
        queries_away = (turn == _NUM_KINDS - 1) & (away >= 0) & ~queries_after
        key = torch.where(queries_after, after, torch.where(queries_away, away, key))
        sees_none = pointed.sees_none[:, None]
        return cls(key, ~(queries_after | queries_away | sees_none))


@dataclass(frozen=True, slots=True)
class Pointed:
    """The keys that sets of an indexer's heads point to and turn away from, for a sequence's new tokens.

    key:       int64 [n, sets, m], places in the sequence's KV; head h of a set points to key h % m
    away:      int64 [n, sets], a place that must not be selected; -1: there is none
    sees_none: bool [n], whether the token sees no whole unit, and so no key
    """

    key: Tensor
    away: Tensor
    sees_none: Tensor

    @classmethod
    def of(cls, problem: Problem, indexer: Indexer, first: int, end: int, generator: torch.Generator) -> Pointed:
        """Makes keys for tokens first .. end - 1 of a sequence. Raises BadProblem if too few units are selected."""
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
    """Returns int64 [n, sets]: a key whose unit is not selected, or -1 if there are too few units; see _too_few."""
    units = (token + 1) // indexing.unit_tokens
    share = torch.rand(token.shape, generator=generator, device=token.device)
    unit = indexing.first + (share * (units - indexing.first - indexing.last - 1).clamp(min=1)).long()
    away = unit * indexing.unit_tokens + indexing.unit_tokens - 1
    is_pointed_to = (key // indexing.unit_tokens == unit[..., None]).any(-1)
    usable = (units > _too_few(indexing)) & ~is_pointed_to
    return torch.where(usable, away, -1)


def _turns(first: int, end: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns int64 [n, columns] twice: each token's place, and the kind of key that its columns ask for."""
    token = torch.arange(first, end, device=device)[:, None].expand(-1, columns)
    turn = torch.arange(columns, device=device) + torch.arange(end - first, device=device)[:, None]
    return token, turn % _NUM_KINDS


def _row_end(key: Tensor, problem: Problem) -> Tensor:
    """Returns the places of the last tokens of the rows that keys lie in."""
    tokens = problem.row.tokens
    return key // tokens * tokens + tokens - 1


def _places(lowest: Tensor, highest: Tensor, turn: Tensor, page_size: int, generator: torch.Generator) -> Tensor:
    """Returns keys from lowest to highest, both included, int64 of the same shape; turn says which kind.

    The kinds are the first, the last, the one after the first, the one before the last, one at an edge of a page, one
    at a power of two, and any. It is any key if the kind's place is out of range.
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

    k: [kv_len, dim], each row sqrt(dim) long. If keys are pooled, the row of a pool's last token is its key, and other
       rows are stored as NaN. The keys of a unit that is scored by their mean are all equal
    """

    k: Tensor

    @classmethod
    def random(cls, problem: Problem, indexer: Indexer, kv_len: int, generator: torch.Generator) -> IndexHaystack:
        """Makes keys of the problem's dtype, on the generator's device."""
        indexing, dim = indexer.indexing, indexer.head_dim
        alike = indexing.unit_tokens if indexing.pooling is Pooling.MEAN else indexing.key_tokens
        rows = torch.randn(-(-kv_len // alike), dim, generator=generator, device=generator.device)
        rows = rows * (math.sqrt(dim) / rows.norm(dim=-1, keepdim=True))
        return cls(rows.repeat_interleave(alike, 0)[:kv_len].to(problem.dtype))

    def stored(self, tokens: slice, indexing: Indexing) -> Tensor:
        """Returns the index keys that a step with these tokens stores, [n, dim]."""
        place = torch.arange(tokens.start, tokens.stop, device=self.k.device)
        ends_pool = (place + 1) % indexing.key_tokens == 0
        return self.k[tokens].masked_fill(~ends_pool[:, None], float("nan"))

    def queries(self, pointed: Pointed, problem: Problem, indexer: Indexer) -> Tensor:
        """Returns index queries, [n, index heads, dim], of the problem's dtype."""
        num_pointed, heads = pointed.key.shape[2], indexer.num_heads // indexer.indexing.sets
        head = torch.arange(heads, device=self.k.device) % num_pointed
        towards = self.k[pointed.key[:, :, head]].float()
        away = self.k[pointed.away.clamp(min=0)].float() * (pointed.away >= 0)[..., None]
        q = (towards - away[:, :, None]).flatten(1, 2)
        return (q / (indexer.indexing.scale * math.sqrt(indexer.head_dim))).to(problem.dtype)
