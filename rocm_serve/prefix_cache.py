"""PrefixCache: full pages of K and V, found by the tokens that they hold, so that no request computes them again.

A page is known by its key: a hash of its tokens and of the key of the page before it. A key therefore stands for all
tokens up to the end of its page, and for the salt that the first page begins with. The cache keeps pages after their
rows are freed. When pages run out, it gives back those that no row holds, the least recently used first. The end of a
chain is given back first, so that the rest can still be found.

In the SWA space a row needs only the pages of a window. Pages are given back there one by one, and a prefix can be used
up to a length whose window is entirely there.

With recurrent layers a row begins after a page that is kept with their state, so a prefix can be used up to its last
such page. States are large and few. Each sequence leaves one after the last multiple of the spacing in its prompt, one
where its prompt leaves the tokens of another one, and the last one that it passes while its text grows. The scheduler
ends the chunks of prompts there. If none is free, the least recently used one is given back, and its page stays.

Pages of the full space that are given back may move to a tier, such as host memory (rocm_serve/page_tier.py). A row
that is admitted gets those that come after the pages which it begins with.

A fault of the device is reported some steps after the step that had it. So a page is found only after that number of
steps, and never if the step that completed it had a fault.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.paging.request_table import RequestTable
from rocm_serve.page_tier import NO_TIER, PageTier

# 32 bytes: two chains with one key cannot be found, even by someone who tries in order to read another tenant's pages.
_KEY_BYTES = 32

_FULL = 0  # of table.spaces

# Pages of rows that were freed which a step takes note of: all 2,048 of a prompt of 32k tokens take a step's time.
_RELEASED_AT_A_STEP = 256

_NOT_KEPT = -1

_SALT = blake2b(digest_size=_KEY_BYTES, person=b"salt")
_PAGE = blake2b(digest_size=_KEY_BYTES, person=b"page")


def salt_key(salt: str) -> bytes:
    """The key that stands for the page before the first one."""
    salted = _SALT.copy()
    salted.update(salt.encode("utf-8", "surrogatepass"))
    return salted.digest()


def page_key(before: bytes, content: bytes) -> bytes:
    """The key of a full page. before: the key of the page before it, or of the salt; content: its tokens, as int32"""
    page = _PAGE.copy()  # a third of the time of making a new one
    page.update(before + content)
    return page.digest()


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page that can be found.

    before:   the page before it; None: it is a first one
    after:    key -> a page that comes after it
    kept_id:  returned by RequestTable.keep()
    step:     the step that entered it
    num_rows: per space: rows that hold it there; _NOT_KEPT if the cache does not keep it
    """

    key: bytes
    before: CachedPage | None
    kept_id: int
    step: int
    num_rows: list[int]
    after: dict[bytes, CachedPage] = field(default_factory=dict)


class CachedRow:
    """The cache's record of a sequence: the keys of its pages, and the cached pages that its row holds while it runs.

    salt:      prefixes are shared among sequences of one salt
    is_cached: whether its pages are looked up and entered at all
    """

    __slots__ = ("first_held", "is_cached", "keys", "moves_at", "newest_state", "pages", "salt", "states_at")

    def __init__(self, salt: str = "", *, is_cached: bool = True) -> None:
        self.salt = salt
        self.is_cached = is_cached
        self.keys: list[bytes] = []  # page_no -> key, as far as keys were needed
        # page_no -> the page; None if the row holds a page of its own with the same tokens, or one that is not cached
        self.pages: list[CachedPage | None] = []
        self.first_held: list[int] = []  # per space: page_no of the first page that the row has not given back
        self.moves_at = 0  # stored tokens at which the next page leaves a window
        self.states_at: tuple[int, ...] = ()  # tokens of the prompt after which states of recurrent layers are to stay
        self.newest_state: CachedPage | None = None  # the last page with a state that is less useful than a later one

    def keys_up_to(self, num_pages: int, token_ids: Sequence[int], page_size: int) -> list[bytes]:
        """The keys of the first num_pages pages, at least."""
        keys = self.keys
        if len(keys) < num_pages:
            key = keys[-1] if keys else salt_key(self.salt)
            content = array("i", token_ids[len(keys) * page_size : num_pages * page_size]).tobytes()
            for first in range(0, len(content), 4 * page_size):
                key = page_key(key, content[first : first + 4 * page_size])
                keys.append(key)
        return keys


class PrefixCache:
    """The pages of a request table that can be found by their tokens.

    The cache owns all pages that the table keeps. The owner of the rows reports when a row is admitted, has stored
    tokens, moves its windows and is freed. Steps are counted by end_step(); all ranks that call the same methods in the
    same order find the same pages.

    steps_until_known: FaultReports.steps_until_known
    tier:              gets pages that are given back because pages run out
    """

    def __init__(self, table: RequestTable, steps_until_known: int, tier: PageTier = NO_TIER) -> None:
        self._table, self._tier = table, tier
        self._steps_until_known = steps_until_known
        self._page_size = table.page_size
        self._windowed = [
            (space, pages) for space, pages in enumerate(table.spaces) if pages.pages.window_left != ALL_KEYS
        ]
        self._pages: dict[bytes, CachedPage] = {}
        # Per space: pages that only the cache holds, the least recently used first. In the full space the end of a
        # chain comes before its beginning: a row that held a page also held those before it, and released them later.
        self._idle: tuple[OrderedDict[CachedPage, None], ...] = tuple(OrderedDict() for _ in table.spaces)
        # The pages with states of recurrent layers, the first to be given back first.
        self._states: OrderedDict[CachedPage, None] = OrderedDict()
        # The pages of rows that were freed, with their keys and first_held: still counted as held by these rows.
        self._left: deque[tuple[list[CachedPage | None], list[bytes], list[int]]] = deque()
        self._has_states, self._spacing = not table.states.is_empty, table.states.spacing
        self._step = 0
        self._right_until = 0
        self._has_rows = False

    def __len__(self) -> int:
        """Number of pages that can be found, or could be once their steps are known to be free of faults."""
        return len(self._pages)

    @property
    def has_rows(self) -> bool:
        """True if a row has been admitted whose pages are entered."""
        return self._has_rows

    @property
    def has_windows(self) -> bool:
        """True if rows give pages back while they run."""
        return bool(self._windowed)

    @property
    def has_states(self) -> bool:
        """True if there are recurrent layers."""
        return self._has_states

    def num_idle(self, space: int) -> int:
        """Number of pages that only the cache holds. space: by its number in table.spaces"""
        self._release_left(INT32_MAX)
        return len(self._idle[space])

    @property
    def least_idle(self) -> int:
        """num_idle() of the full space, without the pages of rows that were freed just now."""
        return len(self._idle[_FULL])

    def find(self, row: CachedRow, token_ids: Sequence[int]) -> list[CachedPage]:
        """The pages of the longest cached prefix, without the last token, which is always computed."""
        self._release_left(INT32_MAX)
        row.states_at = ()
        if not row.is_cached:
            return []
        most = (len(token_ids) - 1) // self._page_size
        found: list[CachedPage] = []
        for page_no in range(most):
            if page_no >= len(row.keys):  # at most twice as far as pages are found: all would take a step's time
                row.keys_up_to(min(most, 2 * page_no + 1), token_ids, self._page_size)
            page = self._pages.get(row.keys[page_no])
            if page is None or page.step > self._right_until:
                break
            found.append(page)
        if self._has_states:
            ends = len(found) * self._page_size, len(token_ids) - 1
            row.states_at = tuple(end // self._spacing * self._spacing for end in ends)
        return found[: self._longest(found)] if self._windowed or self._has_states else found

    def next_state(self, row: CachedRow, num_stored: int) -> int:
        """The number of tokens, above num_stored, at which a chunk of the row's prompt is to end; INT32_MAX: any."""
        return min((end for end in row.states_at if end > num_stored), default=INT32_MAX)

    def admit(self, row: CachedRow, found: Sequence[CachedPage]) -> int:
        """Admits a row of the table that begins with the pages that were found; returns its number."""
        self._has_rows = self._has_rows or row.is_cached
        start = len(found) * self._page_size
        number = self._table.kept.admit_over([page.kept_id for page in found], start) if found else self._table.admit()
        row.pages, row.newest_state = list(found), None
        if found and self._has_states:
            self._states.move_to_end(found[-1])
        row.first_held = [pages.pages.first_needed(start, self._page_size) for pages in self._table.spaces]
        row.moves_at = self._next_move(row)
        for space, first in enumerate(row.first_held):
            idle = self._idle[space]
            for page in found[first:]:
                if page.num_rows[space] == 0:
                    del idle[page]
                page.num_rows[space] += 1
        return number

    def num_in_tier(self, row: CachedRow, token_ids: Sequence[int]) -> int:
        """Number of pages of the tier that come after those which an admitted row began with. They count as used."""
        first, most = len(row.pages), (len(token_ids) - 1) // self._page_size
        end = first
        while row.is_cached and end < most:
            if not self._tier.found(row.keys_up_to(end + 1, token_ids, self._page_size)[end]):
                break
            end += 1
        return end - first

    def restore(self, row: CachedRow, number: int, num_pages: int) -> int:
        """Moves pages of the tier into a row, which has room for them; returns how many it has got.

        Call it after admit(), before the row stores anything. number: of the row; num_pages: of num_in_tier()
        """
        kept, first = self._table.kept, len(row.pages)
        keys = row.keys[first : first + num_pages]
        num = self._tier.restore(keys, self._table.pages_of(number)[first : first + num_pages])
        self._table.mark_stored([number], [(first + num) * self._page_size])
        page_nos = np.arange(first, first + num, dtype=np.int32)
        ids = kept.keep_all(np.full(num, number, np.int32), page_nos).tolist()
        for key, kept_id in zip(keys, ids, strict=False):
            before = row.pages[-1] if row.pages else None
            page = CachedPage(key, before, kept_id, self._right_until, [_NOT_KEPT] * len(self._idle))
            self._put(page)
            row.pages.append(page)
        return num

    def enter(self, rows: Iterable[tuple[CachedRow, int, Sequence[int], int]]) -> None:
        """Makes full pages available that were completed by the step that has ended.

        rows: for each row the CachedRow, its number, its sequence's tokens, and how many of them are stored
        """
        fresh: dict[bytes, CachedPage] = {}
        owners: list[CachedRow] = []
        numbers: list[int] = []
        page_nos: list[int] = []
        for row, number, token_ids, num_stored in rows:
            if row.is_cached:
                missing = self._missing(row, number, token_ids, num_stored // self._page_size, fresh)
                owners += [row] * len(missing)
                numbers += [number] * len(missing)
                page_nos += missing
        if numbers:
            kept, of_pages = self._table.kept, (np.array(numbers, np.int32), np.array(page_nos, np.int32))
            if self._has_states:
                due = np.flatnonzero(kept.states_due(*of_pages)).tolist()
                self._make_room_for_states(len(due), [owners[at] for at in due])
            ids = kept.keep_all(*of_pages)
            for page, kept_id in zip(fresh.values(), ids.tolist(), strict=True):
                page.kept_id = kept_id
                self._put(page)
            if self._has_states:
                with_states = kept.have_states(ids).tolist()
                for page, page_no, row, has_state in zip(fresh.values(), page_nos, owners, with_states, strict=True):
                    if has_state:
                        self._put_state(page, (page_no + 1) * self._page_size, row)

    def move_windows(self, row: CachedRow, num_stored: int) -> None:
        """Records that the row has given back pages that no step needs which begins after num_stored tokens.

        Call it when num_stored has reached row.moves_at; before that, nothing has left a window.
        """
        for space, pages in self._windowed:
            first = pages.pages.first_needed(num_stored, self._page_size)
            for page_no in range(row.first_held[space], min(first, len(row.pages))):
                page = row.pages[page_no]
                if page is not None:
                    self._release(page, space)
            row.first_held[space] = max(first, row.first_held[space])
        row.moves_at = self._next_move(row)

    def leave(self, row: CachedRow) -> None:
        """Records that the row is freed. Its pages stay, and count as used now."""
        self._left.append((row.pages, row.keys, row.first_held))
        row.pages, row.newest_state = [], None

    def make_room(self, space: int, num_pages: int) -> None:
        """Gives idle pages back until num_pages are free in a space, or no idle one is left."""
        self._release_left(INT32_MAX)
        idle, missing = self._idle[space], num_pages - self._table.spaces[space].num_free_pages
        if space == _FULL:
            removed: list[CachedPage] = []
            while idle and missing > 0:
                missing -= self._remove(next(iter(idle)), removed)
            self._move_to_tier([page for page in removed if page.step <= self._right_until])
            self._table.kept.drop([page.kept_id for page in removed])
        else:
            given_back: list[int] = []
            while idle and missing > 0:
                page, _ = idle.popitem(last=False)
                page.num_rows[space] = _NOT_KEPT
                given_back.append(page.kept_id)
                missing -= 1
            self._table.kept.drop(given_back, (self._table.spaces[space].space,))

    def end_step(self) -> None:
        """Counts a step that has run without reporting a fault of the steps before it."""
        self._release_left(_RELEASED_AT_A_STEP)
        self._step += 1
        self._right_until = max(self._right_until, self._step - self._steps_until_known)

    def all_is_right(self) -> None:
        """Records that the device was waited for, and no step had a fault."""
        self._right_until = self._step

    def forget_unknown(self) -> None:
        """Forgets pages of steps that are not known to be free of faults, because a step had one."""
        self._forget([page for page in self._pages.values() if page.step > self._right_until])

    def forget_row(self, row: CachedRow) -> None:
        """Forgets the pages of a row whose sequence has failed, and all pages after them."""
        self._forget([page for page in row.pages if page is not None])

    def clear(self) -> None:
        """Forgets all pages, those of the tier too. Rows go on; pages that follow theirs are not entered."""
        self._forget(list(self._pages.values()))
        self._tier.clear()

    def _missing(
        self, row: CachedRow, number: int, token_ids: Sequence[int], end: int, fresh: dict[bytes, CachedPage]
    ) -> list[int]:
        """The page_no of the pages [., end) completed by row that are to be entered. They are put into fresh."""
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
                    # No chain leads to it: the page before it was given back, or has failed.
                    row.pages += [None] * (end - page_no)
                    break
                if there is None or self._lacks_a_window(there) or self._lacks_a_state(there, number, page_no):
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
        """Makes a page available that is kept in every space and held by one row."""
        old = self._pages.get(page.key)
        if old is not None:  # it lacks a window or a state, or is not known to be right, as one of the tier is
            page.after, old.after = old.after, {}
            for after in page.after.values():
                after.before = page
            self._table.kept.drop([self._give_up(old)])
        self._pages[page.key] = page
        page.num_rows = [1] * len(self._idle)
        if page.before is not None:
            page.before.after[page.key] = page

    def _longest(self, found: Sequence[CachedPage]) -> int:
        """The number of these pages that a row can begin with: every page in its windows is there, and its state."""
        longest, present = 0, [0] * len(self._windowed)
        for num_pages, page in enumerate(found, 1):
            is_whole = not self._has_states or page in self._states
            for at, (space, pages) in enumerate(self._windowed):
                present[at] = 0 if page.num_rows[space] == _NOT_KEPT else present[at] + 1
                first = pages.pages.first_needed(num_pages * self._page_size, self._page_size)
                is_whole &= present[at] >= num_pages - first
            if is_whole:
                longest = num_pages
        return longest

    def _next_move(self, row: CachedRow) -> int:
        """The number of tokens that row will have stored when the next page leaves a window."""
        moves = (
            (row.first_held[space] + 1) * self._page_size + pages.pages.window_left + pages.pages.kept
            for space, pages in self._windowed
        )
        return min(moves, default=INT32_MAX)

    def _lacks_a_window(self, page: CachedPage) -> bool:
        return any(page.num_rows[space] == _NOT_KEPT for space, _ in self._windowed)

    def _lacks_a_state(self, page: CachedPage, row: int, page_no: int) -> bool:
        """True if a page has no state of recurrent layers, and a row of the table has the state after its tokens."""
        if not self._has_states or page in self._states:
            return False
        return bool(self._table.kept.states_due([row], [page_no])[0])

    def _make_room_for_states(self, num: int, rows: Sequence[CachedRow] = ()) -> None:
        """Gives states back until `num` are free, or none is left. rows: their texts have passed their states"""
        self._release_left(INT32_MAX)
        for row in rows:
            passed = row.newest_state
            if passed is not None and passed in self._states and passed.num_rows[_FULL] <= 1:  # no other row holds it
                self._states.move_to_end(passed, last=False)
        kept, given_back = self._table.kept, list[int]()
        while self._states and kept.num_free_states + len(given_back) < num:
            page, _ = self._states.popitem(last=False)
            given_back.append(page.kept_id)
        kept.drop_states(given_back)

    def _put_state(self, page: CachedPage, num_tokens: int, row: CachedRow) -> None:
        """Notes that a page is kept with the state after its last token, num_tokens from the beginning."""
        self._states[page] = None
        row.newest_state = None if num_tokens in row.states_at else page

    def _release_left(self, most: int) -> None:
        """Takes note of up to `most` pages of rows that were freed, the ends of their chains first."""
        while self._left and most > 0:
            pages, keys, first_held = self._left[0]
            for _ in range(min(most, len(pages))):
                page, page_no, most = pages.pop(), len(pages), most - 1
                if page is not None and page.num_rows[_FULL] != _NOT_KEPT:
                    for space, first in enumerate(first_held):
                        if page_no >= first:
                            self._release(page, space)
                    continue
                # Another row's page of these tokens counts as if this row had held it.
                there = self._pages.get(keys[page_no])
                if there is not None and there.num_rows[_FULL] == 0:
                    self._idle[_FULL].move_to_end(there)
            if not pages:
                self._left.popleft()

    def _release(self, page: CachedPage, space: int) -> None:
        """One row less holds a page in a space, unless the cache has forgotten the page there."""
        if page.num_rows[space] > 0:
            page.num_rows[space] -= 1
            if page.num_rows[space] == 0:
                self._idle[space][page] = None

    def _forget(self, pages: Iterable[CachedPage]) -> None:
        removed: list[CachedPage] = []
        for page in pages:
            if page.num_rows[_FULL] != _NOT_KEPT:
                self._remove(page, removed)
        self._table.kept.drop([page.kept_id for page in removed])

    def _move_to_tier(self, pages: Sequence[CachedPage]) -> None:
        """Copies pages whose ids are not dropped yet."""
        if pages:
            ids = [page.kept_id for page in pages]
            self._tier.put([page.key for page in pages], self._table.kept.pages(ids))

    def _remove(self, page: CachedPage, removed: list[CachedPage]) -> int:
        """Makes a page unavailable, and all pages after it; returns how many pages of the full space become free.

        removed: gets the pages, whose ids are to be dropped
        """
        if page.before is not None:
            del page.before.after[page.key]
        num_free, pages = 0, [page]
        while pages:
            page = pages.pop()
            pages += page.after.values()
            page.after = {}
            num_free += page.num_rows[_FULL] == 0
            self._give_up(page)
            removed.append(page)
            del self._pages[page.key]
        return num_free

    def _give_up(self, page: CachedPage) -> int:
        """Forgets which rows hold a page; returns its id, which is to be dropped."""
        for space, num_rows in enumerate(page.num_rows):
            if num_rows == 0:
                del self._idle[space][page]
            page.num_rows[space] = _NOT_KEPT
        self._states.pop(page, None)
        page.before = None
        return page.kept_id
