"""BatchChecks: checks a step against the block table before it begins: rows, reserved pages, stored tokens.

BatchGuards are the safeguards among these checks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.prefixes import SharedPrefixes
from rocm_attn.batch.step_batch import INT32_MAX, Int32Array, StepBatch
from rocm_attn.errors import BadBatch, NeverFits
from rocm_attn.paging.index_spaces import RESERVED_ROW, num_pages
from rocm_attn.paging.rows import Rows


class BatchChecks:
    """The checks of a request table: RequestTable.checks. max_num_seqs: sequences that a step may have"""

    def __init__(self, rows: Rows, max_num_seqs: int) -> None:
        self._rows, self._max_num_seqs = rows, max_num_seqs
        self._prefixes_checked: tuple[SharedPrefixes | None, bytes, int, int] = (None, b"", 0, 0)

    def check(self, batch: StepBatch) -> None:
        """Raises BadBatch unless every row is admitted, named once, has room for its kv_len, its windows and its state.

        Also raises it unless rows that share a prefix hold the same whole pages there. Raises NeverFits for more
        sequences than a step may have.
        """
        rows, named, state = batch.rows, batch.row_bytes, self._rows
        if not named:
            return
        # The rows of a step are mostly those of the step before, and comparing bytes is very cheap.
        if named != state.known_rows[0]:
            state.known_rows = named, self._places(rows)
        if batch.after != state.known_room:
            # -1 in rows that are not admitted, including the reserved row.
            short = state.reserved_len.take(state.known_rows[1]) < batch.kv_len
            if short[short.argmax()]:
                self._refuse(batch, int(short.argmax()))
            state.known_room = batch.after
        for table in state.windowed:
            table.check_windows(rows, batch.start)
        if not state.states.is_empty:
            state.states.check(batch)
        if not batch.is_plain and isinstance(batch.prefixes, SharedPrefixes):
            # While rows stay admitted and are not cut, they keep the whole pages before their last token.
            shared = (batch.prefixes, named, state.generations.last_change, state.num_cuts)
            if shared != self._prefixes_checked:
                batch.prefixes.check_pages(state.spaces[0].entries_host, rows, state.page_size)
                self._prefixes_checked = shared

    def check_stored(self, batch: StepBatch, needed: Int32Array) -> None:
        """Raises BadBatch if fewer than needed[i] tokens of rows[i] are stored: new ones would attend to undefined KV.

        needed: the tokens before the new ones, or with the new ones for a step that stores nothing itself
        A length that only the device knows may be shorter than its bound, so such a step is not checked.
        """
        if batch.num_seqs == 0 or not batch.inputs.kv_len_on_host:
            return
        stored = self._rows.tokens.stored_len.take(batch.rows)
        gaps = needed > stored
        if not gaps[gaps.argmax()]:
            return
        gaps &= batch.q_len > 0
        if gaps.any():
            seq = int(gaps.argmax())
            row = batch.rows[seq]
            start, layers = self._rows.tokens.left_out.get(int(row), (0, ""))
            left_out = f" (its last step did not store in {layers})" if layers and start == stored[seq] else ""
            raise BadBatch(
                f"sequence {seq} attends to the first {needed[seq]} tokens of row {row}, of which {stored[seq]} "
                f"are stored in every layer{left_out}; store the others first, or call mark_stored([{row}], "
                f"[{needed[seq]}]) if their K and V were written in another way"
            )

    def why_no_store(self, batch: StepBatch) -> str:
        """Why a step must not store its new tokens: a page of one of them has other holders. Empty if it may."""
        # The number of a row's new tokens, and so their first place, may be known on the device alone.
        if not self._rows.tokens.has_first_writable or batch.num_seqs == 0 or not batch.inputs.q_len_on_host:
            return ""
        start = batch.start
        below = (start < self._rows.tokens.first_writable.take(batch.rows)) & (batch.q_len > 0)
        if not below[below.argmax()]:
            return ""
        below &= start < self.first_writable_of(batch.rows)
        if not below.any():
            return ""
        seq = int(below.argmax())
        row, token = batch.rows[seq], start[seq]
        return (
            f"sequence {seq} would store token {token} of row {row} in a page that another row or keep() also "
            f"holds; call truncate({row}, {token}) and reserve({row}, {batch.kv_len[seq]}) first, or share and "
            "keep fewer tokens"
        )

    def changed_since(self, change: int, batch: StepBatch, num_staying: int) -> list[int]:
        """The rows of a batch that an earlier step of it must no longer write to.

        Rows that were freed or cut since then are different rows now; in rows that are shared, the shared tokens stay.
        change:      the table's last change when the step was staged
        num_staying: new tokens of a sequence that are no longer written
        """
        generations, rows = self._rows.generations, batch.rows
        if change == generations.last_change:
            return []
        changed = generations.changed_since(change, rows)
        if num_staying < batch.max_q_len:
            shared = generations.shared_since(change, rows)
            # The first new token is not known if only the device knows the length: any page may hold new tokens.
            if batch.inputs.lengths_on_host and shared[shared.argmax()]:
                first = batch.start + num_staying
                shared &= (first < self.first_writable_of(rows)) & (first < batch.kv_len)
            changed |= shared
        found: list[int] = rows[changed].tolist()
        return found

    def first_writable_of(self, rows: Int32Array) -> Int32Array:
        """int32 [num_seqs]: the first token that a step may store in each row."""
        tokens, page_size = self._rows.tokens, self._rows.page_size
        first_writable = tokens.first_writable[rows]
        if not tokens.has_first_writable:
            return first_writable
        # The last page before the first writable token mostly still has another holder.
        sinks = (first_writable > 0) & ~self._is_shared(rows, np.maximum(num_pages(first_writable, page_size) - 1, 0))
        if sinks.any():
            page_no = np.arange(num_pages(int(first_writable[sinks].max()), page_size), dtype=np.int32)
            shared = self._is_shared(rows[sinks, None], page_no) & (page_no * page_size < first_writable[sinks, None])
            first_writable[sinks] = np.minimum(
                first_writable[sinks], np.max(shared * (page_no + 1) * page_size, axis=1)
            )
            tokens.lower_first_writable(rows, first_writable)
        return first_writable

    def _is_shared(self, rows: Int32Array, page_no: Int32Array) -> npt.NDArray[np.bool_]:
        """True if these pages of rows have other holders in a space."""
        spaces = self._rows.spaces
        shared: npt.NDArray[np.bool_] = np.any(
            [table.num_holders(table.entries_host[rows, page_no]) > 1 for table in spaces], axis=0
        )
        return shared

    def _places(self, rows: Int32Array) -> npt.NDArray[np.int64]:
        """Rows for NumPy's faster look-up.

        Raises BadBatch unless all are in the table and none is named twice, NeverFits for too many.
        """
        # Read as unsigned numbers, negative rows are huge.
        if np.maximum.reduce(rows.view(np.uint32)) >= len(self._rows.capacity):
            self._refuse_rows(rows)
        if len(rows) > self._max_num_seqs:
            raise NeverFits(
                f"the step has {len(rows)} sequences; raise max_num_seqs = {self._max_num_seqs}, or split it"
            )
        places = rows.astype(np.int64)
        self._rows.must_be_distinct(places)
        return places

    def _refuse_rows(self, rows: Int32Array) -> None:
        outside = (rows <= RESERVED_ROW) | (rows >= len(self._rows.capacity))
        if outside.any():
            raise BadBatch(
                f"row {rows[outside][0]} is not a request's row; rows run from 1 to "
                f"{len(self._rows.capacity) - 1}, and row 0 is reserved"
            )

    def _refuse(self, batch: StepBatch, seq: int) -> NoReturn:
        """Raises BadBatch for a sequence whose row has no room for it."""
        self._refuse_rows(batch.rows)
        row, kv_len, reserved = batch.rows[seq], batch.kv_len[seq], self._rows.reserved_len[batch.rows[seq]]
        raise BadBatch(
            f"row {row} of sequence {seq} is not admitted; call admit() first"
            if reserved < 0
            else f"sequence {seq} has kv_len {kv_len}, but row {row} has room for {reserved} tokens; "
            f"call reserve({row}, {kv_len}) first"
        )


@dataclass(frozen=True, slots=True)
class BatchGuards:
    """The safeguards of a batch over a request table.

    check:   refuses a batch that cannot be a step
    stored:  refuses a step that needs tokens which are not stored
    evict:   int32 [num_seqs], the tokens before whose windows a step gives pages back: the first new ones
    changed: the rows that are no longer those of an earlier step, which runs again or moves its tokens
    in_turn: the most draft steps of a round that store in a layer one after the other
    """

    check: Callable[[BatchChecks, StepBatch], None] = BatchChecks.check
    stored: Callable[[BatchChecks, StepBatch, Int32Array], None] = BatchChecks.check_stored
    evict: Callable[[StepBatch], Int32Array] = attrgetter("start")
    changed: Callable[[BatchChecks, int, StepBatch, int], list[int]] = BatchChecks.changed_since
    in_turn: int = INT32_MAX
