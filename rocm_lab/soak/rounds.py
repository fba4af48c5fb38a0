"""Rounds of drafts in a soak: the forward that draws drafts on the device, and their expected results.

The two functions below compute ids and parents of later drafts from the ids before them, on the device for the forward
and on the host for the reference. So a round is compared as a tree whose nodes are all new: a draft sees the stored
tokens, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.drafts import Drafts
from rocm_attn.batch.halves import split_batch
from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.kernels.metadata.step_tensors import NO_PARENT
from rocm_attn.step.step import Series
from rocm_lab.soak.checker import LayerTables, StepOutputs

Ids = TypeVar("Ids", Int32Array, Tensor)


def next_ids(ids: Ids, branch: Ids, vocabulary: int) -> Ids:
    """Returns the ids after a draft step, from the step's ids and their branches. Padding's id 0 stays 0."""
    drawn: Ids = (1 + (ids * 5 + branch * 3 + 1) % (vocabulary - 1)) * (ids > 0)
    return drawn


def branches_before(ids: Ids, branch: Ids, branches: int) -> Ids:
    """Returns the branches that the drafts of a step continue, from its ids."""
    found: Ids = (ids * 3 + branch) % branches
    return found


def drafts_after(first: Sequence[int], drafts: Drafts, vocabulary: int) -> tuple[list[int], Int32Array]:
    """Returns ids and parents, as in SequenceTruth, of all drafts of a sequence. first: ids of the first draft step"""
    branch = np.arange(drafts.branches, dtype=np.int32)
    ids, all_ids = np.array(first, np.int32), [np.array(first, np.int32)]
    parents = [np.full(drafts.branches, NO_PARENT, np.int32)]
    for step in range(1, drafts.steps):
        ids = next_ids(ids, branch, vocabulary).astype(np.int32)
        all_ids.append(ids)
        parents.append((step - 1) * drafts.branches + branches_before(ids, branch, drafts.branches).astype(np.int32))
    return np.concatenate(all_ids).tolist(), np.concatenate(parents)


class SoakRounds:
    """The forward function of rounds. It leaves the outputs of all drafts in buffers of its own.

    tables:     per layer, on the device that steps run on
    vocabulary: token ids; max_kv_len: positions of the tables
    most_seqs:  most padded sequences of a round
    rounds:     the rounds that are run
    """

    def __init__(
        self,
        tables: Sequence[LayerTables],
        *,
        vocabulary: int,
        max_kv_len: int,
        most_seqs: int,
        rounds: Sequence[Drafts],
    ) -> None:
        self._tables, self._vocabulary, self._max_kv_len = tables, vocabulary, max_kv_len
        steps = max((drafts.steps for drafts in rounds), default=0)
        self._most_tokens = most_seqs * max((drafts.branches for drafts in rounds), default=0)
        shape = steps, self._most_tokens
        self._out = [rows.q.new_empty(*shape, rows.q.shape[1], rows.v.shape[2]) for rows in tables]
        self._lse = [rows.q.new_empty(*shape, rows.q.shape[1], dtype=torch.float32) for rows in tables]

    def forward(self, round_: Series) -> Tensor:
        """Computes attention of every layer in every draft step. Returns StepOutputs.rows of the padded sequences."""
        ids, branches = round_[0].token_ids, round_[0].branches
        branch = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device) % branches
        rows: list[Tensor] = []
        for number, step in enumerate(round_):
            if number:
                ids = next_ids(ids, branch, self._vocabulary)
                step.set_parents(branches_before(ids, branch, branches))
            entry, rows = ids * self._max_kv_len + step.positions, []
            for layer, tables in enumerate(self._tables):
                out, lse = self._out[layer][number][step.tokens], self._lse[layer][number][step.tokens]
                step.layers.store_and_attend(layer, tables.q[entry], tables.k[entry], tables.v[entry], out, lse)
                rows.append(out[branches - 1 :: branches].flatten(1))
        return torch.cat(rows, 1)

    def poison(self) -> None:
        """Overwrites all outputs with NaN, so that a missing write shows."""
        for tensor in (*self._out, *self._lse):
            tensor.fill_(float("nan"))

    def outputs(self, batch: StepBatch, shape: PaddedShape, rows: Tensor) -> StepOutputs:
        """Returns a copy of the last round's outputs: all drafts of a sequence, sequence after sequence, then padding.

        rows: the result of forward, real sequences only
        """
        order = torch.from_numpy(self._places(batch, shape)).to(rows.device)
        return StepOutputs(
            tuple(out.flatten(0, 1)[order] for out in self._out),
            tuple(lse.flatten(0, 1)[order] for lse in self._lse),
            rows.clone(),
        )

    def _places(self, batch: StepBatch, shape: PaddedShape) -> npt.NDArray[np.int64]:
        """Returns the places of a round's drafts in the buffers, which are ordered by draft step. Padding is last."""
        drafts, of_half = shape.drafts, shape.child.num_seqs
        assert isinstance(drafts, Drafts)
        place = np.arange(of_half * shape.num_halves)
        if shape.num_halves > 1:
            num_first = split_batch(batch, of_half)[0].num_seqs
            is_real = (place < num_first) | ((place >= of_half) & (place < of_half + batch.num_seqs - num_first))
        else:
            is_real = place < batch.num_seqs
        place = np.concatenate([place[is_real], place[~is_real]])
        step, branch = np.arange(drafts.steps), np.arange(drafts.branches)
        of_seq = step[:, None] * self._most_tokens + branch
        places: npt.NDArray[np.int64] = (place[:, None, None] * drafts.branches + of_seq).ravel()
        return places
