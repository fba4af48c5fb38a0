"""RequestTable: the block table. Each admitted request has a row: its page ids in each space, and its length.

Row 0 and page 0 are reserved: padded sequences point there. Pages have reference counts, so that requests can share a
prefix; a partly filled page that several rows hold is copied before one of them continues in it (copy on write). Full
pages can be kept, for a prefix cache: they stay when their row is freed, and other rows may begin with them. With an
SWA (sliding-window) space, a row has pages in both spaces, and one length.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rocm_attn.batch.step_batch import INT32_MAX, MOST_TOKENS, Int32Array, Integers, as_int32
from rocm_attn.errors import BadSetting, NeverFits
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.batch_checks import BatchChecks
from rocm_attn.paging.index_spaces import Space, num_pages
from rocm_attn.paging.kept_pages import KeptPages
from rocm_attn.paging.kv_pool import require_slots
from rocm_attn.paging.page_table import ONE, PageTable, Places, SpacePages, TableGuards
from rocm_attn.paging.row_states import RowStates
from rocm_attn.paging.rows import ALWAYS, NO_ROOM, Rows, one_each
from rocm_attn.paging.state_pool import NO_RECURRENT_LAYERS, RecurrentLayers

ALL_TABLE_GUARDS = TableGuards()
_INT32 = np.dtype(np.int32)
_ALWAYS = np.array(ALWAYS, np.int32)  # see ONE


class RequestTable:
    """The block table: one row of page ids per admitted request, with reference-counted pages.

    Its calls, and those that begin or end a step over it, must not overlap: threads that share it need a lock.

    max_num_seqs: most sequences in a step
    max_num_rows: most requests admitted at a time, at least max_num_seqs (row 0 is extra); 0: max_num_seqs
    max_kv_len:   most tokens of a row
    num_pages:    pages of the full space's pool, the reserved page 0 included
    page_size:    tokens in a page
    windows:      sliding-window spaces, whose pages are freed when they have left the window
    recurrent:    recurrent layers, which keep a state per row in place of pages

    spaces:      the page table of each space; full: that of Space.FULL
    kept:        pages that are kept when their rows are freed, for a prefix cache
    checks:      the checks of a step before it begins
    tokens:      which tokens of each row are stored
    generations: the number of each row's last change
    states:      the recurrent states of rows
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
        recurrent: RecurrentLayers = NO_RECURRENT_LAYERS,
        guards: TableGuards = ALL_TABLE_GUARDS,
    ) -> None:
        max_num_seqs, max_kv_len = whole_number("max_num_seqs", max_num_seqs), whole_number("max_kv_len", max_kv_len)
        page_size, max_num_rows = whole_number("page_size", page_size), whole_number("max_num_rows", max_num_rows)
        num_rows = (max_num_rows or max_num_seqs) + 1
        if min(max_num_seqs, max_kv_len, page_size) < 1:
            raise NeverFits(
                f"max_num_seqs is {max_num_seqs}, max_kv_len is {max_kv_len} and page_size is {page_size}; each must "
                "be at least 1"
            )
        if num_rows > INT32_MAX:
            raise NeverFits(f"{num_rows - 1} rows were asked for; rows are int32, so use at most {INT32_MAX - 1}")
        if num_rows <= max_num_seqs:
            raise NeverFits(
                f"max_num_rows is {max_num_rows} and max_num_seqs is {max_num_seqs}; each sequence of a step needs "
                "a row, so raise max_num_rows"
            )
        self.page_size, self.max_num_seqs, self.max_kv_len = page_size, max_num_seqs, max_kv_len
        self.width = width = -(-max_kv_len // page_size)
        if max_kv_len > MOST_TOKENS:
            raise NeverFits(
                f"max_kv_len is {max_kv_len}; kernels add a few lengths in 32 bits, so use at most {MOST_TOKENS}"
            )
        all_pages = (SpacePages(Space.FULL, num_pages), *windows)
        for pages in all_pages:
            require_slots(pages.num_pages, page_size)
        self._tokens, self._last = np.array(page_size, np.int32), np.array(page_size - 1, np.int32)  # of a page
        self._most = np.array(max_kv_len, np.int32)
        self.spaces = tuple(
            PageTable(pages, num_rows=num_rows, width=width, page_size=page_size, device=device, guards=guards)
            for pages in all_pages
        )
        self.full = self.spaces[0]
        self.states = RowStates(recurrent, num_rows=num_rows, page_size=page_size)
        sizes = {"num_rows": num_rows, "max_kv_len": max_kv_len, "page_size": page_size}
        self._rows = Rows(self.spaces, self.states, **sizes, guards=guards)
        self.tokens, self.generations = self._rows.tokens, self._rows.generations
        self.kept = KeptPages(self._rows, guards)
        self.checks = BatchChecks(self._rows, max_num_seqs)

    @property
    def fewest_free_pages(self) -> int:
        """Free pages in the space that has the fewest."""
        return min(table.num_free_pages for table in self.spaces)

    @property
    def num_free_rows(self) -> int:
        return len(self._rows.free)

    @property
    def is_empty(self) -> bool:
        """True if no request is admitted and no page is kept."""
        has_no_rows = self.num_free_rows == len(self._rows.capacity) - 1
        return has_no_rows and all(table.num_free_pages == table.num_usable_pages for table in self.spaces)

    @property
    def most_new_seqs(self) -> int:
        """Most sequences in a step of newly admitted requests."""
        return min(self.num_free_rows, self.max_num_seqs)

    def space(self, space: Space) -> PageTable:
        """The page table of a space. Raises BadSetting if rows have no pages there."""
        return self._rows.space(space)

    @property
    def next_row(self) -> int:
        """The row that admit() returns next. Raises OutOfRows if every row is taken."""
        return self._rows.next_row

    def admit(self) -> int:
        """Admits a request; returns its row, which has no pages yet. Raises OutOfRows if every row is taken."""
        return self._rows.admit()

    def is_admitted(self, row: int) -> bool:
        """True if a row was admitted and not freed."""
        return self._rows.is_admitted(row)

    def reserve(self, row: int, kv_len: int) -> None:
        """Allocates pages so that row has room for kv_len tokens in every space. It never frees pages of the row.

        Raises OutOfPages, NeverFits beyond max_kv_len and for more pages than the pool has, WrongState for a row that
        is not admitted, and BadSetting for an invalid length; nothing is changed then.
        """
        length = whole_number("kv_len", kv_len)
        if length < 0:
            raise BadSetting(f"kv_len is {length}; it must be 0 or more")
        rows = self._rows
        row = rows.must_be_admitted(row)
        rows.must_fit(length)
        if length < rows.look_from[row]:  # there is mostly room
            rows.reserved_len[row] = max(length, int(rows.reserved_len[row]))
        else:
            self._reserve_all(np.array([row], np.int32), np.array([length], np.int32))

    def reserve_all(self, rows: Integers, kv_len: Integers) -> None:
        """Does reserve(rows[i], kv_len[i]) for every i. If it raises, all rows are unchanged.

        rows, kv_len: integers [num_seqs]
        Raises what reserve() raises, and BadBatch for a row that is named twice.
        """
        # Each step reserves, so arrays of the right type cost no call.
        is_array = rows.__class__ is kv_len.__class__ is np.ndarray
        if (
            not is_array
            or rows.dtype is not _INT32  # type: ignore[union-attr]
            or kv_len.dtype is not _INT32  # type: ignore[union-attr]
            or rows.shape != kv_len.shape  # type: ignore[union-attr]
            or rows.ndim != 1  # type: ignore[union-attr]
        ):
            rows, kv_len = one_each(rows, "kv_len", kv_len)
        if len(rows):
            self._reserve_all(rows, kv_len)  # type: ignore[arg-type]

    def _reserve_all(self, rows: Int32Array, kv_len: Int32Array) -> None:
        state, named = self._rows, rows.tobytes()
        checked, places = state.known_rows
        if named != checked:
            state.must_all_be_admitted(rows)
            places = rows.astype(np.int64)
            state.must_be_distinct(places)
        beyond = kv_len >= state.look_from.take(places)
        if beyond[beyond.argmax()]:
            (at,) = beyond.nonzero()
            self._take_pages(places.take(at), kv_len.take(at))
        state.reserved_len[places] = np.maximum(state.reserved_len.take(places), kv_len)
        state.known_room = named, kv_len.tobytes()

    def _take_pages(self, rows: Places, kv_len: Int32Array) -> None:
        """Takes the pages that rows need for kv_len tokens, and copies of shared pages in which they continue.

        Raises what reserve_all raises, for all of them.
        """
        state, copies = self._rows, [rows[:0]] * len(self.spaces)
        state.must_fit(kv_len.item(kv_len.argmax()))
        unsure = state.look_from.take(rows) == _ALWAYS
        if unsure[unsure.argmax()]:  # if none is unsure, each is admitted, grows, and has its last page alone
            state.must_all_be_admitted(rows)
            grows = kv_len > state.reserved_len[rows]
            rows, kv_len = rows[grows], kv_len[grows]
            # An upper bound: if two rows share a page, only one needs a copy.
            copies = [rows[table.shares(rows, state.reserved_len[rows])] for table in self.spaces]
        end = state.capacity.take(rows) // self._tokens
        new_end = np.maximum((kv_len + self._last) // self._tokens, end)
        missing = [table.missing(rows, end, new_end) for table in self.spaces]
        for table, copied, cells in zip(self.spaces, copies, missing, strict=True):
            table.require_free(rows, kv_len, len(copied) + len(cells))
        for table, copied, cells in zip(self.spaces, copies, missing, strict=True):
            for row in copied.tolist():
                table.own(row, int(state.reserved_len[row]))
            table.take(cells)
        state.capacity[rows] = capacity = new_end * self._tokens
        # They need no page before they have filled their pages.
        state.look_from[rows] = np.minimum(capacity, self._most) + ONE

    def is_reserved(self, rows: Integers, kv_len: Integers) -> bool:
        """True if reserve_all(rows, kv_len) would do nothing: all of these rows have room for kv_len tokens.

        rows, kv_len: integers [num_seqs]. Raises BadBatch for anything else
        """
        rows, kv_len = as_int32("rows", rows), as_int32("kv_len", kv_len)
        if len(rows) != len(kv_len) or len(rows) == 0:
            return False
        short = self.room(rows) < kv_len
        if short[short.argmax()]:
            return False
        self._rows.known_room = rows.tobytes(), kv_len.tobytes()
        return True

    def room(self, rows: Integers) -> Int32Array:
        """int32 [n]: tokens that each row has room for in every space; -1: not admitted. rows: integers [n]

        Raises BadBatch for anything else.
        """
        rows, lengths = as_int32("rows", rows), self._rows.reserved_len
        unsigned = rows.view(np.uint32)  # negative rows are huge ones
        try:
            return lengths.take(unsigned)
        except IndexError:
            return np.where(unsigned < len(lengths), lengths.take(rows, mode="clip"), np.int32(-1))

    def evict(self, rows: Integers, kv_len: Integers) -> None:
        """Frees pages that have left the window of rows[i], which has kv_len[i] tokens stored or in flight.

        These are the pages before the window of the token at kv_len[i], except those of the tokens that are kept for a
        rollback (RuntimeOptions.swa_kept). Every step does this by itself for the tokens before its new ones. Call it
        before reserve() to get these pages earlier. A row without pages gets none for these tokens later, because their
        KV will never be read.

        rows, kv_len: integers [num_seqs]; lengths at most the device's
        Raises WrongState for a row that is not admitted, and BadBatch for one that is named twice, or without a length
        for each.
        """
        if not self._rows.windowed:
            return
        rows, kv_len = one_each(rows, "kv_len", kv_len)
        if len(rows) == 0:
            return
        self._rows.must_all_be_admitted(rows)
        self._rows.must_be_distinct(rows)
        for table in self._rows.windowed:
            table.evict(rows, kv_len, self._rows.capacity[rows] // self.page_size)

    def fork(self, row: int, kv_len: int) -> int:
        """Admits a new row that shares the pages of row's first kv_len tokens. Neither row may store these again.

        To recompute some of them, share fewer, or truncate() the row in question.
        Raises OutOfRows, WrongState for a row that is not admitted, BadSetting for an invalid length, and BadBatch for
        tokens that row has no room for, or whose window pages were freed; nothing is changed then. With recurrent
        layers, if row has no state after kv_len tokens, the new row has none: the step that needs it raises.
        """
        row = self._rows.must_be_admitted(row)
        kv_len = self._rows.must_have_room(row, kv_len, f"{kv_len} of them cannot be shared")
        end = num_pages(kv_len, self.page_size)
        pages = [table.entries_host[row, :end] for table in self.spaces]
        self._rows.first_held(pages, kv_len, row)  # a fork that is refused is noted nowhere
        self.generations.share(row)
        self._rows.look_from[row] = ALWAYS
        self.tokens.on_share()
        stored_len = min(kv_len, int(self.tokens.stored_len[row]))
        child = self._rows.begin(pages, kv_len, stored_len, row)
        self.tokens.raise_first_writable(row, kv_len)
        self.states.fork(row, child, kv_len)
        return child

    def truncate(self, row: int, kv_len: int) -> None:
        """Rolls row back to its first kv_len tokens, and frees the pages after them.

        If kv_len is at least the number of stored tokens, only pages that were reserved ahead are freed, in every
        space. A row that shares pages can be rolled back only this way: the next reserve() copies the page of token
        kv_len if another row holds it too, and allocates new pages after it. A row that shares no page may also simply
        begin a step at an earlier token. Raises WrongState, BadSetting for an invalid length, and BadBatch for more
        tokens than row has room for.
        """
        row = self._rows.must_be_admitted(row)
        kv_len = self._rows.must_have_room(row, kv_len, f"it cannot go back to {kv_len}")
        end, new_end = self._rows.end(row), num_pages(kv_len, self.page_size)
        if kv_len < self.tokens.stored_len[row]:
            self.generations.change(row)
        self.states.truncate(row, kv_len)
        self._rows.known_room, self._rows.look_from[row] = NO_ROOM, ALWAYS
        self._rows.num_cuts += 1
        # In this order an interrupt leaves no token that counts as stored without its page, and none that may be stored
        # in a page that another row holds.
        self.tokens.forget(row, kv_len)
        self._rows.reserved_len[row] = kv_len
        self._rows.capacity[row] = new_end * self.page_size
        for table in self.spaces:
            table.cut(np.array([row]), new_end, np.array([end]))
        self.tokens.lower_first_writable(row, kv_len)
        if kv_len == 0:
            for table in self._rows.windowed:
                table.lack(row, 0)

    def mark_stored(self, rows: Integers, kv_len: Integers) -> None:
        """Declares that K and V of the first kv_len[i] tokens of rows[i] are in their pages, in every layer.

        Call it if the pages were filled in another way than by steps: with KV that was computed elsewhere, or loaded
        from storage.

        With recurrent layers, a row that gets more stored tokens than it had loses its state, because no state after
        these tokens exists; its next step must begin at token 0. KVImporter.import_row() brings a state with the
        tokens. Tokens of steps whose lengths only the device knows do not count as more. With as many tokens or fewer,
        they must be those that steps have stored; if they are others, call truncate() first.

        rows, kv_len: integers [num_seqs]; rows are distinct and have room for kv_len
        Raises WrongState, BadBatch.
        """
        rows, kv_len = one_each(rows, "kv_len", kv_len)
        if len(rows) == 0:
            return
        self._rows.must_all_be_admitted(rows)
        self._rows.must_be_distinct(rows)
        short = kv_len > self._rows.reserved_len[rows]
        for row, length in zip(rows[short].tolist(), kv_len[short].tolist(), strict=True):
            self._rows.must_have_room(row, length, f"{length} of them cannot be stored")
        if not self.states.is_empty:
            grows = kv_len > self.tokens.stored_len[rows]
            self.states.fill(rows[grows], kv_len[grows])
        self.tokens.mark(rows, kv_len)

    def free(self, row: int) -> None:
        """Frees a row and its pages. Raises WrongState for a row that is not admitted, a second free included."""
        self._rows.forget(self._rows.must_be_admitted(row))

    def num_held(self, row: int, space: Space = Space.FULL) -> int:
        """Pages that row holds in a space. Raises WrongState for a row that is not admitted, BadSetting."""
        row = self._rows.must_be_admitted(row)
        return int(self.space(space).num_held(np.array([row]), np.array([self._rows.end(row)]))[0])

    def pages_of(self, row: int, space: Space = Space.FULL) -> Int32Array:
        """The page ids of a row in a space, in order; 0 for pages that were freed because they left the window.

        Raises WrongState for a row that is not admitted, and BadSetting.
        """
        row = self._rows.must_be_admitted(row)
        return np.array(self.space(space).entries_host[row, : self._rows.end(row)], np.int32)
