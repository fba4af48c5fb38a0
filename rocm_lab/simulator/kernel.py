"""Runs a grid of a kernel, program after program, its waves one after the other from barrier to barrier.

Initial registers: LLVM's "User Guide for AMDGPU Backend", "Initial Kernel Execution State", for architected gfx9.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from rocm_lab.simulator.assembly import Assembly
from rocm_lab.simulator.core import EXEC, LANES, NUM_SCALAR, NUM_VECTOR, POISON, Core, Wave
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction
from rocm_lab.simulator.isa.instructions import build_step
from rocm_lab.simulator.isa.step import AT_BARRIER, Context, Step
from rocm_lab.simulator.lds import Lds
from rocm_lab.simulator.memory import Allocation, Memory

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
    """

    grid: tuple[int, int, int]
    num_waves: int
    lds_bytes: int
    arguments: bytes
    allocations: Sequence[Allocation]
    poison: int = POISON


class SimulatedKernel:
    """A kernel whose instructions are built when they are first reached, and kept for further launches."""

    def __init__(self, assembly: Assembly, arch: str) -> None:
        self.assembly = assembly
        self._core = Core(Memory([]))
        self._context = Context(self._core, assembly, arch)
        self._steps: list[Step | None] = [None] * len(assembly.instructions)

    def run(self, launch: Launch) -> int:
        """Runs every program; returns the instructions executed. Raises SimulationFault and UnknownInstruction."""
        arguments = np.frombuffer(launch.arguments, np.uint8)
        packet = np.frombuffer(_dispatch_packet(launch), np.uint8)
        own = [
            Allocation("the kernel arguments", arguments.ctypes.data, arguments.nbytes, is_writable=False),
            Allocation("the dispatch packet", packet.ctypes.data, packet.nbytes, is_writable=False),
        ]
        self._core.memory = Memory([*launch.allocations, *own])
        pointers = {
            "user_sgpr_kernarg_segment_ptr": arguments.ctypes.data,
            "user_sgpr_dispatch_ptr": packet.ctypes.data,
        }
        executed = 0
        with np.errstate(all="ignore"):
            for z, y, x in product(*(range(size) for size in reversed(launch.grid))):
                first_scalars = self._first_scalars(launch, pointers, (x, y, z))
                executed += self._run_program(launch, first_scalars, (x, y, z))
        return executed

    def _first_scalars(self, launch: Launch, pointers: dict[str, int], program: tuple[int, int, int]) -> list[int]:
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

    def _run_program(self, launch: Launch, first_scalars: list[int], program: tuple[int, int, int]) -> int:
        core = self._core
        core.lds = Lds(launch.lds_bytes, launch.poison)
        scratch_words = self.assembly.descriptor["private_segment_fixed_size"] // 4
        waves = [_new_wave(number, first_scalars, scratch_words, launch.poison) for number in range(launch.num_waves)]
        executed = 0
        running = waves
        while running:
            waiting = []
            for wave in running:
                core.resume(wave)
                try:
                    stopped, steps = self._run_wave(wave)
                except (SimulationFault, UnknownInstruction) as fault:
                    text = self.assembly.instructions[wave.pc].text
                    raise type(fault)(
                        f"{self.assembly.name}, program {program}, wave {wave.number}, {text!r}: {fault}"
                    ) from None
                executed += steps
                core.suspend(wave)
                if stopped == AT_BARRIER:
                    waiting.append(wave)
            if waiting and len(waiting) < len(running):
                raise SimulationFault(f"{self.assembly.name}, program {program}: a wave ended, others wait for it")
            core.lds.barrier()
            running = waiting
        return executed

    def _run_wave(self, wave: Wave) -> tuple[int, int]:
        """Runs to the next barrier or the end; returns which of them, and the instructions executed."""
        steps, pc = self._steps, wave.pc
        for executed in range(1, MAX_STEPS_OF_A_WAVE):
            step = steps[pc]
            wave.pc = pc
            if step is None:
                step = steps[pc] = build_step(self._context, self.assembly.instructions[pc])
            target = step()
            if target is None:
                pc += 1
            elif target >= 0:
                pc = target
            else:
                wave.pc = pc + 1
                return target, executed
        raise SimulationFault(f"no end after {MAX_STEPS_OF_A_WAVE} instructions")


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
