"""Operands: from a token of the text to a function that reads it, or an object that writes it.

Sources: "AMD Instinct MI300 Instruction Set Architecture", chapters 5 and 6 (scalar and vector operands, constants,
abs and neg) and LLVM's "Syntax of AMDGPU Instruction Operands".
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rocm_lab.simulator.arrays import F64, U16, U32, U64, Array
from rocm_lab.simulator.core import ACCUMULATION, EXEC, LANES, M0, VCC, Core
from rocm_lab.simulator.faults import UnknownInstruction

# One value for all lanes, [1], or one for each, [64].
Source = Callable[[], Array]


_SPECIAL = {"vcc": VCC, "vcc_lo": VCC, "vcc_hi": VCC + 1, "m0": M0, "exec": EXEC, "exec_lo": EXEC, "exec_hi": EXEC + 1}
_FLOATS = ("0.5", "-0.5", "1.0", "-1.0", "2.0", "-2.0", "4.0", "-4.0", "0.15915494", "0.15915494309189532")


@dataclass(frozen=True, slots=True)
class Register:
    """count registers from index on; is_vector: v and a registers, which core.vector holds one after the other."""

    is_vector: bool
    index: int
    count: int


@cache
def register(token: str) -> Register | None:
    """The registers that a token names, or None for a constant."""
    if token in _SPECIAL:
        return Register(False, _SPECIAL[token], 2 if token in ("vcc", "exec") else 1)
    found = re.fullmatch(r"([vsa])(?:(\d+)|\[(\d+):(\d+)\])", token)
    if not found:
        return None
    kind, single, first, last = found.groups()
    index = int(single or first)
    count = 1 if single else int(last) - index + 1
    return Register(kind != "s", index + (ACCUMULATION if kind == "a" else 0), count)


def vector_register(token: str) -> Register:
    """The vector registers that a token must name."""
    found = register(token)
    if found is None or not found.is_vector:
        raise UnknownInstruction(f"{token!r} where a vector register belongs")
    return found


def scalar_register(token: str) -> Register:
    """The scalar registers that a token must name."""
    found = register(token)
    if found is None or found.is_vector:
        raise UnknownInstruction(f"{token!r} where a scalar register belongs")
    return found


def constant(token: str, dtype: np.dtype[Any]) -> int:
    """The bits of a constant as an operand of this type.

    Integers are bits of a float operand as they stand. If it is a double, those that are not inline are its upper half.
    """
    bits = 8 * dtype.itemsize
    if token in _FLOATS:
        as_float = np.dtype(f"float{bits}").type(token)
        return int(as_float.view(f"uint{bits}"))
    try:
        value = int(token, 0)
    except ValueError:
        raise UnknownInstruction(f"operand {token!r}") from None
    if dtype == F64 and not -16 <= value <= 64:
        value <<= 32
    return value & ((1 << bits) - 1)


def vector_source(core: Core, token: str, dtype: np.dtype[Any], *, high: bool = False) -> Source:
    """Reads an operand of a vector instruction; high: the upper half of a register, of a 16-bit type."""
    name, absolute, negated = token, False, False
    if name.startswith("-") and name not in _FLOATS and not name[1:].isdigit():
        name, negated = name[1:], True
    if name.startswith("neg("):  # of a constant, in which a sign would belong to the number
        name, negated = name[4:-1], True
    if name.startswith("|"):
        name, absolute = name.strip("|"), True
    read = _plain_source(core, name, dtype, high=high)
    if not (absolute or negated):
        return read
    sign = dtype.itemsize * 8 - 1
    unsigned = np.dtype(f"uint{sign + 1}").type

    def with_sign() -> Array:
        bits = read().view(unsigned)
        if absolute:
            bits = bits & unsigned((1 << sign) - 1)
        if negated:
            bits = bits ^ unsigned(1 << sign)
        return bits.view(dtype)

    return with_sign


def _plain_source(core: Core, name: str, dtype: np.dtype[Any], *, high: bool) -> Source:
    found = register(name)
    if found is None:
        value = np.array([constant(name, dtype)], f"uint{8 * dtype.itemsize}").view(dtype)
        return lambda: value
    if dtype.itemsize == 8:
        if not found.is_vector:
            pair = core.scalar[found.index : found.index + 2]
            return lambda: pair.view(dtype)
        low, upper = core.vector[found.index], core.vector[found.index + 1]
        return lambda: (low.astype(U64) | upper.astype(U64) << np.uint64(32)).view(dtype)
    row = core.vector[found.index] if found.is_vector else core.scalar[found.index : found.index + 1]
    if dtype.itemsize == 4:
        typed = row.view(dtype)
        return lambda: typed
    half = row.view(U16)[int(high) :: 2]
    return lambda: half.copy().view(dtype)


class VectorSink:
    """Writes a vector register, or two for 64-bit types; a 16-bit result clears the register's upper half."""

    def __init__(self, core: Core, token: str, dtype: np.dtype[Any]) -> None:
        self._core = core
        self._dtype = dtype
        index = vector_register(token).index
        rows = core.vector[index : index + max(1, dtype.itemsize // 4)]
        self._rows = list(rows.view(dtype) if dtype.itemsize == 4 else rows)

    def write(self, value: Array) -> None:
        """value, [1] or [64], to the active lanes."""
        if self._core.all_active:
            for row, part in zip(self._rows, self._parts(value), strict=True):
                row[:] = part
        else:
            self.write_where(value, self._core.active)

    def write_where(self, value: Array, mask: Array) -> None:
        """Writes value to the lanes of mask, regardless of EXEC."""
        for row, part in zip(self._rows, self._parts(value), strict=True):
            np.copyto(row, part, where=mask, casting="no")

    def _parts(self, value: Array) -> tuple[Array, ...]:
        assert value.dtype == self._dtype, f"{value.dtype} where {self._dtype} belongs"
        if self._dtype.itemsize == 4:
            return (value,)
        if self._dtype.itemsize == 2:
            return (value.view(U16).astype(U32),)
        words = value.view(U64)
        return words.astype(U32), (words >> np.uint64(32)).astype(U32)


def mask_source(core: Core, token: str) -> Source:
    """Reads a pair of scalar registers as bool [64]."""
    index = scalar_register(token).index
    return lambda: core.read_mask(index)


def scalar_source(core: Core, token: str, bits: int) -> Callable[[], int]:
    """Reads an operand of a scalar instruction as an unsigned number of 32 or 64 bits."""
    found = register(token)
    if found is None:
        value = constant(token, np.dtype(f"uint{bits}"))
        return lambda: value
    if found.is_vector:
        raise UnknownInstruction(f"{token!r} where a scalar register belongs")
    index = found.index
    if bits == 64:
        return lambda: core.read_pair(index)
    item = core.scalar.item
    return lambda: int(item(index))


def all_lanes(values: Array) -> Array:
    """[1] or [64] as [64]."""
    # Not np.broadcast_to(), which is Python code and costs more than most instructions.
    return values if len(values) == LANES else values.repeat(LANES)
