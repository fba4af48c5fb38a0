"""Private memory of a lane, to which registers are spilled; ISA section 10.4 "Scratch Space (Private)".

Only places known at compile time, as spills are. Memory that was never written is poison.
"""

import re

import numpy as np

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.operands import vector_register

_NAME = re.compile(r"scratch_(load|store)_dword(?:x(\d))?")


def _access(context: Context, instruction: Instruction) -> Step:
    core = context.core
    instruction.allow("offset")
    found = _NAME.fullmatch(instruction.name)
    assert found is not None
    is_load, count = found[1] == "load", int(found[2] or 1)
    value, *place = instruction.operands if is_load else (instruction.operands[1], instruction.operands[0], "off")
    if place != ["off", "off"] or instruction.operands[-1] != "off":
        raise UnknownInstruction(f"the address of {instruction.text!r}")
    first, is_unaligned = divmod(instruction.number("offset"), 4)
    num_bytes = context.assembly.descriptor["private_segment_fixed_size"]
    if is_unaligned or first < 0 or 4 * (first + count) > num_bytes:
        raise SimulationFault(f"a lane has {num_bytes} bytes of scratch memory")
    index = vector_register(value).index
    registers = core.vector[index : index + count]

    def step() -> None:
        words = core.scratch[first : first + count]
        into, source = (registers, words) if is_load else (words, registers)
        np.copyto(into, source, where=core.active)

    return step


BUILDERS: dict[str, Builder] = {
    f"scratch_{verb}_dword{count}": _access for verb in ("load", "store") for count in ("", "x2", "x3", "x4")
}
