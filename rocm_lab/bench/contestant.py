"""The interface of a library's attention that is timed: it prepares launches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rocm_attn.errors import RocmAttnError
from rocm_attn.problem import Problem
from rocm_lab.bench.step_data import StepData


class NotServed(RocmAttnError):
    """A contestant does not serve a step, or is not installed; the reason, in a clause."""


def require_no_mask(problem: Problem) -> None:
    """Raises NotServed for custom masks, which other libraries take in other forms, or not at all."""
    if problem.custom_mask:
        raise NotServed("it is measured without custom masks")


@dataclass(frozen=True, slots=True)
class LayerLaunch:
    """A layer that can be launched.

    run:    only launches, so it can be captured
    out:    returns the result; a function, because some libraries return a tensor of their own
    kernel: in words
    rounds_products, rounds_queries: the eight-bit multiplication that it does; see KernelEntry
    """

    run: Callable[[], object]
    out: Callable[[], Tensor]
    kernel: str
    rounds_products: bool = False
    rounds_queries: bool = False


class Contestant(Protocol):
    """A library's attention."""

    def prepare(self, data: StepData) -> LayerLaunch:
        """Does all the work that is done once per step. Raises NotServed with a reason."""
