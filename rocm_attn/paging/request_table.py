"""RequestTable: the rows that requests hold, how long each may be, and in each space the pages that its KV lies in.

Row 0 and page 0 are reserved: padded sequences point there. Pages are counted, so that requests can share a prefix;
a partly filled page that several rows hold is copied before one of them goes on in it. With an SWA space, a row has
pages in both spaces, by one length. What is known of a row's tokens, and may be done with them: stored_tokens.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rocm_attn.batch.inputs import ON_HOST, DeviceInputs
from rocm_attn.batch.prefixes import SharedPrefixes
from rocm_attn.batch.step_batch import INT32_MAX, Int32Array, StepBatch
from rocm_attn.errors import BadBatch, BadSetting, CapacityExceeded, OutOfPages, WrongState
from rocm_attn.kernels.metadata.step_tensors import ALL_KEYS
from rocm_attn.paging.index_spaces import RESERVED_ROW, Space, num_pages
from rocm_attn.paging.page_table import ALL_TABLE_GUARDS, PageTable, PendingChanges, SpacePages, TableGuards
from rocm_attn.paging.stored_tokens import StoredTokens


class RequestTable:
    """Rows of pages, with reference counts.

    max_num_seqs: requests that can be admitted at a time (row 0 comes on top)
    max_kv_len:   tokens that a row can hold
    num_pages:    pages of the full space's pool, the reserved page 0 included
    windows:      other spaces, whose pages are given back when they have left the window
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_kv_len: int,
        num_pages: int,
        page_size: int,
        device: torch.device,
        windows: Sequence[SpacePages] = (),
        guards: TableGuards = ALL_TABLE_GUARDS,
    ) -> None:
        if max_num_seqs < 1 or max_kv_len < 1:
            raise CapacityExceeded(
                f"max_num_seqs is {max_num_seqs} and max_kv_len is {max_kv_len}; both must be at least 1"
            )
        self._row_width = guards.row_width
        self.page_size = page_size
        self.max_kv_len = max_kv_len
        self.width = (max_kv_len + page_size - 1) // page_size
        if self.width * page_size > INT32_MAX:
            raise CapacityExceeded(
                f"max_kv_len is {max_kv_len}; lengths are int32, so use at most {INT32_MAX // page_size * page_size}"
            )
        self.spaces = tuple(
            PageTable(
                pages,
                num_rows=max_num_seqs + 1,
                width=self.width,
                page_size=page_size,
                device=device,
                guards=guards,
            )
            for pages in (SpacePages(Space.FULL, num_pages), *windows)
        )
        self._full = self.spaces[0]
        self._windowed = tuple(table for table in self.spaces if table.pages.window_left != ALL_KEYS)
        # Tokens the row's owner asked room for, and tokens the row's pages hold; -1 in both: not admitted.
        self._reserved_len = np.full(max_num_seqs + 1, -1, np.int32)
        self._capacity = np.full(max_num_seqs + 1, -1, np.int32)
        self.tokens = StoredTokens(max_num_seqs + 1, guards.shared_floor)
        self._free_rows = list(range(max_num_seqs, RESERVED_ROW, -1))
        self._seen = np.zeros(max_num_seqs + 1, np.int32)
        self._rows_checked = b""
        self._num_forgotten = 0
        self._prefixes_checked: tuple[SharedPrefixes | None, bytes, int] = (None, b"", 0)
        self._order = np.arange(max_num_seqs, dtype=np.int32)

    @property
    def entries(self) -> torch.Tensor:
        """The full space's pages on the device, int32 [num_rows, width]."""
        return self._full.entries

    @property
    def entries_host(self) -> Int32Array:
        """The full space's pages, int32 [num_rows, width]."""
        return self._full.entries_host

    @property
    def pending(self) -> PendingChanges:
        """What the device does not know yet of the full space."""
        return self._full.pending

    @property
    def num_usable_pages(self) -> int:
        """Pages of the full space that rows can hold."""
        return self._full.num_usable_pages

    @property
    def num_free_pages(self) -> int:
        """Pages of the full space that no row holds."""
        return self._full.num_free_pages

    @property
    def fewest_free_pages(self) -> int:
        """Pages that are free in the space that has the fewest."""
        return min(table.num_free_pages for table in self.spaces)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def space(self, space: Space) -> PageTable:
        """The pages of a space. Raises BadSetting where rows have none there."""
        for table in self.spaces:
            if table.space is space:
                return table
        raise BadSetting(f"rows have no pages in the {space.name} space; build the runtime with swa_pages")

    def admit(self) -> int:
        """A fresh row without pages. Raises CapacityExceeded when every row is taken."""
        if not self._free_rows:
            raise CapacityExceeded(
                f"all {len(self._capacity) - 1} rows are taken; free a request or raise max_num_seqs"
            )
        row = self._free_rows.pop()
        self._capacity[row] = 0
        self._reserved_len[row] = 0
        return row

    def reserve(self, row: int, kv_len: int) -> None:
        """Make room for kv_len tokens in row, in every space. What the row holds beyond them stays.

        Raises OutOfPages, CapacityExceeded beyond max_kv_len and WrongState for a row that is not admitted;
        nothing is changed then.
        """
        self._must_be_admitted(row)
        self._row_width.require(kv_len, self.max_kv_len)
        for table in self.spaces:
            short = self._short(table, row, kv_len)
            if short > table.num_free_pages:
                raise OutOfPages(
                    f"row {row} needs {short} more pages{table.pages.of} for {kv_len} tokens and "
                    f"{table.num_free_pages} are free; free a request or raise {table.pages.knob}"
                )
        reserved = int(self._reserved_len[row])
        if kv_len <= reserved:
            return
        end, new_end = self._end(row), num_pages(kv_len, self.page_size)
        for table in self.spaces:
            if self._shares_last_page(table, row):
                table.own(row, reserved // self.page_size)
            table.append(row, end, new_end)
        self._capacity[row] = max(end, new_end) * self.page_size
        self._reserved_len[row] = kv_len

    def reserve_all(self, rows: Int32Array, kv_len: Int32Array) -> None:
        """reserve(rows[i], kv_len[i]) for every i, or for none: what raises leaves all rows as they were.

        rows, kv_len: int32 [num_seqs]; rows are distinct. Only rows that need a page cost a Python iteration.
        """
        if len(rows) == 0:
            return
        self._must_all_be_admitted(rows)
        self._row_width.require(int(kv_len.max()), self.max_kv_len)
        reserved = self._reserved_len[rows]
        grows = kv_len > reserved
        last_page_no = np.minimum(reserved // self.page_size, self.width - 1)
        shares = self._full.shares(rows, last_page_no)
        for table in self._windowed:
            shares |= table.shares(rows, last_page_no)
        shares &= reserved % self.page_size != 0
        slow = np.flatnonzero(grows & ((kv_len > self._capacity[rows]) | shares))
        if len(slow):
            self._reserve_slowly(rows[slow].tolist(), kv_len[slow].tolist())
        self._reserved_len[rows] = np.maximum(reserved, kv_len)

    def _reserve_slowly(self, rows: list[int], kv_len: list[int]) -> None:
        for table in self.spaces:
            # An upper bound: of two rows that share a page only one needs a copy.
            short = sum(self._short(table, row, length) for row, length in zip(rows, kv_len, strict=True))
            if short > table.num_free_pages:
                raise OutOfPages(
                    f"{len(rows)} sequences need more pages{table.pages.of} than the {table.num_free_pages} that are "
                    f"free; free a request or raise {table.pages.knob}"
                )
        for row, length in zip(rows, kv_len, strict=True):
            self.reserve(row, length)

    def evict(self, rows: Int32Array, kv_len: Int32Array) -> None:
        """Give back what no later step needs of rows[i], which have kv_len[i] tokens stored or on their way.

        Pages before the window of the token at kv_len[i], and before what is kept for going back. Every step does this
        by itself for the tokens before its own new ones; before a step, it makes room for reserve(). A row that has
        no pages yet takes none for these tokens later: their KV is not to be seen.

        rows, kv_len: int32 [num_seqs]; lengths that are no more than the device's
        Raises WrongState for a row that is not admitted.
        """
        if self._windowed and len(rows):
            self._must_all_be_admitted(rows)
        for table in self._windowed:
            table.evict(rows, kv_len, self._capacity[rows] // self.page_size)

    def fork(self, row: int, kv_len: int) -> int:
        """A new row that shares the first kv_len tokens of row, page by page. Neither row stores these again.

        To compute some of them again, share fewer, or truncate() the row that goes back.
        Raises CapacityExceeded, and BadBatch for tokens that row has no room for, or has no window of any more.
        """
        self._must_be_admitted(row)
        if not 0 <= kv_len <= self._reserved_len[row]:
            raise BadBatch(f"row {row} holds {self._reserved_len[row]} tokens; {kv_len} of them cannot be shared")
        child, end = self.admit(), num_pages(kv_len, self.page_size)
        try:
            for table in reversed(self.spaces):  # what may be refused comes first
                table.share(row, child, kv_len, end)
        except BadBatch:
            self._forget(child)
            raise
        self._capacity[child] = end * self.page_size
        self._reserved_len[child] = kv_len
        self.tokens.share(row, child, kv_len)
        return child

    def truncate(self, row: int, kv_len: int) -> None:
        """Row goes back: it keeps its first kv_len tokens, and gives back the pages after them.

        Where row shares pages this is how it goes back at all: the next reserve() copies the page that kv_len lies in,
        if another row holds it too, and takes others for those after it. A row that shares none may as well begin a
        step earlier. Raises WrongState, and BadBatch for more tokens than row has room for.
        """
        self._must_be_admitted(row)
        if not 0 <= kv_len <= self._reserved_len[row]:
            raise BadBatch(f"row {row} has room for {self._reserved_len[row]} tokens; it cannot go back to {kv_len}")
        end, new_end = self._end(row), num_pages(kv_len, self.page_size)
        self._num_forgotten += 1
        # In this order an interrupt leaves no token that counts as stored without its page, and none that may be stored
        # in a page that another row holds.
        self.tokens.forget(row, kv_len)
        self._reserved_len[row] = kv_len
        self._capacity[row] = new_end * self.page_size
        for table in self.spaces:
            table.cut(row, new_end, end)
        self.tokens.lower_from(row, kv_len)

    def mark_stored(self, rows: Int32Array, kv_len: Int32Array) -> None:
        """Say that the K and V of the first kv_len[i] tokens of rows[i] are in their pages, in every layer.

        For a caller who filled the pages by other means than steps that store in every layer: KV that was computed
        elsewhere, or read back from where it was kept.

        rows, kv_len: integers [num_seqs]; rows are distinct and have room for kv_len
        Raises WrongState, BadBatch.
        """
        rows, kv_len = np.asarray(rows, np.int32), np.asarray(kv_len, np.int32)
        if len(rows) == 0:
            return
        self._must_all_be_admitted(rows)
        short = (kv_len > self._reserved_len[rows]) | (kv_len < 0)
        if short.any():
            seq = int(short.argmax())
            raise BadBatch(
                f"row {rows[seq]} has room for {self._reserved_len[rows[seq]]} tokens; {kv_len[seq]} of them cannot be "
                "stored"
            )
        self.tokens.stored_len[rows] = kv_len

    def free(self, row: int) -> None:
        """Give a row and its pages back. Raises WrongState for a row that is not admitted, a second free included."""
        self._must_be_admitted(row)
        for table in self.spaces:
            table.release(row, self._end(row))
        self._forget(row)

    def pending_updates(self) -> Int32Array:
        """PageTable.pending_updates of the full space."""
        return self._full.pending_updates()

    def check_batch(self, batch: StepBatch) -> None:
        """Raise BadBatch unless every row is admitted, named once, has room for its kv_len, and holds its windows.

        Also unless rows that share a prefix hold the same pages there, whole ones.
        """
        rows = batch.rows
        if len(rows) == 0:
            return
        # The rows of a step are mostly those of the step before it, and comparing bytes costs next to nothing.
        named = rows.tobytes()
        if named != self._rows_checked:
            self._check_rows(rows)
            self._rows_checked = named
        reserved = self._reserved_len.take(rows)  # -1 in rows that are not admitted, the reserved row among them
        short = reserved < batch.kv_len
        if short[short.argmax()]:
            self._refuse_rows(rows)
            self._refuse_lengths(batch)
        for table in self._windowed:
            table.check_windows(rows, batch.kv_len - batch.q_len)
        if isinstance(batch.prefixes, SharedPrefixes):
            # While rows stay admitted, the whole pages before their last token stay theirs.
            shared = (batch.prefixes, named, self._num_forgotten)
            if shared != self._prefixes_checked:
                self._check_prefixes(rows, batch.prefixes)
                self._prefixes_checked = shared

    def check_stored(self, batch: StepBatch) -> None:
        """Raise BadBatch where a step begins after the tokens that are stored: it would attend to what is not there.

        A length that only the device knows may be shorter than its bound: such a step is not looked at.
        """
        if batch.num_seqs and batch.inputs.kv_len_on_host:
            late = batch.kv_len - batch.q_len > self.tokens.stored_len.take(batch.rows)
            if late[late.argmax()]:
                self._refuse_gaps(batch, batch.kv_len - batch.q_len)

    def require_stored(self, batch: StepBatch) -> None:
        """As check_stored, for a step that stores nothing itself: all of its tokens must be there."""
        if batch.num_seqs and batch.inputs.kv_len_on_host:
            self._refuse_gaps(batch, batch.kv_len)

    def _refuse_gaps(self, batch: StepBatch, needed: Int32Array) -> None:
        stored = self.tokens.stored_len[batch.rows]
        gaps = (needed > stored) & (batch.q_len > 0)
        if gaps.any():
            seq = int(gaps.argmax())
            row = batch.rows[seq]
            raise BadBatch(
                f"sequence {seq} attends to the first {needed[seq]} tokens of row {row}, of which {stored[seq]} are "
                f"stored in every layer; store the others first, or call mark_stored([{row}], [{needed[seq]}]) if "
                "their K and V came into the pages by other means"
            )

    def why_no_store(self, batch: StepBatch) -> str:
        """Why a step must not store its new tokens, or nothing: another row holds a page that one of them lies in."""
        # How many of a row's tokens are new, and with it where they begin, may be known on the device alone.
        if not self.tokens.has_floors or batch.num_seqs == 0 or not _q_len_on_host(batch):
            return ""
        start = batch.kv_len - batch.q_len
        below = (start < self.tokens.floor.take(batch.rows)) & (batch.q_len > 0)
        if not below[below.argmax()]:
            return ""
        below &= start < self._lowered_floors(batch.rows)
        if not below.any():
            return ""
        seq = int(below.argmax())
        row, token = batch.rows[seq], start[seq]
        return (
            f"sequence {seq} would store token {token} of row {row} in a page that another row holds too; call "
            f"truncate({row}, {token}) and reserve({row}, {batch.kv_len[seq]}) first, or share fewer tokens in fork()"
        )

    def floors(self, rows: Int32Array) -> Int32Array:
        """int32 [num_seqs]: the first token that a step may store in each row."""
        return self._lowered_floors(rows) if self.tokens.has_floors else self.tokens.floor[rows]

    def _lowered_floors(self, rows: Int32Array) -> Int32Array:
        """The floors of rows, once more by the pages that other rows hold now."""
        floor = self.tokens.floor[rows]
        ends = num_pages(floor, self.page_size)
        end = int(ends.max(initial=0))
        held = np.zeros((len(rows), end), np.bool_)
        for table in self.spaces:
            held |= table.held_elsewhere(rows, end)
        page_no = np.arange(end)
        held &= page_no < ends[:, None]
        shared_end = np.max(held * (page_no + 1), axis=1, initial=0) * self.page_size
        lowered: Int32Array = np.minimum(floor, shared_end).astype(np.int32)
        self.tokens.lower(rows, lowered)
        return lowered

    def _check_prefixes(self, rows: Int32Array, prefixes: SharedPrefixes) -> None:
        torn = prefixes.prefix_len % self.page_size != 0
        if torn.any():
            raise BadBatch(
                f"sequence {int(torn.argmax())} has a prefix of {prefixes.prefix_len[torn][0]} tokens in pages of "
                f"{self.page_size}; a prefix has whole pages"
            )
        # The last pages tell: a row comes by another's page when it is forked, and with it by all pages before.
        last = np.maximum(prefixes.prefix_len // self.page_size - 1, 0)
        begin = prefixes.group_begin
        strangers = self.entries_host[rows, last] != self.entries_host[rows[begin], last]
        strangers &= prefixes.prefix_len > 0
        if strangers.any():
            seq = int(strangers.argmax())
            raise BadBatch(
                f"sequence {seq} does not share the {prefixes.prefix_len[seq]} tokens of sequence {begin[seq]}; "
                "fork its row from that one's, or put it into another group"
            )

    def _check_rows(self, rows: Int32Array) -> None:
        """Raise BadBatch unless all rows are in the table and none is named twice."""
        # Read as unsigned, a negative row is a huge one.
        if np.maximum.reduce(rows.view(np.uint32)) >= len(self._capacity):
            self._refuse_rows(rows)
        if len(rows) > len(self._order):
            raise BadBatch(f"{len(rows)} sequences in one step, but the table has {len(self._order)} rows")
        order = self._order[: len(rows)]
        self._seen[rows] = order
        if (self._seen[rows] != order).any():
            seq = int(np.argmax(self._seen[rows] != order))
            raise BadBatch(f"row {rows[seq]} occurs twice in one step; a row belongs to one sequence")

    def _refuse_rows(self, rows: Int32Array) -> None:
        outside = (rows <= RESERVED_ROW) | (rows >= len(self._capacity))
        if outside.any():
            raise BadBatch(
                f"row {rows[outside][0]} is not a request's row; rows run from 1 to {len(self._capacity) - 1}, "
                "row 0 is reserved"
            )

    def _refuse_lengths(self, batch: StepBatch) -> None:
        seq = int(np.argmax(self._reserved_len[batch.rows] < batch.kv_len))
        row = batch.rows[seq]
        if self._capacity[row] < 0:
            raise BadBatch(f"row {row} of sequence {seq} is not admitted; call admit() first")
        raise BadBatch(
            f"sequence {seq} has kv_len {batch.kv_len[seq]}, but row {row} has room for "
            f"{self._reserved_len[row]} tokens; call reserve({row}, {batch.kv_len[seq]}) first"
        )

    def num_held(self, row: int, space: Space = Space.FULL) -> int:
        """Pages that row holds in a space."""
        return self.space(space).num_held(row, self._end(row))

    def pages_of(self, row: int, space: Space = Space.FULL) -> Int32Array:
        """The pages of a row in a space, in order; page 0 in the place of those that were given back."""
        self._must_be_admitted(row)
        return np.array(self.space(space).entries_host[row, : self._end(row)], np.int32)

    def _end(self, row: int) -> int:
        """One past the last page_no that row has room in."""
        return max(0, int(self._capacity[row])) // self.page_size

    def _short(self, table: PageTable, row: int, kv_len: int) -> int:
        wanted = num_pages(kv_len, self.page_size)
        more = table.num_held(row, wanted) - table.num_held(row, self._end(row))
        return max(0, more) + (kv_len > self._reserved_len[row] and self._shares_last_page(table, row))

    def _shares_last_page(self, table: PageTable, row: int) -> bool:
        """Whether the next token of row would land in a page that another row holds too."""
        page_no, offset = divmod(int(self._reserved_len[row]), self.page_size)
        return offset > 0 and bool(table.shares(np.array([row], np.int32), np.array([page_no], np.int32))[0])

    def _must_be_admitted(self, row: int) -> None:
        if not RESERVED_ROW < row < len(self._capacity) or self._capacity[row] < 0:
            raise WrongState(f"row {row} is not admitted: it was never handed out, or it was freed already")

    def _must_all_be_admitted(self, rows: Int32Array) -> None:
        if (
            int(rows.min()) <= RESERVED_ROW
            or int(rows.max()) >= len(self._capacity)
            or (self._capacity[rows] < 0).any()
        ):
            for row in rows.tolist():
                self._must_be_admitted(row)

    def _forget(self, row: int) -> None:
        """A row that holds no page is free."""
        self._num_forgotten += 1
        for table in self._windowed:
            table.start_over(row)
        self.tokens.start_over(row)
        self._capacity[row] = self._reserved_len[row] = -1
        self._free_rows.append(row)


def _q_len_on_host(batch: StepBatch) -> bool:
    return not isinstance(batch.inputs, DeviceInputs) or batch.inputs.q_len is ON_HOST
