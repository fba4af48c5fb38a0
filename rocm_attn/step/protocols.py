"""Protocols of a step: for objects that run steps, for the layer calls of a forward, and for observers."""

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


class LayerCalls(Protocol):
    """The calls that a model's forward makes in each layer, for T padded tokens: Part.layers, or a wrapper of it.

    Each call raises BadTensor for tensors that do not fit, and WrongState if its step is not running.
    """

    __slots__ = ()

    @abstractmethod
    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes K and V of the step's new tokens to their slots in a layer; padded tokens are dropped.

        k, v: [T, kv_heads, head_dim | v_head_dim]; last stride 1, others free. In a latent layer, v is the first part
              of k: k[..., :v_head_dim]
        Raises BadBatch if the step would overwrite tokens that a row shares with another one.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Computes attention of the step's new tokens over the stored tokens of their sequences.

        A layer that shares another layer's K and V passes that layer's number, after that layer has stored.

        q, out: [T, q_heads, head_dim | v_head_dim], different memory; last stride 1, others free; padded tokens of out
                become 0
        lse:    float32 [T, q_heads]; if given, receives the natural log of the softmax denominator (the sink included),
                -inf for padding and for a token that sees no key, with or without a sink
        Raises BadBatch if the step has not stored in this layer and needs tokens that were never stored.
        """

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Calls store, then attend."""
        self.store(layer, k, v)
        self.attend(layer, q, out, lse)

    @abstractmethod
    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """Applies norms and rotary embedding to the projected q, k and v, and stores k and v, in one launch.

        It computes in float32 and rounds once; then it is store(layer, k, v). Positions are Part.positions.

        q, q_out: [T, q_heads, head_dim]; last stride 1, others free. q_out is the input of attend(), and may be q. In a
                  latent layer, whose q gets its other part elsewhere, [T, q_heads, work.rope.dim] is enough
        k, v:     as in store(); not changed
        work:     the layer's work. Keep the object: it is checked only once
        A token at a position outside of the rope table gets NaN in q_out, and is reported as not finite.
        Raises what store() raises.
        """

    @abstractmethod
    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """Computes only q_out of rope_and_store(), for layers that share another layer's K and V."""

    @abstractmethod
    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        """Applies the work between attention and the output projection, in place, in one launch; padding stays 0.

        out = unrotated(out) * sigmoid(gate), in float32, rounded once.

        out:  [T, q_heads, v_head_dim], the output of attend(); last stride 1, others free
        gate: floating point, [T, q_heads] of any strides, or [T, q_heads, v_head_dim] with a last stride of 1
        undo: rotates out by the negative angle of its token, for layers whose V is rotated with K (DeepSeek-V4)
        """

    @abstractmethod
    def fold(self, layer: int, values: Tensor, gates: Tensor, rows: Tensor) -> None:
        """Compresses tokens into rows, in a layer whose rows stand for several tokens (Problem.row).

            rows[t, c] = sum over j:   softmax over j (gates[j, c]) * values[j, c]      if t ends a row, else 0

        j runs over the tokens of the row that ends with t. If rows overlap, it also runs over as many tokens before
        them. The earlier tokens use the first half of their columns, the row's own tokens the second half. Positions
        before the sequence's first token have no weight. Values and gates of recent tokens are kept for later steps.
        This is DeepSeek-V4's compressor without norm and rotary embedding: apply these to rows, then call store() or
        store_index().

        values, gates: [T, columns] of row.state_dtype, columns = head_dim + row.also, or twice as many if rows overlap;
                       last stride 1
        rows:          float32 [T, head_dim + row.also], written; last stride 1
        Raises what store() raises.
        """

    @abstractmethod
    def store_index(self, layer: int, k: Tensor) -> None:
        """Writes the index keys of the step's new tokens, in a layer that has an indexer; padded tokens are dropped.

        k: [T, head_dim of the indexer], last stride 1. If an index key stands for several tokens, the row of the last
           of these tokens is stored, and the other rows are ignored
        Raises what store() raises.
        """

    @abstractmethod
    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Selects, on the device, the keys that each new token attends to, by the layer's indexer.

        The selection stays valid until the next select() of any layer, or the end of the step.

        q:       [T, index heads, head_dim of the indexer], last stride 1; of the layer's dtype, or of the index keys'
                 dtype if that has eight bits
        weights: float32 [T, index heads], last stride 1: factors on each index head's scores; default: 1
        Raises BadBatch if index keys are needed that were never stored.
        """

    @abstractmethod
    def select_among(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Selects again, by other queries, among the candidate blocks that the layer's select() kept in this step.

        The blocks are those of Indexing.candidate_blocks. The new selection replaces the last one; the blocks stay for
        further calls. DeepSeek-V4.1's layers 24, 28, 32 and 36 select this way among the rows of layer 20.

        q, weights: as in select()
        Raises what select() raises, BadTensor for a layer without candidate blocks, and WrongState if its select() did
        not run in this step, or another layer's select() ran since.
        """

    @abstractmethod
    def give_selection(self, layer: int, units: Tensor, counts: Tensor) -> None:
        """Sets the selection in place of select(): copies units that the caller has selected. The layer has an indexer.

        units:  int32 [T, sets, width] of the indexing: for each token and set, ascending unit numbers
        counts: int32 [T, sets]: the number of units in use
        Units that are out of order, or that their token does not see, are reported as a fault of the step; the latter
        add no key. Values of padded tokens do not matter.
        """

    @abstractmethod
    def attend_selected(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Computes attention over the keys that were selected in this step (sparse attention).

        They are those of the layer's own indexer, or of the nearest earlier layer's; see Problem.indexer.

        q, out, lse: as in attend()
        Raises what attend() raises, and WrongState if nothing was selected in this step, or another layer selected
        since.
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
