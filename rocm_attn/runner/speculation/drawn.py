"""Drafts that are drawn: by probabilities of their own, and accepted by rejection sampling.

Where a request samples, its drafts may be drawn as its tokens are: q, the softmax of the drafting model's logits over
the request's temperature. The model that verifies gives p, and kernels/speculative/accept_sampled.py accepts a draft x
with the probability min(1, p(x) / q(x)), and draws from what is left of p where it does not. So tokens come by p, as
without drafts, and more drafts are right than where each must be the one token that p draws by itself. They are other
tokens than without drafts: of the same distribution, and the same for the same seed and drafts.
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
from rocm_attn.runner.request import Sequence
from rocm_attn.runner.scheduler import ScheduledStep
from rocm_attn.runner.sending import coming, sent
from rocm_attn.runner.speculation.beams import Level
from rocm_attn.runner.speculation.drafts import NO_DRAFTS, NOT_DRAWN
from rocm_attn.step.accepting import accept_sampled
from rocm_attn.step.host_ring import Fence, NoFence

_COLDEST = 1e-30
# A uniform number that a sum times it stays below the sum.
_MOST_UNIFORM = 1 - 2**-23


def samples(sequence: Sequence) -> bool:
    """Whether a sequence's drafts may be drawn: its tokens are, and it asks for nothing else."""
    return not sequence.sampler.is_greedy and sequence.asks is None


def terms_of_drafts(sequences: Many[Sequence], num_levels: int) -> npt.NDArray[np.float32]:
    """float32 [sequences, 1 + num_levels]: a temperature, 0 where the likeliest are taken; a number for each level."""
    terms = np.zeros((len(sequences), 1 + num_levels), np.float32)
    for line, sequence in zip(terms, sequences, strict=True):
        if samples(sequence):
            line[0] = max(sequence.sampler.sampling.temperature, _COLDEST)
            first = sequence.num_new
            line[1:] = [sequence.sampler.guess_at(first + level) for level in range(num_levels)]
    return terms


def drawn_level(level: Level, logits: Tensor, terms: Tensor, number: int) -> Level:
    """A level of chains whose drafts are drawn. May be captured.

    logits: [S, vocab]; terms: float32 [S or more, 1 + levels], as of terms_of_drafts; number: of the level, from 0 on
    """
    terms = terms[: logits.shape[0]]
    temperature, uniform = terms[:, :1], terms[:, 1 + number : 2 + number].clamp(max=_MOST_UNIFORM)
    x = logits.float()
    likeliest = level.token_ids.long()
    q = ((x - x.amax(-1, keepdim=True)) / temperature.clamp(min=_COLDEST)).softmax(-1)
    # Of a row that holds no numbers the likeliest is taken too, whatever that is.
    is_drawn = (temperature > 0) & q.sum(-1, keepdim=True).isfinite()
    q = torch.where(is_drawn, q, torch.zeros_like(q).scatter_(1, likeliest, 1.0))
    reached = q.cumsum(-1)
    ids = (reached > uniform * reached[:, -1:]).int().argmax(-1, keepdim=True)
    return level._replace(token_ids=torch.where(is_drawn, ids, likeliest).int(), drawn_by=q[:, None])


class NothingDrawn:
    """Steps none of whose drafts were drawn."""

    def pick(self, step: ScheduledStep, logits: Tensor) -> NothingDrawn:
        """As Rejection.pick."""
        return self

    def read(self) -> Mapping[int, Many[int]]:
        """As Accepted.read."""
        return {}


class Accepted:
    """What became of drawn drafts, on its way to the host. words: int32 [trees, 1 + W]; seqs: tree -> sequence"""

    def __init__(self, seqs: Many[int], words: Tensor, done: Fence) -> None:
        self._seqs, self._words, self._done = seqs, words, done

    def read(self) -> Mapping[int, Many[int]]:
        """Wait for it. Sequence -> its accepted drafts, and the token after them, which is -1 where there is none."""
        self._done.synchronize()
        found = self._words.tolist()
        return {seq: ids[: 1 + count] for seq, (count, *ids) in zip(self._seqs, found, strict=True)}


class _Nodes(NamedTuple):
    """Of the nodes of trees, T together: int32 [4, T] and float32 [4, T]; lens: nodes of each tree."""

    ints: npt.NDArray[np.int32]
    floats: npt.NDArray[np.float32]
    lens: npt.NDArray[np.int32]


class Rejection:
    """Accepts drawn drafts. probabilities: float32 [places, levels, vocab], by which those of a round were drawn"""

    def __init__(self, probabilities: Tensor) -> None:
        self._probabilities = probabilities

    def pick(self, step: ScheduledStep, logits: Tensor) -> Accepted | NothingDrawn:
        """Accept what the sequences of a step have drawn. logits: [num_seqs, rows, vocab], as of Speculation.pick"""
        seqs = [seq for seq in range(step.num_picks) if step.drafts.get(seq, NO_DRAFTS).place != NOT_DRAWN]
        if not seqs:
            return NothingDrawn()
        device, nodes = logits.device, _nodes_of(step, seqs, logits.shape[1])
        row, ids, place, level = sent(nodes.ints, device)
        temperature, top_p, accept, draw = sent(nodes.floats, device)
        most = int(nodes.lens.max())
        target = _probabilities(
            logits.flatten(0, 1)[row.long()], temperature, top_p, cut=bool((nodes.floats[1] < 1).any())
        )
        draft = self._probabilities[place.long(), level.long()]
        chain = np.arange(NO_PARENT, most - 1, dtype=np.int32)
        given = Verified(
            ids,
            sent(np.concatenate([[0], nodes.lens.cumsum()]).astype(np.int32), device),
            sent(nodes.lens, device),
            sent(np.tile(chain, (len(seqs), 1)), device),
        )
        accepted = accept_sampled(Probabilities(target, draft, accept.contiguous(), draw.contiguous()), given)
        words = coming(torch.cat((accepted.num_accepted[:, None], accepted.token_ids), 1))
        done: Fence = torch.Event(device) if device.type != "cpu" else NoFence()
        done.record()
        return Accepted(seqs, words, done)


def _nodes_of(step: ScheduledStep, seqs: Many[int], num_rows: int) -> _Nodes:
    """Rows of logits, ids, places and levels of nodes; temperature, top_p and the numbers that decide."""
    ints, floats, lens = list[tuple[int, int, int, int]](), list[tuple[float, float, float, float]](), list[int]()
    for seq in seqs:
        drafts, sampler, first = step.drafts[seq], step.sequences[seq].sampler, step.sequences[seq].num_new
        last = (seq + 1) * num_rows - 1
        num = len(drafts)
        lens.append(1 + num)
        for node in range(1 + num):
            draft = drafts.token_ids[node - 1] if node else 0
            # No draft comes after the last node, so its level is not looked at.
            ints.append((last - num + node, draft, drafts.place, min(node, num - 1)))
            drawn, accept = sampler.draw(first + node), sampler.accept_at(first + node - 1) if node else 0.0
            floats.append((max(drawn.temperature, _COLDEST), drawn.top_p, accept, drawn.uniform))
    return _Nodes(
        np.ascontiguousarray(np.array(ints, np.int32).T),
        np.ascontiguousarray(np.array(floats, np.float32).T),
        np.array(lens, np.int32),
    )


def _probabilities(logits: Tensor, temperature: Tensor, top_p: Tensor, *, cut: bool) -> Tensor:
    """float32 [T, vocab], contiguous: by which plain sampling draws. cut: whether any top_p is below 1"""
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
