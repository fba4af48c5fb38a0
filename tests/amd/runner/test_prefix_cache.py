"""The prefix cache against a brute force over strings of tokens, with a real request table and no model."""

import gc
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_attn.errors import CapacityExceeded
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.page_table import SpacePages
from rocm_attn.paging.request_table import RequestTable
from rocm_serve.cached_pages import NO_PAGE, CachedPages
from rocm_serve.idle_pages import IdlePages
from rocm_serve.prefix_cache import NONE_FOUND, CachedRow, PrefixCache, page_key, salt_key
from tests.amd.runner.cache_invariants import check_cache

PAGE = 2
STEPS_UNTIL_KNOWN = 3
GOLDEN = "6a7d333e7c7a6663cc52fc881003735659a3cddff3e90369291e88113172b2be"


@dataclass
class Row:
    """A running sequence."""

    number: int
    cached: CachedRow
    tokens: tuple[int, ...]
    salt: str


@dataclass
class Pages:
    """A table and its cache, and the strings of tokens that it must know.

    known: (salt, tokens up to the end of a page) -> the step that completed it
    """

    num_pages: int
    max_kv_len: int = 64
    swa_pages: int = 0
    window_left: int = 0
    known: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        window = SpacePages(Space.SWA, self.swa_pages, window_left=self.window_left) if self.swa_pages else None
        self.table = RequestTable(
            max_num_seqs=8,
            max_kv_len=self.max_kv_len,
            num_pages=self.num_pages,
            page_size=PAGE,
            device=torch.device("cpu"),
            windows=() if window is None else (window,),
        )
        self.cache = PrefixCache(self.table, STEPS_UNTIL_KNOWN)

    def longest_known(self, tokens: Sequence[int], salt: str) -> int:
        """Tokens of the longest prefix, in whole pages and without the last token, that an unlimited cache knows."""
        length = 0
        while length + PAGE < len(tokens):
            step = self.known.get((salt, tuple(tokens[: length + PAGE])))
            if step is None or step > self.step - STEPS_UNTIL_KNOWN:
                break
            length += PAGE
        return length

    def find(self, tokens: Sequence[int], salt: str = "") -> int:
        return len(self.cache.find(CachedRow(salt), tokens)) * PAGE

    def serve(self, tokens: tuple[int, ...], salt: str = "") -> tuple[Row, int]:
        """Returns a row for these tokens, all stored in one step, and the number of them that were found."""
        cached = CachedRow(salt)
        found = self.cache.find(cached, tokens)
        row = Row(self.cache.admit(cached, found), cached, (), salt)
        row.tokens = tokens[: len(found) * PAGE]
        try:
            self.extend(row, tokens[len(found) * PAGE :])
        except CapacityExceeded:
            self.leave(row)
            raise
        return row, len(found) * PAGE

    def extend(self, row: Row, tokens: tuple[int, ...]) -> None:
        """Runs one step in which a row stores more tokens."""
        whole = row.tokens + tokens
        number, start, end = (np.array([value], np.int32) for value in (row.number, len(row.tokens), len(whole)))
        self.table.evict(number, start)
        if self.cache.has_windows and len(row.tokens) >= row.cached.moves_at:
            self.cache.move_windows(row.cached, len(row.tokens))
        for space in range(len(self.table.spaces)):
            self.cache.make_room(space, len(tokens) // PAGE + 1)
        try:
            self.table.reserve(row.number, len(whole))
        except CapacityExceeded:
            idle = [self.cache.num_idle(space) for space in range(len(self.table.spaces))]
            assert 0 in idle, "pages that no row holds are given back first"
            raise
        self.table.mark_stored(number, end)
        row.tokens = whole
        self.step += 1
        self.cache.end_step()
        self.cache.enter([(row.cached, row.number, whole, len(whole))])
        for length in range(PAGE, len(whole) + 1, PAGE):
            self.known.setdefault((row.salt, whole[:length]), self.step)

    def leave(self, row: Row) -> None:
        self.cache.leave(row.cached)
        self.table.free(row.number)

    def idle_steps(self, num: int = STEPS_UNTIL_KNOWN) -> None:
        """Runs steps of other rows."""
        for _ in range(num):
            self.step += 1
            self.cache.end_step()


texts = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=14).map(tuple)
actions = st.lists(
    st.tuples(
        st.sampled_from(["serve", "extend", "leave", "fail", "idle", "right"]), texts, st.sampled_from(["", "x"])
    ),
    max_size=50,
)


@given(actions=actions, num_pages=st.sampled_from([9, 17, 600]))
@settings(max_examples=120)
def test_what_is_found_is_what_a_brute_force_finds(
    actions: list[tuple[str, tuple[int, ...], str]], num_pages: int
) -> None:
    """With pages for everything, exactly that; with few pages, never more, and everything that is still there."""
    pages, rows, waiting = Pages(num_pages), list[Row](), defaultdict[tuple[tuple[int, ...], str], CachedRow](CachedRow)
    for action, tokens, salt in actions:
        for (prompt, its_salt), waits in waiting.items():  # as sequences do that have to wait for room
            assert pages.cache.find(waits, prompt).tolist() == pages.cache.find(CachedRow(its_salt), prompt).tolist()
        waiting[tokens, salt].salt = salt
        if action == "serve" and len(rows) < 8:
            wanted = pages.longest_known(tokens, salt)
            assert pages.find(tokens, salt) <= wanted
            assert num_pages < 600 or pages.find(tokens, salt) == wanted
            try:
                rows.append(pages.serve(tokens, salt)[0])
            except CapacityExceeded:
                assert num_pages < 600
        elif action == "extend" and rows and len(rows[0].tokens) + len(tokens) <= 64:
            with suppress(CapacityExceeded):
                pages.extend(rows[0], tokens)
        elif action == "leave" and rows:
            pages.leave(rows.pop(len(tokens) % len(rows)))
        elif action == "fail" and num_pages < 600 and rows:
            pages.cache.forget_row(rows[0].cached)
            pages.leave(rows.pop(0))
        elif action == "idle":
            pages.idle_steps(1)
        elif action == "right":
            pages.cache.all_is_right()
            pages.known = dict.fromkeys(pages.known, -STEPS_UNTIL_KNOWN)
        check_cache(pages.cache, pages.table)
    for row in rows:
        pages.leave(row)
    pages.cache.clear()
    assert pages.table.full.num_free_pages == pages.table.full.num_usable_pages


@given(
    prompts=st.lists(texts, min_size=1, max_size=20), window_left=st.integers(0, 6), swa_pages=st.sampled_from([9, 12])
)
@settings(max_examples=60)
def test_a_prefix_is_as_long_as_there_are_windows_for_it(
    prompts: list[tuple[int, ...]], window_left: int, swa_pages: int
) -> None:
    """Rows come and go, and pages of their windows with them: the longest prefix that a row could be admitted over."""
    pages, rows = Pages(100, swa_pages=swa_pages, window_left=window_left), list[Row]()
    for tokens in prompts:
        found = pages.cache.find(CachedRow(), tokens)
        keys = CachedRow().keys_up_to(pages.longest_known(tokens, "") // PAGE, tokens, PAGE)
        known = [int(pages.cache._columns.kept_id[pages.cache._pages[key]]) for key in keys]
        kept = pages.table.kept.pages(known, Space.SWA)
        lengths = range(len(known) + 1)
        assert len(found) == max(num for num in lengths if kept[max(0, num * PAGE - window_left) // PAGE : num].all())
        with suppress(CapacityExceeded):
            rows.append(pages.serve(tokens)[0])
        if len(rows) > 1:
            pages.leave(rows.pop(0))
        pages.idle_steps()
        check_cache(pages.cache, pages.table)
    for row in rows:
        pages.leave(row)
    pages.cache.clear()
    assert all(space.num_free_pages == space.num_usable_pages for space in pages.table.spaces)


def test_a_row_gives_each_page_of_a_window_back_once() -> None:
    """Another row holds it still."""
    pages, tokens = Pages(60, swa_pages=40, window_left=3), tuple(range(12))
    first, _ = pages.serve(tokens)
    pages.idle_steps()
    second, found = pages.serve((*tokens, 12))
    assert found == 12
    for new in range(20, 30, 2):
        pages.extend(first, (new, new + 1))
        check_cache(pages.cache, pages.table)
    pages.leave(first)
    pages.leave(second)
    check_cache(pages.cache, pages.table)


def test_a_page_that_two_rows_complete_in_one_step_is_entered_once() -> None:
    pages, tokens = Pages(40), (1, 2, 3, 4)
    rows = [CachedRow(), CachedRow()]
    numbers = [pages.cache.admit(row, NONE_FOUND) for row in rows]
    pages.table.reserve_all(np.array(numbers, np.int32), np.array([4, 4], np.int32))
    pages.table.mark_stored(numbers, [4, 4])
    pages.cache.enter([(row, number, tokens, 4) for row, number in zip(rows, numbers, strict=True)])
    assert len(pages.cache) == 2
    check_cache(pages.cache, pages.table)


def test_no_page_of_a_tier_has_the_last_token_of_a_prompt() -> None:
    pages, row = Pages(40), CachedRow()
    cache = PrefixCache(pages.table, STEPS_UNTIL_KNOWN, Mock(found=lambda key: True))
    cache.admit(row, NONE_FOUND)
    assert [cache.num_in_tier(row, range(length)) for length in (6, 7, 1)] == [2, 3, 0]


def test_a_page_of_a_window_comes_back_when_it_is_computed_again() -> None:
    pages = Pages(40, swa_pages=8, window_left=3)
    tokens = tuple(range(12))
    pages.leave(pages.serve(tokens)[0])
    pages.idle_steps()
    assert pages.find((*tokens, 1)) == 12
    pages.cache.make_room(1, 7)  # the windows' pages are gone, those of the full space are there
    assert pages.find((*tokens, 1)) == 0
    pages.leave(pages.serve(tokens)[0])
    pages.idle_steps()
    assert pages.find((*tokens, 1)) == 12
    assert len(pages.cache) == 6
    check_cache(pages.cache, pages.table)


def test_a_cache_holds_no_object_for_each_of_its_pages() -> None:
    pages = Pages(200, max_kv_len=400)
    gc.collect()
    before = len(gc.get_objects())
    pages.leave(pages.serve(tuple(range(300)))[0])
    pages.known.clear()
    gc.collect()
    assert len(pages.cache) == 150
    assert len(gc.get_objects()) < before + 50


@pytest.mark.parametrize("is_found", [False, True])
def test_a_number_is_given_to_another_page_only_when_no_row_names_it(is_found: bool) -> None:
    pages = Pages(40)
    first = pages.serve((0, 1, 2, 3, 4))[0]
    if is_found:
        pages.idle_steps()
        first, before = pages.serve((0, 1, 2, 3, 4))[0], first
        pages.leave(before)
    named = set(first.cached.pages)
    pages.cache.clear()
    second = pages.serve((5, 6, 7, 8, 9))[0]
    assert named.isdisjoint(second.cached.pages)
    pages.leave(first)
    third = pages.serve((10, 11, 12, 13, 14))[0]
    assert named == set(third.cached.pages)
    check_cache(pages.cache, pages.table)


@given(
    st.lists(st.tuples(st.sampled_from(["link", "unlink", "move"]), st.integers(0, 3), st.integers(0, 3)), max_size=40)
)
def test_pages_after_one_are_those_that_were_linked(actions: list[tuple[str, int, int]]) -> None:
    columns, after = CachedPages(4, 1), {page: list[int]() for page in range(4)}
    for page in range(4):
        assert columns.make(b"", NO_PAGE) == page
    for action, page, other in actions:
        before = columns.before[page]
        if action == "link" and before == NO_PAGE:
            columns.before[page] = other
            columns.link(page)
            after[other].append(page)
        elif action == "unlink":
            columns.unlink(page)
            if before != NO_PAGE:
                after[before].remove(page)
        elif action == "move" and not after[other] and page != other:
            columns.move_after(page, other)
            after[other], after[page] = after[page], []
        for each, wanted in after.items():
            assert sorted(columns.after(each)) == sorted(wanted)
            assert all(columns.before[one] == each for one in wanted)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "take"]), st.lists(st.integers(0, 9), unique=True))))
def test_idle_pages_are_in_the_order_of_their_last_use(actions: list[tuple[str, list[int]]]) -> None:
    idle, wanted = IdlePages(most_stale=2), dict[int, None]()
    for action, pages in actions:
        if action == "add":
            idle.add(np.array(pages, np.int64))
        elif action == "remove":
            idle.remove(np.array(pages, np.int64))
        else:
            first = list(wanted)[: len(pages)]
            assert idle.take(len(pages)).tolist() == first
            pages = first
        for page in pages:
            wanted.pop(page, None)
        if action == "add":
            wanted |= dict.fromkeys(pages)
        assert idle.in_order().tolist() == list(wanted)
        assert len(idle) == len(wanted)


def test_keys_are_the_same_in_every_process_and_a_salt_is_no_page() -> None:
    content, before = np.array([1, 2], np.int32).tobytes(), salt_key("a")
    assert page_key(salt_key(""), content).hex() == GOLDEN
    assert page_key(before, content) != salt_key((before + content).decode("latin-1"))


def test_a_prompt_that_waits_is_not_looked_up_again_from_its_beginning() -> None:
    """A long one at the head of a full queue took a millisecond of each step."""
    pages, waits, tokens = Pages(num_pages=40), CachedRow(), tuple(range(32))
    row, _ = pages.serve(tokens[:20])
    pages.idle_steps()
    assert len(pages.cache.find(waits, tokens)) == 10
    pages.extend(row, tokens[20:])
    pages.idle_steps()
    known, looked_up = pages.cache._pages, Mock(wraps=pages.cache._pages)
    pages.cache._pages = looked_up
    assert len(pages.cache.find(waits, tokens)) == 15
    assert looked_up.get.call_count == 5
    pages.cache._pages = known
    pages.leave(row)
    pages.cache.make_room(0, pages.table.full.num_free_pages + 9)
    assert len(pages.cache.find(waits, tokens)) == 7


def test_the_memory_of_idle_pages_does_not_grow_with_their_uses() -> None:
    idle, pages = IdlePages(most_stale=8), np.arange(100)
    for _ in range(1000):
        idle.add(pages)
        idle.remove(pages)
    assert max(len(each) for each in vars(idle).values() if isinstance(each, np.ndarray)) <= 4 * len(pages) + 8


def test_a_prompt_that_nothing_is_known_of_has_one_key_made() -> None:
    row = CachedRow()
    assert Pages(num_pages=8).cache.find(row, range(64)).tolist() == []
    assert len(row.keys) == 1


def test_the_least_recently_used_chain_goes_first_and_its_end_before_its_beginning() -> None:
    pages = Pages(40)
    for first in (10, 20, 30):
        pages.leave(pages.serve((first, 1, 2, 3, 4, 5))[0])
    pages.idle_steps()
    pages.leave(pages.serve((10, 1, 2, 3, 9))[0])  # its first two pages are used again
    lengths = []
    for freed in range(9):
        lengths.append([pages.find((first, 1, 2, 3, 4, 5, 0)) // PAGE for first in (10, 20, 30)])
        pages.cache.make_room(0, pages.table.full.num_free_pages + 1)
        assert pages.cache.num_idle(0) == 8 - freed
    assert lengths == [
        [3, 3, 3],
        [2, 3, 3],
        [2, 2, 3],
        [2, 1, 3],
        [2, 0, 3],
        [2, 0, 2],
        [2, 0, 1],
        [2, 0, 0],
        [1, 0, 0],
    ]


@pytest.mark.parametrize("what", ["fails", "went wrong"])
def test_what_may_be_wrong_is_not_found_and_what_was_right_before_is(what: str) -> None:
    pages = Pages(40)
    shared, _ = pages.serve((1, 2, 3, 4, 5))
    pages.idle_steps()
    bad, found = pages.serve((1, 2, 3, 4, 6, 7, 8, 9, 0))
    assert found == 4
    if what == "fails":
        pages.cache.forget_row(bad.cached)
    else:
        pages.cache.forget_unknown()
    pages.leave(bad)
    pages.idle_steps()
    assert pages.find((1, 2, 3, 4, 6, 7, 8, 9, 0)) == (0 if what == "fails" else 4)
    check_cache(pages.cache, pages.table)
    pages.leave(shared)
    assert pages.table.full.num_free_pages == pages.table.full.num_usable_pages - len(pages.cache)


def test_what_the_device_was_waited_for_stays_known() -> None:
    pages = Pages(40)
    pages.serve((1, 2, 3, 4, 5))
    pages.cache.all_is_right()
    pages.idle_steps(1)
    assert pages.find((1, 2, 3, 4, 5)) == 4


def test_after_clear_rows_go_on_and_leave_nothing() -> None:
    """Nor after pages of the same tokens that a newer row has stored, maybe with other weights."""
    pages, tokens = Pages(40), (1, 2, 3, 4, 5, 6, 7, 8)
    begun, row = pages.serve(tokens[:1])[0], pages.serve(tokens[:5])[0]
    pages.cache.clear()
    pages.extend(begun, tokens[1:6])
    pages.idle_steps()
    assert len(pages.cache) == pages.find(tokens) == 0
    newer, _ = pages.serve(tokens[:5])
    pages.extend(row, tokens[5:])
    pages.idle_steps()
    assert pages.find((*tokens, 9)) == 4
    for each in (begun, row, newer):
        pages.leave(each)
    pages.cache.clear()
    assert pages.table.full.num_free_pages == pages.table.full.num_usable_pages
