"""A few instructions on their own: registers in, registers out."""

from collections.abc import Mapping, Sequence

import numpy as np

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.assembly import Assembly, parse_instruction
from rocm_lab.simulator.core import EXEC, LANES, POISON, Core
from rocm_lab.simulator.isa.instructions import build_step
from rocm_lab.simulator.isa.step import Context
from rocm_lab.simulator.lds import Lds
from rocm_lab.simulator.memory import Allocation, Memory

ALL_LANES = (1 << LANES) - 1
LANE = np.arange(LANES)


def execute(
    *lines: str,
    vector: Mapping[int, Array | int] | None = None,
    scalar: Mapping[int, int] | None = None,
    exec_mask: int = ALL_LANES,
    scc: int = 0,
    arch: str = "gfx950",
    lds_bytes: int = 0,
    allocations: Sequence[Allocation] = (),
) -> Core:
    """The core after the lines, one after the other; all other registers are poison beforehand."""
    core = Core(Memory(list(allocations)))
    core.lds = Lds(lds_bytes, POISON)
    core.vector[:], core.scalar[:], core.scc = POISON, POISON, scc
    for index, values in (vector or {}).items():
        core.vector[index] = values
    for index, value in (scalar or {}).items():
        core.scalar[index] = value & 0xFFFFFFFF
    core.write_pair(EXEC, exec_mask)
    instructions = tuple(parse_instruction(line) for line in lines)
    context = Context(core, Assembly("snippet", instructions, {}, {}, ()), arch)
    with np.errstate(all="ignore"):
        for instruction in instructions:
            build_step(context, instruction)()
    return core


def floats(core: Core, index: int) -> Array:
    """float32 [64] of a vector register."""
    return core.vector[index].view(np.float32)


def bits(value: float) -> int:
    """The bits of a float32."""
    return int(np.float32(value).view(np.uint32))


def allocation(values: Array, name: str = "memory", *, is_writable: bool = True) -> Allocation:
    """An array as memory; the caller keeps it."""
    return Allocation(name, values.ctypes.data, values.nbytes, is_writable)
