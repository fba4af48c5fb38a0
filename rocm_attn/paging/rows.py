"""Rows: the rows of a request table as its parts share them: how long each may be, and the pages that it holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rocm_attn.batch.step_batch import INT32_MAX, Int32Array
from rocm_attn.errors import BadBatch, BadSetting, NeverFits, OutOfRows, WrongState
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.paging.generations import Generations
from rocm_attn.paging.index_spaces import RESERVED_ROW, Space
from rocm_attn.paging.page_table import PageTable, SpacePages, TableGuards
from rocm_attn.paging.stored_tokens import StoredTokens

# Rows whose next reservation is looked at, whatever its length.
ALWAYS = np.iinfo(np.int32).min
# Rows and lengths of no step.
NO_ROOM = (b"", b"")


class Rows:
    """The state of a table's rows, int32 [num_rows] each.

    reserved_len: tokens that the row's owner asked room for; -1: not admitted
    capacity:     tokens that the row's pages hold; -1: not admitted
    look_from:    the first kv_len for which a row may need a page, or a copy of one. Below it a reservation is a number
    free:         rows that are not admitted, the next one last
    known_rows:   rows that were in the table, each named once, as bytes, and as int64 for NumPy's faster look-up
    known_room:   rows and kv_len, as bytes, that had room when they were last looked at. No row has gone back since
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_kv_len: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
        windows: Sequence[SpacePages],
        guards: TableGuards,
    ) -> None:
        self.row_width = guards.row_width
        self.page_size = page_size
        self.width = (max_kv_len + page_size - 1) // page_size
        if self.width * page_size > INT32_MAX:
            raise NeverFits(
                f"max_kv_len is {max_kv_len}; lengths are int32, so use at most {INT32_MAX // page_size * page_size}"
            )
        self.spaces = tuple(
            PageTable(pages, num_rows=num_rows, width=self.width, page_size=page_size, device=device, guards=guards)
            for pages in (SpacePages(Space.FULL, num_pages), *windows)
        )
        self.windowed = tuple(table for table in self.spaces if table.pages.window_left != ALL_KEYS)
        self.reserved_len = np.full(num_rows, -1, np.int32)
        self.capacity = np.full(num_rows, -1, np.int32)
        self.look_from = np.full(num_rows, ALWAYS, np.int32)
        self.tokens = StoredTokens(num_rows, guards.shared_floor)
        self.generations = Generations(num_rows)
        self.free = list(range(num_rows - 1, RESERVED_ROW, -1))
        self.known_rows = b"", np.empty(0, np.int64)
        self.known_room = NO_ROOM
        self._seen = np.zeros(num_rows, np.int32)

    def space(self, space: Space) -> PageTable:
        """The pages of a space. Raises BadSetting where rows have none there."""
        for table in self.spaces:
            if table.space is space:
                return table
        raise BadSetting(f"rows have no pages in the {space.name} space; build the runtime with swa_pages")

    @property
    def next_row(self) -> int:
        """The row that admit() gives next. Raises OutOfRows when every row is taken."""
        if not self.free:
            raise OutOfRows(f"all {len(self.capacity) - 1} rows are taken; free a request or raise max_num_rows")
        return self.free[-1]

    def admit(self) -> int:
        """A fresh row without pages. Raises OutOfRows when every row is taken."""
        row = self.next_row
        self.generations.change(row)
        self.capacity[row] = self.reserved_len[row] = 0
        return self.free.pop()  # last: an interrupt before it loses no row

    def end(self, row: int) -> int:
        """One past the last page_no that row has room in."""
        return max(0, int(self.capacity[row])) // self.page_size

    def must_be_admitted(self, row: int) -> None:
        if not RESERVED_ROW < row < len(self.capacity) or self.capacity[row] < 0:
            raise WrongState(f"row {row} is not admitted: it was never handed out, or it was freed already")

    def must_all_be_admitted(self, rows: Int32Array) -> None:
        outside = int(rows.min()) <= RESERVED_ROW or int(rows.max()) >= len(self.capacity)
        if outside or (self.capacity[rows] < 0).any():
            for row in rows.tolist():
                self.must_be_admitted(row)

    def must_be_distinct(self, rows: Int32Array) -> None:
        order = np.arange(len(rows), dtype=np.int32)
        self._seen[rows] = order
        if (self._seen[rows] != order).any():
            seq = int(np.argmax(self._seen[rows] != order))
            raise BadBatch(f"row {rows[seq]} occurs twice in one step; a row belongs to one sequence")

    def forget(self, row: int) -> None:
        """A row that holds no page is free."""
        self.generations.change(row)
        self.known_room, self.look_from[row] = NO_ROOM, ALWAYS
        for table in self.windowed:
            table.start_over(row)
        self.tokens.start_over(row)
        self.capacity[row] = self.reserved_len[row] = -1
        if row not in self.free:  # it is where an interrupt has broken off admit()
            self.free.append(row)
