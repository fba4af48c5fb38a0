"""Pages of a window: held while a step may need them, freed after it, shared and copied like any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, CapacityExceeded, NeverFits, OutOfPages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.page_table import PageTable, SpacePages
from rocm_attn.paging.request_table import RequestTable

WINDOW, KEPT, PAGE_SIZE = 5, 2, 3
FULL_PAGES = 12


def make_table(
    swa_pages: int = 10, *, full_pages: int = FULL_PAGES, max_kv_len: int = 21, max_num_seqs: int = 4
) -> RequestTable:
    """Returns a table with pages of 3 tokens. Ids of the SWA space follow those of the full space."""
    swa = SpacePages(Space.SWA, full_pages + swa_pages, "swa_pages", WINDOW, KEPT, full_pages)
    return RequestTable(
        max_num_seqs=max_num_seqs,
        max_kv_len=max_kv_len,
        num_pages=full_pages,
        page_size=PAGE_SIZE,
        device=torch.device("cpu"),
        windows=[swa],
    )


def ints(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def grow(table: RequestTable, row: int, start: int, stop: int) -> None:
    """Reserves and evicts pages as a step with new tokens [start, stop) does."""
    table.reserve(row, stop)
    table.evict(ints(row), ints(start))


def test_pages_before_the_window_and_what_is_kept_are_given_back() -> None:
    table = make_table()
    row = table.admit()
    swa = table.space(Space.SWA)
    table.reserve(row, 12)
    assert swa.num_free_pages == 6
    # Token 9 sees 4 .. 9, token 7 may be computed again and sees 2 .. 7: page 0 is needed until the start is 10.
    grow(table, row, 9, 12)
    assert swa.num_free_pages == 6
    grow(table, row, 10, 12)
    assert table.pages_of(row, Space.SWA).tolist()[0] == 0
    assert swa.num_free_pages == 7
    assert len(set(table.pages_of(row).tolist())) == 4
    assert table.full.num_free_pages == 7
    assert (row, 0, 0) in map(tuple, swa.pending_updates().tolist())
    assert (row, 0, 0) not in map(tuple, table.full.pending_updates().tolist())


@pytest.mark.parametrize("start", range(21))
def test_nothing_that_a_step_or_one_a_few_tokens_back_sees_is_given_back(start: int) -> None:
    table = make_table()
    row = table.admit()
    grow(table, row, start, 21)
    pages = table.pages_of(row, Space.SWA)
    first_seen = max(0, start - KEPT - WINDOW)
    assert (pages[first_seen // PAGE_SIZE :] > 0).all()
    assert not pages[: first_seen // PAGE_SIZE].any()
    table.checks.check(StepBatch(ints(row), ints(21), ints(21 - max(0, start - KEPT))))


def test_a_step_that_goes_back_too_far_is_refused() -> None:
    table = make_table()
    row = table.admit()
    grow(table, row, 15, 18)  # holds tokens from 6 on, so windows from token 11 on
    table.checks.check(StepBatch(ints(row), ints(12), ints(1)))
    with pytest.raises(BadBatch, match="first new token at 10, but row 1 holds keys of windows only from 11 on; raise"):
        table.checks.check(StepBatch(ints(row), ints(11), ints(1)))
    table.free(row)
    assert table.admit() == row
    table.reserve(row, 3)
    table.checks.check(StepBatch(ints(row), ints(3), ints(3)))


def test_a_long_prompt_needs_room_for_its_window_and_a_chunk() -> None:
    table = make_table(swa_pages=6, full_pages=20)
    row = table.admit()
    for start in range(0, 21, 4):
        table.evict(ints(row), ints(start))
        table.reserve(row, min(start + 4, 21))
    other = table.admit()
    with pytest.raises(
        NeverFits, match="needs 7 pages of the SWA space for 21 tokens and there are 6; raise swa_pages"
    ):
        table.reserve(other, 21)


@pytest.mark.parametrize("q_len", range(1, 9))
def test_a_row_holds_no_more_than_is_said(q_len: int) -> None:
    table = make_table()
    row, swa = table.admit(), table.space(Space.SWA)
    most = 0
    for start in range(0, 21, q_len):
        table.evict(ints(row), ints(start))
        table.reserve(row, min(start + q_len, 21))
        held = int(np.count_nonzero(table.pages_of(row, Space.SWA)))
        assert held == table.num_held(row, Space.SWA)
        most = max(most, held)
    said = swa.pages.most_held(21, q_len, PAGE_SIZE)
    assert most <= said <= most + 1
    assert table.space(Space.FULL).pages.most_held(21, q_len, PAGE_SIZE) == 7


def test_running_out_of_one_space_changes_neither_and_names_the_knob() -> None:
    table = make_table(swa_pages=2)
    rows = ints(table.admit(), table.admit())
    before = [space.entries_host.copy() for space in table.spaces]
    with pytest.raises(
        OutOfPages, match=r"need 3 more pages of the SWA space for 9 tokens and 2 are free; .* raise swa_pages"
    ):
        table.reserve_all(rows, ints(6, 3))
    with pytest.raises(NeverFits, match=r"needs 3 pages of the SWA space for 9 tokens and there are 2; .* swa_pages"):
        table.reserve(int(rows[0]), 9)
    for space, entries in zip(table.spaces, before, strict=True):
        assert np.array_equal(space.entries_host, entries)
    assert table.fewest_free_pages == 2
    table.reserve_all(rows, ints(3, 3))
    assert table.fewest_free_pages == 0


def test_a_fork_shares_the_window_and_needs_all_of_it() -> None:
    table = make_table()
    row = table.admit()
    grow(table, row, 15, 18)  # holds tokens from 6 on
    free_rows = table.num_free_rows
    with pytest.raises(BadBatch, match=r"has left the window of the SWA space, .* share at least 11 tokens"):
        table.fork(row, 10)
    assert table.num_free_rows == free_rows
    child = table.fork(row, 17)
    parents, childs = (table.pages_of(each, Space.SWA) for each in (row, child))
    # 17 - 5 - 2 = 10 is in page 3
    assert childs.tolist() == [0, 0, 0, *parents[3:]]
    table.free(row)
    assert np.count_nonzero(table.pages_of(child, Space.SWA)) == 3
    nothing = table.fork(child, 0)
    table.reserve(nothing, 3)
    table.checks.check(StepBatch(ints(nothing), ints(3), ints(3)))


@pytest.mark.parametrize("stored", [0, 1, 2, 3, 4, 9, 10, 20])
def test_room_that_was_reserved_ahead_is_given_back_in_every_space(stored: int) -> None:
    table = make_table()
    row = table.admit()
    grow(table, row, 0, stored)
    table.mark_stored(ints(row), ints(stored))
    table.evict(ints(row), ints(stored))
    held = [table.pages_of(row, pages.space).tolist() for pages in table.spaces]
    free = [pages.num_free_pages for pages in table.spaces]
    table.reserve(row, 21)
    assert [pages.num_free_pages for pages in table.spaces] != free or stored > 18
    table.truncate(row, stored)
    assert [table.pages_of(row, pages.space).tolist() for pages in table.spaces] == held
    assert [pages.num_free_pages for pages in table.spaces] == free
    assert table.tokens.stored_len[row] == stored
    with pytest.raises(BadBatch, match=f"row {row} has room for {stored} tokens; call reserve"):
        table.checks.check(StepBatch(ints(row), ints(stored + 1), ints(1)))
    table.reserve(row, stored + 1)
    table.checks.check(StepBatch(ints(row), ints(stored + 1), ints(1)))
    table.checks.check_stored(StepBatch(ints(row), ints(stored + 1), ints(1)), ints(stored))


@pytest.mark.parametrize(("num_pages", "first_page"), [(1, 1), (4, 4), (4, 0)])
def test_a_space_has_a_page_to_hand_out(num_pages: int, first_page: int) -> None:
    with pytest.raises(CapacityExceeded, match=f"swa_pages is {num_pages} and the first page handed out is"):
        SpacePages(Space.SWA, num_pages, "swa_pages", WINDOW, KEPT, first_page)


class Requests(RuleBasedStateMachine):
    """Random steps, rejections, forks and frees over two small spaces; pages without a row hold nothing.

    content: per space, page -> token of each offset, as the device would hold them
    tokens:  row -> its tokens
    reached: row -> the largest start of a step of it so far
    shared:  row -> tokens that other rows may hold too, which are never removed
    room:    row -> tokens that it has pages for; removed tokens leave their pages
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = make_table()
        self.content: dict[Space, dict[int, list[int]]] = {pages.space: {} for pages in self.table.spaces}
        self.tokens: dict[int, list[int]] = {}
        self.reached: dict[int, int] = {}
        self.shared: dict[int, int] = {}
        self.room: dict[int, int] = {}
        self.next_token = 1

    def flush(self) -> None:
        """Sends changes to the device; then every page without a row is overwritten."""
        for pages in self.table.spaces:
            content = self.content[pages.space]
            content.update({target: list(content[source]) for target, source in pages.pending.copies.items()})
            pages.pending.copies.clear()
            pages.pending.cells.clear()
            for page in set(content) - self.held(pages):
                content[page] = [-1] * PAGE_SIZE

    def pages_wanted(self, pages: PageTable, row: int, stop: int) -> int:
        """Returns pages of a space that row lacks for `stop` tokens, and one more if its next page is shared."""
        held, room = self.table.pages_of(row, pages.space).tolist(), self.room[row]
        others = {
            page for other in self.tokens if other != row for page in self.table.pages_of(other, pages.space).tolist()
        } - {0}
        is_copied = stop > room and room % PAGE_SIZE > 0 and held[room // PAGE_SIZE] in others
        return max(0, -(-stop // PAGE_SIZE) - len(held)) + is_copied

    def held(self, pages: PageTable) -> set[int]:
        return {int(page) for row in self.tokens for page in self.table.pages_of(row, pages.space)} - {0}

    @rule()
    def admit(self) -> None:
        if self.table.num_free_rows:
            row = self.table.admit()
            self.tokens[row], self.reached[row], self.shared[row], self.room[row] = [], 0, 0, 0

    @rule(pick=st.integers(0, 3), new=st.integers(0, 6), evict_first=st.booleans())
    def step(self, pick: int, new: int, evict_first: bool) -> None:
        row = self.pick(pick)
        if row is None:
            return
        start, stop = len(self.tokens[row]), len(self.tokens[row]) + new
        if evict_first:
            self.table.evict(ints(row), ints(start))
            self.reached[row] = max(self.reached[row], start)
        short = [self.pages_wanted(pages, row, stop) > pages.num_free_pages for pages in self.table.spaces]
        if stop > self.table.max_kv_len or any(short):
            with pytest.raises(CapacityExceeded):
                self.table.reserve(row, stop)
            return
        self.table.reserve_all(ints(row), ints(stop))
        self.room[row] = max(self.room[row], stop)
        self.table.checks.check(StepBatch(ints(row), ints(stop), ints(new)))
        self.table.evict(ints(row), ints(start))
        self.reached[row] = max(self.reached[row], start)
        self.flush()
        for index in range(start, stop):
            for pages in self.table.spaces:
                page = int(self.table.pages_of(row, pages.space)[index // PAGE_SIZE])
                self.content[pages.space].setdefault(page, [-1] * PAGE_SIZE)[index % PAGE_SIZE] = self.next_token
            self.tokens[row].append(self.next_token)
            self.next_token += 1

    @rule(pick=st.integers(0, 3), taken=st.integers(1, 8))
    def reject(self, pick: int, taken: int) -> None:
        """Removes the last tokens, at most KEPT of those before the last step."""
        row = self.pick(pick)
        if row is not None:
            taken = min(taken, len(self.tokens[row]) - max(self.shared[row], self.reached[row] - KEPT))
            del self.tokens[row][len(self.tokens[row]) - taken :]

    @rule(pick=st.integers(0, 3), length=st.integers(0, 21))
    def fork(self, pick: int, length: int) -> None:
        row = self.pick(pick)
        if row is None or not self.table.num_free_rows:
            return
        length = min(length, len(self.tokens[row]))
        pages = self.table.pages_of(row, Space.SWA)[max(0, length - WINDOW) // PAGE_SIZE : -(-length // PAGE_SIZE)]
        if not (pages > 0).all():
            with pytest.raises(BadBatch):
                self.table.fork(row, length)
            return
        child = self.table.fork(row, length)
        self.tokens[child], self.reached[child], self.shared[child] = self.tokens[row][:length], length, length
        self.shared[row], self.room[child] = max(self.shared[row], length), length

    @rule(pick=st.integers(0, 3))
    def free(self, pick: int) -> None:
        row = self.pick(pick)
        if row is not None:
            self.table.free(row)
            del self.tokens[row], self.reached[row], self.shared[row], self.room[row]

    def pick(self, number: int) -> int | None:
        rows = sorted(self.tokens)
        return rows[number % len(rows)] if rows else None

    @invariant()
    def every_row_reads_its_own_tokens(self) -> None:
        for pages in self.table.spaces:
            content, waiting = self.content[pages.space], pages.pending.copies
            for row, tokens in self.tokens.items():
                first = max(0, len(tokens) - WINDOW) if pages.space is Space.SWA else 0
                held = self.table.pages_of(row, pages.space).tolist()
                at = [(held[i // PAGE_SIZE], i % PAGE_SIZE) for i in range(first, len(tokens))]
                assert [content[waiting.get(page, page)][offset] for page, offset in at] == tokens[first:]

    @invariant()
    def no_page_leaks_and_no_id_means_two_things(self) -> None:
        full, swa = (self.held(pages) for pages in self.table.spaces)
        assert not full & swa
        for pages, held in zip(self.table.spaces, (full, swa), strict=True):
            assert len(held) + pages.num_free_pages == pages.num_usable_pages

    def teardown(self) -> None:
        for row in list(self.tokens):
            self.table.free(row)
        for pages in self.table.spaces:
            assert pages.num_free_pages == pages.num_usable_pages
            assert not pages.entries_host.any()


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=80, stateful_step_count=40)
