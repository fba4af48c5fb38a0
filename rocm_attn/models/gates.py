"""Gates: turn the inner products of an MLP, each [tokens, inner], into the input of its last matrix.

PRODUCTS of a gate: names of the matrices in files.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

GATE_AND_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """silu(gate) * up."""

    PRODUCTS: ClassVar = GATE_AND_UP

    def mix(self, gate: Tensor, up: Tensor) -> Tensor:
        """[tokens, inner]; every gate has this method."""
        return F.silu(gate) * up


@dataclass(frozen=True, slots=True)
class GeGLU:
    """gelu(gate) * up, with the tanh approximation that Gemma was trained with."""

    PRODUCTS: ClassVar = GATE_AND_UP

    def mix(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), gate at most `limit` and up within +-limit (gpt-oss)."""

    PRODUCTS: ClassVar = GATE_AND_UP

    limit: float
    alpha: float

    def mix(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (self.alpha * gate).sigmoid() * (up + 1)


@dataclass(frozen=True, slots=True)
class ReluSquared:
    """relu(up) ** 2, without a gate (Nemotron-H)."""

    PRODUCTS: ClassVar = ("up_proj",)

    def mix(self, up: Tensor) -> Tensor:
        return up.relu().square()


Gate = SwiGLU | GeGLU | ClampedSwiGLU | ReluSquared
