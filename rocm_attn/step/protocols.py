"""What looks on while steps run wraps one of these two, and is wrapped in its turn."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rocm_attn.batch.step_batch import StepBatch


class Steps(Protocol):
    """Whatever runs steps: a StepRunner, or something around one."""

    def run(self, batch: StepBatch, pad_to: int | None = None) -> Tensor:
        """As StepRunner.run."""
        ...


class LayerCalls(Protocol):
    """What a model's forward calls in each layer: an AttentionRuntime, or something around one."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """As AttentionRuntime.store."""
        ...

    def attend(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        """As AttentionRuntime.attend."""
        ...

    def store_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """As AttentionRuntime.store_and_attend."""
        ...
