"""RequestTable: which pages hold a request's KV. The host decides; the device copy follows through pending updates.

Row 0 and page 0 are reserved: padded sequences point there. Pages are counted, so that requests can share a prefix;
a partly filled page that several rows hold is copied before one of them writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rocm_attn.errors import BadBatch, CapacityExceeded, OutOfPages, WrongState
from rocm_attn.index_spaces import RESERVED_PAGE, RESERVED_ROW, num_pages
from rocm_attn.step_batch import Int32Array, StepBatch


@dataclass(slots=True)
class PendingChanges:
    """What the device does not know yet.

    cells:  (row, first page_no, one past the last) of changed entries
    copies: target page -> source page, to be copied before anything else is stored
    """

    cells: list[tuple[int, int, int]] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.cells or self.copies)


@dataclass(frozen=True, slots=True)
class RowWidth:
    """What a row may hold, and how pages are put into it: never past its end."""

    def require(self, kv_len: int, max_kv_len: int) -> None:
        """Raise CapacityExceeded unless a row can hold kv_len tokens."""
        if kv_len > max_kv_len:
            raise CapacityExceeded(f"{kv_len} tokens exceed the {max_kv_len} that a row can hold; raise max_kv_len")

    def put(self, entries: Int32Array, row: int, first: int, pages: Sequence[int]) -> list[tuple[int, int, int]]:
        """entries[row, first + i] = pages[i]; the changed cells, as PendingChanges lists them."""
        end = first + len(pages)
        entries[row, first:end] = pages
        return [(row, first, end)]


WITHIN_THE_ROW = RowWidth()

# holders of pages, int32 [n] -> whether a row must not write to them
IsShared = Callable[[Int32Array], npt.NDArray[np.bool_]]


def held_by_several(holders: Int32Array) -> npt.NDArray[np.bool_]:
    """Whether more than one row holds a page."""
    return holders > 1


class RequestTable:
    """Rows of pages, int32 [num_rows, width], with reference counts.

    max_num_seqs: requests that can be admitted at a time (row 0 comes on top)
    max_kv_len:   tokens that a row can hold
    num_pages:    pages of the pool, the reserved page 0 included
    row_width:    keeps a row's pages inside the row
    is_shared:    which partly filled pages are copied before a row writes to them
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_kv_len: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
        row_width: RowWidth = WITHIN_THE_ROW,
        is_shared: IsShared = held_by_several,
    ) -> None:
        if max_num_seqs < 1 or max_kv_len < 1:
            raise CapacityExceeded(
                f"max_num_seqs is {max_num_seqs} and max_kv_len is {max_kv_len}; both must be at least 1"
            )
        self._row_width = row_width
        self._is_shared = is_shared
        self.page_size = page_size
        self.max_kv_len = max_kv_len
        self.width = (max_kv_len + page_size - 1) // page_size
        self.entries_host = np.zeros((max_num_seqs + 1, self.width), np.int32)
        self.entries = torch.zeros((max_num_seqs + 1, self.width), dtype=torch.int32, device=device)
        self.pending = PendingChanges()
        self.num_usable_pages = num_pages - 1
        # Tokens the row's owner asked room for, and tokens the row's pages hold; -1 in both: not admitted.
        self._reserved_len = np.full(max_num_seqs + 1, -1, np.int32)
        self._capacity = np.full(max_num_seqs + 1, -1, np.int32)
        self._holders = np.zeros(num_pages, np.int32)  # rows that hold a page
        self._holders[RESERVED_PAGE] = 1
        self._free_pages = list(range(num_pages - 1, RESERVED_PAGE, -1))
        self._free_rows = list(range(max_num_seqs, RESERVED_ROW, -1))
        self._seen = np.zeros(max_num_seqs + 1, np.int32)
        self._rows_checked = b""
        self._order = np.arange(max_num_seqs, dtype=np.int32)

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def admit(self) -> int:
        """A fresh row without pages. Raises CapacityExceeded when every row is taken."""
        if not self._free_rows:
            raise CapacityExceeded(
                f"all {len(self.entries_host) - 1} rows are taken; free a request or raise max_num_seqs"
            )
        row = self._free_rows.pop()
        self._capacity[row] = 0
        self._reserved_len[row] = 0
        return row

    def pages_short(self, row: int, kv_len: int) -> int:
        """Pages that reserve(row, kv_len) would take from the pool; for RESERVED_ROW, what a new row would take."""
        wanted = num_pages(kv_len, self.page_size)
        if row == RESERVED_ROW:
            return wanted
        held = self._num_held(row)
        return max(0, wanted - held) + (kv_len > self._reserved_len[row] and self._shares_last_page(row))

    def reserve(self, row: int, kv_len: int) -> None:
        """Make room for kv_len tokens in row. What the row holds beyond them stays.

        Raises OutOfPages, CapacityExceeded beyond max_kv_len and WrongState for a row that is not admitted;
        nothing is changed then.
        """
        self._must_be_admitted(row)
        self._row_width.require(kv_len, self.max_kv_len)
        short = self.pages_short(row, kv_len)
        if short > self.num_free_pages:
            raise OutOfPages(
                f"row {row} needs {short} more pages for {kv_len} tokens and {self.num_free_pages} are free; "
                "free a request or raise num_pages"
            )
        if kv_len <= self._reserved_len[row]:
            return
        if self._shares_last_page(row):
            self._own_last_page(row)
        held, wanted = self._num_held(row), num_pages(kv_len, self.page_size)
        if wanted > held:
            pages = [self._take_page() for _ in range(wanted - held)]
            self.pending.cells += self._row_width.put(self.entries_host, row, held, pages)
            self._capacity[row] = wanted * self.page_size
        self._reserved_len[row] = kv_len

    def reserve_all(self, rows: Int32Array, kv_len: Int32Array) -> None:
        """reserve(rows[i], kv_len[i]) for every i, or for none: what raises leaves all rows as they were.

        rows, kv_len: int32 [num_seqs]; rows are distinct. Only rows that need a page cost a Python iteration.
        """
        if len(rows) == 0:
            return
        if (
            int(rows.min()) <= RESERVED_ROW
            or int(rows.max()) >= len(self._capacity)
            or (self._capacity[rows] < 0).any()
        ):
            for row in rows.tolist():
                self._must_be_admitted(row)
        reserved = self._reserved_len[rows]
        grows = kv_len > reserved
        last_page = self.entries_host[rows, np.minimum(reserved // self.page_size, self.width - 1)]
        shares = (reserved % self.page_size != 0) & self._is_shared(self._holders[last_page])
        slow = np.flatnonzero(grows & ((kv_len > self._capacity[rows]) | shares))
        if len(slow):
            self._reserve_slowly(rows[slow].tolist(), kv_len[slow].tolist())
        self._reserved_len[rows] = np.maximum(reserved, kv_len)

    def _reserve_slowly(self, rows: list[int], kv_len: list[int]) -> None:
        self._row_width.require(max(kv_len), self.max_kv_len)
        # An upper bound: of two rows that share a page only one needs a copy.
        if sum(map(self.pages_short, rows, kv_len)) > self.num_free_pages:
            raise OutOfPages(
                f"{len(rows)} sequences need more pages than the {self.num_free_pages} that are free; "
                "free a request or raise num_pages"
            )
        for row, length in zip(rows, kv_len, strict=True):
            self.reserve(row, length)

    def fork(self, row: int, kv_len: int) -> int:
        """A new row that shares the first kv_len tokens of row, page by page. Raises CapacityExceeded, BadBatch."""
        self._must_be_admitted(row)
        if not 0 <= kv_len <= self._reserved_len[row]:
            raise BadBatch(f"row {row} holds {self._reserved_len[row]} tokens; {kv_len} of them cannot be shared")
        child = self.admit()
        shared = num_pages(kv_len, self.page_size)
        pages = self.entries_host[row, :shared]
        self._holders[pages] += 1
        self.entries_host[child, :shared] = pages
        if shared:
            self.pending.cells.append((child, 0, shared))
        self._capacity[child] = shared * self.page_size
        self._reserved_len[child] = kv_len
        return child

    def free(self, row: int) -> None:
        """Give a row and its pages back. Raises WrongState for a row that is not admitted, a second free included."""
        self._must_be_admitted(row)
        held = self._num_held(row)
        for page in self.entries_host[row, :held].tolist():
            self._drop_page(page)
        self.entries_host[row, :held] = RESERVED_PAGE
        if held:
            self.pending.cells.append((row, 0, held))
        self._capacity[row] = self._reserved_len[row] = -1
        self._free_rows.append(row)

    def pending_updates(self) -> Int32Array:
        """Changed cells as (row, column, entry), int32 [n, 3].

        Entries are read now, from the host's copy: a cell that changed twice occurs twice, with the same entry.
        """
        if not self.pending.cells:
            return np.empty((0, 3), np.int32)
        ranges = np.array(self.pending.cells, np.int32)
        counts = ranges[:, 2] - ranges[:, 1]
        starts = np.cumsum(counts) - counts
        updates = np.empty((int(counts.sum()), 3), np.int32)
        updates[:, 0] = np.repeat(ranges[:, 0], counts)
        updates[:, 1] = np.arange(len(updates)) + np.repeat(ranges[:, 1] - starts, counts)
        updates[:, 2] = self.entries_host[updates[:, 0], updates[:, 1]]
        return updates

    def check_batch(self, batch: StepBatch) -> None:
        """Raise BadBatch unless every row is admitted, named once, and has room for its kv_len."""
        rows = batch.rows
        if len(rows) == 0:
            return
        # The rows of a step are mostly those of the step before it, and comparing bytes costs next to nothing.
        named = rows.tobytes()
        if named != self._rows_checked:
            self._check_rows(rows)
            self._rows_checked = named
        reserved = self._reserved_len.take(rows)  # -1 in rows that are not admitted, the reserved row among them
        short = reserved < batch.kv_len
        if short[short.argmax()]:
            self._refuse_rows(rows)
            self._refuse_lengths(batch)

    def _check_rows(self, rows: Int32Array) -> None:
        """Raise BadBatch unless all rows are in the table and none is named twice."""
        # Read as unsigned, a negative row is a huge one.
        if np.maximum.reduce(rows.view(np.uint32)) >= len(self._capacity):
            self._refuse_rows(rows)
        if len(rows) > len(self._order):
            raise BadBatch(f"{len(rows)} sequences in one step, but the table has {len(self._order)} rows")
        order = self._order[: len(rows)]
        self._seen[rows] = order
        if (self._seen[rows] != order).any():
            seq = int(np.argmax(self._seen[rows] != order))
            raise BadBatch(f"row {rows[seq]} occurs twice in one step; a row belongs to one sequence")

    def _refuse_rows(self, rows: Int32Array) -> None:
        outside = (rows <= RESERVED_ROW) | (rows >= len(self._capacity))
        if outside.any():
            raise BadBatch(
                f"row {rows[outside][0]} is not a request's row; rows run from 1 to {len(self._capacity) - 1}, "
                "row 0 is reserved"
            )

    def _refuse_lengths(self, batch: StepBatch) -> None:
        seq = int(np.argmax(self._reserved_len[batch.rows] < batch.kv_len))
        row = batch.rows[seq]
        if self._capacity[row] < 0:
            raise BadBatch(f"row {row} of sequence {seq} is not admitted; call admit() first")
        raise BadBatch(
            f"sequence {seq} has kv_len {batch.kv_len[seq]}, but row {row} has room for "
            f"{self._reserved_len[row]} tokens; call reserve({row}, {batch.kv_len[seq]}) first"
        )

    def pages_of(self, row: int) -> Int32Array:
        """The pages that row holds, in order."""
        self._must_be_admitted(row)
        return np.array(self.entries_host[row, : self._num_held(row)], np.int32)

    def _num_held(self, row: int) -> int:
        return max(0, int(self._capacity[row])) // self.page_size

    def _must_be_admitted(self, row: int) -> None:
        if not RESERVED_ROW < row < len(self._capacity) or self._capacity[row] < 0:
            raise WrongState(f"row {row} is not admitted: it was never handed out, or it was freed already")

    def _shares_last_page(self, row: int) -> bool:
        """Whether the next token of row would land in a page that another row holds too."""
        reserved = int(self._reserved_len[row])
        if reserved % self.page_size == 0:
            return False
        page = self.entries_host[row, reserved // self.page_size]
        return bool(self._is_shared(self._holders[page : page + 1])[0])

    def _own_last_page(self, row: int) -> None:
        page_no = int(self._reserved_len[row]) // self.page_size
        shared = int(self.entries_host[row, page_no])
        own = self._take_page()
        # A page that is itself still waiting to be copied holds nothing yet: copy from where its content is.
        self.pending.copies[own] = self.pending.copies.get(shared, shared)
        self._holders[shared] -= 1
        self.entries_host[row, page_no] = own
        self.pending.cells.append((row, page_no, page_no + 1))

    def _take_page(self) -> int:
        page = self._free_pages.pop()
        self._holders[page] = 1
        return page

    def _drop_page(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self.pending.copies.pop(page, None)
            self._free_pages.append(page)
