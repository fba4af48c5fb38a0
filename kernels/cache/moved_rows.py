"""The arguments of moving tokens between pages and contiguous rows: pages of many layers laid out alike, as words.

    rows[place[part] + (t - first) * row_words + w] = word w of token t % page_size of page[t // page_size] of the part

A word is 8, 4, 2 or 1 bytes: the moved values are not interpreted. A part is K or V of one layer, or its scales of
tokens, or its index keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.cache.page_rows import PageRows

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True, eq=False)
class AlikePages:
    """Pages of several parts, with equal shapes and strides.

    sides:  [pages, groups, tokens, outer, inner] words each: token t of a page belongs to group t // tokens, and word w
            of its row is (w // inner, w % inner)
    places: int64 [parts], words from the first side to each, on its device: they may lie anywhere
    """

    sides: tuple[Tensor, ...]
    places: Tensor

    @classmethod
    def of(cls, sides: Sequence[Tensor]) -> AlikePages:
        """The pages of page_words()'s sides, with equal strides and shapes after the pages. One copy to the device."""
        first = sides[0]
        words = [(side.data_ptr() - first.data_ptr()) // first.element_size() for side in sides]
        return cls(tuple(sides), torch.tensor(words, dtype=torch.int64).to(first.device))

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.sides[0].shape[1] * self.sides[0].shape[2]

    @property
    def row_words(self) -> int:
        """Words of a token."""
        return self.sides[0].shape[3] * self.sides[0].shape[4]


class MovedTokens(NamedTuple):
    """The tokens that are moved, and the places of their rows.

    words:     int64 [n], on the device: page ids from token `begin` on, page by page; then, for each part, the place of
               its first row in rows, in words
    rows:      the contiguous rows, one-dimensional, of words like the pages'
    begin:     the first token that has a place in pages, a multiple of the page size
    first:     the first token that has a row
    end:       one after the last token that has a row
    until:     one after the last token that is written in pages: end, or more of its page
    num_pages: number of page ids among the words
    """

    words: Tensor
    rows: Tensor
    begin: int
    first: int
    end: int
    until: int
    num_pages: int


def page_words(cells: PageRows) -> Tensor:
    """Returns pages in the layout of AlikePages. cells: of words"""
    rows = cells.cells.permute(0, 1, 5, 2, 3, 4)
    heads, vectors, elements = rows.shape[3:]
    if vectors == 1 or rows.stride(4) == rows.stride(5) * elements:
        rows = rows.flatten(4, 5)
        is_whole = heads == 1 or rows.stride(3) == rows.stride(4) * rows.shape[4]
        return rows.flatten(3, 4)[:, :, :, None] if is_whole else rows
    return rows.flatten(3, 4)


def word_dtype(raw: Tensor) -> torch.dtype:
    """Returns the largest word that pages consist of: their rows, strides and address are all multiples of it."""
    size = raw.element_size()
    if raw.stride(-1) != 1:
        return _WORDS[size]
    lengths = [raw.shape[-1] * size, raw.data_ptr(), *(stride * size for stride in raw.stride()[:-1])]
    return next(dtype for num_bytes, dtype in _WORDS.items() if all(each % num_bytes == 0 for each in lengths))
