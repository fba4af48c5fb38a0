"""Beams: draft trees by beam search: found level by level on the device, and built as trees on the host.

A level has K drafts per sequence. The next level has the K likeliest of all their continuations, by the product of
probabilities. The verified drafts are the likeliest of all levels. No draft is likelier than its parent, so the chosen
ones form a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_serve.speculation.drafts import LAST_TOKEN, NOT_DRAWN, DraftTree

_WORDS = 3  # words of a draft on its way to the host


class Level(NamedTuple):
    """The drafts of each sequence that stand at one depth.

    token_ids: int32 [S, K]
    branches:  int32 [S, K], the branch of the level before that each comes after; 0 in the first level
    scores:    float32 [S, K], the sum of the logarithms of probabilities; 0 if K is 1
    carried:   [S, K, width], rows that the draft model hands on to the step after each
    drawn_by:  float32 [S, B, vocab]: if drafts are drawn, the probabilities that they were drawn by, per draft that
               they come after: one in the first level, else K; if they are not, [S, 1, 0]
    """

    token_ids: Tensor
    branches: Tensor
    scores: Tensor
    carried: Tensor
    drawn_by: Tensor

    @classmethod
    def empty(cls, num_seqs: int, num_branches: int, carried: Tensor, vocab: int) -> Level:
        """Memory for a level. carried: [0, width], with its dtype, width and device; vocab: of drawn_by, or 0"""
        shape, device = (num_seqs, num_branches), carried.device
        return cls(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
            torch.zeros(*shape, carried.shape[1], dtype=carried.dtype, device=device),
            torch.zeros(num_seqs, 1, vocab, dtype=torch.float32, device=device),
        )

    @classmethod
    def first(cls, logits: Tensor, carried: Tensor, num_branches: int) -> Level:
        """Makes the first level. logits: [S, vocab]; carried: [S, width]"""
        before = torch.zeros(logits.shape[0], 1, dtype=torch.float32, device=logits.device)
        return cls._best(logits, before, carried[:, None], num_branches)

    def next(self, logits: Tensor, carried: Tensor) -> Level:
        """Makes the next level. logits: [S * K, vocab], after each draft of this level; carried: [S * K, width]"""
        num_seqs, num_branches = self.scores.shape
        return self._best(logits, self.scores, carried.view(num_seqs, num_branches, carried.shape[1]), num_branches)

    @classmethod
    def _best(cls, logits: Tensor, before: Tensor, carried: Tensor, num_branches: int) -> Level:
        """before: float32 [S, B], scores of the drafts before; carried: [S, B, width]"""
        num_seqs, num_before = before.shape
        not_drawn = before.new_empty(num_seqs, 1, 0)
        if num_branches == 1:
            ids = logits.argmax(-1, keepdim=True).int()
            return cls(ids, torch.zeros_like(ids), before, carried, not_drawn)
        # A vocabulary may be smaller than the number of branches; the last of the tokens stands for the missing ones.
        num_each = min(num_branches, logits.shape[-1])
        of_each = logits.float().log_softmax(-1).topk(num_each, -1)
        scores = (of_each.values.view(num_seqs, num_before, num_each) + before[:, :, None]).flatten(1)
        num_found = min(num_branches, scores.shape[1])
        best = scores.topk(num_found, -1)
        at = best.indices
        if num_found < num_branches:
            at = torch.cat([at, at[:, -1:].expand(-1, num_branches - num_found)], 1)
        branches = at.div(num_each, rounding_mode="floor")
        ids = of_each.indices.view(num_seqs, -1).gather(1, at)
        return cls(
            ids.int(),
            branches.int(),
            scores.gather(1, at),
            carried.gather(1, branches[:, :, None].expand(-1, -1, carried.shape[2])),
            not_drawn,
        )

    def put(self, level: Level, rows: Tensor) -> None:
        """Copies the first sequences of a level. rows: int64 [n], where each goes"""
        for to, given in zip(self, level, strict=True):
            to.index_copy_(0, rows, given[: len(rows)])

    def put_first(self, level: Level) -> None:
        """Copies a level into the first sequences."""
        for to, given in zip(self, level, strict=True):
            to[: len(given)].copy_(given)

    def of(self, num_seqs: int) -> Level:
        """The level of the first num_seqs sequences, as views."""
        return Level(*(tensor[:num_seqs] for tensor in self))

    def words(self) -> Tensor:
        """int32 [S, 3, K]: the words of a level that the host reads."""
        return torch.stack((self.token_ids, self.branches, self.scores.view(torch.int32)), 1)


class BeamLevels:
    """All levels of some sequences, read by the host. words: int32 [S, levels, 3, K]; see Level.words"""

    def __init__(self, words: Tensor) -> None:
        on_host: npt.NDArray[np.int32] = words.cpu().numpy()
        num_seqs, self._num_levels, num_words, self._num_branches = on_host.shape
        assert num_words == _WORDS
        self._token_ids = on_host[:, :, 0].reshape(num_seqs, -1)
        self._is_chain = self._num_branches == 1
        if not self._is_chain:
            first = (np.arange(self._num_levels, dtype=np.int32) - 1) * self._num_branches
            parents = on_host[:, :, 1] + first[:, None]
            parents[:, 0] = LAST_TOKEN
            self._parents = parents.reshape(num_seqs, -1)
            scores = np.ascontiguousarray(on_host[:, :, 2]).view(np.float32).reshape(num_seqs, -1)
            self._num_drawn = (scores[:, : self._num_branches] > -np.inf).sum(1)
            # The sort is stable: of two equal ones the first stays first, so a parent goes before its child.
            self._best = np.argsort(-scores, axis=1, kind="stable")

    def drafts(self, seq: int, most: int, place: int) -> DraftTree:
        """A sequence's likeliest drafts; if drafts were drawn, the first ones. place: of DraftTree"""
        if self._is_chain:
            return DraftTree.chain(tuple(self._token_ids[seq, :most].tolist()), place)
        if place != NOT_DRAWN:
            return self._drawn(seq, most, place)
        appended = np.sort(self._best[seq, :most])
        number_of = {LAST_TOKEN: LAST_TOKEN} | {place: number for number, place in enumerate(appended.tolist())}
        parents = tuple(number_of[parent] for parent in self._parents[seq, appended].tolist())
        return DraftTree(tuple(self._token_ids[seq, appended].tolist()), parents)

    def _drawn(self, seq: int, most: int, place: int) -> DraftTree:
        """The first branch as far as there is room, then the others level by level: by place, not by token."""
        others = range(1, int(self._num_drawn[seq]))
        nodes = [(level, 0) for level in range(self._num_levels)]
        nodes = [*nodes, *((level, branch) for level in range(self._num_levels) for branch in others)][:most]
        number_of = {node: number for number, node in enumerate(nodes)}
        return DraftTree(
            tuple(int(self._token_ids[seq, level * self._num_branches + branch]) for level, branch in nodes),
            tuple(number_of.get((level - 1, branch), LAST_TOKEN) for level, branch in nodes),
            place,
        )

    def fed(self, seq: int) -> Sequence[int]:
        """The drafts of a sequence whose K and V lie in their places: those of a chain except its last one."""
        fed: list[int] = self._token_ids[seq, :-1].tolist() if self._is_chain else []
        return fed
