"""PrefixCache: full pages of K and V, found by a hash of their tokens, so that no request computes them again.

A page's key is a hash of its tokens and of the key of the page before it. So a key stands for all tokens up to the end
of its page, and for the salt before the first page. The cache keeps pages after their rows are freed. When pages run
out, it evicts those that no row holds, the least recently used first. The end of a chain of pages is evicted first, so
that the rest can still be found.

In the SWA (sliding-window) space a row needs only the pages of its window. Pages are evicted there one by one, and a
prefix can be used up to a length whose whole window is there.

With recurrent layers, a row must start after a page that is kept with a recurrent state (a checkpoint), so a prefix can
be used up to its last such page. States are large, so there are few. Each sequence leaves one after the last multiple
of the spacing in its prompt, one where its prompt diverges from a cached one, and the last one that it passes while it
generates. The scheduler ends prefill chunks there. If no state slot is free, the least recently used state is evicted,
and its page stays.

Evicted pages of the full space may move to a tier, such as host memory (rocm_serve/page_tier.py). A newly admitted row
also gets pages from the tier that continue its cached prefix.

A device fault is reported some steps after the step that had it. So a page is found only after that number of steps,
and never if the step that completed it had a fault.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from rocm_attn.batch.step_batch import INT32_MAX
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.paging.request_table import RequestTable
from rocm_serve.cached_pages import NO_PAGE, NOT_KEPT, CachedPages
from rocm_serve.idle_pages import IdlePages
from rocm_serve.page_tier import NO_TIER, PageTier

# 32 bytes: two chains with one key cannot be found, even by someone who tries in order to read another tenant's pages.
_KEY_BYTES = 32

_FULL = 0  # of table.spaces

# Numbers of pages in CachedPages, one for each page_no of a prefix.
Found = NDArray[np.int64]
NONE_FOUND: Found = np.empty(0, np.int64)

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


class CachedRow:
    """The cache's record of a sequence: the keys of its pages, and the cached pages that its row holds while it runs.

    salt:      prefixes are shared among sequences of one salt
    is_cached: whether its pages are looked up and entered at all
    """

    __slots__ = (
        "first_held",
        "found",
        "is_cached",
        "keys",
        "moves_at",
        "newest_state",
        "num_clears",
        "num_given_up",
        "pages",
        "salt",
        "states_at",
    )

    def __init__(self, salt: str = "", *, is_cached: bool = True) -> None:
        self.salt = salt
        self.is_cached = is_cached
        self.keys: list[bytes] = []  # page_no -> key, as far as keys were needed
        self.found, self.num_given_up = NONE_FOUND, 0  # what find() found last, and what the cache had given up by then
        # page_no -> the page's number; NO_PAGE if the row has its own with the same tokens, or one that is not cached
        self.pages: list[int] = []
        self.first_held: list[int] = []  # per space: page_no of the first page that the row has not given back
        self.num_clears = 0  # how often the cache had been cleared when the row was admitted
        self.moves_at = 0  # stored tokens at which the next page leaves a window
        self.states_at: tuple[int, ...] = ()  # tokens of the prompt after which states of recurrent layers are to stay
        self.newest_state = NO_PAGE  # the last page with a state that is less useful than a later one

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


class Changes:
    """A context for changes that belong together.

    are_halfway: True once an exception has ended some of them halfway: which pages hold what is then unknown
    """

    def __init__(self) -> None:
        self.are_halfway = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.are_halfway |= kind is not None


class PrefixCache:
    """The pages of a request table that can be found by their tokens.

    The cache owns all pages that the table keeps. The owner of the rows reports when a row is admitted, has stored
    tokens, moves its windows and is freed. Steps are counted by end_step(); all ranks that call the same methods in the
    same order find the same pages.

    steps_until_known: FaultReports.steps_until_known
    tier:              gets pages that are given back because pages run out

    changes:    of the cache, and of its owner
    has_states: whether there are recurrent layers
    """

    def __init__(self, table: RequestTable, steps_until_known: int, tier: PageTier = NO_TIER) -> None:
        self._table, self._tier, self.changes = table, tier, Changes()
        self._steps_until_known = steps_until_known
        self._page_size = table.page_size
        self._windowed = [
            (space, pages) for space, pages in enumerate(table.spaces) if pages.pages.window_left != ALL_KEYS
        ]
        self._columns = CachedPages(table.full.pages.num_pages, len(table.spaces))
        self._pages: dict[bytes, int] = {}  # key -> the page's number
        # Per space. In the full space the end of a chain comes before its beginning: a row that held a page also held
        # those before it, and released them later.
        self._idle = tuple(IdlePages() for _ in table.spaces)
        # The pages with states of recurrent layers, the first to be given back first.
        self._states: OrderedDict[int, None] = OrderedDict()
        self.has_states, self._spacing = not table.states.is_empty, table.states.spacing
        self._step = 0
        self._right_until = 0
        self._num_given_up = 0  # how often pages were made unavailable
        self._num_clears = 0

    def __len__(self) -> int:
        """Number of pages that can be found, or could be once their steps are known to be free of faults."""
        return len(self._pages)

    @property
    def has_windows(self) -> bool:
        """True if rows give pages back while they run."""
        return bool(self._windowed)

    def num_idle(self, space: int) -> int:
        """Number of pages that only the cache holds. space: by its number in table.spaces"""
        return len(self._idle[space])

    def num_held(self, space: int, pages: Found) -> int:
        """Number of these pages that rows hold. space: likewise; pages: of find()"""
        return int(np.count_nonzero(self._columns.num_rows[space].take(pages) > 0))

    def can_find(self, row: CachedRow, token_ids: Sequence[int], num_keys: int) -> bool:
        """Computes up to num_keys of the keys that find() needs; returns whether it has all of them."""
        most = self._most_found(token_ids) if row.is_cached else 0
        end = min(most, len(row.keys) + num_keys)
        while len(row.keys) < most and (not row.keys or row.keys[-1] in self._pages):
            if len(row.keys) >= end:
                return False
            # At most twice as far as pages are found: all keys would take a step's time.
            row.keys_up_to(min(end, 2 * len(row.keys) + 1), token_ids, self._page_size)
        return True

    def find(self, row: CachedRow, token_ids: Sequence[int]) -> Found:
        """The pages of the longest cached prefix, without the last token, which is always computed."""
        row.states_at = ()
        if not row.is_cached:
            return NONE_FOUND
        self.can_find(row, token_ids, INT32_MAX)
        # A waiting sequence is looked up before each step, and what was found stays there until pages are given up.
        known = row.found if row.num_given_up == self._num_given_up else NONE_FOUND
        keys = row.keys[len(known) : self._most_found(token_ids)]
        pages = np.fromiter(map(self._pages.get, keys, repeat(NO_PAGE)), np.int64, len(keys))
        ends_here = (pages == NO_PAGE) | (self._columns.step[pages] > self._right_until)
        more = pages[: int(ends_here.argmax())] if ends_here.any() else pages
        row.found = found = np.concatenate((known, more)) if len(more) else known
        row.num_given_up = self._num_given_up
        if self.has_states:
            ends = len(found) * self._page_size, len(token_ids) - 1
            row.states_at = tuple(end // self._spacing * self._spacing for end in ends)
        return found[: self._longest(found)] if self._windowed or self.has_states else found

    def _most_found(self, token_ids: Sequence[int]) -> int:
        return (len(token_ids) - 1) // self._page_size

    def next_state(self, row: CachedRow, num_stored: int) -> int:
        """The number of tokens, above num_stored, at which a chunk of the row's prompt is to end; INT32_MAX: any."""
        return min((end for end in row.states_at if end > num_stored), default=INT32_MAX)

    def admit(self, row: CachedRow, found: Found) -> int:
        """Admits a row of the table that begins with the pages that were found; returns its number."""
        columns, start = self._columns, len(found) * self._page_size
        ids = columns.kept_id[found]
        with self.changes:
            number = self._table.kept.admit_over(ids, start) if len(found) else self._table.admit()
            row.pages, row.newest_state, row.num_clears = found.tolist(), NO_PAGE, self._num_clears
            if row.pages and self.has_states:
                self._states.move_to_end(row.pages[-1])
            row.first_held = [pages.pages.first_needed(start, self._page_size) for pages in self._table.spaces]
            row.moves_at = self._next_move(row)
            columns.num_named[found] += 1
            for space, first in enumerate(row.first_held):
                held = found[first:]
                self._idle[space].remove(held[columns.num_rows[space, held] == 0])
                columns.num_rows[space, held] += 1
        return number

    def num_in_tier(self, row: CachedRow, token_ids: Sequence[int]) -> int:
        """Number of pages of the tier that come after those which an admitted row began with. They count as used."""
        first, most = len(row.pages), self._most_found(token_ids)
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
        with self.changes:
            self._table.mark_stored([number], [(first + num) * self._page_size])
            page_nos = np.arange(first, first + num, dtype=np.int32)
            ids = kept.keep_all(np.full(num, number, np.int32), page_nos).tolist()
            for key, kept_id in zip(keys, ids, strict=False):
                page = self._columns.make(key, row.pages[-1] if row.pages else NO_PAGE)
                self._columns.kept_id[page], self._columns.step[page] = kept_id, self._right_until
                self._put(page)
                row.pages.append(page)
        return num

    def enter(self, rows: Iterable[tuple[CachedRow, int, Sequence[int], int]]) -> None:
        """Makes full pages available that were completed by the step that has ended.

        rows: for each row the CachedRow, its number, its sequence's tokens, and how many of them are stored
        """
        fresh: dict[bytes, int] = {}
        owners: list[CachedRow] = []
        numbers: list[int] = []
        page_nos: list[int] = []
        for row, number, token_ids, num_stored in rows:
            if row.is_cached and row.num_clears == self._num_clears:
                missing = self._missing(row, number, token_ids, num_stored // self._page_size, fresh)
                owners += [row] * len(missing)
                numbers += [number] * len(missing)
                page_nos += missing
        if numbers:
            kept, of_pages = self._table.kept, (np.array(numbers, np.int32), np.array(page_nos, np.int32))
            if self.has_states:
                due = np.flatnonzero(kept.states_due(*of_pages)).tolist()
                self._make_room_for_states(len(due), [owners[at] for at in due])
            ids, pages = kept.keep_all(*of_pages), list(fresh.values())
            self._columns.kept_id[pages], self._columns.step[pages] = ids, self._step
            for page in pages:
                self._put(page)
            if self.has_states:
                with_states = kept.have_states(ids).tolist()
                for page, page_no, row, has_state in zip(pages, page_nos, owners, with_states, strict=True):
                    if has_state:
                        self._put_state(page, (page_no + 1) * self._page_size, row)

    def move_windows(self, row: CachedRow, num_stored: int) -> None:
        """Records that the row has given back pages that no step needs which begins after num_stored tokens.

        Call it when num_stored has reached row.moves_at; before that, nothing has left a window.
        """
        for space, pages in self._windowed:
            first = pages.pages.first_needed(num_stored, self._page_size)
            self._release(space, row.pages[row.first_held[space] : first])
            row.first_held[space] = max(first, row.first_held[space])
        row.moves_at = self._next_move(row)

    def leave(self, row: CachedRow) -> None:
        """Records that the row is freed. Its pages stay, and count as used now."""
        columns, pages = self._columns, np.array(row.pages, np.int64)
        named = pages[pages != NO_PAGE]
        columns.num_named[named] -= 1
        for space, first in enumerate(row.first_held):
            if space != _FULL:
                self._release(space, row.pages[first:][::-1])
        # Where another row's page of the same tokens is kept, it counts as if this row had held it.
        is_own = pages != NO_PAGE
        is_own[is_own] = columns.num_rows[_FULL, named] != NOT_KEPT
        held = pages[is_own]
        columns.num_rows[_FULL, held] -= 1
        for page_no in (~is_own).nonzero()[0].tolist():
            pages[page_no] = self._pages.get(row.keys[page_no], NO_PAGE)
        used = pages[pages != NO_PAGE][::-1]
        self._idle[_FULL].add(used[columns.num_rows[_FULL, used] == 0])
        columns.free_unused(named[columns.num_rows[_FULL, named] == NOT_KEPT].tolist())
        row.pages, row.newest_state = [], NO_PAGE

    def make_room(self, space: int, num_pages: int) -> None:
        """Gives idle pages back until num_pages are free in a space, or no idle one is left."""
        columns, of_space = self._columns, self._table.spaces[space]
        with self.changes:
            given_back = self._idle[space].take(num_pages - of_space.num_free_pages)
            if space != _FULL:
                columns.num_rows[space, given_back] = NOT_KEPT
                self._table.kept.drop(columns.kept_id[given_back], (of_space.space,))
                return
            removed = self._remove(given_back.tolist())
        try:
            self._move_to_tier([page for page in removed if columns.step[page] <= self._right_until])
        finally:  # memory for the copies may run out
            self._drop(removed)

    def end_step(self) -> None:
        """Counts a step that has run without reporting a fault of the steps before it."""
        self._step += 1
        self._right_until = max(self._right_until, self._step - self._steps_until_known)

    def all_is_right(self) -> None:
        """Records that the device was waited for, and no step had a fault."""
        self._right_until = self._step

    def forget_unknown(self) -> None:
        """Forgets pages of steps that are not known to be free of faults, because a step had one."""
        self._forget([page for page in self._pages.values() if self._columns.step[page] > self._right_until])

    def forget_row(self, row: CachedRow) -> None:
        """Forgets the pages of a row whose sequence has failed, and all pages after them."""
        self._forget([page for page in row.pages if page != NO_PAGE])

    def clear(self) -> None:
        """Forgets all pages, those of the tier too. Rows that run go on, and no page of theirs is entered."""
        self._num_clears += 1
        self._forget(list(self._pages.values()))
        self._tier.clear()

    def _missing(
        self, row: CachedRow, number: int, token_ids: Sequence[int], end: int, fresh: dict[bytes, int]
    ) -> list[int]:
        """The page_no of the pages [., end) completed by row that are to be entered. They are put into fresh."""
        first = len(row.pages)
        keys = row.keys_up_to(end, token_ids, self._page_size)
        before = fresh.get(keys[first - 1], self._pages.get(keys[first - 1], NO_PAGE)) if first else NO_PAGE
        missing = []
        for page_no in range(first, end):
            key = keys[page_no]
            page = fresh.get(key)
            if page is None:
                page = self._pages.get(key)
                if page is None and page_no and before == NO_PAGE:
                    # No chain leads to it: the page before it was given back, or has failed.
                    row.pages += [NO_PAGE] * (end - page_no)
                    break
                if page is None or self._lacks_a_window(page) or self._lacks_a_state(page, number, page_no):
                    fresh[key] = before = self._columns.make(key, before)
                    missing.append(page_no)
                    row.pages.append(before)
                    continue
            row.pages.append(NO_PAGE)
            before = page
        return missing

    def _put(self, page: int) -> None:
        """Makes a page available that is kept in every space and held by one row."""
        columns, key = self._columns, self._columns.key[page]
        old = self._pages.get(key)
        if old is not None:  # it lacks a window or a state, or is not known to be right, as one of the tier is
            columns.move_after(old, page)
            self._give_up([old])
            self._drop([old])
        self._pages[key] = page
        columns.num_rows[:, page] = 1
        columns.link(page)

    def _longest(self, found: Found) -> int:
        """The number of these pages that a row can begin with: every page in its windows is there, and its state."""
        ends = np.arange(1, len(found) + 1)
        are_whole = np.ones(len(found), np.bool_)
        for space, pages in self._windowed:
            is_gone = self._columns.num_rows[space, found] == NOT_KEPT
            end_of_gone = np.maximum.accumulate(np.where(is_gone, ends, 0))
            are_whole &= end_of_gone <= pages.pages.first_needed(ends * self._page_size, self._page_size)
        whole = reversed(ends[are_whole].tolist())
        return next((end for end in whole if not self.has_states or int(found[end - 1]) in self._states), 0)

    def _next_move(self, row: CachedRow) -> int:
        """The number of tokens that row will have stored when the next page leaves a window."""
        moves = (
            (row.first_held[space] + 1) * self._page_size + pages.pages.window_left + pages.pages.kept
            for space, pages in self._windowed
        )
        return min(moves, default=INT32_MAX)

    def _lacks_a_window(self, page: int) -> bool:
        return any(self._columns.num_rows[space, page] == NOT_KEPT for space, _ in self._windowed)

    def _lacks_a_state(self, page: int, row: int, page_no: int) -> bool:
        """True if a page has no state of recurrent layers, and a row of the table has the state after its tokens."""
        if not self.has_states or page in self._states:
            return False
        return bool(self._table.kept.states_due([row], [page_no])[0])

    def _make_room_for_states(self, num: int, rows: Sequence[CachedRow] = ()) -> None:
        """Gives states back until `num` are free, or none is left. rows: their texts have passed their states"""
        for row in rows:
            passed = row.newest_state
            if passed in self._states and self._columns.num_rows[_FULL, passed] <= 1:  # no other row holds it
                self._states.move_to_end(passed, last=False)
        kept, missing = self._table.kept, num - self._table.kept.num_free_states
        given_back = [self._states.popitem(last=False)[0] for _ in range(min(len(self._states), missing))]
        kept.drop_states(self._columns.kept_id[given_back])

    def _put_state(self, page: int, num_tokens: int, row: CachedRow) -> None:
        """Notes that a page is kept with the state after its last token, num_tokens from the beginning."""
        self._states[page] = None
        row.newest_state = NO_PAGE if num_tokens in row.states_at else page

    def _release(self, space: int, pages: Sequence[int]) -> None:
        """A row no longer holds pages in a space, in which the cache may have forgotten some. The first goes first."""
        num_rows, held = self._columns.num_rows[space], np.array(pages, np.int64)
        held = held[held != NO_PAGE]
        held = held[num_rows[held] > 0]
        num_rows[held] -= 1
        self._idle[space].add(held[num_rows[held] == 0])

    def _forget(self, pages: Iterable[int]) -> None:
        with self.changes:
            self._drop(self._remove(page for page in pages if self._columns.num_rows[_FULL, page] != NOT_KEPT))

    def _move_to_tier(self, pages: Sequence[int]) -> None:
        """Copies pages whose ids are not dropped yet."""
        if pages:
            of_table = self._table.kept.pages(self._columns.kept_id[pages])
            self._tier.put([self._columns.key[page] for page in pages], of_table)

    def _remove(self, pages: Iterable[int]) -> list[int]:
        """Makes pages unavailable, and all pages after them. Returns them all; they are to be dropped."""
        removed: dict[int, None] = {}
        for first in pages:
            left = [first]
            while left:
                page = left.pop()
                if page not in removed:
                    removed[page] = None
                    left += self._columns.after(page)
        for page in removed:
            del self._pages[self._columns.key[page]]
        self._give_up(removed)
        return list(removed)

    def _give_up(self, pages: Collection[int]) -> None:
        """Forgets which rows hold pages, which are to be dropped."""
        self._num_given_up += len(pages) > 0
        at = np.fromiter(pages, np.int64, len(pages))
        for idle in self._idle:
            idle.remove(at)
        self._columns.num_rows[:, at] = NOT_KEPT
        for page in pages:
            self._states.pop(page, None)
            self._columns.unlink(page)

    def _drop(self, pages: Sequence[int]) -> None:
        """Gives back pages that were given up."""
        with self.changes:
            if pages:
                self._table.kept.drop(self._columns.kept_id[pages])
                self._columns.free_unused(pages)
