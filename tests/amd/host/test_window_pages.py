"""Pages of a window: held while a step may need them, freed after it, shared and copied like any other.

Random steps over such pages are those of tests/amd/random_calls and of the soak.
"""

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, CapacityExceeded, NeverFits, OutOfPages
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.page_table import SpacePages
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


@pytest.mark.parametrize("q_len", [*range(1, 9), 21])
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


def test_a_row_takes_no_page_for_tokens_that_have_left_their_windows_and_gives_back_none_of_another() -> None:
    table = make_table()
    row, other, swa = table.admit(), table.admit(), table.space(Space.SWA)
    table.reserve_all([row, other], [7, 7])
    pages = table.pages_of(other, Space.SWA).tolist()
    table.evict([row], [200])
    table.kept.drop_all()
    table.truncate(row, 7)
    table.reserve(row, 21)
    assert table.num_held(row, Space.SWA) == 0
    assert table.pages_of(other, Space.SWA).tolist() == pages
    assert swa.num_free_pages == swa.num_usable_pages - 3


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


def test_a_fork_of_a_row_that_goes_back_holds_no_page_that_has_left_its_window() -> None:
    table = make_table()
    row = table.admit()
    grow(table, row, 19, 21)  # holds tokens from 12 on
    child = table.fork(row, 17)
    assert table.num_held(child, Space.SWA) == 2
    table.reserve(child, 18)
    table.checks.check(StepBatch(ints(child), ints(18), ints(1)))
    with pytest.raises(BadBatch, match="first new token at 16, but row 2 holds keys of windows only from 17 on"):
        table.checks.check(StepBatch(ints(child), ints(17), ints(1)))


@pytest.mark.parametrize(("num_pages", "first_page"), [(1, 1), (4, 4), (4, 0)])
def test_a_space_has_a_page_to_hand_out(num_pages: int, first_page: int) -> None:
    with pytest.raises(CapacityExceeded, match=f"swa_pages is {num_pages} and the first page handed out is"):
        SpacePages(Space.SWA, num_pages, "swa_pages", WINDOW, KEPT, first_page)
