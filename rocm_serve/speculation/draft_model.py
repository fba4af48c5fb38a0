"""A drafter with a small draft model, which decodes a few tokens ahead of the large one, with its own KV.

It has a row for each sequence. Before it drafts, it stores the sequence's new tokens, from the first one that it has
not stored or has drafted wrongly. The predictions after the last token are the first drafts. All other drafts are one
draft round: one publication and one graph (batch/drafts.py), in which the device picks the token that each draft step
continues. The host reads the drafts of all sequences at once, at the end.
"""

from collections.abc import Sequence as Many
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import FitsLater
from rocm_attn.paging.request_table import RequestTable
from rocm_serve.request import Sequence
from rocm_serve.speculation.beams import BeamLevels
from rocm_serve.speculation.draft_runners import DraftRunners
from rocm_serve.speculation.drafts import DraftTree
from rocm_serve.speculation.row_drafter import RowDrafter


@dataclass(slots=True, eq=False)
class _Follower:
    """The model's row of a sequence.

    token_ids: tokens whose K and V it holds, drafts included
    num_right: the first ones of them that were not drafted
    """

    row: int
    token_ids: list[int] = field(default_factory=list)
    num_right: int = 0

    def go_back(self, token_ids: Many[int]) -> None:
        """Forgets tokens that are no longer right, and the last token, which the next step takes."""
        most = min(len(self.token_ids), len(token_ids) - 1)
        drafted = range(min(self.num_right, most), most)
        self.num_right = next((at for at in drafted if self.token_ids[at] != token_ids[at]), most)
        del self.token_ids[self.num_right :]


class ModelDrafter(RowDrafter[_Follower]):
    """Drafts greedily: the likeliest continuations that its branches find.

    chunk: most tokens of a step while it stores new tokens
    """

    def __init__(self, runners: DraftRunners, table: RequestTable, *, chunk: int, few: int) -> None:
        super().__init__(runners, table, few)
        self._chunk = chunk

    def _draft(self, decoding: Many[tuple[Sequence, int]], alive: Set[int]) -> dict[int, DraftTree]:
        self._keep({sequence.number for sequence, _ in decoding})
        drafting = self._with_room([each for each in decoding if self._follows(each[0])])
        if not drafting:
            return {}
        sequences = [sequence for sequence, _ in drafting]
        found = self._found(sequences)
        places = self.runners.places(sequences)
        return {sequence.number: found.drafts(seq, most, places[seq]) for seq, (sequence, most) in enumerate(drafting)}

    def _follows(self, sequence: Sequence) -> bool:
        """Brings a sequence's row up to the known tokens; False if it is too long."""
        follower = self._rows.get(sequence.number)
        if len(sequence.token_ids) + self.runners.room > self.table.max_kv_len:
            self.leave(sequence.number)
            return False
        if follower is None:
            follower = self._rows[sequence.number] = _Follower(self.table.admit())
        follower.go_back(sequence.token_ids)
        return True

    def _with_room(self, decoding: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """The sequences with room for drafts in their rows. Makes the room; the other sequences leave."""
        room = self.runners.room
        rows = np.array([self._rows[sequence.number].row for sequence, _ in decoding], np.int32)
        try:
            self.table.reserve_all(rows, np.array([len(each.token_ids) + room for each, _ in decoding], np.int32))
        except FitsLater:
            return [each for each in decoding if self._has_room(each[0])]
        return decoding

    def _has_room(self, sequence: Sequence) -> bool:
        try:
            self.table.reserve(self._rows[sequence.number].row, len(sequence.token_ids) + self.runners.room)
        except FitsLater:
            self.leave(sequence.number)
            return False
        return True

    def _found(self, drafting: list[Sequence]) -> BeamLevels:
        """The model's drafts for some sequences."""
        self._catch_up(drafting)
        followers = [self._rows[sequence.number] for sequence in drafting]
        rows = np.array([follower.row for follower in followers], np.int32)
        terms = self.runners.terms(drafting)
        found = self.runners.found(rows, np.array([len(each.token_ids) for each in drafting], np.int32), terms)
        for seq, follower in enumerate(followers):
            follower.num_right = len(follower.token_ids)
            follower.token_ids += found.fed(seq)
        return found

    def _catch_up(self, drafting: list[Sequence]) -> None:
        """Stores unstored tokens, and makes the first drafts of each sequence.

        Sequences with at most as many new tokens as a verification brings come first, so that their step has a graph.
        """
        unseen = [len(each.token_ids) - len(self._rows[each.number].token_ids) for each in drafting]
        few = [seq for seq, num in enumerate(unseen) if num <= self._few]
        many = [seq for seq, num in enumerate(unseen) if num > self._few]
        for left in (few, many):
            while left:
                seqs, budget = [], self._chunk
                q_len: list[int] = []
                for seq in left:
                    if budget > 0:
                        num = min(unseen[seq], budget)
                        seqs.append(seq)
                        q_len.append(num)
                        unseen[seq] -= num
                        budget -= num
                sequences = [drafting[seq] for seq in seqs]
                batch = self._batch(sequences, q_len)
                whole = [seq for seq in seqs if not unseen[seq]]  # all but the last one, at least
                self.runners.take_in(batch, whole, self.runners.terms(sequences))
                del left[: len(whole)]

    def _batch(self, sequences: list[Sequence], q_len: list[int]) -> StepBatch:
        """A step over the next tokens of some sequences, which count as stored from now on."""
        followers, token_ids = [self._rows[sequence.number] for sequence in sequences], list[int]()
        for sequence, follower, num in zip(sequences, followers, q_len, strict=True):
            new = sequence.token_ids[len(follower.token_ids) : len(follower.token_ids) + num]
            follower.token_ids += new
            token_ids += new
        kv_len = [len(follower.token_ids) for follower in followers]
        return StepBatch([follower.row for follower in followers], kv_len, q_len, token_ids)
