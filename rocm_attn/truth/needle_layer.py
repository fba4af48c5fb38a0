"""NeedleLayer: the needles of one layer in all sequences, the inputs of a step, and a check of its outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rocm_attn.problem import AllKeys, Indexer, PoolKind, Problem
from rocm_attn.step.protocols import Attended, LayerCalls
from rocm_attn.truth.choosers import ByIndexer, Chooser, ChosenLayer, NewChooser
from rocm_attn.truth.needles import Haystack, NeedleQueries, Sizes, margin_of, sharpness_of

# A result that is not a key's value is about sqrt(2) away from it; the sum of many other values is about 1 away.
_NOT_ITS_VALUE = 0.5
# How many times the mean query's weight of other keys one query may have: in short rows a key may lie near another.
_TIMES_THE_MEAN = 20
# The most wrong needles that are named per sequence and comparison.
_MOST_NAMED = 8
# Tokens whose outputs are compared at once.
_COMPARED = 1024


@dataclass(slots=True)
class Tally:
    """Counts of one sequence in one layer.

    requested, hidden: keys that were asked for and may be seen, and those that may not
    missed, seen:  the visible keys that were not found, and the hidden ones that came back
    worst:         largest distance of a value that was found
    """

    requested: int = 0
    hidden: int = 0
    missed: int = 0
    seen: int = 0
    worst: float = 0.0

    @property
    def passed(self) -> bool:
        """True if something was asked for, and all of it was right."""
        return self.requested > 0 and self.missed == self.seen == 0


@dataclass(frozen=True, slots=True)
class WrongNeedle:
    """A needle that was not found, or one that was found although it is hidden.

    seq, token, head: the query: sequence of the step, new token of the sequence, query head
    key:              the key that was asked for, a place in the sequence's KV
    distance:         |out - v| / |v|, v being the value of the key
    """

    seq: int
    token: int
    head: int
    key: int
    visible: bool
    distance: float


def tolerance(problem: Problem) -> float:
    """Returns how far a value that was found may be from the stored one, as a fraction of its length.

    It is half a unit in the last place of the pool's encoding and of the output, and the weight of the other keys.
    """
    stored = torch.finfo(problem.page_format.encoding.dtype).eps
    return 1.25 * (stored / 2 + torch.finfo(problem.dtype).eps) + 0.01


class NeedleLayer:
    """One layer's needles, and tensors at fixed addresses for the inputs and outputs of a step.

    kv_len:      tokens of each sequence at the end
    num_tokens:  padded tokens of the largest step
    earlier:     the layer before it whose selection it may share
    sizes:       of its keys and values; 1 if they are not given
    new_chooser: makes what chooses the layer's keys, if its problem has an Indexer
    Raises BadProblem.
    """

    def __init__(
        self,
        problem: Problem,
        kv_len: Sequence[int],
        num_tokens: int,
        generator: torch.Generator,
        earlier: NeedleLayer | None,
        sizes: Sizes | None = None,
        new_chooser: NewChooser = ByIndexer,
    ) -> None:
        self.problem = problem
        self._generator = generator
        self._sharpness = sharpness_of(problem, max(kv_len))
        others = math.exp(-margin_of(problem, max(kv_len), self._sharpness))
        self._tolerance = tolerance(problem) + _TIMES_THE_MEAN * others
        self._haystacks = [Haystack.random(problem, length, generator, sizes) for length in kv_len]
        self._requested: list[NeedleQueries] = []
        self._chooser, self.source = Chooser(), earlier
        device = generator.device

        def rows(*shape: int, dtype: torch.dtype = problem.dtype) -> Tensor:
            return torch.zeros(num_tokens, *shape, dtype=dtype, device=device)

        self._q = rows(problem.num_q_heads, problem.head_dim)
        self._k = rows(problem.num_kv_heads, problem.head_dim)
        is_latent = problem.pool is PoolKind.LATENT
        self._v = self._k[..., : problem.v_head_dim] if is_latent else rows(problem.num_kv_heads, problem.v_head_dim)
        self._out = rows(problem.num_q_heads, problem.v_head_dim)
        columns = problem.fold_columns * (1 + problem.row.overlaps)
        self._values, self._gates = (rows(columns, dtype=torch.float32) for _ in range(2))
        self._folded = rows(problem.fold_columns, dtype=torch.float32)
        if isinstance(problem.indexer, Indexer):
            chosen = ChosenLayer(problem, problem.indexer, kv_len, num_tokens, generator)
            self._chooser, self.source = new_chooser(chosen), self

    def prepare(self, done: Sequence[int], q_len: Sequence[int]) -> None:
        """Sets the inputs of a step. done: tokens of each sequence before it; q_len: the new ones"""
        # Padding is NaN, so that any use of it shows.
        for rows in (self._q, self._k, self._v, self._out, self._values, self._gates):
            rows.fill_(float("nan"))
        self._requested = []
        self._chooser.pointed.clear()
        at = 0
        for seq, (first, new) in enumerate(zip(done, q_len, strict=True)):
            here, there = slice(at, at + new), slice(first, first + new)
            self._chooser.point(seq, here, there)
            requested, haystack = self._ask(seq, there), self._haystacks[seq]
            self._q[here] = haystack.queries(requested, self.problem, self._sharpness)
            self._k[here] = haystack.k[there]
            if self.problem.fold_columns:
                self._scatter(seq, here, there)
            if self.problem.pool is not PoolKind.LATENT:
                self._v[here] = haystack.v[there]
            self._requested.append(requested)
            at += new

    def _scatter(self, seq: int, here: slice, there: slice) -> None:
        """Sets values and gates of which fold() makes the needles of rows: one token of each row has all the weight."""
        row = self.problem.row
        needles = [self._haystacks[seq].k[:, 0], *(self._chooser.also(seq) if row.also else ())]
        token = torch.arange(there.start, there.stop, device=self._k.device)
        end = token // row.tokens * row.tokens + row.tokens - 1
        has_weight = token % row.tokens == end // row.tokens % row.tokens
        wanted = torch.cat([each[end.clamp(max=len(each) - 1)].float() for each in needles], 1)
        wanted = pad(wanted, (0, self.problem.fold_columns - wanted.shape[1]))
        # Any part of what has no weight would be noticed.
        self._values[here], self._gates[here] = 1e3, -1e4
        own = slice(-self.problem.fold_columns, None)
        self._values[here, own] = torch.where(has_weight[:, None], wanted, 1e3)
        self._gates[here, own] = torch.where(has_weight[:, None], 0.0, -1e4)

    def _ask(self, seq: int, there: slice) -> NeedleQueries:
        if isinstance(self.problem.indexer, AllKeys):
            return NeedleQueries.of(self.problem, there.start, there.stop, self._generator)
        assert self.source is not None
        pointed = self.source._chooser.pointed[seq]
        return NeedleQueries.of_selection(self.problem, pointed, there.start, there.stop)

    def run(self, layers: LayerCalls, number: int, num_tokens: int) -> Tensor:
        """Stores, selects and attends. Returns the outputs, [num_tokens, q_heads, v_head_dim]. May be captured."""
        q, k, v, out = (rows[:num_tokens] for rows in (self._q, self._k, self._v, self._out))
        if self.problem.fold_columns:
            folded, dim = self._folded[:num_tokens], self.problem.head_dim
            layers.fold(number, self._values[:num_tokens], self._gates[:num_tokens], folded)
            k.copy_(folded[:, None, :dim])
            if self.problem.row.also:
                self._chooser.take(folded[:, dim:])
        if isinstance(self.problem.indexer, AllKeys):
            layers.store_and_attend(number, q, k, v, out)
            return out
        layers.store(number, k, v)
        self._chooser.choose(layers, number, num_tokens)
        layers.attend_selected(number, q, out)
        return out

    def attended(self, num_tokens: int) -> Attended:
        """The attention of the last step."""
        place = self._out[:num_tokens]
        return Attended(self._q[:num_tokens].clone(), place.clone(), place)

    def attend_again(
        self, layers: LayerCalls, number: int, num_tokens: int, context: Callable[[], AbstractContextManager[None]]
    ) -> Attended:
        """Attends to all keys again, within the context, and leaves the outputs of the last step as they were."""
        before = self.attended(num_tokens)
        with context():
            layers.attend(number, self._q[:num_tokens], before.place)
        again = self.attended(num_tokens)
        before.place.copy_(before.out)
        return again

    def judge(self, tallies: Sequence[Tally]) -> Iterator[WrongNeedle]:
        """Adds the last step's results to the tallies, and yields some of the wrong needles."""
        at = 0
        for seq, (haystack, requested, tally) in enumerate(zip(self._haystacks, self._requested, tallies, strict=True)):
            for first in range(0, len(requested.key), _COMPARED):
                part = requested.part(slice(first, first + _COMPARED))
                far = haystack.distance(part, self._out[at : at + len(part.key)], self.problem)
                at += len(part.key)
                missed = part.visible & ~(far <= self._tolerance)
                seen = ~part.visible & ~((far >= _NOT_ITS_VALUE) & far.isfinite())
                worst = far.masked_fill(~part.visible | missed, 0.0).max()
                num_visible, num_missed, num_seen = torch.stack([part.visible.sum(), missed.sum(), seen.sum()]).tolist()
                tally.requested += num_visible
                tally.hidden += part.visible.numel() - num_visible
                tally.missed += num_missed
                tally.seen += num_seen
                tally.worst = max(tally.worst, float(worst))
                for token, head in (missed | seen).nonzero()[:_MOST_NAMED].tolist():
                    key, visible = int(part.key[token, head]), bool(part.visible[token, head])
                    yield WrongNeedle(seq, first + token, head, key, visible, float(far[token, head]))
