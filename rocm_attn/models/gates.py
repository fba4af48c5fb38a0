"""Gates: combine the two inner products of an MLP elementwise: gate and up, each [tokens, inner]."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """silu(gate) * up."""

    def mix(self, gate: Tensor, up: Tensor) -> Tensor:
        """[tokens, inner]; every gate has this method."""
        return F.silu(gate) * up


@dataclass(frozen=True, slots=True)
class GeGLU:
    """gelu(gate) * up, with the tanh approximation that Gemma was trained with."""

    def mix(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), gate at most `limit` and up within +-limit (gpt-oss)."""

    limit: float
    alpha: float

    def mix(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * (self.alpha * gate).sigmoid() * (up + 1)


Gate = SwiGLU | GeGLU | ClampedSwiGLU
