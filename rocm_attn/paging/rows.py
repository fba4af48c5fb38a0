"""Rows: the state of a request table's rows (lengths, room, pages), which the parts of the table share."""

from collections.abc import Sequence
from functools import partial
from operator import index

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.step_batch import Int32Array, Integers, as_int32
from rocm_attn.errors import BadBatch, BadSetting, OutOfRows, WrongState
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.machine.settings import whole_number
from rocm_attn.paging.index_spaces import RESERVED_ROW, Space
from rocm_attn.paging.page_table import PageTable, Places, TableGuards
from rocm_attn.paging.row_states import RowStates

# Rows whose next reservation is checked for any length.
ALWAYS = np.iinfo(np.int32).min
# The rows and lengths of no step.
NO_ROOM = (b"", b"")
_NO_PAGES: Int32Array = np.empty(0, np.int32)


class RowGenerations:
    """Changes that make a row a different one: admit, free, truncate and admit_over; and fork and keep, which share it.

    A row's generation is the number of its last change, counted over the whole table. So a step has to remember only
    one number, which costs nothing.

    last_change: the number of the table's last change
    """

    __slots__ = ("_of_row", "_of_share", "last_change")

    def __init__(self, num_rows: int) -> None:
        self._of_row: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self._of_share: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.last_change = 0

    def change(self, rows: Int32Array | int) -> None:
        """Notes that rows are different rows from now on."""
        self.last_change += 1
        self._of_row[rows] = self.last_change

    def share(self, rows: Int32Array | int) -> None:
        """Notes that pages of rows have other holders too from now on."""
        self.last_change += 1
        self._of_share[rows] = self.last_change

    def changed_since(self, change: int, rows: Int32Array) -> npt.NDArray[np.bool_]:
        """The rows that changed after a change of the table. rows: int32 [n]"""
        changed: npt.NDArray[np.bool_] = self._of_row[rows] > change
        return changed

    def shared_since(self, change: int, rows: Int32Array) -> npt.NDArray[np.bool_]:
        """The rows whose pages were shared after a change of the table. rows: int32 [n]"""
        shared: npt.NDArray[np.bool_] = self._of_share[rows] > change
        return shared


class Rows:
    """The state of a table's rows.

    reserved_len: int32 [num_rows], tokens that the row's owner reserved room for; -1: not admitted
    capacity:     int32 [num_rows], tokens that the row's pages hold; -1: not admitted
    look_from:    int32 [num_rows], the first kv_len for which a row may need a page, or a copy of one. Below it a
                  reservation only sets a number
    free:         rows that are not admitted, the next one last
    known_rows:   rows that were in the table, each named once, as bytes, and as int64 for NumPy's faster look-up
    known_room:   rows and kv_len, as bytes, that had room at the last check. No row has gone back since
    num_cuts:     how often a row has given pages back and lived on
    must_fit:     raises NeverFits for more tokens than a row can hold
    """

    def __init__(
        self,
        spaces: tuple[PageTable, ...],
        states: RowStates,
        *,
        num_rows: int,
        max_kv_len: int,
        page_size: int,
        guards: TableGuards,
    ) -> None:
        self.spaces, self.states, self.page_size = spaces, states, page_size
        self.windowed = tuple(table for table in spaces if table.window_left != ALL_KEYS)
        self.must_fit = partial(guards.row_width, max_kv_len)
        self.reserved_len = np.full(num_rows, -1, np.int32)
        self.capacity = np.full(num_rows, -1, np.int32)
        self.look_from = np.full(num_rows, ALWAYS, np.int32)
        self.tokens = guards.new_tokens(num_rows)
        self.tokens.on_left_out = states.truncate
        self.generations = RowGenerations(num_rows)
        self.free = list(range(num_rows - 1, RESERVED_ROW, -1))
        self.known_rows = b"", np.empty(0, np.int64)
        self.known_room, self.num_cuts = NO_ROOM, 0
        self._seen = np.zeros(num_rows, np.int32)

    def space(self, space: Space) -> PageTable:
        """The page table of a space. Raises BadSetting if rows have no pages there."""
        for table in self.spaces:
            if table.space is space or (isinstance(space, Space) and table.space == space):
                return table
        if not isinstance(space, Space):
            raise BadSetting(f"space is {space!r}; give a Space, such as Space.FULL")
        raise BadSetting(f"rows have no pages in the {space.name} space; build the runtime with swa_pages")

    @property
    def next_row(self) -> int:
        """The row that comes next. Raises OutOfRows if every row is taken."""
        if not self.free:
            raise OutOfRows(f"all {len(self.capacity) - 1} rows are in use; free a request or raise max_num_rows")
        return self.free[-1]

    def begin(self, pages: Sequence[Int32Array], kv_len: int, stored_len: int, parent: int = RESERVED_ROW) -> int:
        """Admits a row with room for kv_len tokens in pages that have other holders too.

        pages:      of each space, from page_no 0 on; 0 if there is none
        stored_len: tokens that are stored in them
        parent:     the row that has them; the reserved one if they were kept
        Raises OutOfRows, and BadBatch if a page is missing that steps from kv_len on see; nothing is changed then.
        """
        first = self.first_held(pages, kv_len, parent)
        row = self.admit()
        self.capacity[row], self.reserved_len[row] = len(pages[0]) * self.page_size, kv_len
        for table, begin, held in zip(self.spaces, first, pages, strict=True):
            table.begin(row, begin, held, parent)
        self.tokens.mark(row, stored_len)
        self.tokens.raise_first_writable(row, kv_len)
        return row

    def first_held(self, pages: Sequence[Int32Array], kv_len: int, parent: int) -> list[int]:
        """The first page_no that begin() takes in each space. Raises what begin() raises, and changes nothing."""
        first = [table.first_held(held, kv_len, parent) for table, held in zip(self.spaces, pages, strict=True)]
        _ = self.next_row
        return first

    def admit(self) -> int:
        """Admits a row without pages. Raises OutOfRows."""
        row = self.next_row
        self.generations.change(row)
        self.capacity[row] = self.reserved_len[row] = 0
        for table in self.windowed:
            table.begin(row, 0, _NO_PAGES)
        self.states.begin(row)
        return self.free.pop()  # last, so that no interrupt loses a row

    def end(self, row: int) -> int:
        """One past the last page_no for which row has room."""
        return int(self.capacity[row]) // self.page_size

    def is_admitted(self, row: int) -> bool:
        """True if a row was admitted and not freed. A bool, a float, an array or None is no row."""
        try:
            number = RESERVED_ROW if isinstance(row, bool) else index(row)
        except TypeError:
            return False
        return RESERVED_ROW < number < len(self.capacity) and bool(self.capacity[number] >= 0)

    def must_be_admitted(self, row: int) -> int:
        """Returns the row as an int, which the table may keep. Raises WrongState."""
        if not self.is_admitted(row):
            raise WrongState(f"row {row} is not admitted: it was never handed out, or it was freed already")
        return index(row)

    def must_all_be_admitted(self, rows: Places) -> None:
        outside = int(rows.min()) <= RESERVED_ROW or int(rows.max()) >= len(self.capacity)
        if outside or (self.capacity[rows] < 0).any():
            for row in rows.tolist():
                self.must_be_admitted(row)

    def must_be_distinct(self, rows: Places) -> None:
        order = np.arange(len(rows), dtype=np.int32)
        self._seen[rows] = order
        twice = self._seen.take(rows) != order
        seq = int(twice.argmax())
        if twice[seq]:
            raise BadBatch(f"row {rows[seq]} occurs twice in one step; give each sequence its own row")

    def must_have_room(self, row: int, kv_len: int, refused: str) -> int:
        """Returns kv_len as an int. Raises BadSetting for a part of a token, and BadBatch without room."""
        length = whole_number("kv_len", kv_len)
        if not 0 <= length <= self.reserved_len[row]:
            raise BadBatch(f"row {row} has room for {self.reserved_len[row]} tokens; {refused}")
        return length

    def forget(self, row: int) -> None:
        for table in self.spaces:
            table.cut(np.array([row]), 0, np.array([self.end(row)]))
        self.generations.change(row)
        self.known_room, self.look_from[row] = NO_ROOM, ALWAYS
        self.tokens.forget(row, 0)
        self.tokens.lower_first_writable(row, 0)
        self.capacity[row] = self.reserved_len[row] = -1
        if row not in self.free:  # an interrupt in begin() may have left it there
            self.free.append(row)


def one_each(rows: Integers, name: str, numbers: Integers) -> tuple[Int32Array, Int32Array]:
    """Returns rows, and a non-negative number for each. Raises BadBatch."""
    of_rows, of_each = as_int32("rows", rows), as_int32(name, numbers)
    if of_rows.shape != of_each.shape or (of_each < 0).any():
        raise BadBatch(
            f"{len(of_rows)} rows and {name} {of_each.tolist()} were given; give one number of at least 0 per row"
        )
    return of_rows, of_each
