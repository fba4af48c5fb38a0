"""Speculation: drafts are made before a step, and verified by the step's logits.

A step computes the logits after each draft, as if it had been picked. From the sequence's last token on, a token is
picked as it always is, by the request's own way and its own random numbers; where there is a draft of that token, the
logits after it are there already, and the next token is picked from them. So each token is the one that plain decoding
would have picked, greedily or by chance, whatever the drafts are: they decide how many tokens a step brings, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.batch.tree_mask import NO_PARENT, tree_mask
from rocm_attn.errors import BadLogits
from rocm_attn.runner.request import Sequence
from rocm_attn.runner.sampling import Draw, PickedTokens, TokenPicker
from rocm_attn.runner.scheduler import NO_SEQUENCE, ScheduledStep, Taken
from rocm_attn.runner.speculation.drafts import LAST_TOKEN, NO_DRAFTS, Drafts
from rocm_attn.step.metrics import Metrics

Picks = list[Many[int] | BadLogits]
# Scheduler.decoding
Decoding = Callable[[], Iterable[tuple[Sequence, int]]]


class Drafter(Protocol):
    """Guesses what comes next."""

    def draft(self, decoding: Many[tuple[Sequence, int]], alive: Collection[int]) -> Mapping[int, Drafts]:
        """Drafts of some sequences, by their requests' numbers.

        decoding: sequences with the most drafts that each may have, at least 1; the next token of each is to be picked
        alive:    numbers of all requests that have not ended: what is kept of others is to be dropped
        """
        ...


class StepPicks(Protocol):
    """What the sequences of a step get, on its way to the host."""

    def read(self) -> Picks:
        """Wait for it. For each of step.picking the tokens that it gets, or why it gets none."""
        ...


class NoSpeculation:
    """Each step brings a sequence one token."""

    def __init__(self, picker: TokenPicker) -> None:
        self._picker = picker

    def drafts(self, decoding: Decoding, alive: Collection[int]) -> Mapping[int, Drafts]:
        """As Speculation.drafts."""
        return NO_SEQUENCE

    def batch(self, step: ScheduledStep) -> StepBatch:
        """As Speculation.batch."""
        return step.batch

    def pick(self, step: ScheduledStep, logits: Tensor) -> StepPicks:
        """As Speculation.pick. logits: [num_seqs, vocab]"""
        draws = {
            row: sequence.sampler.draw(sequence.num_new)
            for row, sequence in enumerate(step.picking)
            if not sequence.sampler.is_greedy
        }
        return _OneEach(self._picker.pick(logits[: step.num_picks], draws))

    def count(self, step: ScheduledStep, taken: Many[Taken]) -> None:
        """As Speculation.count."""


class Speculation:
    """Drafts for the next step, and what became of them.

    picker:     has room for 1 + num_drafts rows of each sequence of a step
    num_drafts: of a sequence and step, at most
    metrics:    in which drafts are counted
    """

    def __init__(self, drafter: Drafter, picker: TokenPicker, num_drafts: int, metrics: Metrics) -> None:
        self._drafter = drafter
        self._picker = picker
        self._device = picker.tokens.device
        self._num_drafts = num_drafts
        self._metrics = metrics

    def drafts(self, decoding: Decoding, alive: Collection[int]) -> Mapping[int, Drafts]:
        """Drafts for the next step; the tokens of all steps were read.

        decoding: Scheduler.decoding
        alive:    as of Drafter.draft
        """
        return self._drafter.draft([(each, min(most, self._num_drafts)) for each, most in decoding()], alive)

    def batch(self, step: ScheduledStep) -> StepBatch:
        """The batch of a step, with the mask of its trees where it has any."""
        if all(drafts.is_chain for drafts in step.drafts.values()):
            return step.batch
        return replace(step.batch, mask=tree_mask(step.batch, torch.from_numpy(_parents(step)).to(self._device)))

    def pick(self, step: ScheduledStep, logits: Tensor) -> StepPicks:
        """Pick the tokens that each of step.picking gets: the drafts that were right, in order, and one more.

        logits: [num_seqs, rows, vocab], of the last tokens of each sequence; in a decode step rows is 1
        """
        num_rows = logits.shape[1]
        draws: dict[int, Draw] = {}
        for seq, sequence in enumerate(step.picking):
            if not sequence.request.sampling.is_greedy:
                depths = [0, *step.drafts.get(seq, NO_DRAFTS).depths()]
                for row, depth in enumerate(depths, (seq + 1) * num_rows - len(depths)):
                    draws[row] = sequence.sampler.draw(sequence.num_new + depth)
        rows = logits[: step.num_picks].flatten(0, 1)
        return _Verified(self._picker.pick(rows, draws), step, num_rows)

    def count(self, step: ScheduledStep, taken: Many[Taken]) -> None:
        """Count what became of a step's drafts. taken: of each of step.picking"""
        for seq, drafts in step.drafts.items():
            self._metrics.verifications += 1
            self._metrics.drafts += len(drafts)
            self._metrics.accepted_drafts += max(0, len(taken[seq].token_ids) - 1)


class _OneEach:
    """A token for each sequence."""

    def __init__(self, picked: PickedTokens) -> None:
        self._picked = picked

    def read(self) -> Picks:
        """As StepPicks.read."""
        return [pick if isinstance(pick, BadLogits) else (pick,) for pick in self._picked.read()]


class _Verified:
    """A token after each draft, from which the accepted ones follow. num_rows: of each sequence's last tokens"""

    def __init__(self, picked: PickedTokens, step: ScheduledStep, num_rows: int) -> None:
        self._picked, self._step, self._num_rows = picked, step, num_rows

    def read(self) -> Picks:
        """As StepPicks.read."""
        found, picks = self._picked.read(), Picks()
        for seq in range(self._step.num_picks):
            drafts = self._step.drafts.get(seq, NO_DRAFTS)
            last = (seq + 1) * self._num_rows
            picks.append(_found_right(found[last - 1 - len(drafts) : last], drafts))
        return picks


def _parents(step: ScheduledStep) -> Int32Array:
    """int32 [num_tokens]: token -> its parent's place among the sequence's new tokens, or NO_PARENT."""
    parents = []
    for seq, q_len in enumerate(step.batch.q_len.tolist()):
        drafts = step.drafts.get(seq, NO_DRAFTS)
        known = q_len - len(drafts)
        parents += [*range(NO_PARENT, known - 1), *(known + parent for parent in drafts.parents)]
    return np.array(parents, np.int32)


def _found_right(rows: Many[int | BadLogits], drafts: Drafts) -> Many[int] | BadLogits:
    """The tokens from a sequence's last one on. rows: what was picked after it, and after each draft

    Where none can be picked after an accepted draft, the step ends before that draft: its sequence fails in the next.
    """
    tokens: list[int] = []
    at: int | None = LAST_TOKEN
    while at is not None:
        pick = rows[1 + at]
        if isinstance(pick, BadLogits):
            return tokens if tokens else pick
        tokens.append(pick)
        number = drafts.after(at, pick)
        # K and V of a draft serve where they lie in the place of its token.
        at = number if number == at + 1 else None
    return tokens
