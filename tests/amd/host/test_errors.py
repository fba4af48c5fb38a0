"""An error about too little room says whether it may fit later."""

import re

import numpy as np
import pytest
import torch

from rocm_attn.errors import CapacityExceeded, FitsLater, NeverFits, OutOfPages, OutOfRows
from rocm_attn.paging.index_spaces import Space
from rocm_attn.paging.page_table import SpacePages
from rocm_attn.paging.request_table import RequestTable
from tests.amd.house.source_tree import HOUSES, ROOT, python_files


def test_every_error_of_capacity_says_whether_it_may_fit_later() -> None:
    files = (path for folders in HOUSES.values() for folder in folders for path in python_files(ROOT / folder))
    raised = {name for path in files for name in re.findall(r"\braise (\w+)\(", path.read_text())}
    assert {"OutOfPages", "OutOfRows", "NeverFits"} <= raised
    assert "CapacityExceeded" not in raised
    assert issubclass(FitsLater, CapacityExceeded)
    assert issubclass(NeverFits, CapacityExceeded)
    assert not issubclass(NeverFits, FitsLater)


def make_table(num_pages: int, swa_pages: int) -> RequestTable:
    """Returns a table with two rows of up to 40 tokens in pages of 4; the SWA space has a window of 5."""
    return RequestTable(
        max_num_seqs=2,
        max_kv_len=40,
        num_pages=num_pages,
        page_size=4,
        device=torch.device("cpu"),
        windows=[SpacePages(Space.SWA, swa_pages, "swa_pages", window_left=5)],
    )


def rows_of(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def test_what_others_hold_fits_later_and_what_the_pool_cannot_hold_never() -> None:
    table = make_table(num_pages=7, swa_pages=7)
    one, other = table.admit(), table.admit()
    with pytest.raises(OutOfRows, match="all 2 rows are in use") as later:
        table.admit()
    assert isinstance(later.value, FitsLater)
    table.reserve(other, 8)
    with pytest.raises(OutOfPages, match="row 1 needs 5 more pages for 20 tokens and 4 are free"):
        table.reserve(one, 20)
    with pytest.raises(OutOfPages, match="row 1 needs 5 more pages for 20 tokens and 4 are free"):
        table.reserve_all(rows_of(one), rows_of(20))
    for reserve in (table.reserve, lambda row, kv_len: table.reserve_all(rows_of(row), rows_of(kv_len))):
        with pytest.raises(NeverFits, match="row 1 needs 7 pages for 28 tokens and there are 6; raise num_pages"):
            reserve(one, 28)
        with pytest.raises(NeverFits, match="41 tokens exceed the 40 that a row can hold; raise max_kv_len"):
            reserve(one, 41)
    table.free(other)
    table.reserve(one, 20)


def test_a_window_that_never_fits_says_how_a_row_gets_there_all_the_same() -> None:
    table = make_table(num_pages=20, swa_pages=5)
    row = table.admit()
    message = (
        r"row 1 needs 8 pages of the SWA space for 32 tokens and there are 4; raise swa_pages, or continue by fewer "
    )
    with pytest.raises(NeverFits, match=message):
        table.reserve(row, 32)
    for kv_len in range(8, 33, 4):
        table.evict(rows_of(row), rows_of(kv_len - 4))
        table.reserve(row, kv_len)
    assert table.num_held(row, Space.SWA) == 3
