"""RequestTable: pages are held, shared, copied before a write, and freed."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.errors import BadBatch, BadSetting, CapacityExceeded, NeverFits, OutOfPages, WrongState
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.page_table import SpacePages
from rocm_attn.paging.request_table import RequestTable

WINDOWS = (SpacePages(Space.SWA, 9, "swa_pages", 4),)


def make_table(
    num_pages: int = 9,
    page_size: int = 4,
    max_num_seqs: int = 3,
    max_kv_len: int = 20,
    windows: tuple[SpacePages, ...] = (),
) -> RequestTable:
    return RequestTable(
        max_num_seqs=max_num_seqs,
        max_kv_len=max_kv_len,
        num_pages=num_pages,
        page_size=page_size,
        device=torch.device("cpu"),
        windows=windows,
    )


def holding(table: RequestTable, num_tokens: int) -> int:
    """Returns a new row that has room for num_tokens tokens."""
    row = table.admit()
    table.reserve(row, num_tokens)
    return row


def batch_of(rows: list[int], kv_len: list[int], q_len: list[int] | None = None) -> StepBatch:
    return StepBatch(np.array(rows), np.array(kv_len), np.array(q_len if q_len is not None else [1] * len(rows)))


def test_no_row_has_room_for_more_tokens_than_the_longest_although_its_last_page_has() -> None:
    table = make_table(page_size=8, max_kv_len=20)
    rows = np.array([table.admit(), table.admit()], np.int32)
    table.reserve_all(rows, np.array([20, 1], np.int32))
    with pytest.raises(CapacityExceeded, match="21 tokens exceed the 20 that a row can hold; raise max_kv_len"):
        table.reserve_all(rows, np.array([21, 9], np.int32))
    with pytest.raises(CapacityExceeded, match="21 tokens exceed the 20"):
        table.reserve(int(rows[0]), 21)
    assert [len(table.pages_of(int(row))) for row in rows] == [3, 1]
    with pytest.raises(BadBatch, match="has room for 20 tokens"):
        table.checks.check(batch_of(rows[:1].tolist(), [21]))


def test_a_step_is_refused_for_room_that_was_given_back_since_it_was_reserved() -> None:
    table = make_table()
    rows = [table.admit(), table.admit()]
    step = batch_of(rows, [9, 6])
    table.reserve_all(step.rows, step.kv_len)
    table.checks.check(step)
    table.truncate(rows[0], 5)
    with pytest.raises(BadBatch, match="sequence 0 has kv_len 9, but row 1 has room for 5 tokens"):
        table.checks.check(step)
    table.reserve_all(step.rows, step.kv_len)
    table.checks.check(step)
    assert len(table.pages_of(rows[0])) == 3
    table.free(rows[1])
    with pytest.raises(BadBatch, match="row 2 of sequence 1 is not admitted"):
        table.checks.check(step)
    with pytest.raises(WrongState, match="row 2 is not admitted"):
        table.reserve_all(step.rows, step.kv_len)


def test_there_is_room_where_reserving_would_change_nothing() -> None:
    table = make_table(num_pages=12, max_kv_len=16)
    rows = np.array([table.admit(), table.admit()], np.int32)
    assert not table.is_reserved(rows, np.array([1, 1], np.int32))
    table.reserve_all(rows, np.array([5, 3], np.int32))
    held, changes = [table.num_held(int(row)) for row in rows], table.full.pending_updates().tolist()
    for kv_len, expected in (([5, 3], True), ([1, 0], True), ([6, 3], False), ([5, 4], False)):
        assert table.is_reserved(rows, np.array(kv_len, np.int32)) is expected
    assert ([table.num_held(int(row)) for row in rows], table.full.pending_updates().tolist()) == (held, changes)
    table.truncate(int(rows[1]), 2)
    assert not table.is_reserved(rows, np.array([5, 3], np.int32))
    table.free(int(rows[0]))
    assert not table.is_reserved(rows, np.array([5, 2], np.int32))
    assert not table.is_reserved(rows[:0], rows[:0])


def test_a_length_in_a_tensor_is_a_length() -> None:
    """A cut to it was made in part: its pages stayed, and the next call found no array."""
    table = make_table(page_size=1)
    row = holding(table, 5)
    table.truncate(row, torch.tensor(2))  # type: ignore[arg-type]
    child = table.fork(row, np.int8(1))
    assert (len(table.pages_of(row)), len(table.pages_of(child))) == (2, 1)
    with pytest.raises(WrongState, match="is not admitted"):
        table.truncate(np.array([row]), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("of", [np.int8, np.uint64, np.array, torch.tensor], ids=lambda of: of.__name__)
def test_a_row_is_handed_out_again_as_an_int_however_it_was_freed(of: Callable[[int], Any]) -> None:
    """The table kept what it was given: the next request's row was a tensor, which its owner could change."""
    table = make_table(page_size=1)
    row = holding(table, 5)
    given = of(row)
    table.truncate(given, 3)
    table.free(given)
    assert table.next_row.__class__ is table.admit().__class__ is int


@pytest.mark.parametrize("row", [True, 1.0, "1", None, float("nan"), np.True_, np.array([1]), 2**64], ids=repr)
def test_what_names_no_row_is_not_admitted(row: Any) -> None:
    table = make_table()
    table.admit()
    assert not table.is_admitted(row)


@pytest.mark.parametrize(
    "rows", [1, np.array(1, np.int32), [[1], [2, 3]], torch.ones(1, dtype=torch.bfloat16)], ids=str
)
def test_what_is_no_vector_of_integers_is_refused(rows: Any) -> None:
    windowed = make_table(windows=WINDOWS)
    holding(windowed, 8)
    with pytest.raises(BadBatch, match="rows "):
        StepBatch(rows, rows, rows)
    for call in (windowed.reserve_all, windowed.mark_stored, windowed.evict, windowed.kept.keep_all):
        with pytest.raises(BadBatch, match="rows "):
            call(rows, rows)
    square = np.ones((2, 2), np.int32)
    with pytest.raises(BadBatch, match="rows has shape"):
        windowed.reserve_all(square, square)


@pytest.mark.parametrize("row", [-1, 0, 2, 4, 2**31 - 1])
def test_a_row_that_is_not_admitted_is_refused_by_every_call_and_has_no_room(row: int) -> None:
    table = make_table(windows=WINDOWS)
    rows = [holding(table, 8) for _ in range(3)]
    table.free(rows.pop(1))
    calls = table.reserve_all, table.mark_stored, table.evict, table.kept.keep_all, table.kept.states_due
    for call in calls:
        call([], [])  # no row, so nothing to refuse
        with pytest.raises(WrongState, match=f"row {row} is not admitted"):
            call([row], [0])
    assert table.room([*rows, row]).tolist() == [8, 8, -1]
    assert not table.is_reserved([row], [0])


def test_sizes_of_narrow_types_count_as_their_values() -> None:
    """255 rows of np.uint8 and one were none, and the pages of a window were counted in 8 bits too."""
    sizes: dict[str, Any] = {"max_num_seqs": np.uint8(255), "max_kv_len": np.uint8(20), "page_size": np.int8(4)}
    window: Any = np.uint8(200)
    table = RequestTable(
        num_pages=9,
        device=torch.device("cpu"),
        windows=(SpacePages(Space.SWA, 9, "swa_pages", window, window),),
        **sizes,
    )
    assert (table.num_free_rows, table.width, table.page_size.__class__) == (255, 5, int)
    assert table.spaces[1].pages.first_needed(404, 4) == 1
    for name, value in (("max_kv_len", 20.0), ("page_size", True), ("max_num_rows", None), ("max_num_seqs", "3")):
        with pytest.raises(BadSetting, match=f"^{name} is .*; it must be a whole number"):
            RequestTable(num_pages=9, device=torch.device("cpu"), **{**sizes, name: value})
    with pytest.raises(BadSetting, match=r"^swa_pages is 9\.0; it must be a whole number"):
        SpacePages(Space.SWA, 9.0, "swa_pages")  # type: ignore[arg-type]
    with pytest.raises(NeverFits, match="page_size is 0; each must be at least 1"):
        RequestTable(num_pages=9, device=torch.device("cpu"), **{**sizes, "page_size": 0})
    for num_pages, page_size in ((2**62, 4), (9, 2**70)):
        with pytest.raises(NeverFits, match=f"{num_pages} pages of {page_size} tokens overflow an int32 slot id"):
            RequestTable(num_pages=num_pages, device=torch.device("cpu"), **{**sizes, "page_size": page_size})


def test_a_space_by_another_name_and_a_part_of_a_page_are_refused() -> None:
    table = make_table()
    row = holding(table, 5)
    with pytest.raises(BadSetting, match=r"space is 'full'; give a Space, such as Space\.FULL"):
        table.pages_of(row, "full")  # type: ignore[arg-type]
    for page in (1.0, True, "1", None):
        with pytest.raises(BadSetting, match=r"^page is .*; it must be a whole number"):
            table.kept.num_holders(page)  # type: ignore[arg-type]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda space: Space(space.value)], ids=["copied", "by name"])
def test_an_equal_space_is_the_same_space(again: Callable[[Space], Space]) -> None:
    """Rows were said to have no pages in the FULL space."""
    table = make_table()
    row, space = holding(table, 5), again(Space.FULL)
    assert table.space(space) is table.full
    assert table.pages_of(row, space).tolist() == table.pages_of(row).tolist()
    assert table.num_held(row, space) == table.num_held(row)


def test_a_second_free_is_an_error() -> None:
    table = make_table()
    row = table.admit()
    table.free(row)
    with pytest.raises(WrongState, match="freed already"):
        table.free(row)
    with pytest.raises(WrongState):
        table.free(0)


def test_a_page_that_is_still_to_be_copied_is_not_handed_out() -> None:
    table = make_table()
    parent = holding(table, 6)
    child = table.fork(parent, 6)
    whole, shared = table.pages_of(parent).tolist()
    table.reserve(child, 7)
    table.free(parent)
    free = table.full.num_free_pages
    other = holding(table, 4 * free)
    assert shared not in table.pages_of(other)
    with pytest.raises(OutOfPages):
        holding(table, 1)
    table.space(Space.FULL).copies_made()
    assert table.full.num_free_pages == 1
    assert whole in table.pages_of(child)


def test_a_copy_of_a_page_that_is_still_to_be_copied_is_one_of_its_source() -> None:
    table = make_table()
    parent = holding(table, 6)
    shared = int(table.pages_of(parent)[1])
    child = table.fork(parent, 6)
    table.reserve(child, 7)
    grandchild = table.fork(child, 6)
    table.reserve(grandchild, 7)
    own = [int(table.pages_of(row)[1]) for row in (child, grandchild)]
    assert table.full.pending.copies == dict.fromkeys(own, shared)


def test_a_page_whose_copy_is_dropped_is_handed_out_again() -> None:
    table = make_table()
    parent = holding(table, 6)
    child = table.fork(parent, 6)
    table.reserve(child, 7)
    table.free(parent)
    table.free(child)
    assert table.full.num_free_pages == table.full.num_usable_pages
    table.full.copies_made()
    assert table.full.num_free_pages == table.full.num_usable_pages, "a page is free twice"


def test_sharing_more_than_is_held_is_refused() -> None:
    table = make_table()
    row = holding(table, 5)
    with pytest.raises(BadBatch, match="row 1 has room for 5 tokens; 6 of them cannot be shared"):
        table.fork(row, 6)


@pytest.mark.parametrize(
    ("rows", "kv_len", "message"),
    [
        ([0], [1], "row 0 is not a request's row"),
        ([9], [1], "row 9 is not a request's row"),
        ([2], [1], "row 2 of sequence 0 is not admitted"),
        ([1], [9], r"reserve\(1, 9\)"),
        ([1, 1], [2, 2], "occurs twice"),
    ],
)
def test_a_batch_that_the_table_does_not_know_is_refused(rows: list[int], kv_len: list[int], message: str) -> None:
    table = make_table()
    holding(table, 8)
    with pytest.raises(BadBatch, match=message):
        table.checks.check(batch_of(rows, kv_len))


def test_a_row_that_is_named_twice_takes_no_page() -> None:
    table = make_table()
    row, free = table.admit(), table.full.num_free_pages
    with pytest.raises(BadBatch, match="occurs twice"):
        table.reserve_all(np.array([row, row], np.int32), np.array([4, 4], np.int32))
    assert table.full.num_free_pages == free
    assert not table.is_empty, "a request without pages is admitted"
    table.free(row)
    assert table.is_empty


@pytest.mark.parametrize("kv_len", [-5, 8.5, True, "3", None, float("nan")])
def test_a_reservation_of_no_length_is_refused(kv_len: Any) -> None:
    table = make_table()
    row = table.admit()
    with pytest.raises(BadSetting, match=r"^kv_len is "):
        table.reserve(row, kv_len)
    with pytest.raises(BadBatch, match="kv_len holds float64"):
        table.reserve_all(np.array([row], np.int32), np.array([8.5]))
    assert not len(table.pages_of(row))


@pytest.mark.parametrize(
    ("rows", "kv_len", "message"),
    [
        ([1, 1], [3, 1], "row 1 occurs twice"),
        (np.array([2**32 + 1]), np.array([3]), "rows holds values outside of int32"),
        ([1], np.array([2**32 + 3]), "kv_len holds values outside of int32"),
        ([1], [3.5], "kv_len holds float64; it must hold integers"),
        ([1, 2], [3], r"2 rows and kv_len \[3\]"),
        ([1], [-3], r"kv_len \[-3\] were given"),
        ([1], [9], "row 1 has room for 8 tokens; 9 of them cannot be stored"),
    ],
)
def test_what_says_nothing_of_rows_marks_none_stored(rows: Any, kv_len: Any, message: str) -> None:
    table = make_table()
    for _ in range(2):
        holding(table, 8)
    with pytest.raises(BadBatch, match=message):
        table.mark_stored(rows, kv_len)
    assert table.tokens.stored_len.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("of", [list, torch.tensor, np.array, tuple], ids=lambda of: of.__name__)
def test_rows_and_lengths_are_any_integers(of: Callable[[list[int]], Any]) -> None:
    """Lists, tensors and int64 arrays are allowed, as in a batch."""
    table = make_table()
    rows = [table.admit(), table.admit()]
    table.reserve_all(of(rows), of([8, 3]))
    table.mark_stored(of(rows), of([8, 3]))
    table.evict(of(rows), of([8, 3]))
    assert [len(table.pages_of(row)) for row in rows] == [2, 1]
    assert table.tokens.stored_len.tolist() == [0, 8, 3, 0]
    for call in (table.reserve_all, table.mark_stored):
        for given in ((of(rows), of([8])), (np.array(rows, np.int32), np.array([8], np.int32))):
            with pytest.raises(BadBatch, match=r"2 rows and kv_len \[8\]"):
                call(*given)


def test_a_row_that_was_checked_in_another_type_is_another_row() -> None:
    """Row 1 as int64 has the bytes of rows 1 and 0 as int32."""
    table = make_table()
    row = table.admit()
    table.reserve_all(np.array([row]), np.array([5]))
    table.mark_stored([row], [5])
    with pytest.raises(BadBatch, match="row 0 is not a request's row"):
        table.checks.check(batch_of([row, 0], [5, 0], [5, 0]))
    table = make_table()
    table.admit()
    with pytest.raises(BadBatch, match="row 0 is not a request's row"):
        table.checks.check(batch_of([1, 0], [0, 0], [0, 0]))
    table.reserve_all(np.array([row]), np.array([5], np.int32))
    with pytest.raises(BadBatch, match="row 0 is not a request's row"):
        table.checks.check(batch_of([row, 0], [5, 0], [5, 0]))
    table.checks.check(batch_of([row], [5], [5]))


def test_what_is_short_of_pages_says_how_many() -> None:
    """A scheduler drops or preempts until that many more are free."""
    table = make_table(num_pages=6)
    row, other = table.admit(), table.admit()
    table.reserve(row, 12)
    for reserve in (lambda: table.reserve(other, 16), lambda: table.reserve_all([other], [16])):
        with pytest.raises(OutOfPages) as caught:
            reserve()  # type: ignore[no-untyped-call]
        assert caught.value.missing == 2
    table.truncate(row, 4)
    table.reserve(other, 16)


def test_updates_carry_the_newest_entry_of_a_cell() -> None:
    table = make_table()
    row = holding(table, 8)
    table.free(row)
    holding(table, 4)
    device = np.full_like(table.full.entries_host, 77)
    device[table.full.entries_host == 0] = 0
    for r, column, entry in table.full.pending_updates().tolist():
        device[r, column] = entry
    assert np.array_equal(device, table.full.entries_host)


def test_a_row_that_got_pages_by_itself_keeps_them_when_all_rows_are_reserved_for_less() -> None:
    table = make_table(num_pages=20, max_kv_len=64)
    rows = np.array([table.admit(), table.admit()], np.int32)
    table.reserve_all(rows, np.array([3, 3], np.int32))
    table.reserve(int(rows[0]), 21)
    held = table.pages_of(int(rows[0])).tolist()
    table.reserve_all(rows, np.array([9, 5], np.int32))
    assert table.pages_of(int(rows[0])).tolist() == held
    assert [table.num_held(int(row)) for row in rows] == [6, 2]
    table.reserve_all(rows, np.array([25, 9], np.int32))
    assert [table.num_held(int(row)) for row in rows] == [7, 3]
    assert table.full.num_free_pages == 19 - 10


@pytest.mark.parametrize(("kept", "shared"), [(8, True), (7, False), (None, False)])
def test_a_row_that_needs_no_copy_takes_the_last_page(kept: int | None, shared: bool) -> None:
    """Its last page is full, or its own, whether it was cut or not."""
    table = make_table(num_pages=4)
    row = holding(table, 8)
    if kept is not None:
        table.truncate(row, kept)
    table.reserve(table.fork(row, 8) if shared else row, 12)
    assert table.full.num_free_pages == 0


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_row_that_has_room_keeps_it_when_it_is_reserved_for_less(shared: bool, alone: bool) -> None:
    """It takes no page, not even a copy of a page that it shares."""
    table = make_table(num_pages=4)
    row = holding(table, 6)
    child = table.fork(row, 6) if shared else row
    holding(table, 4)
    assert table.full.num_free_pages == 0
    if alone:
        table.reserve(child, 5)
    else:
        table.reserve_all([child], [5])
    assert table.is_reserved([child], [6])
