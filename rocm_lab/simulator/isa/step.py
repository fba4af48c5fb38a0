"""The common parts of every group of instructions."""

from collections.abc import Callable
from dataclasses import dataclass

from rocm_lab.simulator.assembly import Assembly, Instruction
from rocm_lab.simulator.core import Core

# Executes one instruction; returns the index of the next one, or None for the one that follows.
Step = Callable[[], int | None]

# In place of an index: the wave waits for the others of its program, or has ended.
AT_BARRIER, AT_END = -1, -2


@dataclass(frozen=True, slots=True)
class Context:
    """The context that an instruction is built for: the core it will run on, the kernel it is part of, and the arch."""

    core: Core
    assembly: Assembly
    arch: str


Builder = Callable[[Context, Instruction], Step]
