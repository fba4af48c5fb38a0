"""RequestTable: the rows that requests hold, how long each may be, and in each space the pages that its KV lies in.

Row 0 and page 0 are reserved: padded sequences point there. Pages are counted, so that requests can share a prefix;
a partly filled page that several rows hold is copied before one of them goes on in it. Full pages can be kept: they
stay when their row is freed, and other rows begin over them. With an SWA space, a row has pages in both spaces, by one
length. What is known of a row's tokens, and may be done with them: stored_tokens.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import torch

from rocm_attn.batch.prefixes import SharedPrefixes
from rocm_attn.batch.step_batch import INT32_MAX, Int32Array, Integers, StepBatch
from rocm_attn.errors import BadBatch, BadSetting, NeverFits, OutOfPages, OutOfRows, WrongState
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.paging.generations import Generations
from rocm_attn.paging.index_spaces import RESERVED_PAGE, RESERVED_ROW, Space, num_pages
from rocm_attn.paging.kept_pages import GivenIds, KeptIds, KeptPages
from rocm_attn.paging.page_table import ALL_TABLE_GUARDS, PageTable, PendingChanges, SpacePages, TableGuards
from rocm_attn.paging.stored_tokens import StoredTokens

# All that a table may have.
EVERY_SPACE: Final[tuple[Space, ...]] = (Space.FULL, Space.SWA)

# Of a row whose next reservation is looked at, whatever its length.
_ALWAYS = np.iinfo(np.int32).min
# Rows and lengths of no step.
_NO_ROOM = (b"", b"")


class RequestTable:
    """Rows of pages, with reference counts.

    max_num_seqs: sequences that a step may have
    max_num_rows: requests that can be admitted at a time, at least as many (row 0 comes on top); 0: max_num_seqs
    max_kv_len:   tokens that a row can hold
    num_pages:    pages of the full space's pool, the reserved page 0 included
    windows:      other spaces, whose pages are given back when they have left the window
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
        self._row_width = guards.row_width
        self.page_size = page_size
        self.max_num_seqs, self.max_kv_len = max_num_seqs, max_kv_len
        self.width = (max_kv_len + page_size - 1) // page_size
        if self.width * page_size > INT32_MAX:
            raise NeverFits(
                f"max_kv_len is {max_kv_len}; lengths are int32, so use at most {INT32_MAX // page_size * page_size}"
            )
        self.spaces = tuple(
            PageTable(pages, num_rows=num_rows, width=self.width, page_size=page_size, device=device, guards=guards)
            for pages in (SpacePages(Space.FULL, num_pages), *windows)
        )
        self._full = self.spaces[0]
        self._windowed = tuple(table for table in self.spaces if table.pages.window_left != ALL_KEYS)
        # Tokens the row's owner asked room for, and tokens the row's pages hold; -1 in both: not admitted.
        self._reserved_len = np.full(num_rows, -1, np.int32)
        self._capacity = np.full(num_rows, -1, np.int32)
        # The first kv_len for which a row may need a page, or a copy of one. Below it a reservation is a number alone.
        self._look_from = np.full(num_rows, _ALWAYS, np.int32)
        self.tokens = StoredTokens(num_rows, guards.shared_floor)
        self.generations = Generations(num_rows)
        self._kept = KeptPages(len(self.spaces), guards.is_kept)
        self._free_rows = list(range(num_rows - 1, RESERVED_ROW, -1))
        self._seen = np.zeros(num_rows, np.int32)
        # Rows that were in the table, each named once, as bytes and as int64, by which NumPy looks up in half the time.
        self._rows_checked = b"", np.empty(0, np.int64)
        # rows and kv_len, as bytes, for which there was room when it was last looked at, and no row has gone back since
        self._has_room = _NO_ROOM
        self._prefixes_checked: tuple[SharedPrefixes | None, bytes, int] = (None, b"", 0)

    @property
    def entries(self) -> torch.Tensor:
        """The full space's pages on the device, int32 [num_rows, width]."""
        return self._full.entries

    @property
    def entries_host(self) -> Int32Array:
        """The full space's pages, int32 [num_rows, width]."""
        return self._full.entries_host

    @property
    def pending(self) -> PendingChanges:
        """What the device does not know yet of the full space."""
        return self._full.pending

    @property
    def num_usable_pages(self) -> int:
        """Pages of the full space that rows can hold."""
        return self._full.num_usable_pages

    @property
    def num_free_pages(self) -> int:
        """Pages of the full space that are neither held by a row nor kept."""
        return self._full.num_free_pages

    @property
    def fewest_free_pages(self) -> int:
        """Pages that are free in the space that has the fewest."""
        return min(table.num_free_pages for table in self.spaces)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def is_empty(self) -> bool:
        """Whether no request is admitted and no page is kept: nothing that was stored can be read again."""
        has_no_rows = self.num_free_rows == len(self._capacity) - 1
        return has_no_rows and all(table.num_free_pages == table.num_usable_pages for table in self.spaces)

    @property
    def most_new_seqs(self) -> int:
        """Sequences that a step of requests that are admitted now may have."""
        return min(self.num_free_rows, self.max_num_seqs)

    def space(self, space: Space) -> PageTable:
        """The pages of a space. Raises BadSetting where rows have none there."""
        for table in self.spaces:
            if table.space is space:
                return table
        raise BadSetting(f"rows have no pages in the {space.name} space; build the runtime with swa_pages")

    @property
    def next_row(self) -> int:
        """The row that admit() gives next. Raises OutOfRows when every row is taken."""
        if not self._free_rows:
            raise OutOfRows(f"all {len(self._capacity) - 1} rows are taken; free a request or raise max_num_rows")
        return self._free_rows[-1]

    def admit(self) -> int:
        """A fresh row without pages. Raises OutOfRows when every row is taken."""
        row = self.next_row
        self.generations.change(row)
        self._capacity[row] = self._reserved_len[row] = 0
        return self._free_rows.pop()  # last: an interrupt before it loses no row

    def is_admitted(self, row: int) -> bool:
        """Whether a row was admitted and not freed."""
        return bool(self._reserved_len[row] >= 0)

    def reserve(self, row: int, kv_len: int) -> None:
        """Make room for kv_len tokens in row, in every space. What the row holds beyond them stays.

        Raises OutOfPages, NeverFits beyond max_kv_len and for more pages than the pool has, and WrongState for a row
        that is not admitted; nothing is changed then.
        """
        self._must_be_admitted(row)
        self._row_width.require(kv_len, self.max_kv_len)
        for table in self.spaces:
            short = self._short(table, row, kv_len)
            if short > table.num_free_pages:
                table.must_fit(row, kv_len)
                raise OutOfPages(
                    f"row {row} needs {short} more pages{table.pages.of} for {kv_len} tokens and "
                    f"{table.num_free_pages} are free; free a request or raise {table.pages.knob}"
                )
        self._grow(row, kv_len)

    def _grow(self, row: int, kv_len: int) -> None:
        """Take the pages that row needs for kv_len tokens, of which there are enough in every space."""
        reserved = int(self._reserved_len[row])
        if kv_len <= reserved:
            return
        end, new_end = self._end(row), num_pages(kv_len, self.page_size)
        for table in self.spaces:
            if self._shares_last_page(table, row):
                table.own(row, reserved // self.page_size)
            table.append(row, end, new_end)
        self._capacity[row], self._reserved_len[row] = max(end, new_end) * self.page_size, kv_len

    def reserve_all(self, rows: Int32Array, kv_len: Int32Array) -> None:
        """reserve(rows[i], kv_len[i]) for every i, or for none: what raises leaves all rows as they were.

        rows, kv_len: int32 [num_seqs]. Only rows that need a page cost a Python iteration.
        Raises as reserve(), and BadBatch for a row that is named twice.
        """
        if len(rows) == 0:
            return
        named = rows.tobytes()
        checked, places = self._rows_checked
        if named != checked:
            self._must_all_be_admitted(rows)
            self._must_be_distinct(rows)
            places = rows.astype(np.int64)
        look_from = self._look_from.take(places)
        beyond = kv_len >= look_from
        if beyond[beyond.argmax()]:
            self._look_at(rows[beyond], kv_len[beyond], may_share=look_from[look_from.argmin()] == _ALWAYS)
        self._reserved_len[places] = np.maximum(self._reserved_len.take(places), kv_len)
        self._has_room = named, kv_len.tobytes()

    def has_room(self, rows: Int32Array, kv_len: Int32Array) -> bool:
        """Whether reserve_all(rows, kv_len) has nothing to do: all of these rows have room for so many tokens.

        rows, kv_len: int32 [num_seqs]
        """
        short = self._reserved_len.take(rows) < kv_len
        if len(rows) == 0 or short[short.argmax()]:
            return False
        self._has_room = rows.tobytes(), kv_len.tobytes()
        return True

    def room(self, rows: Int32Array) -> Int32Array:
        """int32 [n]: tokens that each row has room for in every space. rows: int32 [n]"""
        return self._reserved_len.take(rows)

    def _look_at(self, rows: Int32Array, kv_len: Int32Array, *, may_share: bool) -> None:
        """Take the pages that rows need for so many tokens, and copies of shared ones where one of them may_share."""
        if may_share:  # else each is admitted and has its last page alone: see _settle()
            self._must_all_be_admitted(rows)
        self._row_width.require(kv_len.item(kv_len.argmax()), self.max_kv_len)
        if may_share:
            rows, kv_len = self._with_own_last_pages(rows, kv_len, self._reserved_len.take(rows))
        capacity = self._capacity.take(rows)
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
        shares = self._full.shares(rows, last_page_no)
        for table in self._windowed:
            shares |= table.shares(rows, last_page_no)
        shares &= reserved % self.page_size != 0
        if shares.any():
            copies = shares & (kv_len > reserved)
            self._must_have_pages(rows.tolist(), kv_len.tolist())
            for row, length in zip(rows[copies].tolist(), kv_len[copies].tolist(), strict=True):
                self._grow(row, length)
            self._settle(rows[copies], self._capacity[rows[copies]])
            rows, kv_len = rows[~shares], kv_len[~shares]
        return rows, kv_len

    def _must_have_pages(self, rows: list[int], kv_len: list[int]) -> None:
        """Raise unless every space has the pages, and the copies of some, that rows need for kv_len tokens."""
        for table in self.spaces:
            # An upper bound: of two rows that share a page only one needs a copy.
            short = sum(self._short(table, row, length) for row, length in zip(rows, kv_len, strict=True))
            if short > table.num_free_pages:
                table.refuse(rows, kv_len)

    def _append_pages(self, rows: Int32Array, kv_len: Int32Array, capacity: Int32Array) -> None:
        """Take pages for kv_len tokens, which are more than capacity. Raises OutOfPages, NeverFits before it does."""
        end, new_end = capacity // self.page_size, num_pages(kv_len, self.page_size)
        missing = [table.num_missing(rows, end, new_end) for table in self.spaces]
        for table, counts in zip(self.spaces, missing, strict=True):
            if sum(counts.tolist()) > table.num_free_pages:
                table.refuse(rows.tolist(), kv_len.tolist())
        for table, counts in zip(self.spaces, missing, strict=True):
            table.append_all(rows, end, counts)
        capacity = new_end * np.int32(self.page_size)
        self._capacity[rows], self._reserved_len[rows] = capacity, kv_len
        self._settle(rows, capacity)

    def _settle(self, rows: Int32Array, capacity: Int32Array) -> None:
        """Rows need nothing before they have filled their capacity: no page before it has another holder."""
        self._look_from[rows] = np.minimum(capacity, self.max_kv_len) + 1

    def evict(self, rows: Int32Array, kv_len: Int32Array) -> None:
        """Give back what no later step needs of rows[i], which have kv_len[i] tokens stored or on their way.

        Pages before the window of the token at kv_len[i], and before what is kept for going back. Every step does this
        by itself for the tokens before its own new ones; before a step, it makes room for reserve(). A row that has
        no pages yet takes none for these tokens later: their KV is not to be seen.

        rows, kv_len: int32 [num_seqs]; lengths that are no more than the device's
        Raises WrongState for a row that is not admitted.
        """
        if self._windowed and len(rows):
            self._must_all_be_admitted(rows)
        for table in self._windowed:
            table.evict(rows, kv_len, self._capacity[rows] // self.page_size)

    def fork(self, row: int, kv_len: int) -> int:
        """A new row that shares the first kv_len tokens of row, page by page. Neither row stores these again.

        To compute some of them again, share fewer, or truncate() the row that goes back.
        Raises OutOfRows, and BadBatch for tokens that row has no room for, or has no window of any more.
        """
        self._must_be_admitted(row)
        if not 0 <= kv_len <= self._reserved_len[row]:
            raise BadBatch(f"row {row} holds {self._reserved_len[row]} tokens; {kv_len} of them cannot be shared")
        child, end = self.admit(), num_pages(kv_len, self.page_size)
        self.generations.change(row)
        self._look_from[row] = _ALWAYS
        try:
            for table in reversed(self.spaces):  # what may be refused comes first
                table.share(row, child, kv_len, end)
        except BadBatch:
            self._forget(child)
            raise
        self._capacity[child], self._reserved_len[child] = end * self.page_size, kv_len
        self.tokens.share(row, child, kv_len)
        return child

    def keep(self, row: int, first_page_no: int, end_page_no: int, spaces: Collection[Space] = EVERY_SPACE) -> KeptIds:
        """Keep the pages [first_page_no, end_page_no) of row until drop(), whatever becomes of row.

        Row does not store in them again: to compute some of their tokens again, truncate() it. A page may be kept
        several times, under an id for each.

        spaces: in which a page is kept; those that the table does not have do not count
        Returns int64 [n] ids, one for each page_no.
        Raises WrongState, and BadBatch for a page that is not full of stored tokens, or has left a window; nothing is
        changed then. A length that only the device knows counts by its bound: keep what is known to be stored.
        """
        self._must_be_admitted(row)
        if not 0 <= first_page_no <= end_page_no:
            raise BadBatch(f"pages [{first_page_no}, {end_page_no}) were to be kept; the range is not one of pages")
        page_no = np.arange(first_page_no, end_page_no, dtype=np.int32)
        return self.keep_all(np.full(len(page_no), row, np.int32), page_no, spaces)

    def keep_all(self, rows: Integers, page_no: Integers, spaces: Collection[Space] = EVERY_SPACE) -> KeptIds:
        """keep(rows[i], page_no[i], page_no[i] + 1) for every i, or for none. A row may be named several times.

        rows, page_no: integers [n]
        """
        if len(rows) == 0:
            return np.empty(0, np.int64)
        return self._keep(np.asarray(rows, np.int32), np.asarray(page_no, np.int32), spaces)

    def _keep(self, rows: Int32Array, page_no: Int32Array, spaces: Collection[Space]) -> KeptIds:
        self._must_all_be_admitted(rows)
        stored_len, kv_len = self.tokens.of(rows), (page_no + 1) * self.page_size
        wrong = (kv_len > stored_len) | (page_no < 0)
        if wrong.any():
            at = int(wrong.argmax())
            raise BadBatch(
                f"row {rows[at]} has {stored_len[at]} stored tokens, which fill the pages before page_no "
                f"{stored_len[at] // self.page_size}; page_no {page_no[at]} cannot be kept"
            )
        named = [table.space in spaces for table in self.spaces]
        for table, is_named in zip(self.spaces, named, strict=True):
            if is_named:
                table.must_hold(rows, page_no)
        self.generations.change(rows)
        self.tokens.raise_floor(rows, kv_len)
        pages = np.zeros((len(self.spaces), len(rows)), np.int32)
        for space, table in enumerate(self.spaces):
            if named[space]:
                pages[space] = table.keep(rows, page_no)
        return self._kept.add(page_no, pages)

    def admit_over(self, ids: GivenIds, kv_len: int) -> int:
        """A new row whose first kv_len tokens are stored in kept pages. They stay kept.

        The row does not store these tokens again; where it goes on within the last page, reserve() copies that.

        ids: int64 [n], page_no 0 first; what keep() returned for any rows, in the order of page_no. Of the SWA space
             only the pages that steps after kv_len tokens see need be kept
        Raises WrongState for ids that are not kept, OutOfRows, NeverFits beyond max_kv_len, and BadBatch for pages that
        are not the first ones of a sequence, that do not hold kv_len tokens, or more than these, or that a window
        lacks; nothing is changed then.
        """
        places = self._kept.places_of(ids)
        end = len(places)
        if kv_len < 0 or num_pages(kv_len, self.page_size) != end:
            raise BadBatch(
                f"{kv_len} tokens lie in {num_pages(max(0, kv_len), self.page_size)} pages of {self.page_size}, and "
                f"{end} kept pages are given; give as many as the tokens need"
            )
        self._row_width.require(kv_len, self.max_kv_len)
        strange = self._kept.page_no_at(places) != np.arange(end)
        if strange.any():
            at = int(strange.argmax())
            raise BadBatch(
                f"kept page {at} was page_no {self._kept.page_no_at(places)[at]} of its sequence; a row begins with "
                "page_no 0, and goes on page by page"
            )
        pages = [self._kept.pages_at(places, space) for space in range(len(self.spaces))]
        first = [table.first_held_of(held, kv_len) for table, held in zip(self.spaces, pages, strict=True)]
        row = self.admit()
        self._capacity[row], self._reserved_len[row] = end * self.page_size, kv_len
        for table, begin, held in zip(self.spaces, first, pages, strict=True):
            table.begin_over(row, begin, held)
        self.tokens.begin_over(row, kv_len)
        return row

    def drop(self, ids: GivenIds, spaces: Collection[Space] = EVERY_SPACE) -> None:
        """Keep pages no longer; those that no row holds, and no other keep, are free.

        spaces: in which they are dropped. An id with pages in no space is gone for ever
        Raises WrongState for ids that are not kept in any of these spaces, or named twice; nothing is changed then.
        """
        places = self._kept.places_of(ids)
        pages = [self._kept.pages_at(places, space) for space in range(len(self.spaces))]
        named = [space for space, table in enumerate(self.spaces) if table.space in spaces]
        # An id without any page is where an interrupted call comes again.
        elsewhere = np.any(pages, axis=0) & ~np.any([pages[space] for space in named], axis=0)
        if elsewhere.any():
            raise WrongState(
                f"{np.asarray(ids)[elsewhere][0]} is kept, but not in {' or '.join(s.name for s in spaces)}: it was "
                "dropped there already, or never kept"
            )
        for space in named:
            self._kept.clear(places, space)
            self.spaces[space].let_go(pages[space][pages[space] != RESERVED_PAGE])
        self._kept.forget_empty(places)

    def drop_all(self) -> None:
        """Keep nothing any longer, and give back all pages that no row holds, those too that an interrupt has lost."""
        self._kept.drop_all()
        for table in self.spaces:
            table.count_anew()

    def kept_pages(self, ids: GivenIds, space: Space = Space.FULL) -> Int32Array:
        """int32 [n]: the pages of ids in a space, 0 for those that are not kept there.

        Raises WrongState, BadSetting.
        """
        table = self.space(space)
        return self._kept.pages_at(self._kept.places_of(ids), self.spaces.index(table))

    def num_holders(self, page: int, space: Space = Space.FULL) -> int:
        """Rows that hold a page, and keeps of it: 0 for a free page. Raises BadBatch, BadSetting."""
        table = self.space(space)
        if not RESERVED_PAGE < page < table.pages.num_pages:
            raise BadBatch(
                f"{page} is not a page{table.pages.of}; pages run from {RESERVED_PAGE + 1} to "
                f"{table.pages.num_pages - 1}"
            )
        return int(table.num_holders(np.array([page]))[0])

    def num_holders_of(self, ids: GivenIds, space: Space = Space.FULL) -> Int32Array:
        """int32 [n]: num_holders of the pages of ids in a space, each keep itself included.

        1: only this keep holds the page, so that drop() makes it free; 0: it is not kept there.
        Raises WrongState, BadSetting.
        """
        pages = self.kept_pages(ids, space)
        holders: Int32Array = self.space(space).num_holders(pages)
        return np.where(pages == RESERVED_PAGE, 0, holders).astype(np.int32)

    def truncate(self, row: int, kv_len: int) -> None:
        """Row goes back: it keeps its first kv_len tokens, and gives back the pages after them.

        With the tokens that are stored, or more, row loses nothing but room that was reserved ahead, in every space.
        Where row shares pages this is how it goes back at all: the next reserve() copies the page that kv_len lies in,
        if another row holds it too, and takes others for those after it. A row that shares none may as well begin a
        step earlier. Raises WrongState, and BadBatch for more tokens than row has room for.
        """
        self._must_be_admitted(row)
        if not 0 <= kv_len <= self._reserved_len[row]:
            raise BadBatch(f"row {row} has room for {self._reserved_len[row]} tokens; it cannot go back to {kv_len}")
        end, new_end = self._end(row), num_pages(kv_len, self.page_size)
        self.generations.change(row)
        self._has_room, self._look_from[row] = _NO_ROOM, _ALWAYS
        # In this order an interrupt leaves no token that counts as stored without its page, and none that may be stored
        # in a page that another row holds.
        self.tokens.forget(row, kv_len)
        self._reserved_len[row] = kv_len
        self._capacity[row] = new_end * self.page_size
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
            self._mark_stored(np.asarray(rows, np.int32), np.asarray(kv_len, np.int32))

    def _mark_stored(self, rows: Int32Array, kv_len: Int32Array) -> None:
        self._must_all_be_admitted(rows)
        short = (kv_len > self._reserved_len[rows]) | (kv_len < 0)
        if short.any():
            seq = int(short.argmax())
            raise BadBatch(
                f"row {rows[seq]} has room for {self._reserved_len[rows[seq]]} tokens; {kv_len[seq]} of them cannot be "
                "stored"
            )
        self.tokens.stored_len[rows] = kv_len

    def free(self, row: int) -> None:
        """Give a row and its pages back. Raises WrongState for a row that is not admitted, a second free included."""
        self._must_be_admitted(row)
        for table in self.spaces:
            table.release(row, self._end(row))
        self._forget(row)

    def pending_updates(self) -> Int32Array:
        """PageTable.pending_updates of the full space."""
        return self._full.pending_updates()

    def check_batch(self, batch: StepBatch) -> None:
        """Raise BadBatch unless every row is admitted, named once, has room for its kv_len, and holds its windows.

        Also unless rows that share a prefix hold the same pages there, whole ones. Raises NeverFits for more sequences
        than a step may have.
        """
        rows = batch.rows
        if len(rows) == 0:
            return
        # The rows of a step are mostly those of the step before it, and comparing bytes costs next to nothing.
        named = batch.row_bytes
        if named != self._rows_checked[0]:
            self._check_rows(rows)
            self._rows_checked = named, rows.astype(np.int64)
        room = named, batch.kv_len_bytes
        if room != self._has_room:
            reserved = self._reserved_len.take(rows)  # -1 in rows that are not admitted, the reserved row among them
            short = reserved < batch.kv_len
            if short[short.argmax()]:
                self._refuse_rows(rows)
                self._refuse_lengths(batch)
            self._has_room = room
        for table in self._windowed:
            table.check_windows(rows, batch.kv_len - batch.q_len)
        if not batch.is_plain and isinstance(batch.prefixes, SharedPrefixes):
            # While rows stay admitted, the whole pages before their last token stay theirs.
            shared = (batch.prefixes, named, self.generations.last_change)
            if shared != self._prefixes_checked:
                batch.prefixes.check_pages(self.entries_host, rows, self.page_size)
                self._prefixes_checked = shared

    def check_stored(self, batch: StepBatch) -> None:
        """Raise BadBatch where a step begins after the tokens that are stored: it would attend to what is not there.

        A length that only the device knows may be shorter than its bound: such a step is not looked at.
        """
        if batch.num_seqs and batch.inputs.kv_len_on_host:
            late = batch.kv_len - batch.q_len > self.tokens.stored_len.take(batch.rows)
            if late[late.argmax()]:
                self._refuse_gaps(batch, batch.kv_len - batch.q_len)

    def require_stored(self, batch: StepBatch) -> None:
        """As check_stored, for a step that stores nothing itself: all of its tokens must be there."""
        if batch.num_seqs and batch.inputs.kv_len_on_host:
            self._refuse_gaps(batch, batch.kv_len)

    def _refuse_gaps(self, batch: StepBatch, needed: Int32Array) -> None:
        stored = self.tokens.stored_len[batch.rows]
        gaps = (needed > stored) & (batch.q_len > 0)
        if gaps.any():
            seq = int(gaps.argmax())
            row = batch.rows[seq]
            raise BadBatch(
                f"sequence {seq} attends to the first {needed[seq]} tokens of row {row}, of which {stored[seq]} are "
                f"stored in every layer; store the others first, or call mark_stored([{row}], [{needed[seq]}]) if "
                "their K and V came into the pages by other means"
            )

    def why_no_store(self, batch: StepBatch) -> str:
        """Why a step must not store its new tokens, or nothing: a page that one of them lies in has other holders."""
        # How many of a row's tokens are new, and with it where they begin, may be known on the device alone.
        if not self.tokens.has_floors or batch.num_seqs == 0 or not batch.inputs.q_len_on_host:
            return ""
        start = batch.kv_len - batch.q_len
        below = (start < self.tokens.floor.take(batch.rows)) & (batch.q_len > 0)
        if not below[below.argmax()]:
            return ""
        below &= start < self._lowered_floors(batch.rows)
        if not below.any():
            return ""
        seq = int(below.argmax())
        row, token = batch.rows[seq], start[seq]
        return (
            f"sequence {seq} would store token {token} of row {row} in a page that another row, or keep(), "
            f"holds too; call truncate({row}, {token}) and reserve({row}, {batch.kv_len[seq]}) first, or share "
            "and keep fewer tokens"
        )

    def floors(self, rows: Int32Array) -> Int32Array:
        """int32 [num_seqs]: the first token that a step may store in each row."""
        return self._lowered_floors(rows) if self.tokens.has_floors else self.tokens.floor[rows]

    def _lowered_floors(self, rows: Int32Array) -> Int32Array:
        """The floors of rows, once more by the pages that have other holders now."""
        floor = self.tokens.floor[rows]
        last = np.maximum(num_pages(floor, self.page_size) - 1, 0)
        stays = floor == 0
        for table in self.spaces:
            stays |= table.num_holders(table.entries_host[rows, last]) > 1
        # Mostly the last page before the floor still has another holder.
        if not stays.all():
            floor[~stays] = self._search_floors(rows[~stays], floor[~stays])
            self.tokens.lower(rows, floor)
        return floor

    def _search_floors(self, rows: Int32Array, floor: Int32Array) -> Int32Array:
        """Where the last page before each floor ends that has another holder."""
        shared_end = PageTable.shared_ends(self.spaces, rows, num_pages(floor, self.page_size)) * self.page_size
        lowered: Int32Array = np.minimum(floor, shared_end).astype(np.int32)
        return lowered

    def _check_rows(self, rows: Int32Array) -> None:
        """Raise BadBatch unless all rows are in the table and none is named twice, NeverFits for too many."""
        # Read as unsigned, a negative row is a huge one.
        if np.maximum.reduce(rows.view(np.uint32)) >= len(self._capacity):
            self._refuse_rows(rows)
        if len(rows) > self.max_num_seqs:
            raise NeverFits(f"{len(rows)} sequences in one step; raise max_num_seqs = {self.max_num_seqs} or split it")
        self._must_be_distinct(rows)

    def _must_be_distinct(self, rows: Int32Array) -> None:
        order = np.arange(len(rows), dtype=np.int32)
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

    def num_held(self, row: int, space: Space = Space.FULL) -> int:
        """Pages that row holds in a space."""
        return self.space(space).num_held(row, self._end(row))

    def pages_of(self, row: int, space: Space = Space.FULL) -> Int32Array:
        """The pages of a row in a space, in order; page 0 in the place of those that were given back."""
        self._must_be_admitted(row)
        return np.array(self.space(space).entries_host[row, : self._end(row)], np.int32)

    def _end(self, row: int) -> int:
        """One past the last page_no that row has room in."""
        return max(0, int(self._capacity[row])) // self.page_size

    def _short(self, table: PageTable, row: int, kv_len: int) -> int:
        wanted = num_pages(kv_len, self.page_size)
        more = table.num_held(row, wanted) - table.num_held(row, self._end(row))
        return max(0, more) + (kv_len > self._reserved_len[row] and self._shares_last_page(table, row))

    def _shares_last_page(self, table: PageTable, row: int) -> bool:
        """Whether the next token of row would land in a page that another row holds too."""
        page_no, offset = divmod(int(self._reserved_len[row]), self.page_size)
        return offset > 0 and bool(table.shares(np.array([row], np.int32), np.array([page_no], np.int32))[0])

    def _must_be_admitted(self, row: int) -> None:
        if not RESERVED_ROW < row < len(self._capacity) or self._capacity[row] < 0:
            raise WrongState(f"row {row} is not admitted: it was never handed out, or it was freed already")

    def _must_all_be_admitted(self, rows: Int32Array) -> None:
        outside = int(rows.min()) <= RESERVED_ROW or int(rows.max()) >= len(self._capacity)
        if outside or (self._capacity[rows] < 0).any():
            for row in rows.tolist():
                self._must_be_admitted(row)

    def _forget(self, row: int) -> None:
        """A row that holds no page is free."""
        self.generations.change(row)
        self._has_room, self._look_from[row] = _NO_ROOM, _ALWAYS
        for table in self._windowed:
            table.start_over(row)
        self.tokens.start_over(row)
        self._capacity[row] = self._reserved_len[row] = -1
        if row not in self._free_rows:  # it is where an interrupt has broken off admit()
            self._free_rows.append(row)
