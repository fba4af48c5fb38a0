"""RequestTable: the rows that requests hold, how long each may be, and in each space the pages that its KV lies in.

Row 0 and page 0 are reserved: padded sequences point there. Pages are counted, so that requests can share a prefix;
a partly filled page that several rows hold is copied before one of them goes on in it. Full pages can be kept: they
stay when their row is freed, and other rows begin over them. With an SWA space, a row has pages in both spaces, by one
length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rocm_attn.batch.step_batch import INT32_MAX, Int32Array, Integers, as_int32
from rocm_attn.errors import BadBatch, BadSetting, NeverFits
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.batch_checks import BatchChecks
from rocm_attn.paging.index_spaces import Space, num_pages
from rocm_attn.paging.kept_pages import KeptPages
from rocm_attn.paging.page_table import PageTable, SpacePages, TableGuards
from rocm_attn.paging.rows import ALWAYS, NO_ROOM, Rows

ALL_TABLE_GUARDS = TableGuards()
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
        self.width = width = -(-max_kv_len // page_size)
        if width * page_size > INT32_MAX:
            raise NeverFits(
                f"max_kv_len is {max_kv_len}; lengths are int32, so use at most {INT32_MAX // page_size * page_size}"
            )
        self.spaces = tuple(
            PageTable(pages, num_rows=num_rows, width=width, page_size=page_size, device=device, guards=guards)
            for pages in (SpacePages(Space.FULL, num_pages), *windows)
        )
        self.full = self.spaces[0]
        self._rows = Rows(self.spaces, num_rows=num_rows, max_kv_len=max_kv_len, page_size=page_size, guards=guards)
        self.tokens, self.generations = self._rows.tokens, self._rows.generations
        self.kept = KeptPages(self._rows, guards)
        self.checks = BatchChecks(self._rows, max_num_seqs)

    @property
    def fewest_free_pages(self) -> int:
        """Pages that are free in the space that has the fewest."""
        return min(table.num_free_pages for table in self.spaces)

    @property
    def num_free_rows(self) -> int:
        return len(self._rows.free)

    @property
    def is_empty(self) -> bool:
        """True if no request is admitted and no page is kept: nothing that was stored can be read again."""
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
        """True if a row was admitted and not freed."""
        return 0 <= row < len(self._rows.reserved_len) and bool(self._rows.reserved_len[row] >= 0)

    def reserve(self, row: int, kv_len: int) -> None:
        """Make room for kv_len tokens in row, in every space. What the row holds beyond them stays.

        Raises OutOfPages, NeverFits beyond max_kv_len and for more pages than the pool has, WrongState for a row that
        is not admitted, and BadSetting for what is no length; nothing is changed then.
        """
        length = whole_number("kv_len", kv_len)
        if length < 0:
            raise BadSetting(f"kv_len is {length}; a row has 0 tokens or more")
        rows = self._rows
        rows.must_be_admitted(row)
        rows.must_fit(length)
        if length < rows.look_from[row]:  # mostly there is room
            rows.reserved_len[row] = max(length, int(rows.reserved_len[row]))
        else:
            self._reserve_all(np.array([row], np.int32), np.array([length], np.int32))

    def reserve_all(self, rows: Integers, kv_len: Integers) -> None:
        """reserve(rows[i], kv_len[i]) for every i, or for none: what raises leaves all rows as they were.

        rows, kv_len: integers [num_seqs]
        Raises as reserve(), and BadBatch for a row that is named twice.
        """
        if len(rows) == 0:
            return
        # Each step reserves: arrays that are right already cost no call.
        is_array = rows.__class__ is kv_len.__class__ is np.ndarray
        if not is_array or rows.dtype is not _INT32 or kv_len.dtype is not _INT32:  # type: ignore[union-attr]
            rows, kv_len = _each("kv_len", rows, kv_len)
        self._reserve_all(rows, kv_len)  # type: ignore[arg-type]

    def _reserve_all(self, rows: Int32Array, kv_len: Int32Array) -> None:
        named = rows.tobytes()
        checked, places = self._rows.known_rows
        if named != checked:
            self._rows.must_all_be_admitted(rows)
            self._rows.must_be_distinct(rows)
            places = rows.astype(np.int64)
        beyond = kv_len >= self._rows.look_from.take(places)
        if beyond[beyond.argmax()]:
            self._take_pages(rows[beyond], kv_len[beyond])
        self._rows.reserved_len[places] = np.maximum(self._rows.reserved_len.take(places), kv_len)
        self._rows.known_room = named, kv_len.tobytes()

    def _take_pages(self, rows: Int32Array, kv_len: Int32Array) -> None:
        """Take the pages that rows need for kv_len tokens, and copies of those that they go on in and share.

        Raises as reserve_all, for all of them.
        """
        state, copies = self._rows, [rows[:0]] * len(self.spaces)
        state.must_fit(kv_len.item(kv_len.argmax()))
        unsure = state.look_from.take(rows) == ALWAYS
        if unsure[unsure.argmax()]:  # else each is admitted, grows, and has its last page alone
            state.must_all_be_admitted(rows)
            grows = kv_len > state.reserved_len[rows]
            rows, kv_len = rows[grows], kv_len[grows]
            # An upper bound: of two rows that share a page only one needs a copy.
            copies = [rows[table.shares(rows, state.reserved_len[rows])] for table in self.spaces]
        end = state.capacity.take(rows) // self.page_size
        new_end = np.maximum(num_pages(kv_len, self.page_size), end)
        missing = [table.missing(rows, end, new_end) for table in self.spaces]
        for table, copied, cells in zip(self.spaces, copies, missing, strict=True):
            table.require_free(rows, kv_len, len(copied) + len(cells))
        for table, copied, cells in zip(self.spaces, copies, missing, strict=True):
            for row in copied.tolist():
                table.own(row, int(state.reserved_len[row]))
            table.take(cells)
        capacity = new_end * self.page_size
        state.capacity[rows] = capacity
        # They need nothing before they have filled their pages.
        state.look_from[rows] = np.minimum(capacity, self.max_kv_len) + 1

    def missing_pages(self, row: int, kv_len: int) -> int:
        """Pages that must become free before reserve(row, kv_len), in the space that lacks the most; 0: none.

        Raises WrongState, BadBatch.
        """
        self._rows.must_be_admitted(row)
        rows, lengths = _each("kv_len", [row], [kv_len])
        reserved, end = self._rows.reserved_len[rows], self._rows.capacity[rows] // self.page_size
        copied = rows[lengths > reserved]
        new_end = np.maximum(num_pages(lengths, self.page_size), end)
        lacking = (
            len(table.missing(rows, end, new_end))
            + len(copied[table.shares(copied, reserved[: len(copied)])])
            - table.num_free_pages
            for table in self.spaces
        )
        return max(0, *lacking)

    def is_reserved(self, rows: Integers, kv_len: Integers) -> bool:
        """True if reserve_all(rows, kv_len) has nothing to do: all of these rows have room for so many tokens.

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
        self._rows.must_have_room(row, kv_len, f"{kv_len} of them cannot be shared")
        self.generations.share(row)
        self._rows.look_from[row] = ALWAYS
        end = num_pages(kv_len, self.page_size)
        stored_len = min(kv_len, int(self.tokens.stored_len[row]))
        child = self._rows.begin([table.entries_host[row, :end] for table in self.spaces], kv_len, stored_len)
        self.tokens.raise_floor(row, kv_len)
        return child

    def truncate(self, row: int, kv_len: int) -> None:
        """Row goes back: it keeps its first kv_len tokens, and gives back the pages after them.

        With the tokens that are stored, or more, row loses nothing but room that was reserved ahead, in every space.
        Where row shares pages this is how it goes back at all: the next reserve() copies the page that kv_len lies in,
        if another row holds it too, and takes others for those after it. A row that shares none may as well begin a
        step earlier. Raises WrongState, and BadBatch for more tokens than row has room for.
        """
        self._rows.must_have_room(row, kv_len, f"it cannot go back to {kv_len}")
        end, new_end = self._rows.end(row), num_pages(kv_len, self.page_size)
        if kv_len < self.tokens.stored_len[row]:
            self.generations.change(row)
        self._rows.known_room, self._rows.look_from[row] = NO_ROOM, ALWAYS
        # In this order an interrupt leaves no token that counts as stored without its page, and none that may be stored
        # in a page that another row holds.
        self.tokens.forget(row, kv_len)
        self._rows.reserved_len[row] = kv_len
        self._rows.capacity[row] = new_end * self.page_size
        for table in self.spaces:
            table.cut(np.array([row]), new_end, np.array([end]))
        self.tokens.lower_floor(row, kv_len)

    def mark_stored(self, rows: Integers, kv_len: Integers) -> None:
        """Say that the K and V of the first kv_len[i] tokens of rows[i] are in their pages, in every layer.

        For a caller who filled the pages by other means than steps that store in every layer: KV that was computed
        elsewhere, or read back from where it was kept.

        rows, kv_len: integers [num_seqs]; rows are distinct and have room for kv_len
        Raises WrongState, BadBatch.
        """
        if len(rows) == 0:
            return
        rows, kv_len = _each("kv_len", rows, kv_len)
        self._rows.must_all_be_admitted(rows)
        self._rows.must_be_distinct(rows)
        short = (kv_len > self._rows.reserved_len[rows]) | (kv_len < 0)
        for row, length in zip(rows[short].tolist(), kv_len[short].tolist(), strict=True):
            self._rows.must_have_room(row, length, f"{length} of them cannot be stored")
        self.tokens.mark(rows, kv_len)

    def free(self, row: int) -> None:
        """Give a row and its pages back. Raises WrongState for a row that is not admitted, a second free included."""
        self._rows.must_be_admitted(row)
        self._rows.forget(row)

    def num_held(self, row: int, space: Space = Space.FULL) -> int:
        """Pages that row holds in a space. Raises WrongState for a row that is not admitted, BadSetting."""
        self._rows.must_be_admitted(row)
        return self.space(space).num_held(row, self._rows.end(row))

    def pages_of(self, row: int, space: Space = Space.FULL) -> Int32Array:
        """The pages of a row in a space, in order; page 0 in the place of those that were given back."""
        self._rows.must_be_admitted(row)
        return np.array(self.space(space).entries_host[row, : self._rows.end(row)], np.int32)


def _each(name: str, rows: Integers, values: Integers) -> tuple[Int32Array, Int32Array]:
    """Rows, and a number for each that is not negative. Raises BadBatch."""
    of_rows, of_each = as_int32("rows", rows), as_int32(name, values)
    if len(of_rows) != len(of_each) or int(of_each.min()) < 0:
        raise BadBatch(f"{len(of_rows)} rows were given, and as {name} {of_each.tolist()}; give each row 0 or more")
    return of_rows, of_each
