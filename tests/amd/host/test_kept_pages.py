"""Pages that outlive their row: kept under ids, reused by other rows, and dropped once."""

import numpy as np
import pytest
import torch

from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, BadSetting, CapacityExceeded, NeverFits, WrongState
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.page_table import SpacePages
from rocm_attn.paging.request_table import RequestTable

WINDOW, PAGE_SIZE, FULL_PAGES, SWA_PAGES, WIDTH = 5, 4, 16, 14, 8


def make_table(*, windowed: bool = False) -> RequestTable:
    """Returns a table with rows of up to 8 pages of 4 tokens. Ids of the SWA space, if any, follow the others."""
    swa = SpacePages(Space.SWA, FULL_PAGES + SWA_PAGES, "swa_pages", WINDOW, 0, FULL_PAGES)
    return RequestTable(
        max_num_seqs=4,
        max_kv_len=WIDTH * PAGE_SIZE - 1,
        num_pages=FULL_PAGES,
        page_size=PAGE_SIZE,
        device=torch.device("cpu"),
        windows=[swa] if windowed else [],
    )


def ints(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def stored_row(table: RequestTable, kv_len: int) -> int:
    row = table.admit()
    table.reserve(row, kv_len)
    table.mark_stored(ints(row), ints(kv_len))
    return row


def step_of(row: int, kv_len: int, q_len: int = 1) -> StepBatch:
    return StepBatch(ints(row), ints(kv_len), ints(q_len))


def state_of(table: RequestTable) -> object:
    """Returns the state that a refused call leaves unchanged."""
    spaces = [
        (
            pages.entries_host.tolist(),
            list(pages._free),
            pages._holders.tolist(),
            [cells.tolist() for cells in pages.pending.cells],
        )
        for pages in table.spaces
    ]
    kept = table.kept
    tokens = table.tokens.stored_len.tolist(), table.tokens.first_writable.tolist()
    return spaces, tokens, kept._ids.tolist(), kept._pages.tolist(), list(table._rows.free)


@pytest.mark.parametrize("whose", ["the row that was kept from", "a row over kept pages"])
def test_a_row_stores_in_a_kept_page_only_after_it_went_back_to_a_copy(whose: str) -> None:
    table = make_table()
    row = stored_row(table, 8)
    ids = table.kept.keep(row, 0, 2)
    if whose == "a row over kept pages":
        row = table.kept.admit_over(ids, 8)
    message = rf"store token 6 of row {row} .*call truncate\({row}, 6"
    with pytest.raises(AssertionError, match=message):
        assert table.checks.why_no_store(step_of(row, 7)) == "", table.checks.why_no_store(step_of(row, 7))
    assert table.checks.first_writable_of(ints(row)).tolist() == [8]
    table.truncate(row, 6)
    table.reserve(row, 7)
    assert table.pages_of(row)[1] not in table.kept.pages(ids)
    assert table.checks.why_no_store(step_of(row, 7)) == ""


def test_ids_are_those_of_kept_pages_alone_however_many_there_are() -> None:
    table = RequestTable(max_num_seqs=1, max_kv_len=3000, num_pages=3001, page_size=1, device=torch.device("cpu"))
    row = stored_row(table, 3000)
    ids = np.concatenate([table.kept.keep(row, 0, 1500), table.kept.keep(row, 1500, 3000)])
    pages = table.pages_of(row).tolist()
    assert table.kept.pages(ids).tolist() == pages
    assert table.kept.have_states(ids).all(), "no layer needs one"
    dropped = ids[ids & 0xFFFF == 0]
    table.kept.drop(dropped)
    for strange in (*dropped, *-dropped, 0, (1 << 26) + len(table.kept._ids)):
        with pytest.raises(WrongState, match=f"^{strange} is not the id of a kept page"):
            table.kept.pages([strange])
    with pytest.raises(BadBatch, match="0 kept pages are given and -1 tokens"):
        make_table().kept.admit_over([], -1)
    assert table.kept.are_kept(pages[:9], Space.FULL)
    table.kept.drop_all()
    assert not table.kept.are_kept(pages[:1], Space.FULL)


def test_pages_that_are_not_full_of_stored_tokens_are_not_kept() -> None:
    table = make_table()
    row = stored_row(table, 7)
    table.reserve(row, 12)
    before = state_of(table)
    with pytest.raises(
        BadBatch, match="row 1 has 7 stored tokens, which fill the pages before page_no 1; page_no 1 ca"
    ):
        table.kept.keep(row, 0, 2)
    with pytest.raises(BadBatch, match="range of pages"):
        table.kept.keep(row, 1, 0)
    with pytest.raises(BadBatch, match="page_no 1 cannot be kept"):
        table.kept.keep(row, 0, 2**40)  # as many numbers would take 4 TiB
    with pytest.raises(BadBatch, match="page_no 7 cannot be kept"):
        table.kept.keep(row, 7, 9)
    with pytest.raises(BadBatch, match=f"page_no {2**31 - 1} cannot be kept"):
        table.kept.keep_all(ints(row), ints(2**31 - 1))
    for first in (2**40, 2**70):
        with pytest.raises(BadBatch, match="page_no holds"):
            table.kept.keep(row, first, first + 1)
    for wrong in (None, "0", 0.5, True):
        with pytest.raises(BadSetting, match=r"end_page_no is .*; it must be a whole number"):
            table.kept.keep(row, 0, wrong)  # type: ignore[arg-type]
    for rows, page_no in ((ints(row), ints(-1)), (ints(row, row), ints(0)), (ints(row), ints(0, 0))):
        with pytest.raises(BadBatch, match="give one number of at least 0 per row"):
            table.kept.keep_all(rows, page_no)
    with pytest.raises(WrongState, match="row 3 is not admitted"):
        table.kept.keep(3, 0, 1)
    with pytest.raises(WrongState, match="row True is not admitted"):  # a mask of all rows
        table.kept.keep(True, 0, 1)
    with pytest.raises(WrongState, match="row 4 is not admitted"):
        table.kept.states_due([4], [0])
    assert table.kept.states_due([], []).tolist() == []
    assert state_of(table) == before
    assert table.kept.keep(row, 1, 1).tolist() == []


def test_ids_of_no_kept_page_and_one_that_is_named_twice_are_refused() -> None:
    table = make_table()
    row = stored_row(table, 8)
    ids, others = (table.kept.keep(row, 0, 2) for _ in range(2))
    table.kept.drop(ids)
    assert sorted(table.kept.ids()) == sorted(others)
    table.free(row)
    newer = table.kept.keep(stored_row(table, 8), 0, 2)  # in the places of the dropped ones
    before = state_of(table)
    for nonsense in (ids, [1], [-int(ids[0])], [0], [2**62], [int(others.max()) + 1]):
        with pytest.raises(WrongState, match=f"{nonsense[0]} is not the id of a kept page"):
            table.kept.num_holders_of(nonsense)
        with pytest.raises(WrongState, match=f"{nonsense[0]} is not the id of a kept page"):
            table.kept.drop(nonsense)
    for no_ids in (others + 0.5, others[:, None], others[0], [2**70], ["1"], None):
        with pytest.raises(BadBatch, match=r"ids of kept pages are .* of shape .*; give a vector of integers"):
            table.kept.drop(no_ids)  # type: ignore[arg-type]
    with pytest.raises(WrongState, match="a kept page is named twice"):
        table.kept.drop([others[0], others[0]])
    assert state_of(table) == before
    table.kept.drop(np.concatenate([others, newer]))


def test_a_row_begins_only_over_pages_that_make_a_sequence_of_its_length() -> None:
    table = make_table()
    ids = table.kept.keep(stored_row(table, 12), 0, 3)
    before = state_of(table)
    for kv_len in (0, 4, 8, 13, -1):
        with pytest.raises(BadBatch, match="give as many pages as the tokens need"):
            table.kept.admit_over(ids, kv_len)
    with pytest.raises(BadBatch, match="kept page 0 was page_no 1"):
        table.kept.admit_over(ids[1:], 8)
    with pytest.raises(BadBatch, match="kept page 1 was page_no 2 of its sequence"):
        table.kept.admit_over(ids[::2], 8)
    assert state_of(table) == before
    assert table.pages_of(table.kept.admit_over([], 0)).tolist() == []


def test_a_window_is_given_back_by_a_length_for_each_row() -> None:
    table = make_table(windowed=True)
    rows = ints(stored_row(table, 16), stored_row(table, 16))
    before = state_of(table)
    with pytest.raises(BadBatch, match=r"2 rows and kv_len \[16\] were given"):
        table.evict(rows, ints(16))
    assert state_of(table) == before


def test_pages_of_several_rows_are_kept_by_one_call() -> None:
    table = make_table()
    row = stored_row(table, 8)
    child = table.fork(row, 8)
    other = stored_row(table, 4)
    ids = table.kept.keep_all(ints(row, child, other, row), ints(0, 0, 0, 1))
    held = [table.pages_of(row)[0], table.pages_of(row)[0], table.pages_of(other)[0], table.pages_of(row)[1]]
    assert table.kept.pages(ids).tolist() == held
    assert table.kept.num_holders_of(ids).tolist() == [4, 4, 2, 3]
    for each in (row, child, other):
        table.free(each)
    assert table.kept.num_holders_of(ids).tolist() == [2, 2, 1, 1]
    table.kept.drop(ids)
    assert table.full.num_free_pages == FULL_PAGES - 1


def test_rows_over_the_same_last_page_alone_share_no_prefix() -> None:
    table = make_table()
    one, other = stored_row(table, 8), stored_row(table, 8)
    first, second = table.kept.keep(one, 0, 2), table.kept.keep(other, 0, 2)
    mixed = table.kept.admit_over([first[0], second[1]], 8)
    table.reserve_all(ints(other, mixed), ints(9, 9))
    batch = StepBatch(ints(other, mixed), ints(9, 9), ints(1, 1), prefixes=SharedPrefixes([PrefixGroup(2, 8)]))
    with pytest.raises(BadBatch, match="sequence 1 does not share"):
        table.checks.check(batch)
    table.free(mixed)
    same = table.kept.admit_over(second, 8)
    table.reserve(same, 9)
    table.checks.check(StepBatch(ints(other, same), ints(9, 9), ints(1, 1), prefixes=batch.prefixes))


def test_a_row_that_is_named_twice_gives_no_page_back_twice() -> None:
    """The page would go to another row while it is kept."""
    table = make_table(windowed=True)
    row = stored_row(table, 16)
    ids, before = table.kept.keep(row, 0, 4), state_of(table)
    with pytest.raises(BadBatch, match="row 1 occurs twice"):
        table.evict(ints(row, row), ints(15, 15))
    assert state_of(table) == before
    table.evict(ints(row), ints(15))
    assert table.kept.num_holders_of(ids, Space.SWA).tolist() == [1, 1, 2, 2]


def test_pages_that_left_the_window_are_kept_in_the_full_space_alone() -> None:
    table = make_table(windowed=True)
    row = stored_row(table, 16)
    table.evict(ints(row), ints(15))  # tokens from 10 on are seen: page_no 0 and 1 have left
    before = state_of(table)
    with pytest.raises(BadBatch, match="page_no 0 of row 1 has left the window of the SWA space; keep it before"):
        table.kept.keep(row, 0, 4)
    assert state_of(table) == before
    ids = np.concatenate([table.kept.keep(row, 0, 2, spaces=[Space.FULL]), table.kept.keep(row, 2, 4)])
    assert (table.kept.pages(ids, Space.SWA) > 0).tolist() == [False, False, True, True]
    assert table.kept.num_holders_of(ids, Space.SWA).tolist() == [0, 0, 2, 2]
    table.free(row)
    over = table.kept.admit_over(ids, 16)
    assert table.pages_of(over, Space.SWA).tolist() == [0, 0, *table.kept.pages(ids[2:], Space.SWA)]
    with pytest.raises(
        BadBatch, match=r"page_no 1 has left .* SWA space, or is no longer kept .* and steps after 12 tokens"
    ):
        table.kept.admit_over(ids[:3], 12)
    table.kept.drop(ids[2:], [Space.SWA])
    with pytest.raises(WrongState, match="is kept, but not in SWA: it was dropped there, or never kept"):
        table.kept.drop(ids, [Space.SWA])
    assert table.kept.num_holders_of(ids).tolist() == [2] * 4


@pytest.mark.parametrize("kv_len", range(1, 29))
def test_a_row_over_kept_pages_holds_its_windows_and_nothing_before_them(kv_len: int) -> None:
    table = make_table(windowed=True)
    ids = table.kept.keep(stored_row(table, 28), 0, 7)[: -(-kv_len // PAGE_SIZE)]
    row = table.kept.admit_over(ids, kv_len)
    held = table.pages_of(row, Space.SWA) > 0
    first_seen = max(0, kv_len - WINDOW) // PAGE_SIZE
    assert held.tolist() == [page_no >= first_seen for page_no in range(len(ids))]
    table.reserve(row, kv_len + 1)
    table.checks.check(step_of(row, kv_len + 1))


def test_a_table_may_have_more_rows_than_a_step_has_sequences() -> None:
    table = RequestTable(
        max_num_seqs=2, max_num_rows=5, max_kv_len=8, num_pages=9, page_size=4, device=torch.device("cpu")
    )
    rows = [table.admit() for _ in range(5)]
    with pytest.raises(CapacityExceeded, match="all 5 rows are in use"):
        table.admit()
    for row in rows:
        table.reserve(row, 4)
    table.checks.check(StepBatch(ints(*rows[3:]), ints(4, 4), ints(4, 4)))
    with pytest.raises(NeverFits, match="raise max_num_seqs = 2"):
        table.checks.check(StepBatch(ints(*rows[:3]), ints(4, 4, 4), ints(4, 4, 4)))
    with pytest.raises(CapacityExceeded, match="max_num_rows is"):
        RequestTable(max_num_seqs=2, max_num_rows=1, max_kv_len=8, num_pages=9, page_size=4, device=torch.device("cpu"))


def test_pages_that_do_not_exist_have_no_holders_to_count() -> None:
    table = make_table()
    for page in (0, -1, FULL_PAGES):
        with pytest.raises(BadBatch, match=f"{page} is not a page; pages run from 1 to 15"):
            table.kept.num_holders(page)
    with pytest.raises(BadSetting, match="no pages in the SWA space"):
        table.kept.num_holders(1, Space.SWA)
