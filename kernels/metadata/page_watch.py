"""PageWatch: the state between steps that detects a page being written while a row still names it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# The words of a row, for each of its last two steps: the step's number, the step since which the row has been one and
# the same sequence, and tokens before and after. A step reads the words of an earlier one, and overwrites the others:
# so its launch may run twice.
ROW_WORDS = 4
STEPS_OF_ROW = 2


@dataclass(frozen=True, slots=True)
class PageWatch:
    """The watch of one space's table. A cell is an entry of the table: row * width + page_no. Steps count from 1.

    entries: int64 [rows, width], since << 32 | page: the page that a cell names, and the step since which it does
    pages:   int64 [pages], written << 32 | cell: the step that a page was written in last, and the cell that led to it
    rows:    int32 [rows, STEPS_OF_ROW * ROW_WORDS]
    """

    entries: Tensor
    pages: Tensor
    rows: Tensor

    def clear(self) -> None:
        """Forgets everything, as in a new watch."""
        for words in (self.entries, self.pages, self.rows):
            words.zero_()

    @classmethod
    def of(cls, num_rows: int, width: int, num_pages: int, device: torch.device) -> PageWatch:
        """Returns a watch in which nothing was named or written yet."""
        return cls(
            torch.zeros(num_rows, width, dtype=torch.int64, device=device),
            torch.zeros(num_pages, dtype=torch.int64, device=device),
            torch.zeros(num_rows, STEPS_OF_ROW * ROW_WORDS, dtype=torch.int32, device=device),
        )
