"""Protocols between the parts of a step: for running steps, for the calls of a forward, and for observers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import TypeVar

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.kernels.cache.row_work import QkvWork, RopeTable
from rocm_attn.machine.watchdog import Watchdog
from rocm_attn.problem import Problem
from rocm_attn.step.plan import StepPlan

Outputs_co = TypeVar("Outputs_co", covariant=True, default=Tensor)


class RunsSteps(Protocol[Outputs_co]):
    """Anything that runs steps: a StepRunner, or a wrapper of one."""

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Outputs_co:
        """See `StepRunner.run`."""
        ...


class LayerCalls(Protocol):
    """The calls of a model's forward in each layer: the layers of a step, or a wrapper of them. T padded tokens.

    Each raises BadTensor for tensors that do not fit, and WrongState unless its step runs.
    """

    __slots__ = ()

    @abstractmethod
    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes the step's new keys and values of a layer to their slots; padded tokens are dropped.

        k, v: [T, kv_heads, head_dim | v_head_dim]; any strides but the last. In a latent layer, v is the first part of
              k: k[..., :v_head_dim]
        Raises BadBatch for a step that begins within tokens that a row shares.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attends from the step's new tokens to all stored tokens of their sequences.

        A layer that keeps no K and V and reads another's attends by that layer's number, after that one has stored.

        q, out: [T, q_heads, head_dim | v_head_dim]; any strides but the last; padded tokens of out receive zeros
        lse:    float32 [T, q_heads]; if given, receives the natural log of the softmax denominator (the sink included),
                -inf for pads and for a token that sees no key, with or without a sink
        Raises BadBatch if the step has not stored and needs tokens that were never stored.
        """

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Calls store, then attend."""
        self.store(layer, k, v)
        self.attend(layer, q, out, lse)

    @abstractmethod
    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """Applies norms and rotary embedding to the projected q, k and v, and stores, in one launch.

        The result is that of the same work in float32, rounded once, then store(layer, k, v). Positions are the step's.

        q, q_out: [T, q_heads, head_dim]; any strides but the last. q_out is the input of attend(), and may be q itself.
                  In a latent layer, which gets q's first part from elsewhere, [T, q_heads, work.rope.dim] is enough
        k, v:     as in store(); not changed
        work:     the layer's; made once, it is checked once
        A token at a position outside of the rope's table gets NaN in q_out, and is reported as not finite.
        Raises what store() raises.
        """

    @abstractmethod
    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """Computes only q_out of rope_and_store(), for layers that keep no K and V and read another's."""

    @abstractmethod
    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        """Applies the work between attention and a layer's projection, in place and in one launch; pads stay zero.

        out = unturned(out) * sigmoid(gate), in float32, rounded once.

        out:  [T, q_heads, v_head_dim], the output of attend(); any strides but the last
        gate: floating point, [T, q_heads] of any strides, or [T, q_heads, v_head_dim] of any strides but the last
        undo: rotates out by the negative angle of its token, for layers whose V is rotated with K (DeepSeek-V4)
        """

    @abstractmethod
    def fold(self, layer: int, values: Tensor, gates: Tensor, rows: Tensor) -> None:
        """Keeps values and gates of the step's new tokens, and makes rows of them, in a layer with rows of several.

            rows[t, c] = sum over j:   softmax over j (gates[j, c]) * values[j, c]      t ends a row, else 0

        j runs over the tokens of the row that t ends. If rows overlap, it also runs over as many tokens before them:
        those give the first half of their columns, and the row's own tokens the second half. Tokens before the first of
        a sequence have no weight. This is DeepSeek-V4's compressor without norm and rotation, which come before
        store(), and before store_index().

        values, gates: [T, columns] of row.state_dtype, columns = rows' columns, or twice as many if rows overlap; any
                       strides but the last
        rows:          float32 [T, head_dim + row.also], written; any strides but the last
        Raises what store() raises.
        """

    @abstractmethod
    def store_index(self, layer: int, k: Tensor) -> None:
        """Writes the step's new index keys of a layer that has an indexer; padded tokens are dropped.

        k: [T, head_dim of the indexer], any strides but the last. If an index key stands for several tokens, the row of
           the last of them is written, and the other rows are ignored
        Raises what store() raises.
        """

    @abstractmethod
    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Chooses the keys that each new token of a layer attends to, by its indexer, on the device.

        The selection stays until the next select() of any layer, or the end of the step.

        q:       [T, index heads, head_dim of the indexer] of the layer's dtype, or of its index keys' dtype if they
                 take eight bits; any strides but the last
        weights: float32 [T, index heads], any strides but the last: scales of each index head's scores; default: 1
        Raises BadBatch if index keys are needed that were never stored.
        """

    @abstractmethod
    def select_among(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Chooses once more, by other queries, among the blocks that the layer's select() has left in this step.

        The blocks are those of Indexing.candidate_blocks. The selection takes the place of the one before; the blocks
        stay for further choices. DeepSeek-V4.1's layers 24, 28, 32 and 36 choose this way among the rows of layer 20.

        q, weights: as in select()
        Raises what select() raises, BadTensor for a layer that leaves no blocks, and WrongState if it has left none in
        this step, or another layer has since.
        """

    @abstractmethod
    def give_selection(self, layer: int, units: Tensor, counts: Tensor) -> None:
        """Replaces select(): copies units that the caller has chosen, for a layer that has an indexer.

        units:  int32 [T, sets, width] of the indexing, for each token and set the numbers of its units, ascending
        counts: int32 [T, sets], how many of them are used
        Units that are not in order, or that their token does not see, are a fault of the step; the latter add no key.
        Pads may have any.
        """

    @abstractmethod
    def attend_selected(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attends to the keys that were chosen in this step.

        Its problem says by which indexer: the layer's own, or that of the nearest earlier layer with one.

        q, out, lse: as in attend()
        Raises what attend() raises, and WrongState if nothing was chosen in this step, or by another layer since.
        """


class WrappedLayers(LayerCalls):
    """The layer calls of a step, each of which goes through _call()."""

    __slots__ = ()

    @abstractmethod
    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        """Makes one call of the wrapped layers. name: of the method of LayerCalls, which has the other arguments"""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._call("store", layer, k, v)

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        self._call("attend", layer, q, out, lse)

    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        self._call("rope_and_store", layer, q, k, v, q_out, work)

    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        self._call("rope_queries", layer, q, q_out, work)

    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        self._call("finish", layer, out, gate=gate, undo=undo)

    def fold(self, layer: int, values: Tensor, gates: Tensor, rows: Tensor) -> None:
        self._call("fold", layer, values, gates, rows)

    def store_index(self, layer: int, k: Tensor) -> None:
        self._call("store_index", layer, k)

    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        self._call("select", layer, q, weights)

    def select_among(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        self._call("select_among", layer, q, weights)

    def give_selection(self, layer: int, units: Tensor, counts: Tensor) -> None:
        self._call("give_selection", layer, units, counts)

    def attend_selected(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        self._call("attend_selected", layer, q, out, lse)


class Flight:
    """A flight recorder that records nothing; the base of those that do."""

    def note(self, batch: StepBatch, plan: StepPlan, replayed: bool, epoch: int) -> None:
        """Called when a step is about to run.

        replayed: True if a graph of it exists
        epoch:    of the addresses that graphs read
        """

    def failed(self, error: BaseException) -> None:
        """Called when the step that was noted last, or one that could not be staged, has raised."""


NO_FLIGHT_RECORDER = Flight()


_NOTHING = nullcontext()


class NoWatchdog(Watchdog):
    """A watchdog that watches nothing."""

    def watch(self, what: str) -> AbstractContextManager[None]:
        return _NOTHING


NO_WATCHDOG = NoWatchdog(0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """A layer's attention in a step. q, out: copies; place: the tensor that out is a copy of"""

    q: Tensor
    out: Tensor
    place: Tensor


# Computes a layer's attention again, if it calls it, and enters the context that it is given around that call.
AttendsAgain = Callable[[Callable[[], AbstractContextManager[None]]], Attended | None]


@dataclass(frozen=True, slots=True, eq=False)
class WrongLayer:
    """A layer of a step whose attention to all keys was found wrong.

    finding: a sentence
    seqs:    of the batch, some of which are wrong
    found:   the attention with the wrong results
    again:   computes it again
    """

    finding: str
    layer: int
    problem: Problem
    batch: StepBatch
    seqs: Sequence[int]
    found: Attended
    again: AttendsAgain


class Evidence:
    """Keeps nothing of a layer that was found wrong; the base of what keeps its inputs and its machine code."""

    def keep(self, wrong: WrongLayer) -> None:
        """Called while the step's lengths, tables and pages are as they were when the layer attended."""


NO_EVIDENCE = Evidence()
