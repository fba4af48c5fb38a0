"""PackedMask: one bit for each new token and each key of its sequence.

Cell (t, j) of sequence i, its t-th new token and the key at kv_index j, is bit c % 32 of word c // 32, where

    c = indptr[i] + t * kv_len[i] + j                       which is also bit c % 8 of byte c // 8

A token sees exactly the keys whose bits are set; it need not see itself, and may see what comes after it. In a layer
with a window it sees those of them from kv_index positions[token] - window_left on. A position counts as the place of
its sequence's first new token at least: no window reaches further back than that token's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedMask:
    """The masks of a step, sequence after sequence.

    words:     int32 [n]      the cells of all sequences, and words that are not read
    indptr:    int64 [S + 1]  sequence -> its first cell
    positions: int32 [T]      token -> its position; in a tree of drafts its depth after the older keys
    """

    words: Tensor
    indptr: Tensor
    positions: Tensor

    def check(self, num_seqs: int, num_tokens: int) -> None:
        """What a launcher asserts of the mask of a step with so many sequences and padded tokens."""
        assert self.words.dtype == torch.int32
        assert self.words.is_contiguous()
        assert self.indptr.dtype == torch.int64
        assert self.indptr.is_contiguous()
        assert self.indptr.shape == (num_seqs + 1,)
        assert self.positions.dtype == torch.int32
        assert self.positions.is_contiguous()
        assert self.positions.shape == (num_tokens,)
