"""PageTable: which pages of one space each row holds. The host decides; the device copy follows by pending changes.

A row holds the pages [first, end) of its sequence. In the full space first is 0; in the SWA space it moves on with the
window, and the entries before it are page 0, which no kernel reads for a step that may run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.errors import BadBatch, NeverFits, OutOfPages
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, OWN_TABLE, TableTerms
from rocm_attn.paging.index_spaces import RESERVED_PAGE, Space, num_pages
from rocm_attn.paging.kept_pages import IsKept, the_same_id
from rocm_attn.paging.stored_tokens import SharedFloor, after_what_is_shared


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
        """Raise NeverFits unless a row can hold kv_len tokens."""
        if kv_len > max_kv_len:
            raise NeverFits(f"{kv_len} tokens exceed the {max_kv_len} that a row can hold; raise max_kv_len")

    def put(self, entries: Int32Array, row: int, first: int, pages: Sequence[int]) -> list[tuple[int, int, int]]:
        """entries[row, first + i] = pages[i]; the changed cells, as PendingChanges lists them."""
        end = first + len(pages)
        entries[row, first:end] = pages
        return [(row, first, end)]

    def put_all(
        self, entries: Int32Array, rows: Int32Array, first: Int32Array, counts: Int32Array, pages: Int32Array
    ) -> list[tuple[int, int, int]]:
        """put() the next counts[i] pages into rows[i], from first[i] on, for every i."""
        if len(pages) > len(rows) or not counts.all():
            return self._put_row_by_row(entries, rows, first, counts, pages)
        entries[rows, first] = pages
        begin = first.tolist()
        return list(zip(rows.tolist(), begin, [at + 1 for at in begin], strict=True))

    def _put_row_by_row(
        self, entries: Int32Array, rows: Int32Array, first: Int32Array, counts: Int32Array, pages: Int32Array
    ) -> list[tuple[int, int, int]]:
        cells, left = [], pages.tolist()
        for row, begin, count in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True):
            if count:
                cells += self.put(entries, row, begin, left[:count])
                del left[:count]
        return cells


WITHIN_THE_ROW = RowWidth()

# holders of pages, int32 [n] -> whether a row must not write to them
IsShared = Callable[[Int32Array], npt.NDArray[np.bool_]]


def held_by_several(holders: Int32Array) -> npt.NDArray[np.bool_]:
    """Whether a page has more than one holder: rows, and keeps."""
    return holders > 1


# a page without holders, copies that are still to be made -> whether one of them reads it
IsSource = Callable[[int, Mapping[int, int]], bool]


def still_to_be_copied(page: int, copies: Mapping[int, int]) -> bool:
    """Whether a page is the source of a copy that no launch has made yet."""
    return page in copies.values()


@dataclass(frozen=True, slots=True)
class TableGuards:
    """The safeguards of request rows and their pages.

    row_width:    keeps a row's pages inside the row
    is_shared:    which partly filled pages are copied before a row writes to them
    is_source:    which free pages are not handed out yet, because a copy has still to be made of them
    shared_floor: which tokens neither a fork nor its parent stores again
    is_kept:      which ids are taken for those of kept pages
    """

    row_width: RowWidth = WITHIN_THE_ROW
    is_shared: IsShared = held_by_several
    is_source: IsSource = still_to_be_copied
    shared_floor: SharedFloor = after_what_is_shared
    is_kept: IsKept = the_same_id


ALL_TABLE_GUARDS = TableGuards()


@dataclass(frozen=True, slots=True)
class SpacePages:
    """The pages of a space, before there is a table of them.

    num_pages:   of its pool, the reserved page 0 included
    knob:        the setting that num_pages came from
    window_left: previous keys that the furthest-looking layer sees; ALL_KEYS: all of them
    kept:        tokens before such a window that stay: as many as a sequence may go back, by drafts that are rejected
    first_page:  the first id that is handed out. Ids of two spaces that share none cannot be mixed up unseen
    """

    space: Space
    num_pages: int
    knob: str = "num_pages"
    window_left: int = ALL_KEYS
    kept: int = 0
    first_page: int = RESERVED_PAGE + 1

    def __post_init__(self) -> None:
        if not RESERVED_PAGE < self.first_page < self.num_pages:
            raise NeverFits(
                f"{self.knob} is {self.num_pages} and the first page handed out is {self.first_page}; at least one "
                f"page must be handed out, and page {RESERVED_PAGE} is reserved"
            )

    @property
    def of(self) -> str:
        """What follows "pages", in a sentence."""
        return "" if self.space == Space.FULL else f" of the {self.space.name} space"

    def first_needed(self, start: int, page_size: int) -> int:
        """The first page_no that steps whose new tokens begin at start or later may need."""
        return max(0, start - self.window_left - self.kept) // page_size

    def most_held(self, kv_len: int, q_len: int, page_size: int) -> int:
        """The most pages that a row holds while it grows to kv_len tokens, by up to q_len at a time."""
        # A stretch of tokens may begin and end within pages.
        return min(num_pages(kv_len, page_size), num_pages(self.window_left + self.kept + q_len, page_size) + 1)


class PageTable:
    """Rows of pages of one space, int32 [num_rows, width], with reference counts.

    A page is held by rows, and by keeps, which outlast them. The caller knows how long rows are: `end` is one past a
    row's last page_no.

    Changes are made in such an order that an interrupt between two statements may lose a page, which has no holder
    and is not free then, but never leaves one free that has a holder, or shared and not counted so.
    """

    def __init__(
        self,
        pages: SpacePages,
        *,
        num_rows: int,
        width: int,
        page_size: int,
        device: torch.device,
        guards: TableGuards,
    ) -> None:
        self.pages = pages
        self.entries_host = np.zeros((num_rows, width), np.int32)
        self.entries = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        self.pending = PendingChanges()
        self.num_usable_pages = pages.num_pages - pages.first_page
        self._page_size = page_size
        self._guards = guards
        self._holders = np.zeros(pages.num_pages, np.int32)  # rows that hold a page, and keeps of it
        self._holders[RESERVED_PAGE] = 1
        self._free = list(range(pages.num_pages - 1, pages.first_page - 1, -1))
        # These have no holder, but a copy has still to be made of each.
        self._sources: list[int] = []
        # Of each row: the first page_no that it holds or will hold, the earliest start of a step whose windows are all
        # there, and the start at which the next page is out of reach of every later step. int64: sums of two bounds.
        self._first = np.zeros(num_rows, np.int64)
        self._earliest_start = np.zeros(num_rows, np.int64)
        self._next_eviction = np.zeros(num_rows, np.int64)
        self._set_first(slice(None), 0)

    @property
    def space(self) -> Space:
        """What the ids mean."""
        return self.pages.space

    @property
    def window_left(self) -> int:
        """Previous keys that the furthest-looking layer of the space sees; ALL_KEYS: all of them."""
        return self.pages.window_left

    @property
    def terms(self) -> TableTerms:
        """Page 0 belongs to no one, and a sequence's new tokens are in its KV."""
        return OWN_TABLE

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def start_over(self, row: int) -> None:
        """A row that holds nothing begins anew."""
        self._set_first(row, 0)

    def num_held(self, row: int, end: int) -> int:
        """Pages that row holds."""
        return max(0, end - int(self._first[row]))

    def append(self, row: int, end: int, new_end: int) -> None:
        """Take the pages [end, new_end) of row; those before its window are not taken."""
        first = max(end, int(self._first[row]))
        taken = [self._take() for _ in range(first, new_end)]
        if taken:
            self.pending.cells += self._guards.row_width.put(self.entries_host, row, first, taken)

    def num_missing(self, rows: Int32Array, end: Int32Array, new_end: Int32Array) -> Int32Array:
        """int32 [n]: pages that rows lack to hold [., new_end) in the place of [., end), which is no more."""
        if self.window_left == ALL_KEYS:
            return new_end - end
        first = self._first[rows]
        return (np.maximum(new_end, first) - np.maximum(end, first)).astype(np.int32)

    def append_all(self, rows: Int32Array, end: Int32Array, counts: Int32Array) -> None:
        """append() to every row, which has the pages [., end) and takes counts of them."""
        total = sum(counts.tolist())
        if total:
            taken = self._free[-total:]
            del self._free[-total:]
            taken.reverse()  # the last one is the next one
            pages = np.array(taken, np.int32)
            self._holders[pages] = 1
            first = end if self.window_left == ALL_KEYS else np.maximum(end, self._first[rows])
            self.pending.cells += self._guards.row_width.put_all(self.entries_host, rows, first, counts, pages)

    def must_fit(self, row: int, kv_len: int) -> None:
        """Raise NeverFits where row would need more pages than the pool has, whatever others give back."""
        needed = self.num_held(row, num_pages(kv_len, self._page_size))
        if needed > self.num_usable_pages:
            raise NeverFits(
                f"row {row} needs {needed} pages{self.pages.of} for {kv_len} tokens and there are "
                f"{self.num_usable_pages}; raise {self.pages.knob}"
                + ("" if self.window_left == ALL_KEYS else ", or go on by fewer tokens at a time, with evict() before")
            )

    def refuse(self, rows: Sequence[int], kv_len: Sequence[int], needed: int) -> NoReturn:
        """Raise for rows that need more pages than are free: NeverFits as must_fit, else OutOfPages."""
        for row, length in zip(rows, kv_len, strict=True):
            self.must_fit(row, length)
        raise OutOfPages(
            f"{len(rows)} sequences need {needed} more pages{self.pages.of} and {self.num_free_pages} are free; "
            f"free a request or raise {self.pages.knob}",
            missing=needed - self.num_free_pages,
        )

    def shares(self, rows: Int32Array, page_no: Int32Array) -> npt.NDArray[np.bool_]:
        """Whether rows must not write to these pages of theirs."""
        return self._guards.is_shared(self._holders[self.entries_host[rows, page_no]])

    def num_holders(self, pages: Int32Array) -> Int32Array:
        """Rows that hold these pages, and keeps of them; the shape of pages."""
        return self._holders[pages]

    def held_elsewhere(self, rows: Int32Array, end: int) -> npt.NDArray[np.bool_]:
        """Of the pages [0, end) of rows, [len(rows), end]: whether they have other holders too."""
        return self._holders[self.entries_host[rows, :end]] > 1

    @staticmethod
    def shared_ends(
        tables: Sequence[PageTable], rows: Int32Array, ends: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int64]:
        """[n]: one past the last of the pages [0, ends[i]) of rows[i] that has another holder in a table; 0: none."""
        end = int(ends.max(initial=0))
        held = np.zeros((len(rows), end), np.bool_)
        for table in tables:
            held |= table.held_elsewhere(rows, end)
        page_no = np.arange(end)
        held &= page_no < ends[:, None]
        last: npt.NDArray[np.int64] = np.max(held * (page_no + 1), axis=1, initial=0)
        return last

    def own(self, row: int, page_no: int) -> None:
        """Put a copy in the place of a page that row shares."""
        shared = int(self.entries_host[row, page_no])
        own = self._take()
        # A page that is itself still waiting to be copied holds nothing yet: copy from where its content is.
        self.pending.copies[own] = self.pending.copies.get(shared, shared)
        self.pending.cells.append((row, page_no, page_no + 1))
        self.entries_host[row, page_no] = own
        self._holders[shared] -= 1

    def share(self, row: int, child: int, kv_len: int, end: int) -> None:
        """Let child hold the pages [., end) of row that steps from kv_len on may need.

        Raises BadBatch where some of these have left the window of row; nothing is changed then.
        """
        if 0 < kv_len < self._earliest_start[row]:
            raise BadBatch(
                f"the pages that {kv_len} shared tokens would be attended with have left the window of row {row}; "
                f"share at least {self._earliest_start[row]} tokens, or compute them again"
            )
        first = max(int(self._first[row]), self.pages.first_needed(kv_len, self._page_size))
        self._set_first(child, first if kv_len else 0)
        self._hold(child, first, self.entries_host[row, first:end])

    def must_hold(self, rows: Int32Array, page_no: Int32Array) -> None:
        """Raise BadBatch where page page_no[i] of rows[i] has left the window."""
        left = self.entries_host[rows, page_no] == RESERVED_PAGE
        if left.any():
            at = int(left.argmax())
            raise BadBatch(
                f"page_no {page_no[at]} of row {rows[at]} has left the window of the {self.space.name} space; keep it "
                "before a step gives it back, or in the other space alone"
            )

    def keep(self, rows: Int32Array, page_no: Int32Array) -> Int32Array:
        """One holder more for page page_no[i] of rows[i]; the pages, int32 [n]."""
        pages: Int32Array = self.entries_host[rows, page_no]
        np.add.at(self._holders, pages, 1)  # rows may share a page
        return pages

    def let_go(self, pages: Int32Array) -> None:
        """One holder less for each of these pages, for each time that it is named; without any it is free."""
        np.subtract.at(self._holders, pages, 1)
        free = list(dict.fromkeys(pages[self._holders[pages] == 0].tolist()))
        if self.pending.copies:
            for page in free:
                self._set_free(page)
        else:
            self._free += free

    def count_anew(self) -> None:
        """Count the holders of all pages from the rows, where no page is kept; those without any are free.

        So pages come back that an interrupted call has lost. Called again after an interrupt of its own.
        """
        holders = np.bincount(self.entries_host.ravel(), minlength=len(self._holders)).astype(np.int32)
        holders[RESERVED_PAGE] = 1
        # A copy to a page that no row holds was to be made by a call that did not come so far.
        copies = {page: source for page, source in self.pending.copies.items() if holders[page]}
        sources = set(copies.values())
        lost = [page for page in range(self.pages.num_pages - 1, self.pages.first_page - 1, -1) if not holders[page]]
        self.pending.copies = copies
        self._holders, self._sources = holders, [page for page in lost if page in sources]
        self._free = [page for page in lost if page not in sources]

    def first_held_of(self, pages: Int32Array, kv_len: int) -> int:
        """The first page_no that a row of kv_len tokens takes, of kept pages from page_no 0 on; 0: not kept.

        Raises BadBatch where a page is missing that steps from kv_len on see.
        """
        needed = min(self.pages.first_needed(kv_len, self._page_size), len(pages))
        missing = np.flatnonzero(pages[needed:] == RESERVED_PAGE)
        first = needed + int(missing[-1]) + 1 if len(missing) else needed
        if len(missing) and kv_len < first * self._page_size + self.pages.window_left:
            raise BadBatch(
                f"page_no {first - 1} is not kept in the {self.space.name} space any more, and steps after {kv_len} "
                "tokens look at it; admit over fewer pages, or compute them again"
            )
        return first

    def begin_over(self, row: int, first: int, pages: Int32Array) -> None:
        """Let row, which holds nothing, hold kept pages from page_no first on. pages: from page_no 0 on."""
        self._set_first(row, first)
        self._hold(row, first, pages[first:])

    def evict(self, rows: Int32Array, start: Int32Array, end: Int32Array) -> None:
        """Give back the pages that no step needs whose new tokens begin at start[i] or later in rows[i].

        They may be handed out again at once: the table is changed, and pages are written, by launches after those
        that may still read them, on the same stream. Only rows that leave a page cost a Python iteration.
        """
        due = start >= self._next_eviction[rows]
        if due.any():
            for row, begin, stop in zip(rows[due].tolist(), start[due].tolist(), end[due].tolist(), strict=True):
                first = self.pages.first_needed(begin, self._page_size)
                self._give_back(row, int(self._first[row]), min(first, stop))
                self._set_first(row, first)

    def cut(self, row: int, first: int, end: int) -> None:
        """Give back the pages [first, end) of row, the last ones that it holds."""
        self._give_back(row, max(first, int(self._first[row])), end)

    def release(self, row: int, end: int) -> None:
        """Give all pages of a row back."""
        self._give_back(row, int(self._first[row]), end)

    def check_windows(self, rows: Int32Array, start: Int32Array) -> None:
        """Raise BadBatch where a step that begins at start[i] in rows[i] would look at pages that were given back."""
        early = start < self._earliest_start[rows]
        if early.any():
            seq = int(np.argmax(early))
            raise BadBatch(
                f"sequence {seq} has its first new token at {start[seq]}, but row {rows[seq]} holds the keys of "
                f"windows from {self._earliest_start[rows[seq]]} on; raise swa_kept to the tokens it goes back"
            )

    def pending_updates(self) -> Int32Array:
        """Changed cells as (row, column, entry), int32 [n, 3].

        Entries are read now, from the host's copy: a cell that changed twice occurs twice, with the same entry.
        """
        if not self.pending.cells:
            return np.empty((0, 3), np.int32)
        ranges = np.array(self.pending.cells, np.int32)
        counts = ranges[:, 2] - ranges[:, 1]
        if (counts == 1).all():  # as where sequences grow by tokens
            ranges[:, 2] = self.entries_host[ranges[:, 0], ranges[:, 1]]
            return ranges
        starts = np.cumsum(counts) - counts
        updates = np.empty((int(counts.sum()), 3), np.int32)
        updates[:, 0] = np.repeat(ranges[:, 0], counts)
        updates[:, 1] = np.arange(len(updates)) + np.repeat(ranges[:, 1] - starts, counts)
        updates[:, 2] = self.entries_host[updates[:, 0], updates[:, 1]]
        return updates

    def copies_made(self) -> None:
        """Every pending copy was launched: its source may be handed out again, if no row holds it any more."""
        self.pending.copies.clear()
        sources, self._sources = self._sources, []
        self._free += sources

    def _set_first(self, row: int | slice, first: int) -> None:
        """The first page_no of row, and what follows from it."""
        tokens = first * self._page_size
        self._first[row] = first
        self._earliest_start[row] = tokens + self.pages.window_left if first else 0
        self._next_eviction[row] = tokens + self._page_size + self.pages.window_left + self.pages.kept

    def _hold(self, row: int, first: int, pages: Int32Array) -> None:
        """Row holds these pages too, from page_no first on."""
        if len(pages):
            self._holders[pages] += 1
            self.entries_host[row, first : first + len(pages)] = pages
            self.pending.cells.append((row, first, first + len(pages)))

    def _give_back(self, row: int, first: int, end: int) -> None:
        if first < end:
            pages = self.entries_host[row, first:end].copy()
            self.pending.cells.append((row, first, end))
            self.entries_host[row, first:end] = RESERVED_PAGE
            self.let_go(pages[pages != RESERVED_PAGE])  # it is where an interrupted call comes again

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def _set_free(self, page: int) -> None:
        """A page without holders may be handed out, as soon as no copy has to be made of it."""
        source = self.pending.copies.pop(page, page)
        # A page handed out too early would be written to before it was read by a copy that is launched once more.
        (self._sources if self._guards.is_source(page, self.pending.copies) else self._free).append(page)
        if source in self._sources and not self._guards.is_source(source, self.pending.copies):
            self._sources.remove(source)
            self._free.append(source)
