"""A small model drafts for a large one: it decodes a few tokens further, over K and V of its own.

Its rows follow the sequences. Before it drafts it stores what a sequence has got since, from the first token on that it
has not stored or has guessed wrong. Then it decodes step by step: each step takes the tokens of the one before where
they are, on the device, and the host reads all of them at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import Progress
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import DeviceFault, FitsLater
from rocm_attn.paging.request_table import RequestTable
from rocm_attn.runner.request import Sequence
from rocm_attn.runner.speculation.drafts import LAST_TOKEN, Drafts


@dataclass(slots=True, eq=False)
class _Follower:
    """The model's row of a sequence.

    token_ids: whose K and V it holds, drafts included
    num_right: of them, those that were not guessed
    """

    row: int
    token_ids: list[int] = field(default_factory=list)
    num_right: int = 0

    def go_back(self, token_ids: Many[int]) -> None:
        """Forget what is no longer right, and the last token, which the next step takes."""
        most = min(len(self.token_ids), len(token_ids) - 1)
        guessed = range(min(self.num_right, most), most)
        self.num_right = next((at for at in guessed if self.token_ids[at] != token_ids[at]), most)
        del self.token_ids[self.num_right :]


class ModelDrafter:
    """Drafts greedily.

    runner:       of the small model; its forward gives logits [num_seqs, vocab]
    table:        its rows, with room for a row for each sequence that decodes
    chunk:        tokens of a step, at most, while it stores what it has not seen
    num_branches: tokens of each step that become drafts: the likeliest goes on, the others are alternatives to it
    """

    def __init__(self, runner: StepRunner, table: RequestTable, *, chunk: int, num_branches: int) -> None:
        self._runner = runner
        self._table = table
        self._chunk = chunk
        self._num_branches = num_branches
        self._followers: dict[int, _Follower] = {}

    def draft(self, decoding: Many[tuple[Sequence, int]], alive: Collection[int]) -> Mapping[int, Drafts]:
        """As Drafter.draft. A sequence that the model has no room for, or that is too long for it, gets none.

        After a fault of the device there are none either, and the model begins anew: drafts are but guesses.
        """
        try:
            return self._draft(decoding)
        except DeviceFault:
            for number in list(self._followers):
                self._leave(number)
            return {}

    def capture_all(self, progress: Progress) -> None:
        """As Drafter.capture_all."""
        self._runner.capture_all(progress)

    def _draft(self, decoding: Many[tuple[Sequence, int]]) -> Mapping[int, Drafts]:
        decode = {sequence.number for sequence, _ in decoding}
        for number in self._followers.keys() - decode:
            self._leave(number)
        steps = {each.number: self._num_steps(each, most) for each, most in decoding}
        # Those with the most steps come first, so that each step has the first ones of the step before.
        drafting = sorted((each for each, _ in decoding if steps[each.number]), key=lambda each: -steps[each.number])
        drafting = [sequence for sequence in drafting if self._has_room(sequence, steps[sequence.number])]
        if not drafting:
            return {}
        found = self._decode(drafting, [steps[sequence.number] for sequence in drafting])
        most_of = {sequence.number: most for sequence, most in decoding}
        return {
            sequence.number: self._tree(found[: steps[sequence.number], seq].tolist(), most_of[sequence.number])
            for seq, sequence in enumerate(drafting)
        }

    def _num_steps(self, sequence: Sequence, most: int) -> int:
        """Steps of the model that bring `most` drafts of a sequence, or as many as the model's context allows."""
        room = max(0, self._table.max_kv_len - len(sequence.token_ids) + 1)
        return min(-(-most // self._num_branches), room)

    def _has_room(self, sequence: Sequence, num_steps: int) -> bool:
        """Bring a sequence's row up to what is known, and make room for its drafts; False where there is none."""
        follower = self._followers.get(sequence.number)
        try:
            if follower is None:
                follower = self._followers[sequence.number] = _Follower(self._table.admit())
            follower.go_back(sequence.token_ids)
            self._table.reserve(follower.row, len(sequence.token_ids) + num_steps - 1)
        except FitsLater:
            self._leave(sequence.number)
            return False
        return True

    def _leave(self, number: int) -> None:
        follower = self._followers.pop(number, None)
        if follower is not None:
            self._table.free(follower.row)

    def _decode(self, drafting: list[Sequence], num_steps: list[int]) -> npt.NDArray[np.int64]:
        """int64 [steps, num_seqs, branches]: the likeliest tokens of each step, the best first."""
        last = self._catch_up(drafting)
        likeliest = [self._likeliest(last)]
        rows = np.array([self._followers[sequence.number].row for sequence in drafting], np.int32)
        known = np.array([len(sequence.token_ids) for sequence in drafting], np.int32)
        for step in range(1, num_steps[0]):
            num = sum(steps > step for steps in num_steps)
            tokens = likeliest[-1][:num, 0].int().contiguous()
            batch = StepBatch(
                rows[:num], known[:num] + step, np.ones(num, np.int32), inputs=DeviceInputs(token_ids=tokens)
            )
            likeliest.append(self._likeliest(self._runner.run(batch)))
        padded = [torch.nn.functional.pad(each, (0, 0, 0, len(drafting) - len(each))) for each in likeliest]
        found: npt.NDArray[np.int64] = torch.stack(padded).cpu().numpy()
        for seq, sequence in enumerate(drafting):
            follower = self._followers[sequence.number]
            follower.num_right = len(follower.token_ids)
            follower.token_ids += found[: num_steps[seq] - 1, seq, 0].tolist()
        return found

    def _catch_up(self, drafting: list[Sequence]) -> Tensor:
        """Logits [num_seqs, vocab] after the last token of each sequence; what was not stored before it is."""
        last: list[Tensor] = [torch.empty(0)] * len(drafting)
        left = list(range(len(drafting)))
        while left:
            seqs, budget = [], self._chunk
            q_len: list[int] = []
            for seq in left:
                if budget > 0:
                    seqs.append(seq)
                    q_len.append(min(self._num_unseen(drafting[seq]), budget))
                    budget -= q_len[-1]
            logits = self._run([drafting[seq] for seq in seqs], q_len)
            whole = [seq for seq in seqs if not self._num_unseen(drafting[seq])]
            if len(whole) == len(drafting):
                return logits
            for row, seq in enumerate(seqs):
                if seq in whole:
                    last[seq] = logits[row].clone()  # the next step may be written to the same memory
            left = [seq for seq in left if seq not in whole]
        return torch.stack(last)

    def _num_unseen(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) - len(self._followers[sequence.number].token_ids)

    def _run(self, sequences: list[Sequence], q_len: list[int]) -> Tensor:
        """A step over the next tokens of some sequences."""
        followers, token_ids = [self._followers[sequence.number] for sequence in sequences], list[int]()
        for sequence, follower, num in zip(sequences, followers, q_len, strict=True):
            new = sequence.token_ids[len(follower.token_ids) : len(follower.token_ids) + num]
            follower.token_ids += new
            token_ids += new
        kv_len = [len(follower.token_ids) for follower in followers]
        return self._runner.run(StepBatch([follower.row for follower in followers], kv_len, q_len, token_ids))

    def _likeliest(self, logits: Tensor) -> Tensor:
        """int64 [rows, branches]: the best first."""
        if self._num_branches == 1:
            return logits.argmax(-1, keepdim=True)
        return logits.topk(min(self._num_branches, logits.shape[-1]), -1).indices

    def _tree(self, likeliest: list[list[int]], most: int) -> Drafts:
        """The best of each step in a chain, and then the others, each beside the best one of its step."""
        chain = [best for best, *_ in likeliest][:most]
        others = [(at - 1, token) for at, (_, *beside) in enumerate(likeliest[: len(chain)]) for token in beside]
        others = others[: most - len(chain)]
        parents = [*range(LAST_TOKEN, len(chain) - 1), *(parent for parent, _ in others)]
        return Drafts((*chain, *(token for _, token in others)), tuple(parents))
