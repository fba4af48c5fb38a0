"""PackedMask: one bit for each new token and each key of its sequence from some key on.

Cell (t, j) of sequence i, its t-th new token and the key at kv_index j >= start[i], is bit c % 32 of word c // 32, and
bit c % 8 of byte c // 8, where

    c = indptr[i] + t * (kv_len[i] - start[i]) + j - start[i]

A token sees every key before start[i], and those of the others whose bits are set; it need not see itself, and may see
later tokens. A tree of drafts needs bits of its own tokens only, and start 0 is a mask of all keys. In a layer with a
window it sees only those from kv_index window_start[token] on. Places of a tree's tokens are not their depths: the
code that writes the mask knows both (place_trees.py, place_mask.py, pack_mask.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedMask:
    """The masks of a step, sequence after sequence.

    words:        int32 [n]      the cells of all sequences, and words that are not read
    indptr:       int64 [S + 1]  sequence -> its first cell
    start:        int32 [S]      sequence -> the first key that has cells, from 0 up to kv_len
    window_start: int32 [T]      token -> the first key of its window, which may lie before the sequence's; in a layer
                                 without a window empty, and not read
    """

    words: Tensor
    indptr: Tensor
    start: Tensor
    window_start: Tensor

    def check(self, num_seqs: int, num_tokens: int, *, windowed: bool) -> None:
        """Asserts dtypes, shapes and contiguity.

        num_seqs, num_tokens: of the step, padded; windowed: whether the layer has a window
        """
        assert self.words.dtype == torch.int32
        assert self.words.is_contiguous()
        assert self.indptr.dtype == torch.int64
        assert self.indptr.is_contiguous()
        assert self.indptr.shape == (num_seqs + 1,)
        assert self.start.dtype == torch.int32
        assert self.start.is_contiguous()
        assert self.start.shape == (num_seqs,)
        assert self.window_start.dtype == torch.int32
        assert self.window_start.is_contiguous()
        assert not windowed or self.window_start.shape == (num_tokens,), "a mask is placed by each window"


def mask_arguments(mask: PackedMask | None) -> tuple[Tensor | None, ...]:
    """The arguments of kernels that read a mask, in their order: words, indptr, start, window_start; None without."""
    return (None,) * 4 if mask is None else (mask.words, mask.indptr, mask.start, mask.window_start)
