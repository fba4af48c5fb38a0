"""A drafter with an EAGLE head, which predicts from the large model's hidden states; these never leave the device.

After each step of the large model, and before the next one, the head processes the step's new tokens, including those
of prompts: for each, the large model's hidden state and the id of the next token. Rejected drafts are left out. The
predictions after the last token are the first drafts, and all others are one draft round (draft_runners.py).

The head has its own rows and KV. For a sequence that starts with cached pages, or was preempted, there are no hidden
states of the earlier tokens, so its row in the head starts after them. Its drafts may be worse.
"""

from collections.abc import Sequence as Many
from collections.abc import Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import CapacityExceeded
from rocm_attn.machine.sending import sent
from rocm_attn.paging.index_spaces import RESERVED_ROW
from rocm_attn.paging.request_table import RequestTable
from rocm_serve.appended import Appended
from rocm_serve.request import Sequence
from rocm_serve.scheduled_step import ScheduledStep
from rocm_serve.speculation.draft_runners import DraftRunners
from rocm_serve.speculation.drafts import LAST_TOKEN, NO_DRAFTS, DraftTree
from rocm_serve.speculation.row_drafter import RowDrafter


@dataclass(slots=True, eq=False)
class _Row:
    """The head's row of a sequence. first, end: the half-open range of the sequence's tokens that it has taken in"""

    row: int
    first: int
    end: int

    @property
    def num_stored(self) -> int:
        """Number of tokens in the row."""
        return self.end - self.first


class _New(NamedTuple):
    """The new tokens of a sequence in a step.

    first:  place of the first one in the text
    places: of the tokens that stay, in order, among the rows of the step
    """

    sequence: Sequence
    first: int
    places: list[int]


class EagleDrafter(RowDrafter[_Row]):
    """Drafts with a head, for the sequences of the last step.

    handed:   [most_tokens, hidden], a row for each token of the large model's last step
    features: likewise, the input of the head
    """

    def __init__(
        self, runners: DraftRunners, table: RequestTable, *, handed: Tensor, features: Tensor, few: int
    ) -> None:
        super().__init__(runners, table, few)
        self._handed, self._features = handed, features
        self._new: dict[int, _New] = {}

    def follow(self, step: ScheduledStep, appended: Appended) -> None:
        first = 0
        kv_len, q_len = step.batch.kv_len.tolist(), step.batch.q_len.tolist()
        for seq, sequence in enumerate(step.sequences):
            if sequence.row != RESERVED_ROW:
                drafts = step.drafts.get(seq, NO_DRAFTS)
                known = q_len[seq] - len(drafts)
                places = list(range(first, first + known))
                if len(drafts):
                    places += [first + known + draft for draft in _accepted(drafts, appended.token_ids[seq])]
                self._new[sequence.number] = _New(sequence, kv_len[seq] - q_len[seq], places)
            first += q_len[seq]

    def _draft(self, decoding: Many[tuple[Sequence, int]], alive: Set[int]) -> dict[int, DraftTree]:
        new, self._new = self._new, {}
        self._keep(alive)
        wanted = {sequence.number: most for sequence, most in decoding}
        pending = [each for number, each in new.items() if self._has_room(each, number in wanted)]
        drafting = [each for each in pending if each.sequence.number in wanted]
        place_of = {each.sequence.number: place for place, each in enumerate(drafting)}
        few = [each for each in drafting if len(each.places) <= self._few]
        many = [each for each in drafting if len(each.places) > self._few]
        many += [each for each in pending if each.sequence.number not in wanted]
        for part in (few, many):
            if part:
                whole = [place_of[each.sequence.number] for each in part if each.sequence.number in place_of]
                terms = self.runners.terms([each.sequence for each in part])
                self.runners.take_in(self._batch(part), whole, terms)
        if not drafting:
            return {}
        rows = [self._rows[each.sequence.number] for each in drafting]
        found = self.runners.found(
            np.array([row.row for row in rows], np.int32),
            np.array([row.num_stored for row in rows], np.int32),
            self.runners.terms([each.sequence for each in drafting]),
        )
        places = self.runners.places([each.sequence for each in drafting])
        numbers = (each.sequence.number for each in drafting)
        return {number: found.drafts(seq, wanted[number], places[seq]) for seq, number in enumerate(numbers)}

    def _has_room(self, new: _New, drafts: bool) -> bool:
        """True if the head has a row for new tokens, and for drafts after them."""
        sequence, end = new.sequence, new.first + len(new.places)
        number = sequence.number
        if sequence.row == RESERVED_ROW or end >= len(sequence.token_ids):
            self.leave(number)
            return False
        held = self._rows.get(number)
        if held is not None and held.end != new.first:
            self.leave(number)
            held = None
        try:
            if held is None:
                held = self._rows[number] = _Row(self.table.admit(), new.first, new.first)
            stored = end - held.first
            self.table.reserve(held.row, stored + (self.runners.room if drafts else 0))
        except CapacityExceeded:  # the drafts may go past the context's end too
            self.leave(number)
            return False
        return True

    def _batch(self, part: list[_New]) -> StepBatch:
        """A step of the head over the new tokens of some sequences. Copies the rows that it reads into place."""
        rows, kv_len, q_len, token_ids, places = [], [], [], list[int](), list[int]()
        for each in part:
            held, num = self._rows[each.sequence.number], len(each.places)
            token_ids += each.sequence.token_ids[each.first + 1 : each.first + 1 + num]
            held.end += num
            rows.append(held.row)
            kv_len.append(held.num_stored)
            q_len.append(num)
            places += each.places
        chosen = sent(np.array(places, np.int64), self._handed.device)
        torch.index_select(self._handed, 0, chosen, out=self._features[: len(places)])
        return StepBatch(rows, kv_len, q_len, token_ids)


def _accepted(drafts: DraftTree, token_ids: Many[int]) -> list[int]:
    """The drafts that were accepted, in order. token_ids: these, and one token more"""
    path: list[int] = []
    for token in token_ids[:-1]:
        draft = drafts.after(path[-1] if path else LAST_TOKEN, token)
        assert draft is not None, "what was accepted was drafted"
        path.append(draft)
    return path
