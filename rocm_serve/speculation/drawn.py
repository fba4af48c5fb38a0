"""Sampled drafts: drafts are sampled from the draft model's distribution, and accepted by rejection sampling.

If a request samples, its drafts may be sampled too: q is the softmax of the draft model's logits over the request's
temperature, p that of the verifying model. kernels/speculative/accept_sampled.py accepts a draft x with probability
min(1, p(x) / q(x)), and otherwise samples from the rest of p. So tokens are distributed by p, as without drafts, and
more drafts are accepted than if each had to equal the token that p samples by itself. The tokens differ from those
without drafts, but have the same distribution, and are the same for the same seed and drafts.

A tree of K branches has K first drafts, sampled without replacement, and each is continued by one draft per level. Only
their position decides which drafts are verified: choosing the likeliest, as in trees that are not sampled, would change
their distribution from q. Random numbers belong to an index in the text and a branch, so none is used twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.kernels.speculative.arguments import Probabilities, Verified
from rocm_attn.machine.sending import coming, sent
from rocm_attn.step.accepting import accept_sampled
from rocm_attn.step.host_ring import Fence, NoFence
from rocm_serve.request import Sequence
from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.speculation.beams import Level
from rocm_serve.speculation.drafts import NO_DRAFTS, NOT_DRAWN

_COLDEST = 1e-30
# The largest uniform number used: a sum times it stays below the sum.
_MOST_UNIFORM = 1 - 2**-23
# Another draft is drawn only if the drafts before it leave at least this part of q: less is rounding.
_LEAST_LEFT = 2**-16


def samples(sequence: Sequence) -> bool:
    """True if a sequence's drafts may be drawn: its tokens are, and it asks for nothing else."""
    return not sequence.sampler.is_greedy and sequence.parameters is None


def terms_of_drafts(sequences: Many[Sequence], num_levels: int, num_branches: int) -> npt.NDArray[np.float32]:
    """float32 [sequences, 1 + num_levels * num_branches]: a temperature, and a number per level and branch.

    The temperature is 0 if the likeliest drafts are taken. The numbers of a level are adjacent.
    """
    num_terms = num_levels * num_branches
    terms = np.zeros((len(sequences), 1 + num_terms), np.float32)
    for line, sequence in zip(terms, sequences, strict=True):
        if samples(sequence):
            line[0] = max(sequence.sampler.sampling.temperature, _COLDEST)
            first = sequence.num_new * num_branches
            line[1:] = [sequence.sampler.draft_number_at(first + term) for term in range(num_terms)]
    return terms


def drawn_level(level: Level, logits: Tensor, carried: Tensor, terms: Tensor, number: int) -> Level:
    """A level with drawn drafts in the place of the likeliest, for sequences that draw. May be captured.

    level:   [S, K] of the likeliest
    logits:  [S * B, vocab], after each of the B drafts before: one in the first level, else K
    carried: [S * B, width], of those
    terms:   float32 [S or more, 1 + levels * K]; see terms_of_drafts
    number:  of the level, from 0 on

    Branch b continues branch b. If q has fewer tokens than there are branches, scores of the others are -inf.
    """
    num_seqs, num_branches = level.token_ids.shape
    terms, first = terms[:num_seqs], 1 + number * num_branches
    uniform = terms[:, first : first + num_branches].clamp(max=_MOST_UNIFORM)
    temperature = terms[:, :1, None]
    x = logits.float().view(num_seqs, -1, logits.shape[-1])
    q = ((x - x.amax(-1, keepdim=True)) / temperature.clamp(min=_COLDEST)).softmax(-1)
    # The likeliest token is also taken of a row with NaN, whatever that token is.
    is_drawn = (temperature > 0) & q.sum(-1, keepdim=True).isfinite()
    q = torch.where(is_drawn, q, torch.zeros_like(q).scatter_(2, x.argmax(-1, keepdim=True), 1.0))
    own = carried.view(num_seqs, x.shape[1], carried.shape[1]).expand(-1, num_branches, -1)
    if number == 0:
        ids, is_left = _siblings(q[:, 0], uniform)
        branches = torch.zeros_like(level.branches)
    else:
        ids, is_left = _drawn_ids(q, uniform), torch.ones_like(uniform, dtype=torch.bool)
        branches = torch.arange(num_branches, dtype=torch.int32, device=q.device).expand(num_seqs, -1)
    draws = terms[:, :1] > 0
    return Level(
        torch.where(draws, ids, level.token_ids),
        torch.where(draws, branches, level.branches),
        torch.where(draws, torch.where(is_left, 0.0, float("-inf")), level.scores),
        torch.where(draws[:, :, None], own, level.carried),
        q,
    )


def _drawn_ids(weights: Tensor, uniform: Tensor) -> Tensor:
    """int32 [..]: a token of each row of weights [.., vocab], by a number of [0, 1) each."""
    reached = weights.cumsum(-1)
    return (reached > uniform[..., None] * reached[..., -1:]).int().argmax(-1).int()


def _siblings(q: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Drawn without replacement: int32 [S, K], and bool [S, K], True if there was anything left to draw.

    q: [S, vocab]; uniform: [S, K]
    """
    ids, is_left = list[Tensor](), list[Tensor]()
    weights, rest = q, torch.ones_like(q[:, 0])
    for branch in range(uniform.shape[1]):
        drawn = _drawn_ids(weights, uniform[:, branch])
        ids.append(drawn)
        is_left.append(rest > _LEAST_LEFT)
        at = drawn[:, None].long()
        rest = rest - q.gather(1, at)[:, 0]
        weights = weights.scatter(1, at, 0.0)
    return torch.stack(ids, 1), torch.stack(is_left, 1)


class AcceptedDrafts(NamedTuple):
    """A sequence's accepted drafts: their tokens and the one after them, -1 if there is none; their numbers."""

    token_ids: list[int]
    drafts: list[int]


class NothingDrawn:
    """The result of steps without drawn drafts."""

    def pick(self, step: ScheduledStep, logits: Tensor) -> NothingDrawn:
        return self

    def read(self) -> Mapping[int, AcceptedDrafts]:
        return {}


class AcceptedOnHost:
    """The accepted drafts, on their way to the host. words: int32 [trees, 1 + 2 W]; seqs: tree -> sequence"""

    def __init__(self, seqs: Many[int], words: Tensor, done: Fence) -> None:
        self._seqs, self._words, self._done = seqs, words, done

    def read(self) -> Mapping[int, AcceptedDrafts]:
        """Waits for them. Returns the accepted drafts of each sequence that has drawn ones."""
        self._done.synchronize()
        found, width = self._words.tolist(), self._words.shape[1] // 2
        return {
            seq: AcceptedDrafts(words[: 1 + count], [node - 1 for node in words[1 + width : 1 + width + count]])
            for seq, (count, *words) in zip(self._seqs, found, strict=True)
        }


class _Nodes(NamedTuple):
    """Nodes of trees, T in all: int32 [4, T] and float32 [4, T]. Per tree: nodes [trees], parents [trees, W]."""

    ints: npt.NDArray[np.int32]
    floats: npt.NDArray[np.float32]
    lens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]


class Rejection:
    """Accepts drawn drafts.

    probabilities: of the round, see DraftRunners
    num_branches:  of the round
    """

    def __init__(self, probabilities: Tensor, num_branches: int) -> None:
        self._probabilities, self._num_branches = probabilities, num_branches

    def pick(self, step: ScheduledStep, logits: Tensor) -> AcceptedOnHost | NothingDrawn:
        """Accepts drawn drafts of a step's sequences. logits: [num_seqs, rows, vocab]; see Speculation.pick"""
        seqs = [seq for seq in range(step.num_picks) if step.drafts.get(seq, NO_DRAFTS).place != NOT_DRAWN]
        if not seqs:
            return NothingDrawn()
        device, nodes = logits.device, _nodes_of(step, seqs, logits.shape[1], self._num_branches)
        row, ids, place, drawn_by = sent(nodes.ints, device)
        temperature, top_p, accept, draw = sent(nodes.floats, device)
        target = _probabilities(
            logits.flatten(0, 1)[row.long()], temperature, top_p, cut=bool((nodes.floats[1] < 1).any())
        )
        last = self._probabilities.shape[1] - 1
        draft = self._probabilities[place.long(), drawn_by.long().clamp_(max=last)]
        given = Verified(
            ids,
            sent(np.concatenate([[0], nodes.lens.cumsum()]).astype(np.int32), device),
            sent(nodes.lens, device),
            sent(nodes.parents, device),
        )
        accepted = accept_sampled(Probabilities(target, draft, accept.contiguous(), draw.contiguous()), given)
        words = coming(torch.cat((accepted.num_accepted[:, None], accepted.token_ids, accepted.path[:, 1:]), 1))
        done: Fence = torch.Event(device) if device.type != "cpu" else NoFence()
        done.record()
        return AcceptedOnHost(seqs, words, done)


def _nodes_of(step: ScheduledStep, seqs: Many[int], num_rows: int, num_branches: int) -> _Nodes:
    """Rows of logits, ids, places and the rows their children were drawn by; temperature, top_p and random numbers."""
    ints, floats = list[tuple[int, int, int, int]](), list[tuple[float, float, float, float]]()
    lens = np.array([1 + len(step.drafts[seq]) for seq in seqs], np.int32)
    parents = np.full((len(seqs), int(lens.max())), NO_PARENT, np.int32)
    for line, seq in zip(parents, seqs, strict=True):
        drafts, sampler, first = step.drafts[seq], step.sequences[seq].sampler, step.sequences[seq].num_new
        row = (seq + 1) * num_rows - 1 - len(drafts)
        root = sampler.draw(first)
        temperature = max(root.temperature, _COLDEST)
        ints.append((row, 0, drafts.place, 0))
        floats.append((temperature, root.top_p, 0.0, root.uniform))
        line[1 : 1 + len(drafts)] = np.array(drafts.parents, np.int32) + 1
        for node, (token, depth, branch) in enumerate(
            zip(drafts.token_ids, drafts.depths(), drafts.first_branches(), strict=True), 1
        ):
            # No draft comes after one of the last level, so its row of probabilities is not used.
            ints.append((row + node, token, drafts.place, 1 + (depth - 1) * num_branches + branch))
            accept = sampler.accept_at((first + depth - 1) * num_branches + branch)
            floats.append((temperature, root.top_p, accept, sampler.draw(first + depth).uniform))
    return _Nodes(
        np.ascontiguousarray(np.array(ints, np.int32).T),
        np.ascontiguousarray(np.array(floats, np.float32).T),
        lens,
        parents,
    )


def _probabilities(logits: Tensor, temperature: Tensor, top_p: Tensor, *, cut: bool) -> Tensor:
    """float32 [T, vocab], contiguous: the probabilities of plain sampling. cut: whether any top_p is below 1"""
    x = logits.float()
    weights = ((x - x.amax(-1, keepdim=True)) / temperature[:, None]).softmax(-1)
    if cut:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        mass = ordered.cumsum(-1)
        last = weights.shape[-1] - 1
        needed = torch.searchsorted(mass, top_p[:, None] * mass[:, -1:]).clamp_(max=last)
        kept = torch.arange(last + 1, device=logits.device) <= needed
        weights = torch.zeros_like(weights).scatter_(1, order, torch.where(kept, ordered, 0.0))
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.contiguous()
