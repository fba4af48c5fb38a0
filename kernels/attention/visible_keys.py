"""VisibleKeys, PackedMask: the keys that each new token of a step sees, where a layer's scores alone do not say it.

A token sees the keys of one range of places, first[token] <= kv_index < end[token] (visible_ranges.py). It need not see
itself, and may see later tokens. A packed mask is the general case: one bit for each new token and each key of its
sequence from some key on, by which keys of the range are hidden.

Cell (t, j) of sequence i, its t-th new token and the key at kv_index j >= start[i], is bit c % 32 of word c // 32, and
bit c % 8 of byte c // 8, where

    c = indptr[i] + t * (kv_len[i] - start[i]) + j - start[i]

Keys before start[i] have no cells, and none of them is hidden. A tree of drafts needs bits of its own tokens only,
start 0 is a mask of all keys, and with start kv_len there are no cells: ranges then say it all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class VisibleKeys:
    """The keys that tokens see, as ranges.

    first: int32 [T]  token -> the first key of its range, 0 or more; not read in a layer without a window
    end:   int32 [T]  token -> one past the last, at most kv_len; 0: the token sees no key
    """

    first: Tensor
    end: Tensor

    def check(self, num_seqs: int, num_tokens: int) -> None:
        """Asserts dtypes, shapes and contiguity. num_seqs, num_tokens: of the step, padded"""
        for each in (self.first, self.end):
            assert each.dtype == torch.int32
            assert each.is_contiguous()
            assert each.shape == (num_tokens,)

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """The arguments of kernels that read it, in their order: words, indptr and start of cells, first, end."""
        return None, None, None, self.first, self.end


@dataclass(frozen=True, slots=True, eq=False)
class PackedMask(VisibleKeys):
    """Ranges, and cells, sequence after sequence.

    words:  int32 [n]      the cells of all sequences, and words that are not read
    indptr: int64 [S + 1]  sequence -> its first cell
    start:  int32 [S]      sequence -> the first key that has cells, up to kv_len; below 0 if it lost its keys
    """

    words: Tensor
    indptr: Tensor
    start: Tensor

    def check(self, num_seqs: int, num_tokens: int) -> None:
        VisibleKeys.check(self, num_seqs, num_tokens)
        assert self.words.dtype == torch.int32
        assert self.words.is_contiguous()
        assert self.indptr.dtype == torch.int64
        assert self.indptr.is_contiguous()
        assert self.indptr.shape == (num_seqs + 1,)
        assert self.start.dtype == torch.int32
        assert self.start.is_contiguous()
        assert self.start.shape == (num_seqs,)

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        return self.words, self.indptr, self.start, self.first, self.end


def key_arguments(mask: VisibleKeys | None) -> tuple[Tensor | None, ...]:
    """The arguments of kernels that may be given visible keys; None without them."""
    return (None,) * 5 if mask is None else mask.arguments
