"""ScheduledStep: the sequences that the scheduler chose for a step, with their tokens, and the StepBatch of it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.capture.step_times import StepBudget
from rocm_serve.request import ALL_READ, Sequence
from rocm_serve.speculation.drafts import DraftTree

# The drafts of a step without any.
NO_SEQUENCE: Mapping[int, DraftTree] = MappingProxyType({})
# The places that a step without late masks leaves out.
NONE_LEFT_OUT = frozenset[int]()


# Not frozen: setting the fields of a frozen class takes three times as long.
@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A step to be run; pages for its tokens are reserved. Not to be changed.

    sequences: seq -> the sequence
    picking:   those that pick a token after this step: all but the last ones, whose prompts go on in the next step
    batch:     the token ids include pending(place), for the token in this place among the picks of the step before
    drafts:    seq -> the drafts that its new tokens end with, if it has any
    has_trees: whether drafts have branches
    with_parameters: the places among `picking` of those that do not simply take the likeliest token
    """

    sequences: tuple[Sequence, ...]
    picking: tuple[Sequence, ...]
    batch: StepBatch
    drafts: Mapping[int, DraftTree]
    has_trees: bool
    with_parameters: Many[int]

    @property
    def num_picks(self) -> int:
        """Number of sequences that pick a token."""
        return len(self.picking)

    @property
    def is_of_a_suspect(self) -> bool:
        """True if its one sequence is served alone, because a fault may be due to it."""
        return self.sequences[0].is_suspect


class Chosen(NamedTuple):
    """The sequences of a step, and the number of new tokens of each. Those that pick a token come first."""

    sequences: list[Sequence]
    new: list[int]


class Lengths(NamedTuple):
    """Rows, stored tokens and new tokens of the sequences of a step. int32 [num_seqs] each"""

    rows: Int32Array
    stored: Int32Array
    new: Int32Array

    @classmethod
    def of(cls, chosen: Chosen) -> Lengths:
        rows, stored = [each.row for each in chosen.sequences], [each.num_stored for each in chosen.sequences]
        return cls(np.array(rows, np.int32), np.array(stored, np.int32), np.array(chosen.new, np.int32))


# Place in a step -> the drafts that follow its sequence's last token, at least one.
Verified = Mapping[int, DraftTree]


def pending(place: int) -> int:
    """The id that stands for an unread token: the one in this place among the picks of the step before."""
    return -1 - place


# The budget of a step whose time nothing bounds.
_UNBOUNDED = StepBudget(0, 0, ())


@dataclass(slots=True, eq=False)
class PromptRoom:
    """The room for prompts in a step, while they get their tokens in order.

    tokens:        of the step that are left
    prompt_tokens: of prompts at their beginning that are left
    taken:         tokens of the step that have gone to sequences
    """

    tokens: int
    prompt_tokens: int
    budget: StepBudget
    taken: int

    @classmethod
    def beside(cls, num_decoding: int, num_waiting: int, budget: StepBudget) -> PromptRoom:
        """The room next to sequences that decode; without any, no stream waits, and the step is a whole one.

        num_waiting: sequences that have no token yet, admitted or not
        """
        tokens = max(budget.chunk - num_decoding, 1)
        if not num_decoding:
            return cls(tokens, tokens, _UNBOUNDED, 0)
        return cls(tokens, budget.tokens_beside(num_decoding, num_waiting), budget, num_decoding)

    @property
    def is_open(self) -> bool:
        """True if another prompt gets tokens."""
        return self.tokens > 0 and self.prompt_tokens > 0

    def take(self, num_left: int, stored: int, ends_at: int) -> int:
        """The tokens that a prompt gets: at least one.

        ends_at: number of its tokens, above `stored`, at which its chunk is to end
        The room is closed by a prompt that would get more tokens if there were more room.
        """
        at_first, doubles_after, sizes = self.prompt_tokens, self.budget.doubles_after, self.budget.sizes
        most = -(-at_first * doubles_after // (doubles_after + stored + at_first))
        if stored:  # few tokens take no less time than reading the weights; attention has the rest, or half of all
            of_attention = max(at_first - max(0, self.budget.read_tokens - self.taken), at_first // 2)
            most = min(most, -(-of_attention * doubles_after // stored))
        num_left = min(num_left, ends_at - stored)
        q_len = min(num_left, self.tokens, max(most, 1))
        if q_len < num_left and sizes and (end := self.taken + q_len) <= sizes[-1]:
            # Its other tokens come later, so no pads are computed in their place now, unless the larger step has more
            # of its tokens for each one that is computed.
            padded = next(size for size in sizes if size >= end)
            filled = max((size for size in sizes if size <= end), default=0)
            if (filled - self.taken) * padded >= q_len * filled > 0:
                q_len = filled - self.taken
        self.tokens -= q_len
        self.taken += q_len
        self.prompt_tokens -= q_len + q_len * (stored + q_len) // doubles_after
        if q_len < num_left:
            self.prompt_tokens = 0
        return q_len


def _goes_on(each: tuple[Sequence, int]) -> bool:
    """True if a sequence gets so few tokens that its prompt goes on in the next step."""
    sequence, q_len = each
    return q_len < sequence.num_left


def picking_first(chosen: Chosen) -> Chosen:
    """The same sequences and their new tokens; those that pick a token come first, and keep their order."""
    in_order = sorted(zip(*chosen, strict=True), key=_goes_on)
    return Chosen([sequence for sequence, _ in in_order], [q_len for _, q_len in in_order])


def step_of(chosen: Chosen, verified: Verified, lengths: Lengths) -> ScheduledStep:
    """Makes the step. verified, lengths: of those that are chosen"""
    token_ids, last = array("i"), list[int]()  # appending to a list takes a quarter of the time
    for seq, sequence in enumerate(chosen.sequences):
        if sequence.pending_at != ALL_READ:
            last.append(-1 - sequence.pending_at)  # see pending()
        elif seq in verified:
            last += (sequence.token_ids[-1], *verified[seq].token_ids)
        else:
            stored = sequence.num_stored
            token_ids.fromlist(last)
            token_ids += sequence.token_ids[stored : stored + chosen.new[seq]]
            last.clear()
    token_ids.fromlist(last)
    rows, num_stored, new = lengths
    batch = StepBatch(rows, num_stored + new, new, np.frombuffer(token_ids, np.int32))
    sequences = tuple(chosen.sequences)
    num_picks = len(sequences)
    while num_picks and _goes_on((sequences[num_picks - 1], chosen.new[num_picks - 1])):
        num_picks -= 1
    picking = sequences[:num_picks]
    with_parameters = [seq for seq, each in enumerate(picking) if not each.is_plain]
    has_trees = not all(drafts.is_chain for drafts in verified.values())
    return ScheduledStep(sequences, picking, batch, verified, has_trees, with_parameters)
