"""Atomic operations on one or two 32-bit words of global memory; ISA sections 9.1 "Buffer" and 10.3 "Global".

Lane after lane; hardware promises no order. With sc0 the destination receives the previous value. A compare-and-swap
has the new value in its data's first half and the one to compare with in the second.
"""

import operator
import re
from collections.abc import Callable

import numpy as np

from rocm_lab.simulator.arrays import U16, Array
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.isa.convert import from_bfloat16, to_bfloat16
from rocm_lab.simulator.isa.global_memory import memory_addresses
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.isa.words import WordSink, WordSource
from rocm_lab.simulator.operands import vector_register

# (value in memory, the lane's value) -> new value in memory.
_Compute = Callable[[Array, Array], Array]

# By name, the type whose values are computed: of words, and with "_x2" of pairs of them, as large as the memory.
_OF_WORDS: dict[str, tuple[str, _Compute]] = {
    "add": ("u", operator.add),
    "sub": ("u", operator.sub),
    "and": ("u", operator.and_),
    "or": ("u", operator.or_),
    "xor": ("u", operator.xor),
    "umax": ("u", np.maximum),
    "umin": ("u", np.minimum),
    "smax": ("i", np.maximum),
    "smin": ("i", np.minimum),
    "swap": ("u", lambda old, new: new),
}


def _add_bfloat16(old: Array, new: Array) -> Array:
    return to_bfloat16(from_bfloat16(old) + from_bfloat16(new)).astype(U16)


_OF_FLOATS: dict[str, tuple[str, _Compute]] = {
    "add_f32": ("f4", operator.add),
    "add_f64": ("f8", operator.add),
    "max_f64": ("f8", np.fmax),
    "min_f64": ("f8", np.fmin),
    "pk_add_f16": ("f2", operator.add),
    "pk_add_bf16": ("u2", _add_bfloat16),
}
_COMPARE = "cmpswap"


def _atomic(context: Context, instruction: Instruction) -> Step:
    core = context.core
    name = re.sub(r"^(?:buffer|global)_atomic_|_x2$", "", instruction.name)
    size = 8 if "_x2" in instruction.name or name.endswith("f64") else 4
    compares = name == _COMPARE
    kind, compute = _OF_FLOATS[name] if name in _OF_FLOATS else _OF_WORDS["swap" if compares else name]
    dtype = np.dtype(f"<{kind}" if name in _OF_FLOATS else f"<{kind}{size}")
    operands = list(instruction.operands)
    returns = "sc0" in instruction.modifiers
    if instruction.name.startswith("buffer_"):
        value = destination = operands.pop(0)
    else:
        destination = operands.pop(0) if returns else operands[1]
        value = operands.pop(1)
    addresses = memory_addresses(core, instruction, tuple(operands), size)
    source = WordSource(core, vector_register(value).index, size * (1 + compares))
    sink = WordSink(core, vector_register(destination).index, size)

    def step() -> None:
        if not core.any_active:
            return
        where, in_range = addresses()
        given = source.read()
        before = np.zeros((len(given), size), np.uint8)
        for place, lane in enumerate(np.flatnonzero(core.active)):
            if not in_range[lane]:
                continue
            address = where[lane : lane + 1]
            before[place] = core.memory.load(address, size)[0]
            if compares and (before[place] != given[place, size:]).any():
                continue
            after = compute(before[place].view(dtype), given[place, :size].view(dtype))
            core.memory.store(address, after.view(np.uint8)[None])
        if returns:
            sink.write(before)

    return step


BUILDERS: dict[str, Builder] = {
    f"{space}_atomic_{name}": _atomic
    for space in ("buffer", "global")
    for name in (*(f"{name}{words}" for name in (*_OF_WORDS, _COMPARE) for words in ("", "_x2")), *_OF_FLOATS)
}
