"""Atomic operations on one or two 32-bit words of global memory; ISA sections 9.1 "Buffer" and 10.3 "Global".

Lane after lane; hardware promises no order. With sc0 the destination receives the previous value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.isa.global_memory import memory_addresses
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.isa.words import WordSink
from rocm_lab.simulator.operands import vector_register

# (value in memory, the lane's value) -> new value in memory; excess bits are cut.
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
    name, size = instruction.name.removesuffix("_x2"), 8 if instruction.name.endswith("_x2") else 4
    compute, dtype = _OPS[name.rpartition("_")[2]], np.dtype(f"<u{size}")
    operands = list(instruction.operands)
    returns = "sc0" in instruction.modifiers
    if instruction.name.startswith("buffer_"):
        value = destination = operands.pop(0)
    else:
        destination = operands.pop(0) if returns else operands[1]
        value = operands.pop(1)
    addresses = memory_addresses(core, instruction, tuple(operands), size)
    first = vector_register(value).index
    sink = WordSink(core, vector_register(destination).index, size)

    def step() -> None:
        if not core.any_active:
            return
        where, in_range = addresses()
        values = core.vector[first : first + size // 4].T.copy().view(dtype)[:, 0]
        before = np.zeros((int(core.active.sum()), 1), dtype)
        for place, lane in enumerate(np.flatnonzero(core.active)):
            if in_range[lane]:
                address = where[lane : lane + 1]
                before[place] = core.memory.load(address, size).view(dtype)[0]
                after = compute(int(before[place, 0]), int(values[lane])) & (1 << 8 * size) - 1
                core.memory.store(address, np.array([[after]], dtype).view(np.uint8))
        if returns:
            sink.write(before.view(np.uint8))

    return step


BUILDERS: dict[str, Builder] = {
    f"{space}_atomic_{name}{words}": _atomic for space in ("buffer", "global") for name in _OPS for words in ("", "_x2")
}
