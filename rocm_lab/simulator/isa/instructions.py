"""Every instruction that the simulator knows, by mnemonic."""

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.faults import UnknownInstruction
from rocm_lab.simulator.isa import (
    atomic,
    control,
    convert,
    cross_lane,
    eight_bits,
    global_memory,
    local_memory,
    matrix,
    packed,
    scalar,
    scratch,
    vector_float,
    vector_integer,
)
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.isa.vector import VectorOp

_GROUPS = (
    control,
    scalar,
    vector_integer,
    vector_float,
    convert,
    eight_bits,
    packed,
    cross_lane,
    local_memory,
    global_memory,
    atomic,
    scratch,
    matrix,
)
BUILDERS: dict[str, Builder] = {name: builder for group in _GROUPS for name, builder in group.BUILDERS.items()}
# The operands of those that are a row of a table: how many destinations, and whether the destination is read.
VECTOR_OPS: dict[str, VectorOp] = {**vector_integer.OPS, **vector_float.OPS, **convert.OPS}
assert len(BUILDERS) == sum(len(group.BUILDERS) for group in _GROUPS), "an instruction is in two groups"


def build_step(context: Context, instruction: Instruction) -> Step:
    """The instruction as a function that executes it. Raises UnknownInstruction."""
    builder = BUILDERS.get(instruction.name)
    if builder is None:
        raise UnknownInstruction(f"{instruction.name} of {instruction.text!r}")
    return builder(context, instruction)
