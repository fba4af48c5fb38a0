"""How the programs and the waves of a launch take turns, and a place from which all they do can be watched."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from rocm_lab.simulator.assembly import Assembly
from rocm_lab.simulator.core import Core, Wave
from rocm_lab.simulator.isa.step import Step
from rocm_lab.simulator.lds import Lds
from rocm_lab.simulator.memory import Allocation, Memory

TO_THE_BARRIER = 1 << 60

Program = tuple[int, int, int]


class Turn(NamedTuple):
    """The wave that runs next, and the instructions after which it stops at the latest."""

    wave: Wave
    steps: int


class Watch:
    """Programs run in order, and their waves one after the other, each to its next barrier; nothing is noted.

    Others may order them differently, and note what happens.
    """

    def begin(self, assembly: Assembly, allocations: list[Allocation]) -> Memory:
        """Begins a launch; returns the memory that it runs in."""
        return Memory(allocations)

    def programs(self, grid: Program) -> Iterable[Program]:
        """The programs (x, y, z) in the order in which they run."""
        return ((x, y, z) for z, y, x in product(*(range(size) for size in reversed(grid))))

    def begin_program(self, program: Program, num_waves: int, lds_bytes: int, poison: int) -> Lds:
        """Begins a program of num_waves waves; returns its LDS."""
        return Lds(lds_bytes, poison)

    def step(self, core: Core, index: int, step: Step) -> Step:
        """The function that executes an instruction of the launch's kernel, of which step is the plain one."""
        return step

    def turn(self, ready: Sequence[Wave]) -> Turn:
        """The next turn; ready: the waves that have not met the others yet, by their number."""
        return Turn(ready[0], TO_THE_BARRIER)

    def meet(self) -> None:
        """All waves of the program that have not ended wait at a barrier, or all have ended."""

    def end(self) -> None:
        """The launch has ended, perhaps by a fault."""
