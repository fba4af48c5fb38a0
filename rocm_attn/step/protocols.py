"""Protocols at the seams of a step: what runs steps, what a forward calls, and what looks on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor
from typing_extensions import TypeVar

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.step.plan import StepPlan

Outputs_co = TypeVar("Outputs_co", covariant=True, default=Tensor)


class Steps(Protocol[Outputs_co]):
    """Whatever runs steps: a StepRunner, or something around one."""

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Outputs_co:
        """As StepRunner.run."""
        ...


class LayerCalls(Protocol):
    """What a model's forward calls in each layer: the layers of a step, or something around them. T padded tokens."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the step's new keys and values of a layer to their slots; padded tokens are dropped.

        k, v: [T, kv_heads, head_dim | v_head_dim]; any strides but the last. Of a latent layer, v is the first part of
              k: k[..., :v_head_dim]
        Raises BadTensor, WrongState, and BadBatch for a step that begins within tokens that a row shares.
        """
        ...

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """Attention of the step's new tokens over everything that is stored for their sequences.

        A layer that keeps no K and V and reads another's attends by that layer's number, after that one has stored.

        q, out: [T, q_heads, head_dim | v_head_dim]; any strides but the last; padded tokens of out receive zeros
        lse:    float32 [T, q_heads]; when given, receives the natural log of the softmax denominator (the sink in it),
                -inf for pads and for a token that sees no key, whether or not there is a sink
        Raises BadTensor, WrongState, and BadBatch where the step has not stored and needs tokens that were never
        stored.
        """
        ...

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """store, then attend."""
        ...

    def store_index(self, layer: int, k: Tensor) -> None:
        """Write the step's new index keys of a layer that has an indexer; padded tokens are dropped.

        k: [T, head_dim of the indexer], any strides but the last
        Raises as store().
        """
        ...

    def select(self, layer: int, q: Tensor, weights: Tensor | None = None) -> None:
        """Choose the keys that each new token of a layer attends to, by its indexer, on the device.

        What is chosen stays until the next select() of any layer, or the end of the step.

        q:       [T, index heads, head_dim of the indexer] of the layer's dtype, or of its index keys' where those take
                 eight bits; any strides but the last
        weights: float32 [T, index heads], any strides but the last: what each index head's scores are multiplied by;
                 not given: 1
        Raises BadTensor, WrongState, and BadBatch where index keys are needed that were never stored.
        """
        ...

    def attend_selected(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """As attend, over the keys that were chosen in this step: by the layer's own indexer, or by the nearest earlier
        layer's that has one, as the layer's problem says.

        Raises as attend(), and WrongState where nothing was chosen in this step, or another layer has chosen since.
        """
        ...


class Flight(Protocol):
    """Hears of every step."""

    def note(self, batch: StepBatch, plan: StepPlan, replayed: bool, epoch: int) -> None:
        """A step is about to run.

        replayed: whether a graph of it exists
        epoch:    of the addresses that graphs read
        """
        ...

    def failed(self, error: BaseException) -> None:
        """The step that was noted last, or one that could not be staged, has raised."""
        ...


class NoFlightRecorder:
    """Remembers nothing."""

    def note(self, batch: StepBatch, plan: StepPlan, replayed: bool, epoch: int) -> None:
        """As Flight.note."""

    def failed(self, error: BaseException) -> None:
        """As Flight.failed."""


NO_FLIGHT_RECORDER = NoFlightRecorder()


class Watch(Protocol):
    """Looks on while something runs that might not end."""

    def watch(self, what: str) -> AbstractContextManager[None]:
        """A context to run it in."""
        ...


class NoWatchdog:
    """Looks away."""

    def watch(self, what: str) -> AbstractContextManager[None]:
        """As Watch.watch."""
        return nullcontext()


NO_WATCHDOG = NoWatchdog()
