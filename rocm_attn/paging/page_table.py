"""PageTable: the block table of one space, on the host. Changes are queued, and sent to the device with the next step.

A row holds the pages [first, end) of its sequence. In the full space, first is 0. In the SWA space it moves with the
window; the entries before it are page 0, which kernels never read in a valid step.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.errors import BadBatch, NeverFits, OutOfPages
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS, OWN_TABLE
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.index_spaces import RESERVED_PAGE, RESERVED_ROW, Index, Space, num_pages
from rocm_attn.paging.state_record import RecordHead, must_be_after
from rocm_attn.paging.stored_tokens import StoredTokens

# int64 [n]: places in a table, row * width + page_no.
Cells = npt.NDArray[np.int64]
_NO_CELLS: Cells = np.empty(0, np.int64)
# Rows or pages: NumPy looks up places of int64 several times as fast.
Places = npt.NDArray[np.integer]
ONE = np.array(1, np.int32)  # for NumPy, which takes twice as long for a number of Python


@dataclass(slots=True)
class PendingChanges:
    """Changes that the device does not have yet.

    cells:  of changed entries
    copies: target page -> source page, to be copied before anything else is stored
    """

    cells: list[Cells] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)


def within_the_row(max_kv_len: int, kv_len: int) -> None:
    """Raises NeverFits unless a row can hold kv_len tokens: pages past its end would lie in the next row."""
    if kv_len > max_kv_len:
        raise NeverFits(f"{kv_len} tokens exceed the {max_kv_len} that a row can hold; raise max_kv_len")


@dataclass(frozen=True, slots=True)
class TableGuards:
    """The safeguards of request rows and their pages.

    row_width:  refuses lengths that a row has no room for
    writers:    holders that a partly filled page may have when a row writes to it; with more, it is copied first
    sources:    copies that no launch has made yet -> pages without holders that are not handed out yet
    new_tokens: makes the record of tokens that neither a fork nor its parent stores again
    is_kept:    given ids, ids in their places -> which of them are kept
    sent_state: refuses a buffer with changed bytes, and a state that is not the one after the tokens which came with it
    """

    row_width: Callable[[int, int], None] = within_the_row
    writers: int = 1
    sources: Callable[[dict[int, int]], Collection[int]] = dict.values
    new_tokens: Callable[[int], StoredTokens] = StoredTokens
    is_kept: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.bool_]] = np.equal
    sent_state: Callable[[RecordHead, int, int], None] = must_be_after


@dataclass(frozen=True, slots=True)
class SpacePages:
    """The pages of a space, before there is a table of them.

    num_pages:   of its pool, the reserved page 0 included
    knob:        the setting that num_pages came from
    window_left: previous keys that a query sees in the layer with the longest window; ALL_KEYS: all
    kept:        tokens before such a window that stay: the most that a sequence may go back, by rejected drafts
    first_page:  the first id that is handed out. If two spaces share no ids, mixing them up is always noticed
    """

    space: Space
    num_pages: int
    knob: str = "num_pages"
    window_left: int = ALL_KEYS
    kept: int = 0
    first_page: int = RESERVED_PAGE + 1

    def __post_init__(self) -> None:
        for name in ("num_pages", "window_left", "kept", "first_page"):
            of = self.knob if name == "num_pages" else name
            object.__setattr__(self, name, whole_number(of, getattr(self, name)))
        if not RESERVED_PAGE < self.first_page < self.num_pages:
            raise NeverFits(
                f"{self.knob} is {self.num_pages} and the first page handed out is {self.first_page}; at least one "
                f"page must be handed out, and page {RESERVED_PAGE} is reserved"
            )

    @property
    def of(self) -> str:
        """The words after "pages", in a sentence."""
        return "" if self.space == Space.FULL else f" of the {self.space.name} space"

    def first_needed(self, start: Index, page_size: int) -> Index:
        """The first page_no that steps with new tokens from start on may need."""
        before = start - (self.window_left + self.kept)
        return before * (before > 0) // page_size

    def most_held(self, kv_len: Index, q_len: Index, page_size: int) -> Index:
        """The most pages that a row holds while it grows to kv_len tokens, by up to q_len at a time."""
        most = num_pages(kv_len, page_size)
        if self.window_left == ALL_KEYS:
            return most
        # A stretch of tokens may begin and end within pages.
        beyond = most - num_pages(q_len + (self.window_left + self.kept), page_size) - 1
        return most - beyond * (beyond > 0)


class PageTable:
    """Rows of pages of one space, with reference counts.

    A page is held by rows, and by keeps, which outlast them. The caller knows the lengths of rows: `end` is one past a
    row's last page_no.

    space:            the meaning of the ids
    window_left:      previous keys that a query sees in the space's layer with the longest window; ALL_KEYS: all
    entries:          int32 [num_rows, width], on the device; entries_host is on the host
    pending:          changes that the device does not have yet
    num_usable_pages: pages that can be handed out
    first_token:      int64 [num_rows], the first token whose KV may be in a row's pages: that of its first page, or a
                      later one if the KV was sent from elsewhere, where earlier ones had left the window

    Changes are made in such an order that an interrupt between two statements may lose a page, which then has no holder
    and is not free. It never leaves a page free that has a holder, or shared without being counted as such.
    """

    # Page 0 belongs to no request, and a sequence's new tokens are in its KV.
    terms = OWN_TABLE
    # Pages are given back by windows alone: a chunk is one, too.
    chunk = ALL_KEYS

    def __init__(
        self, pages: SpacePages, *, num_rows: int, width: int, page_size: int, device: torch.device, guards: TableGuards
    ) -> None:
        self.pages = pages
        self.space, self.window_left = pages.space, pages.window_left
        self.entries_host = np.zeros((num_rows, width), np.int32)
        self.entries = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        self.pending = PendingChanges()
        self.num_usable_pages = pages.num_pages - pages.first_page
        self._cells = self.entries_host.reshape(-1)
        self._width, self._page_size = width, page_size
        self._row = np.array(width, np.int64)
        self._writers, self._sources_of = guards.writers, guards.sources
        self._holders = np.zeros(pages.num_pages, np.int32)  # rows that hold a page, and keeps of it
        self._holders[RESERVED_PAGE] = 1
        self._free = list(range(pages.num_pages - 1, pages.first_page - 1, -1))
        # Pages without a holder that are still the source of a pending copy.
        self._sources: list[int] = []
        # For each row: the first page_no that it holds or will hold, the earliest start of a step whose windows are all
        # there, and the start from which no step needs that first page. int64: sums of two bounds.
        self._first, self.first_token = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
        self._earliest_start = np.zeros(num_rows, np.int64)
        self._next_eviction = np.zeros(num_rows, np.int64)

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def num_held(self, rows: Places, end: Places) -> Places:
        """int64 [n]: the pages that each row holds. rows, end: integers [n]"""
        held: Places = np.maximum(end - self._first[rows], 0)
        return held

    def missing(self, rows: Places, end: Int32Array, new_end: Int32Array) -> Cells:
        """The cells in which rows that hold the pages [., end) lack one of [., new_end); none before their windows."""
        first = end if self.window_left == ALL_KEYS else np.maximum(end, self._first[rows])
        return self._cells_of(rows, first, new_end)

    def require_free(self, rows: Places, kv_len: Int32Array, needed: int) -> None:
        """Raises unless `needed` pages are free, which rows need for kv_len tokens.

        NeverFits if a row alone needs more pages than the pool has; else OutOfPages.
        """
        free, of = len(self._free), self.pages.of
        if needed <= free:
            return
        instead = "" if self.window_left == ALL_KEYS else ", or continue by fewer tokens at a time, with evict() before"
        held = self.num_held(rows, num_pages(kv_len, self._page_size))
        for row, length, most in zip(rows.tolist(), kv_len.tolist(), held.tolist(), strict=True):
            if most > self.num_usable_pages:
                raise NeverFits(
                    f"row {row} needs {most} pages{of} for {length} tokens and there are {self.num_usable_pages}; "
                    f"raise {self.pages.knob}{instead}"
                )
        who = f"row {rows[0]} needs" if len(rows) == 1 else f"{len(rows)} sequences need"
        raise OutOfPages(
            f"{who} {needed} more pages{of} for {kv_len.sum()} tokens and {free} are free; free a request or raise "
            f"{self.pages.knob}",
            missing=needed - free,
        )

    def take(self, cells: Cells) -> None:
        """Puts a free page into each of these cells; there are enough."""
        if len(cells):
            pages = np.array(self._free[: -len(cells) - 1 : -1], np.int64)  # the last one is handed out next
            del self._free[-len(cells) :]
            self._holders[pages] = ONE
            self._put(cells, pages.astype(np.int32))

    def shares(self, rows: Places, length: Int32Array) -> npt.NDArray[np.bool_]:
        """True if the token after `length` tokens of rows would be in a partly filled page with other holders."""
        page = self.entries_host[rows, length // self._page_size]
        return (length % self._page_size > 0) & (self._holders[page] > self._writers)

    def own(self, row: int, length: int) -> None:
        """Replaces the page that row shares after `length` tokens by a copy, if it is still shared."""
        page_no = length // self._page_size
        shared = int(self.entries_host[row, page_no])
        if self._holders[shared] <= self._writers:
            return
        own = self._free.pop()
        self._holders[own] = 1
        # A page that itself waits to be copied has no content yet, so the copy is made from its source.
        self.pending.copies[own] = self.pending.copies.get(shared, shared)
        self._put(np.array([row * self._width + page_no]), own)
        self._holders[shared] -= 1

    def num_holders(self, pages: Int32Array) -> Int32Array:
        """The number of rows and keeps that hold these pages; the shape of pages."""
        return self._holders[pages]

    def may_be_written(self, pages: Int32Array) -> bool:
        """True if one row alone holds each of these pages, and no pending copy reads or writes one."""
        copies = self.pending.copies
        copied = {*copies, *copies.values()}
        return bool((self.num_holders(pages) == 1).all()) and copied.isdisjoint(pages.tolist())

    def first_held(self, pages: Int32Array, kv_len: int, parent: int) -> int:
        """The first page_no that a row of kv_len tokens takes of pages, which begin at page_no 0; 0: missing.

        parent: the row that has them, or the reserved one
        Raises BadBatch if a page or a token is missing that steps from kv_len on see.
        """
        needed = self.pages.first_needed(kv_len, self._page_size)
        missing = np.flatnonzero(pages[needed:] == RESERVED_PAGE)
        first = needed + int(missing[-1]) + 1 if len(missing) else needed
        lacks = int(self.first_token[parent]) > needed * self._page_size and kv_len > 0
        if not len(missing) and not lacks:
            return first
        fewest = max(first * self._page_size, int(self.first_token[parent])) + self.window_left
        if kv_len < fewest:
            more = "" if self.window_left == ALL_KEYS else f" at least {fewest} tokens or"
            raise BadBatch(
                f"page_no {max(first - 1, 0)} has left the window of the {self.space.name} space, or is no longer kept "
                f"there, and steps after {kv_len} tokens read it; share{more} fewer pages, or compute them again"
            )
        return first

    def begin(self, row: int, first: int, pages: Int32Array, parent: int = RESERVED_ROW) -> None:
        """Makes row, which holds nothing, hold pages from page_no first on. pages: from page_no 0 on

        parent: see first_held()
        """
        self._set_first(np.array([row]), np.array([first]), self.first_token[[parent]] * (len(pages) > 0))
        held = pages[first:]
        if len(held):
            self.hold(held)
            start = row * self._width
            self._put(np.arange(start + first, start + len(pages)), held)

    def lack(self, row: int, first_token: int) -> None:
        """Notes that the KV of a row's tokens before this one is in no page; 0: that of every token may be."""
        at = np.array([row])
        self._set_first(at, self._first[at], np.array([first_token]))

    def hold(self, pages: Int32Array) -> None:
        """Adds one holder to each of these pages, as often as it is named."""
        np.add.at(self._holders, pages.astype(np.int64), ONE)  # with other types NumPy takes 30 times as long

    def let_go(self, pages: Int32Array) -> None:
        """Removes one holder from each of these pages, as often as it is named; a page without holders is free."""
        np.subtract.at(self._holders, pages.astype(np.int64), ONE)
        free = list(dict.fromkeys(pages[self._holders[pages] == 0].tolist()))
        if self.pending.copies:
            for page in free:
                self._set_free(page)
        else:
            self._free += free

    def count_anew(self) -> None:
        """Counts the holders of all pages again from the rows, when no page is kept; those without any are free.

        This recovers pages that an interrupted call has lost. After an interrupt, call it again.
        """
        holders = np.bincount(self._cells, minlength=len(self._holders)).astype(np.int32)
        holders[RESERVED_PAGE] = 1
        # A copy to a page that no row holds belongs to a call that was interrupted before.
        copies = {page: source for page, source in self.pending.copies.items() if holders[page]}
        sources = set(copies.values())
        lost = [page for page in range(self.pages.num_pages - 1, self.pages.first_page - 1, -1) if not holders[page]]
        self.pending.copies = copies
        self._holders, self._sources = holders, [page for page in lost if page in sources]
        self._free = [page for page in lost if page not in sources]

    def evict(self, rows: Int32Array, start: Int32Array, end: Int32Array) -> None:
        """Gives back the pages that no step needs whose new tokens begin at start[i] or later in rows[i].

        They may be handed out again at once: the table is changed, and pages are written, by launches after those that
        may still read them, on the same stream.
        """
        due = start >= self._next_eviction[rows]
        if due.any():
            rows, first = rows[due], self.pages.first_needed(start[due], self._page_size)
            self.cut(rows, 0, np.minimum(first, end[due]))
            self._set_first(rows, first, self.first_token[rows])

    def cut(self, rows: Int32Array, first: int, end: Int32Array) -> None:
        """Gives back those of the pages [first, end) that rows hold."""
        cells = self._cells_of(rows, np.maximum(first, self._first[rows]), end)
        if len(cells):
            pages = self._cells[cells]
            self._put(cells, RESERVED_PAGE)
            self.let_go(pages[pages != RESERVED_PAGE])  # a repeat of an interrupted call finds the reserved page

    def check_windows(self, rows: Int32Array, start: Int32Array) -> None:
        """Raises BadBatch if a step that begins at start[i] in rows[i] would see pages that were given back."""
        early = start < self._earliest_start[rows]
        if early.any():
            seq = int(np.argmax(early))
            raise BadBatch(
                f"sequence {seq} has its first new token at {start[seq]}, but row {rows[seq]} holds keys of "
                f"windows only from {self._earliest_start[rows[seq]]} on; raise swa_kept to the number of tokens "
                "that it goes back"
            )

    def pending_updates(self) -> Int32Array:
        """Changed cells as (row, column, entry), int32 [n, 3].

        Entries are read now, from the host's copy: a cell that changed twice occurs twice, with the same entry.
        """
        pending = self.pending.cells
        cells = pending[0] if len(pending) == 1 else np.concatenate((_NO_CELLS, *pending))
        rows, updates = cells // self._row, np.empty((len(cells), 3), np.int32)
        updates[:, 0], updates[:, 1], updates[:, 2] = rows, cells - rows * self._row, self._cells[cells]
        return updates

    def copies_made(self) -> None:
        """Notes that every pending copy was launched: its source may be handed out again if no row holds it now."""
        self.pending.copies.clear()
        sources, self._sources = self._sources, []
        self._free += sources

    def _cells_of(self, rows: Places, first: Places, end: Int32Array) -> Cells:
        """The cells of the pages [first[i], end[i]) of rows[i], row after row."""
        start, counts = rows * self._row + first, end - first
        if len(counts) == 0 or counts.item(counts.argmin()) == counts.item(counts.argmax()) == 1:
            return start  # usual when sequences grow by tokens
        spans = zip(start.tolist(), counts.tolist(), strict=True)
        return np.concatenate([np.arange(at, at + count) for at, count in spans])

    def _put(self, cells: Cells, pages: Places | int) -> None:
        self.pending.cells.append(cells)
        self._cells[cells] = pages

    def _set_first(self, rows: Places, first: Places, first_token: Places) -> None:
        """Sets the first page_no of rows and their first token, and the values that depend on them."""
        self._first[rows] = first
        tokens = self._first[rows] * self._page_size
        self.first_token[rows] = there = np.maximum(tokens, first_token)
        self._earliest_start[rows] = np.where(there > 0, there + self.window_left, 0)
        self._next_eviction[rows] = tokens + self._page_size + self.window_left + self.pages.kept

    def _set_free(self, page: int) -> None:
        """Makes a page without holders free, as soon as it is not the source of a pending copy."""
        source = self.pending.copies.pop(page, page)
        waiting = self._sources_of(self.pending.copies)
        # If it were handed out too early, it would be written before a repeated launch of the copy reads it.
        (self._sources if page in waiting else self._free).append(page)
        if source in self._sources and source not in waiting:
            self._sources.remove(source)
            self._free.append(source)
