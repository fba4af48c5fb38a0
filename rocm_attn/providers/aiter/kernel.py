"""AiterKernel: the base of bound kernels that call AITER."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import Target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import NO_SCHEDULE, PoolSize, Schedule, StepBounds
from rocm_attn.providers.scratch import ScratchTensor, num_words


@dataclass(frozen=True)
class AiterKernel(ABC):
    """A kernel without a schedule and without scratch, unless it says otherwise.

    name:    of the row of entries.py
    refuses: raise LookupError for layers that bind() refuses
    """

    problem: Problem
    name: ClassVar[str]
    refuses: ClassVar[tuple[Callable[[Problem], None], ...]] = ()

    @classmethod
    def bind(cls, problem: Problem, target: Target, pool: PoolSize) -> AiterKernel:
        """Binds a kernel that chooses its own tiles, or has one. Raises LookupError for layers that it refuses."""
        for refuse in cls.refuses:
            refuse(problem)
        return cls(problem)

    @property
    def schedule(self) -> Schedule:
        return NO_SCHEDULE

    def describe(self) -> str:
        values = (str(getattr(self, each.name)) for each in fields(self))
        return f"aiter.{self.name}({', '.join(values)})"

    def room(self, shape: PaddedShape) -> tuple[ScratchTensor, ...]:
        """The scratch of a step of this shape."""
        return ()

    def workspace_words(self, shape: PaddedShape) -> int:
        return num_words(self.room(shape))

    @abstractmethod
    def attend(self, args: AttendArgs, step: StepTensors, bounds: StepBounds) -> None:
        """See `BoundKernel.attend`."""
