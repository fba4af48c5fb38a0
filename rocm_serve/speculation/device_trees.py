"""The structure of a round's drafts: chains, or trees, of which a path is followed on the device.

A round feeds each sequence its last token and W - 1 drafts, in W places. kernels/speculative/next_step.py follows
drafts that come after each other, and so does the next draft step. For a tree, the accepted nodes are first brought
into that order: the K and V of the large model, the picks after them, and the rows that it has left for a head. The
host gets only the path, by which it reads the results.

The next tree is made from the drafts of all levels in the way of the host (beams.py): the W - 1 likeliest ones, in the
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
from rocm_attn.kernels.speculative.arguments import Accepted, SpeculativeStep, Verified
from rocm_attn.machine.devices import on_device
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.memory import DeviceStep
from rocm_serve.sampling.sampling import PickedRows


class DraftTokens(Protocol):
    """The drafts of rounds that follow from one step. n sequences, W places each."""

    @property
    def picked(self) -> Tensor:
        """int32 [n * W]: the picks along the accepted drafts; those of sequence s begin at s * W."""
        ...

    def begin(self, batch: StepBatch) -> None:
        """Notes that the step itself is launched, and that a round will follow. batch: as it was run"""
        ...

    def accept(self) -> None:
        """Orders the accepted drafts after tokens were picked, and before the next round's inputs are made."""
        ...

    def before_accepting(self) -> None:
        """Does the part of accept() before its launches, for a round that `accepting` is a part of."""
        ...

    @property
    def accepting(self) -> Many[Recording] | None:
        """The launches of accept(); None: they are not recorded yet."""
        ...

    def in_order(self, found: PickedRows, path: Int32Array) -> PickedRows:
        """The results of a round, in the order of picked. path: int32 [n, W], of its results; both on the host"""
        ...

    def new_tokens(self) -> Tensor:
        """int32 [n * few]: like picked, per sequence as many as can be accepted and one more."""
        ...

    def hand_over(self, handed: Tensor, to: Tensor) -> None:
        """Copies the large model's rows of new_tokens() for a head. handed: [T, any], of the step; to: likewise"""
        ...

    def put(self, words: Tensor) -> None:
        """Makes drafts the inputs of the next round. words: int32 [n, levels, 3, K]; see Level.words"""
        ...

    def changed(self) -> tuple[Tensor, ...]:
        """The tensors that put() changes depending on their old values."""
        ...


class Chains:
    """Drafts that come after each other. picked: see DraftTokens"""

    def __init__(self, given: SpeculativeStep, picked: Tensor) -> None:
        num_seqs = given.limit.shape[0]
        self._num_tokens = given.terms.shape[0]
        self.picked = picked[: self._num_tokens]
        self._draft_tokens = given.token_ids[: self._num_tokens].view(num_seqs, -1)[:, 1:]

    def begin(self, batch: StepBatch) -> None:
        """Like DraftTokens.begin."""

    def accept(self) -> None:
        """Like DraftTokens.accept."""

    def before_accepting(self) -> None:
        """Like DraftTokens.before_accepting."""

    accepting: Many[Recording] = ()

    def in_order(self, found: PickedRows, path: Int32Array) -> PickedRows:
        """Like DraftTokens.in_order."""
        return found

    def new_tokens(self) -> Tensor:
        """Like DraftTokens.new_tokens."""
        return self.picked

    def hand_over(self, handed: Tensor, to: Tensor) -> None:
        """Like DraftTokens.hand_over."""
        to[: self._num_tokens].copy_(handed[: self._num_tokens])

    def put(self, words: Tensor) -> None:
        """Like DraftTokens.put."""
        self._draft_tokens.copy_(words[:, :, 0, 0])

    def changed(self) -> tuple[Tensor, ...]:
        """Like DraftTokens.changed."""
        return ()


class Trees:
    """Drafts of which several may come after one token.

    runtime: of the model that verifies, whose step the rounds repeat
    step:    location of that step's inputs
    drawn:   int32 [n * W], the pick after each node
    path:    int32 [n, W], receives which nodes were accepted
    few:     1 + levels of drafts
    recorder: makes a graph of accept(), which runs eagerly without one
    """

    @torch.inference_mode(False)  # memory made in inference mode cannot be written outside of it
    def __init__(
        self,
        runtime: AttentionRuntime,
        step: DeviceStep,
        given: SpeculativeStep,
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
        self._draft_tokens = given.token_ids[:num_tokens].view(num_seqs, width)[:, 1:]
        self._numbers = given.terms.view(num_seqs, width, 3)[:, :, 2]
        self._parents = torch.full((num_seqs, width), NO_PARENT, dtype=torch.int32, device=device)
        ends = torch.arange(0, num_tokens + 1, width, dtype=torch.int32, device=device)
        self._verified = Verified(given.token_ids[:num_tokens], ends, given.kv_len[:num_seqs], self._parents)
        self._accepted = Accepted.empty(num_seqs, width, device)._replace(path=path)
        self._first = ends[:-1, None]
        self._places = torch.arange(1, width, dtype=torch.int32, device=device)
        self.picked = self._accepted.token_ids.view(-1)

    def begin(self, batch: StepBatch) -> None:
        """Like DraftTokens.begin."""
        assert isinstance(batch.mask, TreeMask), "Speculation gives steps of drafts that may branch a mask"
        self._parents.copy_(batch.mask.parents)

    def accept(self) -> None:
        """Like DraftTokens.accept."""
        self.before_accepting()
        if self._recorder is not None and self._has_accepted and self._accepting is None:
            self._record(self._recorder)
        if self._accepting is not None:
            self._accepting.replay()
        else:
            self._accept()
        self._has_accepted = True

    def before_accepting(self) -> None:
        """Like DraftTokens.before_accepting."""
        self._runtime.gate.before_move()

    @property
    def accepting(self) -> Many[Recording] | None:
        """Like DraftTokens.accepting."""
        return (self._accepting,) if self._accepting is not None else None

    def _record(self, recorder: Recorder) -> None:
        """Makes a graph of _accept(), with a round in which no draft is right: a move may not be made twice."""
        changed = self._drawn, self._draft_tokens
        held = [tensor.clone() for tensor in changed]
        self._drawn.fill_(-2)  # neither a draft nor the filler after accepted ones has this value
        try:
            self._accepting, _ = recorder.record(self._accept)
        except (RecordingRefused, torch.OutOfMemoryError):
            self._recorder = None
        finally:
            for tensor, value in zip(changed, held, strict=True):
                tensor.copy_(value)

    def _accept(self) -> None:
        """Makes the launches of accept()."""
        accepted, core = self._accepted, self._runtime.core
        with on_device(self._runtime.device):
            core.ops.accept_drawn(self._drawn, self._verified, accepted)
        core.moves.move(accepted, self._rows)
        # The order of a chain: drafts that were picked, and after them one that never is.
        is_wrong = self._places > accepted.num_accepted[:, None]
        self._draft_tokens.copy_(accepted.token_ids[:, :-1].masked_fill(is_wrong, -1))

    def in_order(self, found: PickedRows, path: Int32Array) -> PickedRows:
        """Like DraftTokens.in_order. After the end of a path it is the result of its first place."""
        num_seqs, width = path.shape
        rows = (np.arange(num_seqs, dtype=np.int32)[:, None] * np.int32(width) + path.clip(min=0)).reshape(-1)
        return PickedRows(found.token_ids[rows], found.best[rows])

    def new_tokens(self) -> Tensor:
        """Like DraftTokens.new_tokens."""
        return self._accepted.token_ids[:, : self._few].clamp(min=0).flatten()

    def hand_over(self, handed: Tensor, to: Tensor) -> None:
        """Like DraftTokens.hand_over."""
        rows = (self._first + self._accepted.path[:, : self._few].clamp(min=0)).flatten()
        torch.index_select(handed, 0, rows, out=to[: len(rows)])

    def changed(self) -> tuple[Tensor, ...]:
        """Like DraftTokens.changed."""
        return (self._numbers,)

    def put(self, words: Tensor) -> None:
        """Like DraftTokens.put."""
        num_seqs, levels, _, branches = words.shape
        width = self._parents.shape[1]
        before = torch.arange(-branches, (levels - 1) * branches, branches, dtype=torch.int32, device=words.device)
        parents = (words[:, :, 1] + before[:, None]).view(num_seqs, -1)
        scores = words[:, :, 2].contiguous().view(torch.float32).view(num_seqs, -1)
        # The sort is stable: of two equal ones the first stays first, so a parent goes before its child.
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : width - 1]
        appended = best.sort(dim=1).values
        # A value that is no node's place stands for a parent outside the tree: nothing can be accepted after it.
        nodes = torch.full_like(parents, width).scatter_(1, appended, self._places.expand(num_seqs, -1))
        parents = parents.gather(1, appended)
        of_node = nodes.gather(1, parents.clamp(min=0).long())
        self._parents[:, 1:].copy_(of_node.masked_fill_(parents < 0, 0))
        self._draft_tokens.copy_(words[:, :, 0].reshape(num_seqs, -1).gather(1, appended))
        # next_step.py has written them for a chain: a node is picked from by the number of its depth.
        self._numbers[:, 1:].copy_(self._numbers.gather(1, appended.div(branches, rounding_mode="floor") + 1))
        with on_device(self._runtime.device):
            for tensors, window_left in self._windows:
                self._runtime.core.ops.place_trees(self._parents, 0, 0, window_left, tensors)
