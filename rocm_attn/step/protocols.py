"""Protocols at the seams of a step: what runs steps, what a forward calls, and what looks on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor
from typing_extensions import TypeVar

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.kernels.cache.row_work import QkvWork, RopeTable
from rocm_attn.machine.watchdog import Watchdog
from rocm_attn.step.plan import StepPlan

Outputs_co = TypeVar("Outputs_co", covariant=True, default=Tensor)


class Steps(Protocol[Outputs_co]):
    """Whatever runs steps: a StepRunner, or something around one."""

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Outputs_co:
        """As StepRunner.run."""
        ...


class LayerCalls(Protocol):
    """What a model's forward calls in each layer: the layers of a step, or something around them. T padded tokens.

    Each raises BadTensor for what does not fit, and WrongState unless its step runs.
    """

    __slots__ = ()

    @abstractmethod
    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the step's new keys and values of a layer to their slots; padded tokens are dropped.

        k, v: [T, kv_heads, head_dim | v_head_dim]; any strides but the last. Of a latent layer, v is the first part of
              k: k[..., :v_head_dim]
        Raises BadBatch for a step that begins within tokens that a row shares.
        """

    @abstractmethod
    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of the step's new tokens over everything that is stored for their sequences.

        A layer that keeps no K and V and reads another's attends by that layer's number, after that one has stored.

        q, out: [T, q_heads, head_dim | v_head_dim]; any strides but the last; padded tokens of out receive zeros
        lse:    float32 [T, q_heads]; when given, receives the natural log of the softmax denominator (the sink in it),
                -inf for pads and for a token that sees no key, whether or not there is a sink
        Raises BadBatch where the step has not stored and needs tokens that were never stored.
        """

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """store, then attend."""
        self.store(layer, k, v)
        self.attend(layer, q, out, lse)

    @abstractmethod
    def rope_and_store(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """Norms and rotary embedding of q, k and v as the projections gave them, and the store, in one launch.

        As the same work in float32, rounded once, then store(layer, k, v). Positions are the step's.

        q, q_out: [T, q_heads, head_dim]; any strides but the last. q_out is what attend() takes, and may be q itself.
                  Of a latent layer, whose q has its first part from elsewhere, [T, q_heads, work.rope.dim] will do
        k, v:     as in store(); not changed
        work:     the layer's; made once, it is checked once
        A token at a position that the rope's table has not gets NaN in q_out, and is reported as not finite.
        Raises as store().
        """

    @abstractmethod
    def rope_queries(self, layer: int, q: Tensor, q_out: Tensor, work: QkvWork) -> None:
        """q_out of rope_and_store() alone: for layers that keep no K and V and read another's."""

    @abstractmethod
    def finish(self, layer: int, out: Tensor, *, gate: Tensor | None = None, undo: RopeTable | None = None) -> None:
        """What follows attention before a layer's projection, in place and in one launch; pads stay zero.

        out = unturned(out) * sigmoid(gate), in float32, rounded once.

        out:  [T, q_heads, v_head_dim], as attend() has left it; any strides but the last
        gate: floating point, [T, q_heads] of any strides, or [T, q_heads, v_head_dim] of any strides but the last
        undo: turns out by the negative angle of its token, for layers whose V is turned with K (DeepSeek-V4)
        """

    @abstractmethod
    def store_index(self, layer: int, k: Tensor) -> None:
        """Write the step's new index keys of a layer that has an indexer; padded tokens are dropped.

        k: [T, head_dim of the indexer], any strides but the last. Where an index key stands for several tokens, the row
           of the last of them is written, and those of the others are not looked at
        Raises as store().
        """

    @abstractmethod
    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Choose the keys that each new token of a layer attends to, by its indexer, on the device.

        What is chosen stays until the next select() of any layer, or the end of the step.

        q:       [T, index heads, head_dim of the indexer] of the layer's dtype, or of its index keys' where those take
                 eight bits; any strides but the last
        weights: float32 [T, index heads], any strides but the last: what each index head's scores are multiplied by;
                 not given: 1
        Raises BadBatch where index keys are needed that were never stored.
        """

    @abstractmethod
    def give_selection(self, layer: int, units: Tensor, counts: Tensor) -> None:
        """In place of select(): the units that the caller has chosen, of a layer that has an indexer; they are copied.

        units:  int32 [T, sets, width] of the indexing, of each token and set the numbers of its units, ascending
        counts: int32 [T, sets], how many of them count
        Units that are not in order, or that lie outside of what their token sees, are a fault of the step, and those
        outside give no key.
        """

    @abstractmethod
    def attend_selected(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention over the keys that were chosen in this step: by the layer's own indexer, or by the nearest earlier
        layer's that has one, as the layer's problem says.

        q, out, lse: as in attend()
        Raises as attend(), and WrongState where nothing was chosen in this step, or another layer has chosen since.
        """


class Flight:
    """Hears of every step, and remembers nothing."""

    def note(self, batch: StepBatch, plan: StepPlan, replayed: bool, epoch: int) -> None:
        """A step is about to run.

        replayed: whether a graph of it exists
        epoch:    of the addresses that graphs read
        """

    def failed(self, error: BaseException) -> None:
        """The step that was noted last, or one that could not be staged, has raised."""


NO_FLIGHT_RECORDER = Flight()


class NoWatchdog(Watchdog):
    """Looks away."""

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        yield


NO_WATCHDOG = NoWatchdog(0.0)
