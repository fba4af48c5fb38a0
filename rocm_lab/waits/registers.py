"""Sets of registers as bits of one number: v and a registers from bit 0 on, scalar ones after them, then the mode.

The numbers are the simulator's: a0 follows v255; 106 is VCC, 124 M0, 126 EXEC.
"""

import re

import numpy as np

from rocm_lab.simulator.core import ACCUMULATION, EXEC, M0, NUM_SCALAR, NUM_VECTOR, VCC
from rocm_lab.simulator.operands import constant, register

_U64 = np.dtype(np.uint64)
# Signs, absolute values and extensions around a register.
_AROUND = re.compile(r"^(?:-|neg\(|abs\(|sext\(|\|)+|[)|]+$")
# The last four are apertures of the address space: constants of a launch (LLVM's User Guide for AMDGPU).
_NO_REGISTERS = ("off", "null", "src_shared_base", "src_shared_limit", "src_private_base", "src_private_limit")

VECTORS = (1 << NUM_VECTOR) - 1
SCALARS = ((1 << NUM_SCALAR) - 1) << NUM_VECTOR
# The registers that s_setreg writes, which no operand names.
MODE = 1 << (NUM_VECTOR + NUM_SCALAR)


def _scalars(first: int, count: int) -> int:
    return ((1 << count) - 1) << (NUM_VECTOR + first)


VCC_BITS, M0_BITS, EXEC_BITS = _scalars(VCC, 2), _scalars(M0, 1), _scalars(EXEC, 2)


def registers_of(token: str) -> int:
    """The registers that an operand names; none for a constant. Raises UnknownInstruction for anything else."""
    name = _AROUND.sub("", token)
    found = register(name)
    if found is not None:
        bits = (1 << found.count) - 1
        return bits << (found.index + (0 if found.is_vector else NUM_VECTOR))
    if token not in _NO_REGISTERS:
        constant(name, _U64)
    return 0


def text_of(registers: int) -> str:
    """The registers as assembly names them, as in "v[2:3] s4"."""
    found = []
    while registers:
        first = (registers & -registers).bit_length() - 1
        count = 1
        while registers >> (first + count) & 1 and first + count not in (ACCUMULATION, NUM_VECTOR):
            count += 1
        registers &= ~(((1 << count) - 1) << first)
        found.append(_name(first, count))
    return " ".join(found)


def _name(first: int, count: int) -> str:
    if 1 << first == MODE:
        return "the mode"
    bank = "v" if first < ACCUMULATION else "a" if first < NUM_VECTOR else "s"
    index = first - {"v": 0, "a": ACCUMULATION, "s": NUM_VECTOR}[bank]
    special = {VCC: "vcc", M0: "m0", EXEC: "exec"}
    if bank == "s" and index in special:
        return special[index]
    return f"{bank}{index}" if count == 1 else f"{bank}[{index}:{index + count - 1}]"
