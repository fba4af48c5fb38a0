"""StoredTokens and StepStores: how many tokens of each row have K and V stored, and which of these other rows share.

StoredTokens has the numbers between steps. StepStores has the layers in which the running step has stored: the tokens
of a step that raised halfway through the layers do not count as stored, and a step that only attends stores nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rocm_attn.batch.step_batch import Int32Array, StepBatch
from rocm_attn.errors import BadBatch, WrongState

_NO_STEP = (b"", b"")


class StoredTokens:
    """The tokens of each row of the request table.

    last:      StepBatch.after of the last step, which need not be in _stored_len. A step with an equal StepBatch.before
               goes on from there, as most do, and needs no other check
    changed:   rows that were cut since the running step was staged: they may be different rows now
    first_writable: int32 [num_rows], the first token that a step may store; those before it may lie in pages that
               have other holders
    on_first_writable: called when it has risen for a row, for the running step
    on_share:  called before rows are forked or kept: of those of the running step, tokens that it stores again do not
               count as stored
    on_cut:    called with a row and the number of tokens that it keeps, for the running step
    on_left_out: called with a row and its stored tokens, if a step stored those after them in some layers only
    left_out:  row -> its stored tokens, and the layers in which a step after these did not store, in words
    """

    def __init__(self, num_rows: int) -> None:
        self._stored_len = np.zeros(num_rows, np.int32)
        self.last = _NO_STEP
        self.first_writable = np.zeros(num_rows, np.int32)
        self.has_first_writable = False
        self.changed: list[int] = []
        self.on_first_writable: Callable[[], None] = lambda: None
        self.on_share: Callable[[], None] = lambda: None
        self.on_cut: Callable[[int, int], None] = lambda row, kv_len: None
        self.on_left_out: Callable[[int, int], None] = lambda row, kv_len: None
        self.left_out: dict[int, tuple[int, str]] = {}

    @property
    def stored_len(self) -> Int32Array:
        """int32 [num_rows]: tokens whose K and V are stored in every layer. Read-only: mark() writes."""
        rows, kv_len = self.last
        if rows:
            # NumPy looks int64 up in a third of the time.
            self._stored_len[np.frombuffer(rows, np.int32).astype(np.int64)] = np.frombuffer(kv_len, np.int32)
        return self._stored_len

    def mark(self, rows: Int32Array | int, kv_len: Int32Array | int) -> None:
        """Sets the stored tokens of rows to their first kv_len tokens."""
        stored_len = self.stored_len
        self.last = _NO_STEP
        stored_len[rows] = kv_len

    def forget(self, row: int, kv_len: int) -> None:
        """Marks tokens of row from kv_len on as not stored."""
        self.changed.append(row)
        self.on_cut(row, kv_len)
        self.left_out.pop(row, None)
        self.mark(row, min(kv_len, int(self.stored_len[row])))

    def raise_first_writable(self, rows: Int32Array | int, kv_len: Int32Array | int) -> None:
        """Notes that the first kv_len tokens of rows, which may be named twice, lie in pages with other holders too."""
        np.maximum.at(self.first_writable, rows, kv_len)
        self.has_first_writable = bool(self.first_writable.any())
        self.on_first_writable()

    def lower_first_writable(self, rows: Int32Array | int, kv_len: Int32Array | int) -> None:
        """Notes that tokens of rows from kv_len on lie in pages that have no other holder."""
        self.first_writable[rows] = np.minimum(self.first_writable[rows], kv_len)
        self.has_first_writable = bool(self.first_writable.any())

    def end_step(self, batch: StepBatch, *, complete: bool) -> None:
        """Notes that a step has written to pages; complete: in every layer. Otherwise its tokens are not stored yet."""
        if complete and batch.min_q_len > 0 and not self.changed:
            if batch.row_bytes != self.last[0]:
                _ = self.stored_len
            self.last = batch.after
            return
        rows = batch.rows
        reached = batch.kv_len if complete else np.minimum(batch.start, self.stored_len[rows])
        wrote = (batch.q_len > 0) & ~np.isin(rows, self.changed)
        self.mark(rows[wrote], reached[wrote])


@dataclass(frozen=True, slots=True)
class Sides:
    """All that a step stores, numbered: K and V of every layer, then index keys, states, and those of recurrent layers.

    num_layers: of the runtime
    indexed:    layers with index keys
    folding:    layers with a state
    of_states:  recurrent layers and their parts; these have numbers of their own
    """

    num_layers: int
    indexed: tuple[int, ...] = ()
    folding: tuple[int, ...] = ()
    of_states: tuple[tuple[int, str], ...] = ()

    def __len__(self) -> int:
        return self.num_layers + len(self.indexed) + len(self.folding) + len(self.of_states)

    def index(self, layer: int) -> int:
        return self.num_layers + self.indexed.index(layer)

    def state(self, layer: int) -> int:
        return self.num_layers + len(self.indexed) + self.folding.index(layer)

    def recurrent(self, layer: int, part: str) -> int:
        return len(self) - len(self.of_states) + self.of_states.index((layer, part))

    def of_layer(self, layer: int) -> list[int]:
        """The numbers of all that a layer stores."""
        indexed = [self.index(layer)] if layer in self.indexed else []
        return [layer, *indexed, *([self.state(layer)] if layer in self.folding else [])]

    def name(self, number: int) -> str:
        """The words for a number in an error."""
        if number < self.num_layers:
            return f"layer {number}"
        of_index = number - self.num_layers
        if of_index < len(self.indexed):
            return f"the index keys of layer {self.indexed[of_index]}"
        of_state = of_index - len(self.indexed)
        if of_state < len(self.folding):
            return f"the state of layer {self.folding[of_state]}"
        layer, part = self.of_states[of_state - len(self.folding)]
        return f"the {part} of recurrent layer {layer}"


class StepStores:
    """The layers in which the running step has stored.

    sides:          all that a step stores
    tokens:         records the stored tokens
    require_stored: raises BadBatch unless the required tokens of a batch's rows are stored
    refusal:        why the step may not store; empty if it may
    """

    def __init__(
        self,
        sides: Sides,
        tokens: StoredTokens,
        require_stored: Callable[[StepBatch, Int32Array], None],
    ) -> None:
        self._tokens = tokens
        self._sides = sides
        # Looked up, not shifted: a shift by a number of NumPy's is one of 64 bits.
        self._bit_of = tuple(1 << side for side in range(len(sides)))
        self._all = (1 << len(sides)) - 1
        self._has_states = bool(sides.of_states)
        self._require_stored = require_stored
        self._batch: StepBatch | None = None
        self._done = [0]
        self._in_turn = 1
        self._wrote = False
        self.refusal = ""
        tokens.on_first_writable, tokens.on_cut = self._first_writable_has_risen, self._was_cut
        tokens.on_share = self._forget_stored_again

    def begin(self, batch: StepBatch, num_children: int, refusal: str, in_turn: int) -> None:
        """Starts the record of a step that is staged.

        num_children: halves, draft steps, or those of both halves
        in_turn:      children of a half, which store in a layer one after the other
        """
        self._batch, self.refusal, self._in_turn = batch, refusal, in_turn
        self._done = [0] * num_children
        # The host has noted the slots that the step gets, unless only the device knows its lengths.
        self._wrote = self._has_states and batch.inputs.lengths_on_host
        if self._tokens.changed:
            self._tokens.changed.clear()

    def note_fill(self) -> None:
        """Notes that the step has slots of recurrent layers from now on, whatever its layers store in them."""
        self._wrote |= self._has_states

    def _first_writable_has_risen(self) -> None:
        """Updates the refusal after a row was forked or kept: the step may not store tokens that others now read."""
        batch = self._batch
        if batch is None or self.refusal or not batch.inputs.q_len_on_host:
            return
        shared = (batch.q_len > 0) & (batch.start < self._tokens.first_writable[batch.rows])
        if shared.any():
            seq = int(shared.argmax())
            self.refusal = (
                f"row {batch.rows[seq]} was forked or kept while its step runs, and the step would store token "
                f"{batch.start[seq]} again, which others now read; end the step, truncate() the row and begin again"
            )

    def _forget_stored_again(self) -> None:
        """Tokens that the running step stores again may have the old K and V in some layers, and the new in others."""
        batch = self._batch
        if batch is not None and self._wrote and batch.inputs.q_len_on_host:
            again = (batch.q_len > 0) & (batch.start < self._tokens.stored_len[batch.rows])
            self._tokens.mark(batch.rows[again], batch.start[again])

    def _was_cut(self, row: int, kv_len: int) -> None:
        """Updates the refusal after a row was freed or cut: the pages of its new tokens may be another row's by now."""
        batch = self._batch
        if batch is not None and not self.refusal and ((batch.rows == row) & (batch.kv_len > kv_len)).any():
            self.refusal = (
                f"row {row} was freed, or cut to {kv_len} tokens, while its step runs, and the step would store in "
                "pages that may belong to another row; end the step and begin again"
            )

    def before_store(self, child: int, layer: int) -> None:
        """Raises BadBatch for a step that would write to a page that several rows hold.

        Raises WrongState for a draft step if the draft step before it has not stored in the layer.
        """
        if self.refusal:
            raise BadBatch(self.refusal)
        if child % self._in_turn and not self._has_stored(child - 1, layer):
            step = child % self._in_turn
            raise WrongState(
                f"draft step {step} stores in layer {layer} before draft step {step - 1}; run the draft steps of a "
                "round in order, each with all its layers"
            )
        self._wrote = True

    def _has_stored(self, child: int, layer: int) -> bool:
        """True if a child has stored in a layer, and for a layer that does not exist, which the call itself refuses."""
        try:
            return bool(self._done[child] & self._bit_of[layer])
        except (IndexError, TypeError):
            return True

    def before_move(self) -> None:
        """Raises BadBatch if the running step, or the last one, may not write to the pages of its new tokens.

        Raises WrongState before it has stored in every layer: it would store over what was moved.
        """
        if self.refusal:
            raise BadBatch(self.refusal)
        if self.layers != self._all:
            raise WrongState(
                "the step of the accepted tokens has not stored in every layer; move them once it has, at the end of "
                "its forward or after it"
            )

    def after_store(self, child: int, layer: int) -> None:
        """Notes that a child of the step has stored in a layer."""
        self._done[child] |= self._bit_of[layer]

    def before_attend(self, child: int, layer: int) -> None:
        """Raises BadBatch for a child that attends to tokens that were stored neither before nor by this step."""
        if not self._done[child] & self._bit_of[layer] and self._batch is not None:
            self._require_stored(self._batch, self._batch.kv_len)

    @property
    def layers(self) -> int:
        """Bit i is set if every child has stored in layer i."""
        layers = self._all
        for done in self._done:
            layers &= done
        return layers

    def replay(self, replay: Callable[[], object], layers: int) -> None:
        """Launches a graph that stores in these layers, and ends the step. Raises what its calls of layers would."""
        if layers:
            if self.refusal:
                raise BadBatch(self.refusal)
            self._wrote = True
        else:
            self.note_fill()  # by the graph
        if layers != self._all and self._batch is not None:
            try:
                self._require_stored(self._batch, self._batch.kv_len)
            except BadBatch as error:
                raise BadBatch(f"{error}; the captured forward does not store in {self._all_but(layers)}") from None
        replay()
        self._done = [layers]
        self.end()

    def end(self) -> None:
        """Ends the step, with or without an error. It may be repeated if an interrupt breaks it off."""
        batch = self._batch
        if batch is not None and self._wrote:
            # No child has stored in more layers than all of them, which is the largest number.
            is_whole = min(self._done) == self._all
            if not is_whole:
                self._note_left_out(batch)
            # Branches of drafts lie side by side, and are no tokens from which another step could continue.
            self._tokens.end_step(batch, complete=is_whole and (batch.is_plain or batch.drafts.branches <= 1))
        self._batch = None

    def _note_left_out(self, batch: StepBatch) -> None:
        """Keeps the layers in which a finished step has not stored, for the error of the next step."""
        words = self._all_but(self.layers)
        stored, new = np.minimum(batch.start, self._tokens.stored_len[batch.rows]), batch.q_len > 0
        for row, start in zip(batch.rows.tolist(), batch.start.tolist(), strict=True):
            self._tokens.left_out[row] = start, words
        for row, kv_len in zip(batch.rows[new].tolist(), stored[new].tolist(), strict=True):
            self._tokens.on_left_out(row, kv_len)

    def _all_but(self, layers: int) -> str:
        """The layers without these, in words."""
        missing = [number for number in range(self._all.bit_length()) if not layers >> number & 1]
        names = [self._sides.name(number) for number in missing[:8]]
        return ", ".join(names) + (" and others" if len(missing) > len(names) else "")


class NoStores(StepStores):
    """The record of an engine's steps, which is the engine's own: nothing is checked, and nothing is noted."""

    def __init__(self) -> None:
        """Listens to no table."""

    def before_store(self, child: int, layer: int) -> None:
        """Checks nothing."""

    def after_store(self, child: int, layer: int) -> None:
        """Notes nothing."""

    def before_attend(self, child: int, layer: int) -> None:
        """Checks nothing."""


NO_STORES = NoStores()
