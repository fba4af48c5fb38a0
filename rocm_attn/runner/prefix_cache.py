"""PrefixCache: full pages of K and V, found by the tokens that they hold, so that no request computes them again.

A page is known by its key: a hash of its tokens and of the key of the page before it. So a key stands for all tokens up
to the end of its page, and for the salt that the first page begins with. The cache keeps pages beyond their rows, and
gives those back that no row holds, the least recently used first, when pages run out. Of a chain the end is given back
first: what remains can be found.

In the SWA space a row needs the pages of a window alone. There pages are given back one by one, and a prefix can be
used up to a length whose window is wholly there.

An interrupt may come between any two lines of a change, the table's own among them. What it has left undone is not
found out: the next call gives all pages back that no row holds, and the cache begins anew. Rows go on.

A fault of the device is reported some steps after its own. So a page is found only after as many steps, and never if
the step that completed it went wrong.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.paging.request_table import RequestTable

# 32 bytes: two chains of one key cannot be found, not even by one who looks for them to read another tenant's pages.
_KEY_BYTES = 32

_FULL = 0  # of table.spaces

_NOT_KEPT = -1

_SALT = blake2b(digest_size=_KEY_BYTES, person=b"salt")
_PAGE = blake2b(digest_size=_KEY_BYTES, person=b"page")


def salt_key(salt: str) -> bytes:
    """What stands for the page before the first one."""
    salted = _SALT.copy()
    salted.update(salt.encode("utf-8", "surrogatepass"))
    return salted.digest()


def page_key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of a full page. before: the key of the page before it, or of the salt; token_ids: of the page"""
    page = _PAGE.copy()  # a third of the time that a new one takes
    page.update(before + array("i", token_ids).tobytes())
    return page.digest()


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page that can be found.

    before:   the page before it; None: it is a first one
    after:    key -> a page that comes after it
    kept_id:  what RequestTable.keep() gave
    step:     in which it was entered
    num_rows: of each space: rows that hold it there; _NOT_KEPT where the cache does not keep it
    """

    key: bytes
    before: CachedPage | None
    kept_id: int
    step: int
    num_rows: list[int]
    after: dict[bytes, CachedPage] = field(default_factory=dict)


class CachedRow:
    """A sequence as the cache knows it: the keys of its pages, and the cached pages that its row holds while it runs.

    salt:      prefixes are shared among sequences of one salt
    is_cached: whether its pages are looked up and entered at all
    """

    __slots__ = ("first_held", "is_cached", "keys", "moves_at", "pages", "salt")

    def __init__(self, salt: str = "", *, is_cached: bool = True) -> None:
        self.salt = salt
        self.is_cached = is_cached
        self.keys: list[bytes] = []  # page_no -> key, as far as it was asked for
        # page_no -> the page, None where row holds one of its own with the same tokens, or one that is not cached
        self.pages: list[CachedPage | None] = []
        self.first_held: list[int] = []  # of each space: page_no of the first page that row has not given back
        self.moves_at = 0  # stored tokens at which the next page leaves a window

    def keys_up_to(self, num_pages: int, token_ids: Sequence[int], page_size: int) -> list[bytes]:
        """The keys of the first num_pages pages, at least."""
        keys = self.keys
        if len(keys) < num_pages:
            key = keys[-1] if keys else salt_key(self.salt)
            for first in range(len(keys) * page_size, num_pages * page_size, page_size):
                key = page_key(key, token_ids[first : first + page_size])
                keys.append(key)
        return keys


class PrefixCache:
    """The pages of a request table that can be found by their tokens.

    All pages that the table keeps are the cache's. The owner of the rows says when a row is admitted, has stored
    tokens, moves its windows and is freed. Steps are counted by end_step(); all ranks that call the same methods in the
    same order find the same pages.

    steps_until_known: FaultReports.steps_until_known
    """

    def __init__(self, table: RequestTable, steps_until_known: int) -> None:
        self._table = table
        self._steps_until_known = steps_until_known
        self._page_size = table.page_size
        self._windowed = [
            (space, pages) for space, pages in enumerate(table.spaces) if pages.pages.window_left != ALL_KEYS
        ]
        self._pages: dict[bytes, CachedPage] = {}
        # Of each space: pages that only the cache holds, the least recently used first. In the full space the end of a
        # chain comes before its beginning: a row that held a page held those before it, too, and let go of them later.
        self._idle: tuple[OrderedDict[CachedPage, None], ...] = tuple(OrderedDict() for _ in table.spaces)
        self._step = 0
        self._right_until = 0
        self._has_rows = False
        self._is_changing = False  # pages that are kept and those that can be found need not be the same ones

    def __len__(self) -> int:
        """Pages that can be found, or could be once their steps are known to have gone well."""
        return len(self._pages)

    @property
    def has_rows(self) -> bool:
        """Whether a row has been admitted whose pages are entered."""
        return self._has_rows

    @property
    def has_windows(self) -> bool:
        """Whether rows give pages back while they run."""
        return bool(self._windowed)

    def num_idle(self, space: int) -> int:
        """Pages that only the cache holds. space: by its number in table.spaces"""
        return len(self._idle[space])

    def find(self, row: CachedRow, token_ids: Sequence[int]) -> list[CachedPage]:
        """The pages of the longest prefix that is there, without the last token: that one is always computed."""
        if self._is_changing:
            self._begin_anew()
        if not (row.is_cached and self._pages):
            return []
        most = (len(token_ids) - 1) // self._page_size
        found: list[CachedPage] = []
        for key in row.keys_up_to(most, token_ids, self._page_size)[:most]:
            page = self._pages.get(key)
            if page is None or page.step > self._right_until:
                break
            found.append(page)
        return found[: self._longest(found)] if self._windowed else found

    def admit(self, row: CachedRow, found: Sequence[CachedPage]) -> int:
        """A new row of the table that begins with the pages that were found."""
        self._has_rows = self._has_rows or row.is_cached
        self._begin_change()
        start = len(found) * self._page_size
        number = self._table.kept.admit_over([page.kept_id for page in found], start) if found else self._table.admit()
        row.pages = list(found)
        row.first_held = [pages.pages.first_needed(start, self._page_size) for pages in self._table.spaces]
        row.moves_at = self._next_move(row)
        for space, first in enumerate(row.first_held):
            for page in found[first:]:
                self._hold(page, space)
        self._is_changing = False
        return number

    def enter(self, rows: Iterable[tuple[CachedRow, int, Sequence[int], int]]) -> None:
        """Let full pages be found that were completed by the step that has ended.

        rows: of each row the CachedRow, its number, its sequence's tokens, and how many of them are stored
        """
        self._begin_change()
        fresh: dict[bytes, CachedPage] = {}
        numbers: list[int] = []
        page_nos: list[int] = []
        for row, number, token_ids, num_stored in rows:
            if row.is_cached:
                missing = self._missing(row, token_ids, num_stored // self._page_size, fresh)
                numbers += [number] * len(missing)
                page_nos += missing
        if numbers:
            ids = self._table.kept.keep_all(np.array(numbers, np.int32), np.array(page_nos, np.int32)).tolist()
            for page, kept_id in zip(fresh.values(), ids, strict=True):
                page.kept_id = kept_id
                self._put(page)
        self._is_changing = False

    def move_windows(self, row: CachedRow, num_stored: int) -> None:
        """The row has given back what no step needs that begins after num_stored tokens.

        To be called when num_stored has come to row.moves_at; before that, nothing has left a window.
        After an interrupt it is called again, and goes on.
        """
        if self._is_changing:
            self._begin_anew()
        for space, pages in self._windowed:
            first = pages.pages.first_needed(num_stored, self._page_size)
            for page_no in range(row.first_held[space], min(first, len(row.pages))):
                page = row.pages[page_no]
                if page is not None:
                    # One statement: each page is let go once.
                    row.first_held[space], page.num_rows = page_no + 1, self._without_row(page, (space,))
            row.first_held[space] = max(first, row.first_held[space])
        row.moves_at = self._next_move(row)

    def leave(self, row: CachedRow) -> None:
        """The row is freed. Its pages stay, and count as used now.

        After an interrupt it is called again, and goes on.
        """
        if self._is_changing:
            self._begin_anew()
        for page_no in range(len(row.pages) - 1, -1, -1):
            page = row.pages[page_no]
            if page is not None:
                held = [space for space, first in enumerate(row.first_held) if page_no >= first]
                # As above.
                row.pages[page_no], page.num_rows = None, self._without_row(page, held)
            # Another row's page of these tokens is as useful as if this row had held it.
            there = self._pages.get(row.keys[page_no])
            if there is not None and there.num_rows[_FULL] == 0:
                self._idle[_FULL].move_to_end(there)
        row.pages = []

    def make_room(self, space: int, num_pages: int) -> None:
        """Give idle pages back until so many are free in a space, or no idle one is left."""
        self._begin_change()
        idle, missing = self._idle[space], num_pages - self._table.spaces[space].num_free_pages
        given_back: list[int] = []
        if space == _FULL:
            while idle and missing > 0:
                missing -= self._remove(next(iter(idle)), given_back)
            self._table.kept.drop(given_back)
        else:
            while idle and missing > 0:
                page, _ = idle.popitem(last=False)
                page.num_rows[space] = _NOT_KEPT
                given_back.append(page.kept_id)
                missing -= 1
            self._table.kept.drop(given_back, (self._table.spaces[space].space,))
        self._is_changing = False

    def end_step(self) -> None:
        """One more step has run, and reported no fault of the steps before it."""
        self._step += 1
        self._right_until = max(self._right_until, self._step - self._steps_until_known)

    def all_is_right(self) -> None:
        """The device was waited for, and no step has gone wrong."""
        self._right_until = self._step

    def forget_unknown(self) -> None:
        """A step has gone wrong: what was entered since it is not to be found any more."""
        self._forget([page for page in self._pages.values() if page.step > self._right_until])

    def forget_row(self, row: CachedRow) -> None:
        """The row's sequence has failed: what it holds, and what comes after that, is not to be found any more."""
        self._forget([page for page in row.pages if page is not None])

    def clear(self) -> None:
        """Nothing is to be found any more. Rows go on; what comes after their pages is not entered."""
        self._forget(list(self._pages.values()))

    def _missing(self, row: CachedRow, token_ids: Sequence[int], end: int, fresh: dict[bytes, CachedPage]) -> list[int]:
        """Which of the pages [., end) that row has completed are to be entered: page_no. They are put into fresh."""
        first = len(row.pages)
        keys = row.keys_up_to(end, token_ids, self._page_size)
        before = (fresh.get(keys[first - 1]) or self._pages.get(keys[first - 1])) if first else None
        missing = []
        for page_no in range(first, end):
            key = keys[page_no]
            page = fresh.get(key)
            if page is None:
                there = self._pages.get(key)
                if there is None and page_no and before is None:
                    # Nothing leads to it: the page before it was given back, or has failed.
                    row.pages += [None] * (end - page_no)
                    break
                if there is None or self._lacks_a_window(there):
                    page = CachedPage(key, before, 0, self._step, [_NOT_KEPT] * len(self._idle))
                    fresh[key] = before = page
                    missing.append(page_no)
                    row.pages.append(page)
                    continue
                page = there
            row.pages.append(None)
            before = page
        return missing

    def _put(self, page: CachedPage) -> None:
        """Let a page be found that is kept in every space and held by one row."""
        old = self._pages.get(page.key)
        if old is not None:  # it lacks a window
            page.after, old.after = old.after, {}
            for after in page.after.values():
                after.before = page
            self._table.kept.drop([self._give_up(old)])
        self._pages[page.key] = page
        page.num_rows = [1] * len(self._idle)
        if page.before is not None:
            page.before.after[page.key] = page

    def _longest(self, found: Sequence[CachedPage]) -> int:
        """How many of these pages a row can begin with, so that all that its windows see is there."""
        longest, present = 0, [0] * len(self._windowed)
        for num_pages, page in enumerate(found, 1):
            is_whole = True
            for at, (space, pages) in enumerate(self._windowed):
                present[at] = 0 if page.num_rows[space] == _NOT_KEPT else present[at] + 1
                first = pages.pages.first_needed(num_pages * self._page_size, self._page_size)
                is_whole &= present[at] >= num_pages - first
            if is_whole:
                longest = num_pages
        return longest

    def _next_move(self, row: CachedRow) -> int:
        """How many tokens row will have stored when the next page leaves a window."""
        moves = (
            (row.first_held[space] + 1) * self._page_size + pages.pages.window_left + pages.pages.kept
            for space, pages in self._windowed
        )
        return min(moves, default=INT32_MAX)

    def _lacks_a_window(self, page: CachedPage) -> bool:
        return any(page.num_rows[space] == _NOT_KEPT for space, _ in self._windowed)

    def _hold(self, page: CachedPage, space: int) -> None:
        if page.num_rows[space] == 0:
            del self._idle[space][page]
        page.num_rows[space] += 1

    def _without_row(self, page: CachedPage, spaces: Iterable[int]) -> list[int]:
        """What page.num_rows is when one row less holds it in some spaces, unless the cache has forgotten it there."""
        num_rows = list(page.num_rows)
        for space in spaces:
            if num_rows[space] > 0:
                num_rows[space] -= 1
                if num_rows[space] == 0:
                    self._idle[space][page] = None
        return num_rows

    def _begin_change(self) -> None:
        if self._is_changing:
            self._begin_anew()
        self._is_changing = True

    def _begin_anew(self) -> None:
        """Give back all that the table keeps, or has lost; after an interrupt it is called again."""
        for page in self._pages.values():
            page.num_rows, page.before, page.after = [_NOT_KEPT] * len(self._idle), None, {}
        for idle in self._idle:
            idle.clear()
        self._table.kept.drop_all()
        self._pages = {}
        self._is_changing = False

    def _forget(self, pages: Iterable[CachedPage]) -> None:
        self._begin_change()
        given_back: list[int] = []
        for page in pages:
            if page.num_rows[_FULL] != _NOT_KEPT:
                self._remove(page, given_back)
        self._table.kept.drop(given_back)
        self._is_changing = False

    def _remove(self, page: CachedPage, given_back: list[int]) -> int:
        """Let a page be found no more, nor any page after it; how many pages of the full space become free.

        given_back: gets the ids that are to be dropped
        """
        if page.before is not None:
            del page.before.after[page.key]
        num_free, pages = 0, [page]
        while pages:
            page = pages.pop()
            pages += page.after.values()
            page.after = {}
            num_free += page.num_rows[_FULL] == 0
            given_back.append(self._give_up(page))
            del self._pages[page.key]
        return num_free

    def _give_up(self, page: CachedPage) -> int:
        """Forget which rows hold a page; its id, which is to be dropped."""
        for space, num_rows in enumerate(page.num_rows):
            if num_rows == 0:
                del self._idle[space][page]
            page.num_rows[space] = _NOT_KEPT
        page.before = None
        return page.kept_id
