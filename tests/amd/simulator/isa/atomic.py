"""Atomic operations on 32-bit words of global memory; ISA sections 9.1 "Buffer Instructions" and 10.3 "Global".

Lane after lane; hardware promises no order. With sc0 the destination receives what was there before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from tests.amd.simulator.arrays import U32
from tests.amd.simulator.assembly import Instruction
from tests.amd.simulator.isa.global_memory import memory_addresses
from tests.amd.simulator.isa.step import Builder, Context, Step
from tests.amd.simulator.isa.words import WordSink
from tests.amd.simulator.operands import vector_register

# From the word in memory and the lane's to the new word; what exceeds 32 bits is cut.
_OPS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "umax": max,
    "umin": min,
    "swap": lambda old, new: new,
}


def _atomic(context: Context, instruction: Instruction) -> Step:
    core = context.core
    compute = _OPS[instruction.name.rpartition("_")[2]]
    operands = list(instruction.operands)
    returns = "sc0" in instruction.modifiers
    if instruction.name.startswith("buffer_"):
        value = destination = operands.pop(0)
    else:
        destination = operands.pop(0) if returns else operands[1]
        value = operands.pop(1)
    addresses = memory_addresses(core, instruction, tuple(operands), 4)
    values = core.vector[vector_register(value).index]
    sink = WordSink(core, vector_register(destination).index, 4)

    def step() -> None:
        if not core.any_active:
            return
        where, in_range = addresses()
        before = np.zeros((int(core.active.sum()), 1), U32)
        for place, lane in enumerate(np.flatnonzero(core.active)):
            if in_range[lane]:
                address = where[lane : lane + 1]
                before[place] = core.memory.load(address, 4).view(U32)[0]
                after = compute(int(before[place, 0]), int(values[lane])) & 0xFFFFFFFF
                core.memory.store(address, np.array([[after]], U32).view(np.uint8))
        if returns:
            sink.write(before.view(np.uint8))

    return step


BUILDERS: dict[str, Builder] = {f"{space}_atomic_{name}": _atomic for space in ("buffer", "global") for name in _OPS}
