"""Machine code without one of its barriers, and a judge of whether that barrier was needed.

The judge shares nothing with the search for races: it keeps, as sets, the bytes that each wave loads and the values
that it stores from one meeting of the waves to the next. A barrier that is not there joins two of these intervals. It
was not needed if in no interval of the run a wave stores to a byte that another wave loads, or stores something else to
it. The addresses of our kernels do not depend on the order of the waves, so that one order is enough.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import pytest

from rocm_lab.races.watch import RaceWatch
from rocm_lab.simulator import launcher
from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.assembly import Assembly
from rocm_lab.simulator.core import Core
from rocm_lab.simulator.faults import SimulationFault
from rocm_lab.simulator.isa.step import Step
from rocm_lab.simulator.kernel import SimulatedKernel
from rocm_lab.simulator.lds import Lds
from rocm_lab.simulator.memory import Allocation, Memory
from rocm_lab.simulator.watch import Program, Watch
from tests.amd.simulator.case import KernelCase
from tests.amd.simulator.wait_mutants import without


class Barrier(Enum):
    """The verdict on a barrier, from the run without it."""

    FOUND = "its removal is a race"
    NOT_NEEDED = "not needed: between its neighbours no wave stores what another one accesses"
    MISSED = "a race that was not found"


@dataclass(frozen=True, slots=True)
class Removed:
    """A barrier that was removed from a kernel, by the number of its instruction."""

    kernel: str
    index: int
    barrier: Barrier


class _Stop(Exception):
    """The answer is known."""


class _FirstRace(RaceWatch):
    """Stops at the end of the interval or launch that has a race."""

    def meet(self) -> None:
        super().meet()
        self._stop()

    def end(self) -> None:
        super().end()
        self._stop()

    def _stop(self) -> None:
        if self.races:
            raise _Stop


class Judge(Watch):
    """Keeps the bytes of each wave since the waves met last. is_needed: true if two waves met at a byte."""

    def __init__(self) -> None:
        self.is_needed = False
        self.wave = 0
        self.loads: dict[int, set[int]] = defaultdict(set)
        self.stores: dict[int, set[tuple[int, int]]] = defaultdict(set)

    def begin(self, assembly: Assembly, allocations: list[Allocation]) -> Memory:
        return _JudgedMemory(allocations, self)

    def begin_program(self, program: Program, num_waves: int, lds_bytes: int, poison: int) -> Lds:
        return _JudgedLds(lds_bytes, poison, self)

    def step(self, core: Core, index: int, step: Step) -> Step:
        def stepped() -> int | None:
            self.wave = core.wave_number
            return step()

        return stepped

    def meet(self) -> None:
        for wave, stored in self.stores.items():
            places = {place for place, _ in stored}
            for other in {*self.loads, *self.stores} - {wave}:
                theirs = {place for place, _ in self.stores[other] - stored} if other in self.stores else set()
                self.is_needed |= not places.isdisjoint(self.loads[other] | theirs)
        self.loads.clear()
        self.stores.clear()

    def note_load(self, first: Array, size: int) -> None:
        """Bytes that the running wave loads; of LDS below 0."""
        for address in first.tolist():
            self.loads[self.wave].update(range(address, address + size))

    def note_store(self, first: Array, values: Array) -> None:
        """Bytes that the running wave stores."""
        for address, stored in zip(first.tolist(), values.tolist(), strict=True):
            self.stores[self.wave].update(enumerate(stored, address))


# LDS begins at address 0, and here below all memory.
_LDS = -1 << 40


class _JudgedMemory(Memory):
    def __init__(self, allocations: list[Allocation], judge: Judge) -> None:
        super().__init__(allocations)
        self.judge = judge

    def load(self, addresses: Array, size: int) -> Array:
        self.judge.note_load(addresses, size)
        return super().load(addresses, size)

    def store(self, addresses: Array, values: Array) -> None:
        self.judge.note_store(addresses, values)
        super().store(addresses, values)


class _JudgedLds(Lds):
    def __init__(self, num_bytes: int, poison: int, judge: Judge) -> None:
        super().__init__(num_bytes, poison)
        self.judge = judge

    def _note_load(self, offsets: Array, size: int, wave: int) -> None:
        self.judge.note_load(offsets + _LDS, size)

    def _note_store(self, offsets: Array, values: Array, wave: int) -> None:
        self.judge.note_store(offsets + _LDS, values)


def removed_barriers(case: KernelCase, kernel: str) -> Iterator[Removed]:
    """Removes each barrier that the case's run reaches from a kernel's code, one at a time."""
    kernels: dict[str, tuple[launcher.Code, SimulatedKernel]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_simulated", kernels)
        case.simulate()
        of_kernel = {key: each for key, each in kernels.items() if each[1].assembly.name == kernel}
        assert of_kernel, f"{case} does not run {kernel}"
        for key, (code, simulated) in of_kernel.items():
            for index in reached_barriers(simulated):
                kernels[key] = code, SimulatedKernel(without(simulated.assembly, index), case.arch)
                yield Removed(kernel, index, _barrier(case))
            kernels[key] = code, simulated


def reached_barriers(kernel: SimulatedKernel) -> list[int]:
    """The barriers that were executed."""
    lines = enumerate(kernel.assembly.instructions)
    return [index for index, line in lines if line.name == "s_barrier" and kernel.was_reached(index)]


def _barrier(case: KernelCase) -> Barrier:
    # A wave that goes on too early may stray, and end the run before the other one has stored: another order may not.
    for seed in range(8):
        with launcher.watched(_FirstRace(seed=seed)):
            try:
                case.simulate()
            except _Stop:
                return Barrier.FOUND
            except (AssertionError, SimulationFault):
                continue
        break
    with launcher.watched(Judge()) as judge:
        try:
            case.simulate()
        except (AssertionError, SimulationFault):
            return Barrier.MISSED
    return Barrier.MISSED if judge.is_needed else Barrier.NOT_NEEDED
