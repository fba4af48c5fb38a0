"""How the guesses of rounds hang together: as chains, or as trees, of which a path is followed on the device.

A round feeds each sequence its last token and W - 1 guesses, in W places. kernels/speculative/next_round.py goes along
guesses that come after each other, and so does what drafts next. Of a tree, the nodes that were accepted are brought
into that order first: the K and V of the large model, the picks after them, and the rows that it has left for a head.
Nothing of that is told to the host but the path, by which it reads what was found.

The next tree is made of the drafts of all levels as the host would make it (beams.py): the W - 1 likeliest ones, in the
order of their places.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.hip_graphs.errors import RecordingRefused
from rocm_attn.hip_graphs.recorder import Recorder, Recording
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.kernels.speculative.arguments import Accepted, GuessedRound, Verified
from rocm_attn.machine.devices import on_device
from rocm_attn.runner.sampling import Found
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.memory import DeviceStep


class Guessed(Protocol):
    """The guesses of rounds that follow from one step. n sequences, W places each."""

    @property
    def picked(self) -> Tensor:
        """int32 [n * W]: what was picked along the guesses that were accepted, of each sequence from its W-th on."""
        ...

    def begin(self, batch: StepBatch) -> None:
        """The step itself is launched, and a round will follow. batch: as it was run"""
        ...

    def accept(self) -> None:
        """Tokens were picked: bring what was accepted into order, before the next round is made of it."""
        ...

    def before_accepting(self) -> None:
        """What accept() does before its launches, for a round that `accepting` is a part of."""
        ...

    @property
    def accepting(self) -> Many[Recording] | None:
        """The launches of accept(); None: they are no recording yet."""
        ...

    def in_order(self, found: Found, path: Int32Array) -> Found:
        """What was found of a round, in the order of picked. path: int32 [n, W], as told; both on the host"""
        ...

    def new_tokens(self) -> Tensor:
        """int32 [n * few]: as picked, of each sequence as many as can be accepted and one more."""
        ...

    def hand_over(self, handed: Tensor, to: Tensor) -> None:
        """Copy what the large model has left for a head of new_tokens(). handed: [T, any], of the step; to: likewise"""
        ...

    def put(self, words: Tensor) -> None:
        """Make drafts the guesses of the next round. words: int32 [n, levels, 3, K], as of Level.words"""
        ...

    def changed(self) -> tuple[Tensor, ...]:
        """What put() does not write alone, but by what it holds."""
        ...


class Chains:
    """Guesses that come after each other. picked: as of Guessed"""

    def __init__(self, given: GuessedRound, picked: Tensor) -> None:
        num_seqs = given.limit.shape[0]
        self._num_tokens = given.terms.shape[0]
        self.picked = picked[: self._num_tokens]
        self._guesses = given.token_ids[: self._num_tokens].view(num_seqs, -1)[:, 1:]

    def begin(self, batch: StepBatch) -> None:
        """As Guessed.begin."""

    def accept(self) -> None:
        """As Guessed.accept."""

    def before_accepting(self) -> None:
        """As Guessed.before_accepting."""

    accepting: Many[Recording] = ()

    def in_order(self, found: Found, path: Int32Array) -> Found:
        """As Guessed.in_order."""
        return found

    def new_tokens(self) -> Tensor:
        """As Guessed.new_tokens."""
        return self.picked

    def hand_over(self, handed: Tensor, to: Tensor) -> None:
        """As Guessed.hand_over."""
        to[: self._num_tokens].copy_(handed[: self._num_tokens])

    def put(self, words: Tensor) -> None:
        """As Guessed.put."""
        self._guesses.copy_(words[:, :, 0, 0])

    def changed(self) -> tuple[Tensor, ...]:
        """As Guessed.changed."""
        return ()


class Trees:
    """Guesses of which several may come after one.

    runtime: of the model that verifies, whose step the rounds repeat
    step:    where that step's inputs are
    drawn:   int32 [n * W], what was picked after each node
    path:    int32 [n, W], receives which nodes were accepted
    few:     1 + levels of drafts
    recorder: makes a graph of accept(), which runs as it is without one
    """

    @torch.inference_mode(False)  # memory that is made in that mode cannot be written outside of it
    def __init__(
        self,
        runtime: AttentionRuntime,
        step: DeviceStep,
        given: GuessedRound,
        drawn: Tensor,
        path: Tensor,
        *,
        few: int,
        recorder: Recorder | None,
    ) -> None:
        num_seqs, device = given.limit.shape[0], runtime.device
        num_tokens = given.terms.shape[0]
        width = num_tokens // num_seqs
        self._runtime, self._windows, self._few = runtime, step.windows, few
        self._recorder, self._has_accepted = recorder, False
        self._accepting: Recording | None = None
        self._drawn = drawn[:num_tokens]
        self._rows = given.row_of_seq[:num_seqs]
        self._guesses = given.token_ids[:num_tokens].view(num_seqs, width)[:, 1:]
        self._numbers = given.terms.view(num_seqs, width, 3)[:, :, 2]
        self._parents = torch.full((num_seqs, width), NO_PARENT, dtype=torch.int32, device=device)
        ends = torch.arange(0, num_tokens + 1, width, dtype=torch.int32, device=device)
        self._verified = Verified(given.token_ids[:num_tokens], ends, given.kv_len[:num_seqs], self._parents)
        self._accepted = Accepted.empty(num_seqs, width, device)._replace(path=path)
        self._first = ends[:-1, None]
        self._places = torch.arange(1, width, dtype=torch.int32, device=device)
        self.picked = self._accepted.token_ids.view(-1)

    def begin(self, batch: StepBatch) -> None:
        """As Guessed.begin."""
        assert isinstance(batch.mask, TreeMask), "Speculation gives steps of drafts that may branch a mask"
        self._parents.copy_(batch.mask.parents)

    def accept(self) -> None:
        """As Guessed.accept."""
        self.before_accepting()
        if self._recorder is not None and self._has_accepted and self._accepting is None:
            self._record(self._recorder)
        if self._accepting is not None:
            self._accepting.replay()
        else:
            self._accept()
        self._has_accepted = True

    def before_accepting(self) -> None:
        """As Guessed.before_accepting."""
        self._runtime.gate.before_move()

    @property
    def accepting(self) -> Many[Recording] | None:
        """As Guessed.accepting."""
        return (self._accepting,) if self._accepting is not None else None

    def _record(self, recorder: Recorder) -> None:
        """Make a graph of _accept(), of a round in which nothing is right: a move may not be made twice."""
        changed = self._drawn, self._guesses
        held = [tensor.clone() for tensor in changed]
        self._drawn.fill_(-2)  # no guess is that, nor is what stands after those that were accepted
        try:
            self._accepting, _ = recorder.record(self._accept)
        except (RecordingRefused, torch.OutOfMemoryError):
            self._recorder = None
        finally:
            for tensor, value in zip(changed, held, strict=True):
                tensor.copy_(value)

    def _accept(self) -> None:
        """The launches of accept()."""
        accepted, core = self._accepted, self._runtime.core
        with on_device(self._runtime.device):
            core.ops.accept_drawn(self._drawn, self._verified, accepted)
        core.moves.move(accepted, self._rows)
        # As of a chain: guesses that were picked, and after them one that never is.
        is_wrong = self._places > accepted.num_accepted[:, None]
        self._guesses.copy_(accepted.token_ids[:, :-1].masked_fill(is_wrong, -1))

    def in_order(self, found: Found, path: Int32Array) -> Found:
        """As Guessed.in_order. After the end of a path it is what was found of its first place."""
        num_seqs, width = path.shape
        rows = (np.arange(num_seqs, dtype=np.int32)[:, None] * np.int32(width) + path.clip(min=0)).reshape(-1)
        return Found(found.token_ids[rows], found.best[rows])

    def new_tokens(self) -> Tensor:
        """As Guessed.new_tokens."""
        return self._accepted.token_ids[:, : self._few].clamp(min=0).flatten()

    def hand_over(self, handed: Tensor, to: Tensor) -> None:
        """As Guessed.hand_over."""
        rows = (self._first + self._accepted.path[:, : self._few].clamp(min=0)).flatten()
        torch.index_select(handed, 0, rows, out=to[: len(rows)])

    def changed(self) -> tuple[Tensor, ...]:
        """As Guessed.changed."""
        return (self._numbers,)

    def put(self, words: Tensor) -> None:
        """As Guessed.put."""
        num_seqs, levels, _, branches = words.shape
        width = self._parents.shape[1]
        before = torch.arange(-branches, (levels - 1) * branches, branches, dtype=torch.int32, device=words.device)
        parents = (words[:, :, 1] + before[:, None]).view(num_seqs, -1)
        scores = words[:, :, 2].contiguous().view(torch.float32).view(num_seqs, -1)
        # Where two are alike the one that comes first goes before: the parent goes before its child.
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : width - 1]
        taken = best.sort(dim=1).values
        # What is no node's place stands for a parent that is not among them: nothing can be accepted after it.
        nodes = torch.full_like(parents, width).scatter_(1, taken, self._places.expand(num_seqs, -1))
        parents = parents.gather(1, taken)
        of_node = nodes.gather(1, parents.clamp(min=0).long())
        self._parents[:, 1:].copy_(of_node.masked_fill_(parents < 0, 0))
        self._guesses.copy_(words[:, :, 0].reshape(num_seqs, -1).gather(1, taken))
        # next_round.py has put them as for a chain: a node is picked from by the number of its depth.
        self._numbers[:, 1:].copy_(self._numbers.gather(1, taken.div(branches, rounding_mode="floor") + 1))
        with on_device(self._runtime.device):
            for tensors, window_left in self._windows:
                self._runtime.core.ops.place_trees(self._parents, 0, 0, window_left, tensors)
