"""PackedMask: one bit for each new token and each key of its sequence.

Cell (t, j) of sequence i, its t-th new token and the key at kv_index j, is bit c % 32 of word c // 32, where

    c = indptr[i] + t * kv_len[i] + j                       which is also bit c % 8 of byte c // 8

A token sees exactly the keys whose bits are set; it need not see itself, and may see what lies behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedMask:
    """The masks of a step, sequence after sequence.

    words:  int32 [n]      the cells of all sequences, and words that nobody reads
    indptr: int64 [S + 1]  sequence -> its first cell
    """

    words: Tensor
    indptr: Tensor

    def check(self, num_seqs: int) -> None:
        """What a launcher asserts of the mask of a step with so many sequences."""
        assert self.words.dtype == torch.int32
        assert self.words.is_contiguous()
        assert self.indptr.dtype == torch.int64
        assert self.indptr.is_contiguous()
        assert self.indptr.shape == (num_seqs + 1,)
