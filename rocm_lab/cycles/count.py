"""The count of a kernel's hot loop: clocks of an iteration, and the share of the matrix units' ceiling."""

from collections import Counter
from dataclasses import dataclass

from rocm_lab.cycles import rates
from rocm_lab.cycles.issue import Simd, slots_of
from rocm_lab.cycles.loops import hot_loop, is_staggered, other_half
from rocm_lab.cycles.rates import Kind
from rocm_lab.simulator.assembly import Assembly
from rocm_lab.waits.effects import Unit

# Iterations of a wave that are issued; the second half counts.
_ITERATIONS = 12


@dataclass(frozen=True, slots=True)
class LoopCount:
    """The count of one kernel's hot loop, on a SIMD with that many waves.

    loop:          name of its first block
    waves:         of a SIMD
    clocks:        in which each of them ends an iteration
    matrix:        clocks that they keep the matrix unit in it; no order of instructions is faster
    vector, local_memory, vector_memory: the same for other units
    packed:        their packed float32 operations, during which no product runs
    barriers:      of an iteration of a wave
    """

    loop: str
    waves: int
    clocks: float
    matrix: int
    vector: int
    local_memory: int
    vector_memory: int
    packed: int
    barriers: int

    @property
    def share(self) -> float:
        """The share of the matrix units' ceiling."""
        return self.matrix / self.clocks


def count_loop(assembly: Assembly, arch: str, waves: int, program_waves: int) -> LoopCount | None:
    """Counts the hot loop with that many waves of a SIMD; None if no loop has matrix instructions.

    program_waves: waves of a program on one SIMD: a program of 8 waves has 2 there, one of 4 or fewer has 1

    Raises UnknownInstruction.
    """
    loop = hot_loop(assembly)
    if loop is None:
        return None
    slots = slots_of(loop.body, arch)
    programs = [wave // program_waves for wave in range(waves)]
    other = other_half(assembly, loop) if program_waves > 1 else None
    simd = Simd(slots, programs, is_staggered(assembly))
    if other is not None:
        simd.second, simd.priority = slots_of(other.body, arch), other.priority - loop.priority
    clocks = simd.clocks(_ITERATIONS)
    of_unit = Counter[Unit]()
    for slot in slots:
        of_unit[slot.unit] += waves * (slot.matrix or slot.service or slot.busy)
    return LoopCount(
        loop=loop.name,
        waves=waves,
        clocks=clocks,
        matrix=of_unit[Unit.MATRIX],
        vector=of_unit[Unit.VECTOR],
        local_memory=of_unit[Unit.LOCAL_MEMORY],
        vector_memory=of_unit[Unit.VECTOR_MEMORY],
        packed=waves * sum(slot.vector is Kind.PACKED for slot in slots),
        barriers=sum(slot.name == "s_barrier" for slot in slots),
    )


def waves_of(room: int, num_warps: int) -> tuple[int, int]:
    """(waves of a SIMD, those of one program) of programs of num_warps waves, if a SIMD has room for `room` waves."""
    of_program = max(1, num_warps // rates.SIMDS)
    return max(room // of_program, 1) * of_program, of_program
