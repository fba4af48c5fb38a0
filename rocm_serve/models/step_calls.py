"""StepCalls: the calls of a step that a model's layers make."""

from __future__ import annotations

from typing import Protocol

from rocm_attn.step.protocols import LayerCalls
from rocm_attn.step.state_layers import StateCalls


class StepCalls(Protocol):
    """The part of a step's inputs that layers need.

    layers: attention of the step's tokens
    states: recurrences of the step's tokens
    """

    @property
    def layers(self) -> LayerCalls: ...
    @property
    def states(self) -> StateCalls: ...
