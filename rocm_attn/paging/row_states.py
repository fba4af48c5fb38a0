"""RowStates: the host's view of recurrent states: each row's tag, the token count of its state, and the checkpoints.

The device refuses a sequence whose row does not have the state that the step needs (kernels/states/places.py). The host
finds most such cases earlier, and raises an error that explains them. Both apply the same rule independently.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rocm_attn.batch.drafts import NO_DRAFTS
from rocm_attn.batch.mask import NO_MASK
from rocm_attn.batch.step_batch import INT32_MAX, Int32Array, StepBatch
from rocm_attn.errors import BadBatch, BadSetting, NeverFits
from rocm_attn.paging.state_pool import SLOTS_OF_ROW, RecurrentLayers, StateCopy, StatePool, StateSource

# A header of the host: start, first, end, as in kernels/states/places.py. These serve no step, and every step.
_NOTHING = (INT32_MAX, 0, 0)
_ANYTHING = (-1, 0, INT32_MAX)


class RowStates:
    """The states of a request table's rows, and checkpoints of them.

    changed: rows whose tags the device does not have yet
    copies:  states to be copied before the next step, in order
    tags:    int32 [rows], the request that each row belongs to
    is_empty: True if the model has no recurrent layer, so that there is nothing to keep
    """

    def __init__(self, recurrent: RecurrentLayers, *, num_rows: int, page_size: int) -> None:
        self.recurrent, self._page_size = recurrent, page_size
        self.is_empty = not recurrent.layers  # a field, because each step reads it
        self.spacing = recurrent.spacing or page_size
        if self.spacing % page_size:
            raise BadSetting(
                f"checkpoints are taken every {self.spacing} tokens and pages have {page_size}; give a multiple"
            )
        first = SLOTS_OF_ROW * num_rows
        if recurrent.checkpoints > INT32_MAX - first:
            raise NeverFits(
                f"checkpoints of recurrent layers is {recurrent.checkpoints}; slots are int32, so use at most "
                f"{INT32_MAX - first}"
            )
        self.tags = np.zeros(num_rows, np.int32)
        self.changed, self.copies = list[int](), list[StateCopy]()
        self._headers = np.empty((num_rows, SLOTS_OF_ROW, 3), np.int32)
        self._headers[:] = _NOTHING
        self._next_tag = 0
        self._free = list(range(first + recurrent.checkpoints - 1, first - 1, -1))
        # Slot of a checkpoint -> its tag.
        self._tag_of: dict[int, int] = {}

    def begin(self, row: int) -> None:
        """Gives a row a tag that no request has had, so that it has no state."""
        if not self.is_empty:
            self.tags[row] = self._new_tag()
            self._headers[row] = _NOTHING
            self.changed.append(row)

    def fill(self, rows: Int32Array, kv_len: Int32Array) -> None:
        """Notes that rows[i] get tokens up to kv_len[i] that no step has computed, so that they lose their states.

        A row whose track was lost keeps its state up to the tokens that its steps may have stored.
        """
        for row, tokens in zip(rows.tolist(), kv_len.tolist(), strict=True):
            start, first, end = self._headers[row].T
            if not ((start == _ANYTHING[0]) & (first == _ANYTHING[1]) & (tokens <= end)).any():
                self.begin(row)

    def truncate(self, row: int, kv_len: int) -> None:
        """Notes that a row whose track was lost has no tokens from kv_len on that a step has stored in every layer."""
        if not self.is_empty:
            lost = self._are_lost(row)
            self._headers[row, lost, 2] = np.minimum(self._headers[row, lost, 2], kv_len)

    def fork(self, row: int, child: int, kv_len: int) -> None:
        """Copies the state of a row after kv_len tokens to the row that shares them."""
        if not self.is_empty and kv_len > 0:
            serve, lost = _serve(self._headers[row], np.int32(kv_len)), self._are_lost(row)
            if serve.any():
                self._headers[child, 0] = -1, kv_len if (serve & ~lost).any() else _ANYTHING[1], kv_len
            self._copy(child, self._in_row(row, kv_len))

    def begin_at(self, row: int, checkpoint: int, kv_len: int) -> None:
        """Copies a checkpoint, which was taken after kv_len tokens, to a row."""
        if not self.is_empty and kv_len > 0:
            self._headers[row, 0] = -1, kv_len, kv_len
            self._copy(row, StateSource(checkpoint, 1, self._tag_of[checkpoint], kv_len))

    def checkpoint_at(self, kv_len: int, states: Int32Array) -> int:
        """The slot of the state after kv_len tokens; 0 if none is needed. Raises BadBatch if it is not kept.

        states: int32 [n], the slots that are kept with the pages of these tokens, in order
        """
        if self.is_empty or kv_len == 0:
            return 0
        if kv_len % self._page_size or not states[-1]:
            ends = ((np.flatnonzero(states) + 1) * self._page_size).tolist()
            raise BadBatch(
                f"recurrent layers have no state after {kv_len} kept tokens; begin after "
                f"{', '.join(map(str, ends)) or 'no'} tokens, which KeptPages.have_states() says, or compute them again"
            )
        return int(states[-1])

    def keep_all(self, rows: Int32Array, kv_len: Int32Array) -> Int32Array:
        """int32 [n]: the slot of a checkpoint of rows[i] after kv_len[i] tokens; 0 if none is due, or none is free.

        The step after the one that made the state may be staged already.
        """
        states = np.zeros(len(rows), np.int32)
        for at in np.flatnonzero(self.are_due(rows, kv_len)).tolist():
            row, tokens = int(rows[at]), int(kv_len[at])
            if self._free:
                states[at] = slot = self._free.pop()
                self._tag_of[slot] = tag = self._new_tag()
                self.copies.append(StateCopy(slot, tag, self._in_row(row, tokens)))
        return states

    def are_due(self, rows: Int32Array, kv_len: Int32Array) -> npt.NDArray[np.bool_]:
        """bool [n]: True if keep_all() takes a checkpoint of rows[i] after kv_len[i] tokens, as long as one is free.

        A state that only the device knows of may not be there, and each row that began at it would be a fault.
        """
        due: npt.NDArray[np.bool_] = kv_len % self.spacing == 0
        if self.is_empty:
            due[:] = False
        for at in np.flatnonzero(due).tolist():
            row = int(rows[at])
            serve = _serve(self._headers[row], np.int32(kv_len[at]))
            due[at] = (serve & ~self._are_lost(row)).any()
        return due

    @property
    def num_free(self) -> int:
        return len(self._free)

    def drop(self, checkpoints: Sequence[int]) -> None:
        """Gives checkpoints back; 0 stands for none, and one that was given back is left alone."""
        self._free += [slot for slot in checkpoints if self._tag_of.pop(slot, 0)]

    def drop_all(self) -> None:
        self.drop(list(self._tag_of))

    def give(self, pool: StatePool, rows: Int32Array, kv_len: Int32Array) -> tuple[npt.NDArray[np.int64], Int32Array]:
        """Notes that a caller writes the states of rows after kv_len[i] tokens, in place of any that they had.

        Pending copies are made first: they may read these slots, which were another request's when it was forked.

        rows, kv_len: int32 [n]; no step has stored tokens in the rows since begin() gave them their tags
        Returns int64 [n], the slots to write, and int32 [n, 4], their headers.
        """
        slots = SLOTS_OF_ROW * rows.astype(np.int64)
        self._headers[rows, 0] = np.stack([np.full_like(kv_len, -1), kv_len, kv_len], 1)
        while self.copies:
            pool.copy(self.copies[0])
            del self.copies[0]
        headers = np.stack([self.tags[rows], *self._headers[rows, 0].T], 1)
        return slots, headers

    def source_of(self, row: int, kv_len: int) -> StateSource:
        """Where the device has the state of a row after kv_len tokens, if its copy is still pending too.

        Raises BadBatch if the host knows that the row has no such state.
        """
        if not self._serves(row, kv_len):
            raise BadBatch(
                f"the state of row {row} is there {self._served(row)}, and {kv_len} tokens are to be sent; send "
                "tokens that a state is there for"
            )
        source = self._in_row(row, kv_len)
        # A copy may read what an earlier one writes.
        for copy in reversed(self.copies):
            if (copy.target, copy.tag) == (source.slot, source.tag):
                source = copy.source
        return source

    def check(self, batch: StepBatch) -> None:
        """Raises BadBatch for a sequence whose row has no state before its first new token."""
        if batch.num_seqs == 0:
            return
        if batch.drafts is not NO_DRAFTS or batch.mask is not NO_MASK:
            raise BadBatch(
                "the step is a round of drafts or has a mask, and states of recurrent layers go on token after token; "
                "verify chains of drafts in steps without a mask"
            )
        if not batch.inputs.lengths_on_host:
            return
        headers, start = self._headers[batch.rows], batch.start[:, None]
        wrong = ~_serve(headers, start).any(1) & (batch.start > 0) & (batch.q_len > 0)
        if wrong.any():
            seq = int(wrong.argmax())
            row = int(batch.rows[seq])
            raise BadBatch(
                f"sequence {seq} goes on after {batch.start[seq]} tokens of row {row}, whose state is there "
                f"{self._served(row)}; go back by at most {self.recurrent.kept} tokens of the last step, begin at a "
                "checkpoint, or at token 0"
            )

    def note(self, batch: StepBatch) -> None:
        """Notes the states that a step writes, which is staged now."""
        if batch.num_seqs == 0:
            return
        new = batch.q_len > 0  # with lengths on the device, a bound
        if not batch.inputs.lengths_on_host:
            self.lose_track(batch.rows[new])
            return
        rows, start, end = batch.rows[new], batch.start[new], batch.kv_len[new]
        headers = self._headers[rows]
        serves = _serve(headers, start[:, None])
        target = np.where(start > 0, 1 - np.where(serves, headers[..., 0], -2).argmax(1), 0)
        first = np.where(batch.q_len[new] <= self.recurrent.kept, start, end)
        self._headers[rows, target] = np.stack([start, first, end], 1)
        self._headers[rows[start == 0], 1] = _NOTHING

    def lose_track(self, rows: Int32Array) -> None:
        """Notes that only the device knows the tokens that the states of rows serve: the host refuses nothing there."""
        self._headers[rows] = _ANYTHING

    def pending_updates(self) -> Int32Array:
        """Changed tags as (row, column, entry), int32 [n, 3]."""
        rows = np.array(sorted(set(self.changed)), np.int32)
        return np.stack([rows, np.zeros_like(rows), self.tags[rows]], 1)

    def _new_tag(self) -> int:
        self._next_tag = self._next_tag % INT32_MAX + 1
        return self._next_tag

    def _in_row(self, row: int, kv_len: int) -> StateSource:
        return StateSource(SLOTS_OF_ROW * row, SLOTS_OF_ROW, int(self.tags[row]), kv_len)

    def _copy(self, row: int, source: StateSource) -> None:
        self.copies.append(StateCopy(SLOTS_OF_ROW * row, int(self.tags[row]), source))

    def _are_lost(self, row: int) -> npt.NDArray[np.bool_]:
        """bool [2]: the slots of a row of which only the device knows what they serve."""
        lost: npt.NDArray[np.bool_] = (self._headers[row, :, :2] == _ANYTHING[:2]).all(1)
        return lost

    def _serves(self, row: int, kv_len: int) -> bool:
        """True if a step may go on after kv_len tokens of a row, as far as the host knows."""
        return bool(_serve(self._headers[row], np.int32(kv_len)).any())

    def _served(self, row: int) -> str:
        """The tokens after which a step may go on in a row, in words."""
        headers, ranges = self._headers[row].tolist(), list[str]()
        for (start, first, end), (other, *_) in zip(headers, reversed(headers), strict=True):
            first, last = max(first, start + 1), min(end, other) if other > start else end  # see _serve()
            if start < INT32_MAX:
                ranges.append(f"{first} tokens" if first == last else f"{first} to {last} tokens")
        return f"after {' or '.join(ranges)}" if ranges else "for no token"


def _serve(headers: Int32Array, num_tokens: Int32Array | np.int32) -> npt.NDArray[np.bool_]:
    """bool [..., 2]: True if a slot has the state after this number of tokens of its row; see kernels/states/places.py.

    The step that wrote it began before them. A slot has none after the first token of a newer step: the tokens there
    were stored anew, and are the newer step's.
    headers: int32 [..., 2, 3]; num_tokens: int32 [..., 1], or one for all
    """
    start, first, end = headers[..., 0], headers[..., 1], headers[..., 2]
    newer = start[..., ::-1]
    serve: npt.NDArray[np.bool_] = (start < num_tokens) & (first <= num_tokens) & (num_tokens <= end)
    serve &= ~((start < newer) & (newer < num_tokens))
    return serve
