"""What is known of the tokens of rows: up to which one their K and V are stored, and which of them other rows share.

StoredTokens knows it from step to step. StepStores knows which layers the step that runs has stored in: a step that
raised half way through the layers has stored nothing, and one that only attends writes to no page.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.errors import BadBatch, WrongState

# tokens that a fork shares with its parent -> the first token that either may store
SharedFloor = Callable[[int], int]


def after_what_is_shared(kv_len: int) -> int:
    """Neither row stores what both may read."""
    return kv_len


class StoredTokens:
    """Of each row of the request table, int32 [num_rows].

    stored_len: tokens whose K and V are stored in every layer
    changed:    rows that were cut since the step that runs was staged: they may be others now
    floor:      the first token that a step may store; those before it may lie in pages that have other holders
    on_floors:  called when floors have risen, for the step that runs
    """

    def __init__(self, num_rows: int, shared_floor: SharedFloor) -> None:
        self._stored_len = np.zeros(num_rows, np.int32)
        # rows and kv_len of the last step, which is not in stored_len yet: mostly the next one goes on from there.
        self._last = (b"", b"")
        self.floor = np.zeros(num_rows, np.int32)
        self.has_floors = False
        self._shared_floor = shared_floor
        self.changed: list[int] = []
        self.on_floors: Callable[[], None] = lambda: None

    @property
    def stored_len(self) -> Int32Array:
        """See the class; to be written to as well."""
        rows, kv_len = self._last
        if rows:
            self._stored_len[np.frombuffer(rows, np.int32)] = np.frombuffer(kv_len, np.int32)
            self._last = (b"", b"")
        return self._stored_len

    def of(self, rows: Int32Array) -> Int32Array:
        """int32 [n]: tokens of rows that are stored. A step may still go on from the last one."""
        last, kv_len = self._last
        if last:
            self._stored_len[np.frombuffer(last, np.int32)] = np.frombuffer(kv_len, np.int32)
        return self._stored_len[rows]

    def goes_on(self, batch: StepBatch) -> bool:
        """Whether a step has the rows of the last one, and its new tokens come next in all of them.

        Most steps do; nothing else has to be asked of them.
        """
        rows, kv_len = self._last
        return rows == batch.row_bytes and kv_len == (batch.kv_len - batch.q_len).tobytes()

    def start_over(self, row: int) -> None:
        """A row that holds nothing begins anew."""
        self.forget(row, 0)
        self.lower_from(row, 0)

    def share(self, row: int, child: int, kv_len: int) -> None:
        """child gets the first kv_len tokens of row."""
        stored_len = self.stored_len
        stored_len[child] = min(kv_len, int(stored_len[row]))
        floor = self._shared_floor(kv_len)
        self.floor[child] = floor
        self.floor[row] = max(floor, int(self.floor[row]))
        self.has_floors = self.has_floors or floor > 0
        self.on_floors()

    def begin_over(self, row: int, kv_len: int) -> None:
        """Row, which held nothing, gets kv_len tokens that are stored in kept pages."""
        self.stored_len[row] = kv_len
        self.raise_floor(np.array([row], np.int32), np.array([kv_len], np.int32))

    def raise_floor(self, rows: Int32Array, kv_len: Int32Array) -> None:
        """The first kv_len[i] tokens of rows[i], which are stored, lie in pages that have other holders too."""
        for row, length in zip(rows.tolist(), kv_len.tolist(), strict=True):
            floor = self._shared_floor(length)
            self.floor[row] = max(floor, int(self.floor[row]))
            self.has_floors = self.has_floors or floor > 0
        self.on_floors()

    def forget(self, row: int, kv_len: int) -> None:
        """Tokens of row from kv_len on do not count as stored."""
        self.changed.append(row)
        stored_len = self.stored_len
        stored_len[row] = min(kv_len, int(stored_len[row]))

    def lower_from(self, row: int, kv_len: int) -> None:
        """Row has given back the pages after kv_len: it shares nothing there."""
        if self.floor[row] > kv_len:
            self.lower(np.array([row]), np.array([kv_len], np.int32))

    def lower(self, rows: npt.NDArray[np.integer], floor: Int32Array) -> None:
        """Tokens from floor[i] on of rows[i] lie in pages that have no other holder."""
        self.floor[rows] = floor
        self.has_floors = bool(self.floor.any())

    def end_step(self, batch: StepBatch, *, complete: bool) -> None:
        """A step has written to pages; complete: in every layer. Otherwise its tokens have still to be stored."""
        if complete and batch.min_q_len > 0 and not self.changed:
            if batch.row_bytes != self._last[0]:
                _ = self.stored_len
            self._last = batch.row_bytes, batch.kv_len_bytes
            return
        rows, kv_len, q_len = batch.rows, batch.kv_len, batch.q_len
        stored_len = self.stored_len
        reached = kv_len if complete else np.minimum(kv_len - q_len, stored_len[rows])
        wrote = (q_len > 0) & ~np.isin(rows, self.changed)
        stored_len[rows[wrote]] = reached[wrote]


class StepStores:
    """The layers that the step that runs has stored in.

    num_layers:     of the runtime, and after them those that have index keys to store
    tokens:         learns what was stored
    require_stored: raises BadBatch unless all tokens of a step's rows are stored
    """

    def __init__(self, num_layers: int, tokens: StoredTokens, require_stored: Callable[[StepBatch], None]) -> None:
        self._tokens = tokens
        self._all = (1 << num_layers) - 1
        self._require_stored = require_stored
        self._batch: StepBatch | None = None
        self._done = [0]
        self._in_turn = 1
        self._wrote = False
        self.refusal = ""
        tokens.on_floors = self._floors_have_risen

    def begin(self, batch: StepBatch, num_children: int, refusal: str, in_turn: int) -> None:
        """A step is staged.

        num_children: halves, draft steps, or those of both halves
        refusal:      why it may not store, or nothing
        in_turn:      children of a half, which store in a layer one after the other
        """
        self._batch, self.refusal, self._in_turn = batch, refusal, in_turn
        self._done = [0] * num_children
        self._wrote = False
        if self._tokens.changed:
            self._tokens.changed.clear()

    def _floors_have_risen(self) -> None:
        """A row was forked or kept: the step that runs may not store what others read of it by now."""
        batch = self._batch
        if batch is None or self.refusal or not batch.inputs.q_len_on_host:
            return
        begin = batch.kv_len - batch.q_len
        shared = (batch.q_len > 0) & (begin < self._tokens.floor[batch.rows])
        if shared.any():
            seq = int(shared.argmax())
            self.refusal = (
                f"row {batch.rows[seq]} was forked or kept while its step runs, which would store token {begin[seq]} "
                "again that others read by now; end the step, truncate() the row and begin again"
            )

    def before_store(self, child: int, layer: int) -> None:
        """Raise BadBatch for a step that would write to a page that several rows hold, and WrongState for a draft step
        whose draft step before has not stored in the layer."""
        if self.refusal:
            raise BadBatch(self.refusal)
        if self._in_turn > 1 and child % self._in_turn and not self._done[child - 1] >> layer & 1:
            step = child % self._in_turn
            raise WrongState(
                f"draft step {step} stores in layer {layer} before draft step {step - 1} has; run the draft steps of a "
                "round in order, each with all its layers"
            )
        self._wrote = True

    def before_move(self) -> None:
        """Raise BadBatch where the step that runs, or the last one, may not write to the pages of its new tokens."""
        if self.refusal:
            raise BadBatch(self.refusal)

    def after_store(self, child: int, layer: int) -> None:
        """A child of the step has stored in a layer."""
        self._done[child] |= 1 << layer

    def before_attend(self, child: int, layer: int) -> None:
        """Raise BadBatch for a child that attends to tokens that were stored neither before nor by this step."""
        if not self._done[child] >> layer & 1 and self._batch is not None:
            self._require_stored(self._batch)

    @property
    def layers(self) -> int:
        """Bit i: every child has stored in layer i."""
        layers = self._all
        for done in self._done:
            layers &= done
        return layers

    def before_replay(self, layers: int) -> None:
        """The step is about to be run by a graph that stores in these layers. Raises as what is before the calls."""
        if layers:
            if self.refusal:
                raise BadBatch(self.refusal)
            self._wrote = True
        if layers != self._all and self._batch is not None:
            self._require_stored(self._batch)

    def after_replay(self, layers: int) -> None:
        """The graph was launched."""
        self._done = [layers]

    def end(self) -> None:
        """The step is over, whether it went well or not. Doing it again is harmless: an interrupt may break it off."""
        if self._batch is not None and self._wrote:
            # Branches of drafts lie beside each other, and are no tokens that another step could go on from.
            batch = self._batch
            # No child has stored in more layers than all of them, which is the largest number.
            is_whole = min(self._done) == self._all
            self._tokens.end_step(batch, complete=is_whole and (batch.is_plain or batch.drafts.branches <= 1))
        self._batch = None
