"""What is timed: a library's attention, as something that prepares launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rocm_attn.bench.step_data import StepData
from rocm_attn.errors import RocmAttnError


class NotServed(RocmAttnError):
    """A contestant does not serve a step, or is not there; why, in a clause."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A layer that can be launched.

    run:    launches only, so that it can be captured
    out:    where the result is; a function, as some libraries return a tensor of their own
    kernel: in words
    rounds_products, rounds_queries: what eight-bit multiplication it does; see KernelRow
    """

    run: Callable[[], object]
    out: Callable[[], Tensor]
    kernel: str
    rounds_products: bool = False
    rounds_queries: bool = False


class Contestant(Protocol):
    """A library's attention."""

    def prepare(self, data: StepData) -> Launch:
        """Everything that is done once a step. Raises NotServed with a reason."""
        ...
