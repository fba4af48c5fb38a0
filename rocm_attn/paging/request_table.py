"""RequestTable: the rows that requests hold, how long each may be, and in each space the pages that its KV lies in.

Row 0 and page 0 are reserved: padded sequences point there. Pages are counted, so that requests can share a prefix;
a partly filled page that several rows hold is copied before one of them goes on in it. Full pages can be kept
(keeps.py): they stay when their row is freed, and other rows begin over them. With an SWA space, a row has pages in
both spaces, by one length. The tokens of rows that are stored: stored_tokens.py. The checks of a step: batch_checks.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rocm_attn.batch.step_batch import Int32Array, Integers, as_int32
from rocm_attn.errors import BadBatch, BadSetting, NeverFits, OutOfPages
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.batch_checks import BatchChecks
from rocm_attn.paging.index_spaces import Space, num_pages
from rocm_attn.paging.keeps import Keeps
from rocm_attn.paging.page_table import ALL_TABLE_GUARDS, PageTable, SpacePages, TableGuards
from rocm_attn.paging.rows import ALWAYS, NO_ROOM, Rows

_INT32 = np.dtype(np.int32)


class RequestTable:
    """Rows of pages, with reference counts.

    max_num_seqs: sequences that a step may have
    max_num_rows: requests that can be admitted at a time, at least as many (row 0 comes on top); 0: max_num_seqs
    max_kv_len:   tokens that a row can hold
    num_pages:    pages of the full space's pool, the reserved page 0 included
    windows:      other spaces, whose pages are given back when they have left the window

    spaces:      the page table of each space; full: that of the full one
    kept:        the pages that are kept, whatever becomes of their rows
    checks:      what a step asks before it begins
    tokens:      the tokens of rows that are stored
    generations: when each row changed last
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_kv_len: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
        windows: Sequence[SpacePages] = (),
        max_num_rows: int = 0,
        guards: TableGuards = ALL_TABLE_GUARDS,
    ) -> None:
        num_rows = (max_num_rows or max_num_seqs) + 1
        if max_num_seqs < 1 or max_kv_len < 1:
            raise NeverFits(f"max_num_seqs is {max_num_seqs} and max_kv_len is {max_kv_len}; both must be at least 1")
        if num_rows <= max_num_seqs:
            raise NeverFits(
                f"max_num_rows is {max_num_rows} and a step may have max_num_seqs = {max_num_seqs} sequences, each of "
                "which needs a row; raise max_num_rows"
            )
        self.page_size, self.max_num_seqs, self.max_kv_len = page_size, max_num_seqs, max_kv_len
        self._rows = rows = Rows(
            num_rows=num_rows,
            max_kv_len=max_kv_len,
            num_pages=num_pages,
            page_size=page_size,
            device=device,
            windows=windows,
            guards=guards,
        )
        self.width, self.spaces, self.full = rows.width, rows.spaces, rows.spaces[0]
        self.tokens, self.generations = rows.tokens, rows.generations
        self.kept = Keeps(rows, max_kv_len, guards.is_kept)
        self.checks = BatchChecks(rows, max_num_seqs)

    @property
    def fewest_free_pages(self) -> int:
        """Pages that are free in the space that has the fewest."""
        return min(table.num_free_pages for table in self.spaces)

    @property
    def num_free_rows(self) -> int:
        return len(self._rows.free)

    @property
    def is_empty(self) -> bool:
        """Whether no request is admitted and no page is kept: nothing that was stored can be read again."""
        has_no_rows = self.num_free_rows == len(self._rows.capacity) - 1
        return has_no_rows and all(table.num_free_pages == table.num_usable_pages for table in self.spaces)

    @property
    def most_new_seqs(self) -> int:
        """Sequences that a step of requests that are admitted now may have."""
        return min(self.num_free_rows, self.max_num_seqs)

    def space(self, space: Space) -> PageTable:
        """The pages of a space. Raises BadSetting where rows have none there."""
        return self._rows.space(space)

    @property
    def next_row(self) -> int:
        """The row that admit() gives next. Raises OutOfRows when every row is taken."""
        return self._rows.next_row

    def admit(self) -> int:
        """A fresh row without pages. Raises OutOfRows when every row is taken."""
        return self._rows.admit()

    def is_admitted(self, row: int) -> bool:
        """Whether a row was admitted and not freed."""
        return bool(self._rows.reserved_len[row] >= 0)

    def reserve(self, row: int, kv_len: int) -> None:
        """Make room for kv_len tokens in row, in every space. What the row holds beyond them stays.

        Raises OutOfPages, NeverFits beyond max_kv_len and for more pages than the pool has, and WrongState for a row
        that is not admitted; nothing is changed then.
        """
        self._rows.must_be_admitted(row)
        kv_len = _length(kv_len)
        self._rows.row_width.require(kv_len, self.max_kv_len)
        for table in self.spaces:
            short = self._short(table, row, kv_len)
            if short > table.num_free_pages:
                table.must_fit(row, kv_len)
                raise OutOfPages(
                    f"row {row} needs {short} more pages{table.pages.of} for {kv_len} tokens and "
                    f"{table.num_free_pages} are free; free a request or raise {table.pages.knob}",
                    missing=short - table.num_free_pages,
                )
        self._grow(row, kv_len)

    def _grow(self, row: int, kv_len: int) -> None:
        """Take the pages that row needs for kv_len tokens, of which there are enough in every space."""
        reserved = int(self._rows.reserved_len[row])
        if kv_len <= reserved:
            return
        end, new_end = self._rows.end(row), num_pages(kv_len, self.page_size)
        for table in self.spaces:
            if self._shares_last_page(table, row):
                table.own(row, reserved // self.page_size)
            table.append(row, end, new_end)
        self._rows.capacity[row], self._rows.reserved_len[row] = max(end, new_end) * self.page_size, kv_len

    def reserve_all(self, rows: Integers, kv_len: Integers) -> None:
        """reserve(rows[i], kv_len[i]) for every i, or for none: what raises leaves all rows as they were.

        rows, kv_len: integers [num_seqs]. Only rows that need a page cost a Python iteration.
        Raises as reserve(), and BadBatch for a row that is named twice.
        """
        if len(rows) == 0:
            return
        # Each step reserves: arrays that are right already cost no call.
        is_array = rows.__class__ is kv_len.__class__ is np.ndarray
        if not is_array or rows.dtype is not _INT32 or kv_len.dtype is not _INT32:  # type: ignore[union-attr]
            rows, kv_len = as_int32("rows", rows), as_int32("kv_len", kv_len)
        self._reserve_all(rows, kv_len)  # type: ignore[arg-type]

    def _reserve_all(self, rows: Int32Array, kv_len: Int32Array) -> None:
        named = rows.tobytes()
        checked, places = self._rows.known_rows
        if named != checked:
            self._rows.must_all_be_admitted(rows)
            self._rows.must_be_distinct(rows)
            places = rows.astype(np.int64)
        look_from = self._rows.look_from.take(places)
        beyond = kv_len >= look_from
        if beyond[beyond.argmax()]:
            self._look_at(rows[beyond], kv_len[beyond], may_share=look_from[look_from.argmin()] == ALWAYS)
        self._rows.reserved_len[places] = np.maximum(self._rows.reserved_len.take(places), kv_len)
        self._rows.known_room = named, kv_len.tobytes()

    def is_reserved(self, rows: Integers, kv_len: Integers) -> bool:
        """Whether reserve_all(rows, kv_len) has nothing to do: all of these rows have room for so many tokens.

        rows, kv_len: integers [num_seqs]
        """
        rows, kv_len = as_int32("rows", rows), as_int32("kv_len", kv_len)
        short = self._rows.reserved_len.take(rows) < kv_len
        if len(rows) == 0 or short[short.argmax()]:
            return False
        self._rows.known_room = rows.tobytes(), kv_len.tobytes()
        return True

    def room(self, rows: Integers) -> Int32Array:
        """int32 [n]: tokens that each row has room for in every space; -1: it is not admitted. rows: integers [n]"""
        return self._rows.reserved_len.take(as_int32("rows", rows))

    def missing_pages(self, row: int, kv_len: int) -> int:
        """Pages that must become free before reserve(row, kv_len), in the space that lacks the most; 0: none."""
        self._rows.must_be_admitted(row)
        kv_len = _length(kv_len)
        return max(0, *(self._short(table, row, kv_len) - table.num_free_pages for table in self.spaces))

    def _look_at(self, rows: Int32Array, kv_len: Int32Array, *, may_share: bool) -> None:
        """Take the pages that rows need for so many tokens, and copies of shared ones where one of them may_share."""
        if may_share:  # else each is admitted and has its last page alone: see _settle()
            self._rows.must_all_be_admitted(rows)
        self._rows.row_width.require(kv_len.item(kv_len.argmax()), self.max_kv_len)
        if may_share:
            rows, kv_len = self._with_own_last_pages(rows, kv_len, self._rows.reserved_len.take(rows))
        capacity = self._rows.capacity.take(rows)
        grows = kv_len > capacity
        if not grows.all():
            self._settle(rows[~grows], capacity[~grows])
            rows, kv_len, capacity = rows[grows], kv_len[grows], capacity[grows]
        if len(rows):
            self._append_pages(rows, kv_len, capacity)

    def _with_own_last_pages(
        self, rows: Int32Array, kv_len: Int32Array, reserved: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Reserve for rows that go on in a page which others hold too; the others of rows, and their kv_len.

        Raises as reserve_all, for all of them.
        """
        last_page_no = np.minimum(reserved // self.page_size, self.width - 1)
        shares = self.full.shares(rows, last_page_no)
        for table in self._rows.windowed:
            shares |= table.shares(rows, last_page_no)
        shares &= reserved % self.page_size != 0
        if shares.any():
            copies = shares & (kv_len > reserved)
            self._must_have_pages(rows.tolist(), kv_len.tolist())
            for row, length in zip(rows[copies].tolist(), kv_len[copies].tolist(), strict=True):
                self._grow(row, length)
            self._settle(rows[copies], self._rows.capacity[rows[copies]])
            rows, kv_len = rows[~shares], kv_len[~shares]
        return rows, kv_len

    def _must_have_pages(self, rows: list[int], kv_len: list[int]) -> None:
        """Raise unless every space has the pages, and the copies of some, that rows need for kv_len tokens."""
        for table in self.spaces:
            # An upper bound: of two rows that share a page only one needs a copy.
            short = sum(self._short(table, row, length) for row, length in zip(rows, kv_len, strict=True))
            if short > table.num_free_pages:
                table.refuse(rows, kv_len, short)

    def _append_pages(self, rows: Int32Array, kv_len: Int32Array, capacity: Int32Array) -> None:
        """Take pages for kv_len tokens, which are more than capacity. Raises OutOfPages, NeverFits before it does."""
        end, new_end = capacity // self.page_size, num_pages(kv_len, self.page_size)
        missing = [table.num_missing(rows, end, new_end) for table in self.spaces]
        for table, counts in zip(self.spaces, missing, strict=True):
            needed = sum(counts.tolist())
            if needed > table.num_free_pages:
                table.refuse(rows.tolist(), kv_len.tolist(), needed)
        for table, counts in zip(self.spaces, missing, strict=True):
            table.append_all(rows, end, counts)
        capacity = new_end * np.int32(self.page_size)
        self._rows.capacity[rows], self._rows.reserved_len[rows] = capacity, kv_len
        self._settle(rows, capacity)

    def _settle(self, rows: Int32Array, capacity: Int32Array) -> None:
        """Rows need nothing before they have filled their capacity: no page before it has another holder."""
        self._rows.look_from[rows] = np.minimum(capacity, self.max_kv_len) + 1

    def evict(self, rows: Integers, kv_len: Integers) -> None:
        """Give back what no later step needs of rows[i], which have kv_len[i] tokens stored or on their way.

        Pages before the window of the token at kv_len[i], and before what is kept for going back. Every step does this
        by itself for the tokens before its own new ones; before a step, it makes room for reserve(). A row that has
        no pages yet takes none for these tokens later: their KV is not to be seen.

        rows, kv_len: integers [num_seqs]; lengths that are no more than the device's
        Raises WrongState for a row that is not admitted.
        """
        if not self._rows.windowed or len(rows) == 0:
            return
        rows, kv_len = as_int32("rows", rows), as_int32("kv_len", kv_len)
        self._rows.must_all_be_admitted(rows)
        for table in self._rows.windowed:
            table.evict(rows, kv_len, self._rows.capacity[rows] // self.page_size)

    def fork(self, row: int, kv_len: int) -> int:
        """A new row that shares the first kv_len tokens of row, page by page. Neither row stores these again.

        To compute some of them again, share fewer, or truncate() the row that goes back.
        Raises OutOfRows, and BadBatch for tokens that row has no room for, or has no window of any more.
        """
        self._rows.must_be_admitted(row)
        if not 0 <= kv_len <= self._rows.reserved_len[row]:
            raise BadBatch(f"row {row} holds {self._rows.reserved_len[row]} tokens; {kv_len} of them cannot be shared")
        child, end = self.admit(), num_pages(kv_len, self.page_size)
        self.generations.change(row)
        self._rows.look_from[row] = ALWAYS
        try:
            for table in reversed(self.spaces):  # what may be refused comes first
                table.share(row, child, kv_len, end)
        except BadBatch:
            self._rows.forget(child)
            raise
        self._rows.capacity[child], self._rows.reserved_len[child] = end * self.page_size, kv_len
        self.tokens.share(row, child, kv_len)
        return child

    def truncate(self, row: int, kv_len: int) -> None:
        """Row goes back: it keeps its first kv_len tokens, and gives back the pages after them.

        With the tokens that are stored, or more, row loses nothing but room that was reserved ahead, in every space.
        Where row shares pages this is how it goes back at all: the next reserve() copies the page that kv_len lies in,
        if another row holds it too, and takes others for those after it. A row that shares none may as well begin a
        step earlier. Raises WrongState, and BadBatch for more tokens than row has room for.
        """
        self._rows.must_be_admitted(row)
        if not 0 <= kv_len <= self._rows.reserved_len[row]:
            raise BadBatch(
                f"row {row} has room for {self._rows.reserved_len[row]} tokens; it cannot go back to {kv_len}"
            )
        end, new_end = self._rows.end(row), num_pages(kv_len, self.page_size)
        self.generations.change(row)
        self._rows.known_room, self._rows.look_from[row] = NO_ROOM, ALWAYS
        # In this order an interrupt leaves no token that counts as stored without its page, and none that may be stored
        # in a page that another row holds.
        self.tokens.forget(row, kv_len)
        self._rows.reserved_len[row] = kv_len
        self._rows.capacity[row] = new_end * self.page_size
        for table in self.spaces:
            table.cut(row, new_end, end)
        self.tokens.lower_from(row, kv_len)

    def mark_stored(self, rows: Integers, kv_len: Integers) -> None:
        """Say that the K and V of the first kv_len[i] tokens of rows[i] are in their pages, in every layer.

        For a caller who filled the pages by other means than steps that store in every layer: KV that was computed
        elsewhere, or read back from where it was kept.

        rows, kv_len: integers [num_seqs]; rows are distinct and have room for kv_len
        Raises WrongState, BadBatch.
        """
        if len(rows):
            self._mark_stored(as_int32("rows", rows), as_int32("kv_len", kv_len))

    def _mark_stored(self, rows: Int32Array, kv_len: Int32Array) -> None:
        self._rows.must_all_be_admitted(rows)
        self._rows.must_be_distinct(rows)
        short = (kv_len > self._rows.reserved_len[rows]) | (kv_len < 0)
        if short.any():
            seq = int(short.argmax())
            raise BadBatch(
                f"row {rows[seq]} has room for {self._rows.reserved_len[rows[seq]]} tokens; {kv_len[seq]} of them "
                "cannot be stored"
            )
        self.tokens.stored_len[rows] = kv_len

    def free(self, row: int) -> None:
        """Give a row and its pages back. Raises WrongState for a row that is not admitted, a second free included."""
        self._rows.must_be_admitted(row)
        for table in self.spaces:
            table.release(row, self._rows.end(row))
        self._rows.forget(row)

    def num_held(self, row: int, space: Space = Space.FULL) -> int:
        """Pages that row holds in a space. Raises WrongState for a row that is not admitted, BadSetting."""
        self._rows.must_be_admitted(row)
        return self.space(space).num_held(row, self._rows.end(row))

    def pages_of(self, row: int, space: Space = Space.FULL) -> Int32Array:
        """The pages of a row in a space, in order; page 0 in the place of those that were given back."""
        self._rows.must_be_admitted(row)
        return np.array(self.space(space).entries_host[row, : self._rows.end(row)], np.int32)

    def _short(self, table: PageTable, row: int, kv_len: int) -> int:
        wanted = num_pages(kv_len, self.page_size)
        more = table.num_held(row, wanted) - table.num_held(row, self._rows.end(row))
        return max(0, more) + (kv_len > self._rows.reserved_len[row] and self._shares_last_page(table, row))

    def _shares_last_page(self, table: PageTable, row: int) -> bool:
        """Whether the next token of row would land in a page that another row holds too."""
        page_no, offset = divmod(int(self._rows.reserved_len[row]), self.page_size)
        return offset > 0 and bool(table.shares(np.array([row], np.int32), np.array([page_no], np.int32))[0])


def _length(kv_len: int) -> int:
    """A number of tokens. Raises BadSetting for a number that is not whole, or below 0."""
    length = whole_number("kv_len", kv_len)
    if length < 0:
        raise BadSetting(f"kv_len is {length}; a row has 0 tokens or more")
    return length
