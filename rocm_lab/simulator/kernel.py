"""Runs a grid of a kernel, program after program, its waves in turns from barrier to barrier (watch.py).

Initial registers: LLVM's "User Guide for AMDGPU Backend", "Initial Kernel Execution State", for architected gfx9.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rocm_lab.simulator.assembly import Assembly
from rocm_lab.simulator.core import EXEC, LANES, NUM_SCALAR, NUM_VECTOR, POISON, Core, Wave
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction
from rocm_lab.simulator.isa.instructions import build_step
from rocm_lab.simulator.isa.step import AT_BARRIER, Context, Step
from rocm_lab.simulator.memory import Allocation, Memory
from rocm_lab.simulator.watch import Program, Watch

# More than any kernel of the tests needs; an endless loop is an error, not a hang.
MAX_STEPS_OF_A_WAVE = 5_000_000

# The values that a launch may request in its first scalar registers, in this order, and their numbers of registers.
_USER_REGISTERS = (
    ("user_sgpr_dispatch_ptr", 2),
    ("user_sgpr_queue_ptr", 2),
    ("user_sgpr_kernarg_segment_ptr", 2),
    ("user_sgpr_dispatch_id", 2),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    grid:         programs along x, y, z
    num_waves:    waves of a program
    lds_bytes:    LDS of a program
    arguments:    the kernel arguments as they lie in memory
    allocations:  the memory that the program may access
    poison:       the word that fills registers and LDS beforehand
    watch:        orders programs and waves, and may note what they do
    """

    grid: tuple[int, int, int]
    num_waves: int
    lds_bytes: int
    arguments: bytes
    allocations: Sequence[Allocation]
    poison: int = POISON
    watch: Watch = field(default_factory=Watch)


class SimulatedKernel:
    """A kernel whose instructions are built when they are first reached, and kept for further launches."""

    def __init__(self, assembly: Assembly, arch: str) -> None:
        self.assembly = assembly
        self._core = Core(Memory([]))
        self._context = Context(self._core, assembly, arch)
        self._plain: list[Step | None] = [None] * len(assembly.instructions)
        self._steps = [*self._plain]

    def run(self, launch: Launch) -> int:
        """Runs every program; returns the instructions executed. Raises SimulationFault and UnknownInstruction."""
        arguments = np.frombuffer(launch.arguments, np.uint8)
        packet = np.frombuffer(_dispatch_packet(launch), np.uint8)
        own = [
            Allocation("the kernel arguments", arguments.ctypes.data, arguments.nbytes, is_writable=False),
            Allocation("the dispatch packet", packet.ctypes.data, packet.nbytes, is_writable=False),
        ]
        self._core.memory = launch.watch.begin(self.assembly, [*launch.allocations, *own])
        self._steps = [None] * len(self._plain)
        pointers = {
            "user_sgpr_kernarg_segment_ptr": arguments.ctypes.data,
            "user_sgpr_dispatch_ptr": packet.ctypes.data,
        }
        executed = 0
        with np.errstate(all="ignore"):
            try:
                for program in launch.watch.programs(launch.grid):
                    first_scalars = self._first_scalars(launch, pointers, program)
                    executed += self._run_program(launch, first_scalars, program)
            finally:
                launch.watch.end()
        return executed

    def was_reached(self, index: int) -> bool:
        """True if a launch has executed an instruction."""
        return self._plain[index] is not None

    def _first_scalars(self, launch: Launch, pointers: dict[str, int], program: Program) -> list[int]:
        """The scalar registers that a wave starts with."""
        entries = self.assembly.descriptor
        words: list[int] = []
        for name, count in _USER_REGISTERS:
            if entries.get(name):
                pointer = pointers.get(name, launch.poison << 32 | launch.poison)
                words += [pointer >> 32 * word & 0xFFFFFFFF for word in range(count)]
        first = entries.get("user_sgpr_kernarg_preload_offset", 0)
        preloaded = entries.get("user_sgpr_kernarg_preload_length", 0)
        padded = launch.arguments.ljust(4 * (first + preloaded), b"\0")
        words += struct.unpack_from(f"<{preloaded}I", padded, 4 * first)
        if len(words) != entries["user_sgpr_count"]:
            raise UnknownInstruction(f"{self.assembly.name} starts with other scalar registers than are known")
        ids = zip("xyz", program, strict=True)
        return words + [index for axis, index in ids if entries[f"system_sgpr_workgroup_id_{axis}"]]

    def _run_program(self, launch: Launch, first_scalars: list[int], program: Program) -> int:
        core = self._core
        core.lds = launch.watch.begin_program(program, launch.num_waves, launch.lds_bytes, launch.poison)
        scratch_words = self.assembly.descriptor["private_segment_fixed_size"] // 4
        running = [_new_wave(number, first_scalars, scratch_words, launch.poison) for number in range(launch.num_waves)]
        executed = 0
        while running:
            ready, waiting = [*running], []
            while ready:
                wave, most = launch.watch.turn(ready)
                core.resume(wave)
                try:
                    stopped, steps = self._run_wave(wave, most, launch.watch)
                except (SimulationFault, UnknownInstruction) as fault:
                    text = self.assembly.instructions[wave.pc].text
                    raise type(fault)(
                        f"{self.assembly.name}, program {program}, wave {wave.number}, {text!r}: {fault}"
                    ) from None
                executed += steps
                core.suspend(wave)
                if stopped is not None:
                    ready.remove(wave)
                if stopped == AT_BARRIER:
                    waiting.append(wave)
            if waiting and len(waiting) < len(running):
                raise SimulationFault(f"{self.assembly.name}, program {program}: a wave ended, others wait for it")
            core.lds.barrier()
            launch.watch.meet()
            running = sorted(waiting, key=lambda wave: wave.number)
        return executed

    def _run_wave(self, wave: Wave, most: int, watch: Watch) -> tuple[int | None, int]:
        """Runs to the next barrier or the end, or some instructions.

        Returns which of the two, or None, and the instructions executed.
        """
        steps, pc = self._steps, wave.pc
        stopped, most = None, min(most, MAX_STEPS_OF_A_WAVE)
        for executed in range(1, most + 1):
            step = steps[pc]
            wave.pc = pc
            if step is None:
                step = steps[pc] = watch.step(self._core, pc, self._build(pc))
            target = step()
            if target is None:
                pc += 1
            elif target >= 0:
                pc = target
            else:
                pc, stopped, most = pc + 1, target, executed
                break
        wave.pc = pc
        # Those before a barrier count too: a loop without an end may have one.
        wave.steps += most
        if wave.steps >= MAX_STEPS_OF_A_WAVE and stopped in (None, AT_BARRIER):
            raise SimulationFault(f"no end after {wave.steps} instructions")
        return stopped, most

    def _build(self, index: int) -> Step:
        """The plain function that executes an instruction, which is built once."""
        step = self._plain[index]
        if step is None:
            step = self._plain[index] = build_step(self._context, self.assembly.instructions[index])
        return step


def _new_wave(number: int, first_scalars: list[int], scratch_words: int, poison: int) -> Wave:
    """Everything is poison except EXEC, the first scalar registers and the lane's number in the program, in v0."""
    vector = np.full((NUM_VECTOR, LANES), poison, np.uint32)
    vector[0] = np.arange(LANES) + LANES * number
    scalar = np.full(NUM_SCALAR, poison, np.uint32)
    scalar[: len(first_scalars)] = first_scalars
    scalar[EXEC : EXEC + 2] = 0xFFFFFFFF
    return Wave(number, vector, scalar, np.full((scratch_words, LANES), poison, np.uint32))


def _dispatch_packet(launch: Launch) -> bytes:
    """The fields of an AQL kernel dispatch packet that a kernel may read: work-group and grid size in work-items."""
    lanes = LANES * launch.num_waves
    x, y, z = launch.grid
    return struct.pack("<HHHHHHIII40x", 0, 3, lanes, 1, 1, 0, x * lanes, y, z)
