"""StepCalls: the calls of a step that a model's layers make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from rocm_attn.models.rope import Rope
from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.state_layers import StateCalls

# The cos and sin of each rope for index keys: [T, 2, dim], see rotate. The runtime turns all other rows.
CosSin = Mapping[Rope, Tensor]


class StepCalls(Protocol):
    """The part of a step's inputs that layers need.

    layers: attention of the step's tokens
    states: recurrences of the step's tokens
    """

    @property
    def layers(self) -> LayerCalls: ...
    @property
    def states(self) -> StateCalls: ...
