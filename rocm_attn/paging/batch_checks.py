"""BatchChecks: what a step asks of a request table before it begins."""

from __future__ import annotations

import numpy as np

from rocm_attn.batch.prefixes import SharedPrefixes
from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.errors import BadBatch, NeverFits
from rocm_attn.paging.index_spaces import RESERVED_ROW, num_pages
from rocm_attn.paging.page_table import PageTable
from rocm_attn.paging.rows import Rows


class BatchChecks:
    """The checks of a request table: RequestTable.checks. max_num_seqs: sequences that a step may have"""

    def __init__(self, rows: Rows, max_num_seqs: int) -> None:
        self._rows, self._max_num_seqs = rows, max_num_seqs
        self._prefixes_checked: tuple[SharedPrefixes | None, bytes, int] = (None, b"", 0)

    def check(self, batch: StepBatch) -> None:
        """Raise BadBatch unless every row is admitted, named once, has room for its kv_len, and holds its windows.

        Also unless rows that share a prefix hold the same pages there, whole ones. Raises NeverFits for more sequences
        than a step may have.
        """
        rows = batch.rows
        if len(rows) == 0:
            return
        # The rows of a step are mostly those of the step before it, and comparing bytes costs next to nothing.
        named = batch.row_bytes
        if named != self._rows.known_rows[0]:
            self._check_rows(rows)
            self._rows.known_rows = named, rows.astype(np.int64)
        room = named, batch.kv_len_bytes
        if room != self._rows.known_room:
            reserved = self._rows.reserved_len.take(
                rows
            )  # -1 in rows that are not admitted, the reserved row among them
            short = reserved < batch.kv_len
            if short[short.argmax()]:
                self._refuse_rows(rows)
                self._refuse_lengths(batch)
            self._rows.known_room = room
        for table in self._rows.windowed:
            table.check_windows(rows, batch.kv_len - batch.q_len)
        if not batch.is_plain and isinstance(batch.prefixes, SharedPrefixes):
            # While rows stay admitted, the whole pages before their last token stay theirs.
            shared = (batch.prefixes, named, self._rows.generations.last_change)
            if shared != self._prefixes_checked:
                batch.prefixes.check_pages(self._rows.spaces[0].entries_host, rows, self._rows.page_size)
                self._prefixes_checked = shared

    def check_stored(self, batch: StepBatch) -> None:
        """Raise BadBatch where a step begins after the tokens that are stored: it would attend to what is not there.

        A length that only the device knows may be shorter than its bound: such a step is not looked at.
        """
        if batch.num_seqs and batch.inputs.kv_len_on_host:
            late = batch.kv_len - batch.q_len > self._rows.tokens.stored_len.take(batch.rows)
            if late[late.argmax()]:
                self._refuse_gaps(batch, batch.kv_len - batch.q_len)

    def require_stored(self, batch: StepBatch) -> None:
        """As check_stored, for a step that stores nothing itself: all of its tokens must be there."""
        if batch.num_seqs and batch.inputs.kv_len_on_host:
            self._refuse_gaps(batch, batch.kv_len)

    def _refuse_gaps(self, batch: StepBatch, needed: Int32Array) -> None:
        stored = self._rows.tokens.stored_len[batch.rows]
        gaps = (needed > stored) & (batch.q_len > 0)
        if gaps.any():
            seq = int(gaps.argmax())
            row = batch.rows[seq]
            start, layers = self._rows.tokens.left_out.get(int(row), (0, ""))
            left_out = f" (its last step did not store in {layers})" if layers and start == stored[seq] else ""
            raise BadBatch(
                f"sequence {seq} attends to the first {needed[seq]} tokens of row {row}, of which {stored[seq]} are "
                f"stored in every layer{left_out}; store the others first, or call mark_stored([{row}], "
                f"[{needed[seq]}]) if their K and V came into the pages by other means"
            )

    def why_no_store(self, batch: StepBatch) -> str:
        """Why a step must not store its new tokens, or nothing: a page that one of them lies in has other holders."""
        # How many of a row's tokens are new, and with it where they begin, may be known on the device alone.
        if not self._rows.tokens.has_floors or batch.num_seqs == 0 or not batch.inputs.q_len_on_host:
            return ""
        start = batch.kv_len - batch.q_len
        below = (start < self._rows.tokens.floor.take(batch.rows)) & (batch.q_len > 0)
        if not below[below.argmax()]:
            return ""
        below &= start < self._lowered_floors(batch.rows)
        if not below.any():
            return ""
        seq = int(below.argmax())
        row, token = batch.rows[seq], start[seq]
        return (
            f"sequence {seq} would store token {token} of row {row} in a page that another row, or keep(), "
            f"holds too; call truncate({row}, {token}) and reserve({row}, {batch.kv_len[seq]}) first, or share "
            "and keep fewer tokens"
        )

    def floors(self, rows: Int32Array) -> Int32Array:
        """int32 [num_seqs]: the first token that a step may store in each row."""
        return self._lowered_floors(rows) if self._rows.tokens.has_floors else self._rows.tokens.floor[rows]

    def _lowered_floors(self, rows: Int32Array) -> Int32Array:
        """The floors of rows, once more by the pages that have other holders now."""
        floor = self._rows.tokens.floor[rows]
        last = np.maximum(num_pages(floor, self._rows.page_size) - 1, 0)
        stays = floor == 0
        for table in self._rows.spaces:
            stays |= table.num_holders(table.entries_host[rows, last]) > 1
        # Mostly the last page before the floor still has another holder.
        if not stays.all():
            floor[~stays] = self._search_floors(rows[~stays], floor[~stays])
            self._rows.tokens.lower(rows, floor)
        return floor

    def _search_floors(self, rows: Int32Array, floor: Int32Array) -> Int32Array:
        """Where the last page before each floor ends that has another holder."""
        shared_end = (
            PageTable.shared_ends(self._rows.spaces, rows, num_pages(floor, self._rows.page_size))
            * self._rows.page_size
        )
        lowered: Int32Array = np.minimum(floor, shared_end).astype(np.int32)
        return lowered

    def _check_rows(self, rows: Int32Array) -> None:
        """Raise BadBatch unless all rows are in the table and none is named twice, NeverFits for too many."""
        # Read as unsigned, a negative row is a huge one.
        if np.maximum.reduce(rows.view(np.uint32)) >= len(self._rows.capacity):
            self._refuse_rows(rows)
        if len(rows) > self._max_num_seqs:
            raise NeverFits(f"{len(rows)} sequences in one step; raise max_num_seqs = {self._max_num_seqs} or split it")
        self._rows.must_be_distinct(rows)

    def _refuse_rows(self, rows: Int32Array) -> None:
        outside = (rows <= RESERVED_ROW) | (rows >= len(self._rows.capacity))
        if outside.any():
            raise BadBatch(
                f"row {rows[outside][0]} is not a request's row; rows run from 1 to {len(self._rows.capacity) - 1}, "
                "row 0 is reserved"
            )

    def _refuse_lengths(self, batch: StepBatch) -> None:
        seq = int(np.argmax(self._rows.reserved_len[batch.rows] < batch.kv_len))
        row = batch.rows[seq]
        if self._rows.capacity[row] < 0:
            raise BadBatch(f"row {row} of sequence {seq} is not admitted; call admit() first")
        raise BadBatch(
            f"sequence {seq} has kv_len {batch.kv_len[seq]}, but row {row} has room for "
            f"{self._rows.reserved_len[row]} tokens; call reserve({row}, {batch.kv_len[seq]}) first"
        )
