"""TableView: how kernels see any table, whoever owns it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torch import Tensor

from rocm_attn.paging.index_spaces import Space


class TableUnit(enum.Enum):
    """What an entry names."""

    PAGE = "page"
    SLOT = "slot"


@dataclass(frozen=True, slots=True)
class TableView:
    """A table of pages (or slots) and the sequences that read it.

    entries:    int32 [rows, width]; row stride is free
    row_of_seq: int32 [S]; sequence -> row. A table that has one row for each sequence brings 0, 1, 2, ...
    unit, space: what an entry names, and in which pool
    """

    entries: Tensor
    row_of_seq: Tensor
    unit: TableUnit = TableUnit.PAGE
    space: Space = Space.FULL

    def narrow(self, width: int) -> TableView:
        """The same table, cut to its first `width` columns."""
        return TableView(self.entries[:, :width], self.row_of_seq, self.unit, self.space)
