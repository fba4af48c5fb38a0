"""Bounds of scalar registers, from which the end of the place in LDS that a load into LDS writes follows.

A load into LDS may be in flight across a barrier that is there for another part of LDS. Then a read of LDS after the
barrier is right if its place lies behind the load's: a read of an address and a constant offset is never below the
offset. An address below 0 that the offset brings back is not thought of; the simulator refuses those.

Bounds are of unsigned numbers of 32 bits. A register without bounds can hold anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.core import LANES, M0, NUM_SCALAR, NUM_VECTOR
from rocm_lab.simulator.isa.global_memory import access_size
from rocm_lab.simulator.operands import register
from rocm_lab.waits.effects import Effects, Unit
from rocm_lab.waits.graph import Block, Graph

_LARGEST = (1 << 32) - 1
# Growing bounds are given up after so many changes of a block's.
_MOST_CHANGES = 16


class Bounds(NamedTuple):
    """The least and the largest value, both included."""

    low: int
    high: int


ANYTHING = Bounds(0, _LARGEST)
_NOTHING = Bounds(0, 0)
Values = dict[int, Bounds]


def _within(low: int, high: int) -> Bounds:
    return Bounds(low, high) if 0 <= low <= high <= _LARGEST else ANYTHING


def _shifted(a: Bounds, by: Bounds, plus: Bounds = _NOTHING) -> Bounds:
    if by.low != by.high:
        return ANYTHING
    return _within((a.low << (by.low & 31)) + plus.low, (a.high << (by.low & 31)) + plus.high)


def _shifted_down(a: Bounds, by: Bounds) -> Bounds:
    return Bounds(a.low >> (by.low & 31), a.high >> (by.low & 31)) if by.low == by.high else ANYTHING


def _field(a: Bounds, where: Bounds) -> Bounds:
    width = where.low >> 16 & 0x7F
    return Bounds(0, (1 << width) - 1) if where.low == where.high and width < 32 else ANYTHING


def _add_after_shift(shift: int) -> Callable[..., Bounds]:
    return lambda a, b: _shifted(a, Bounds(shift, shift), b)


_OPS: dict[str, Callable[..., Bounds]] = {
    "s_mov_b32": lambda a: a,
    "s_movk_i32": lambda a: a if a.high < 1 << 15 else ANYTHING,
    "s_add_i32": lambda a, b: _within(a.low + b.low, a.high + b.high),
    "s_add_u32": lambda a, b: _within(a.low + b.low, a.high + b.high),
    "s_mul_i32": lambda a, b: _within(a.low * b.low, a.high * b.high),
    "s_lshl_b32": _shifted,
    "s_lshr_b32": _shifted_down,
    "s_and_b32": lambda a, b: Bounds(0, min(a.high, b.high)),
    "s_or_b32": lambda a, b: Bounds(max(a.low, b.low), (1 << (a.high | b.high).bit_length()) - 1),
    "s_bfe_u32": _field,
    "s_min_u32": lambda a, b: Bounds(min(a.low, b.low), min(a.high, b.high)),
    **{f"s_lshl{shift}_add_u32": _add_after_shift(shift) for shift in (1, 2, 3, 4)},
}
# They leave SCC, which a comparison has set, as it is.
_KEEP_SCC = ("s_mov_b32", "s_mov_b64", "s_movk_i32", "s_mul_i32", "s_cselect_b32", "s_cselect_b64")


class Places:
    """The places in LDS of a kernel's loads into LDS."""

    def __init__(self, instructions: Sequence[Instruction], effects: Mapping[int, Effects], blocks: Graph) -> None:
        self._instructions = instructions
        self._effects = effects
        self._blocks = blocks
        self._ends = self._find_ends()

    def is_behind(self, read: int, load: int) -> bool:
        """True if a read of LDS never reads what a load into LDS writes; both by index."""
        return self._instructions[read].number("offset") >= self._ends[load]

    def _find_ends(self) -> dict[int, int]:
        """Load into LDS -> the byte behind the last one that any lane writes."""
        entries: dict[int, Values] = {0: {}}
        changes = dict.fromkeys(self._blocks, 0)
        waiting = [0]
        while waiting:
            first = waiting.pop()
            after = self._after(self._blocks[first], entries[first], {})
            for follower in self._blocks[first].followers:
                joined = _join(entries[follower], after) if follower in entries else after
                if joined == entries.get(follower):
                    continue
                changes[follower] += 1
                if changes[follower] > _MOST_CHANGES:
                    joined = {name: bounds for name, bounds in joined.items() if entries[follower].get(name) == bounds}
                entries[follower] = joined
                waiting.append(follower)
        ends: dict[int, int] = {}
        for first, values in entries.items():
            self._after(self._blocks[first], values, ends)
        return ends

    def _after(self, block: Block, before: Values, ends: dict[int, int]) -> Values:
        """The values at the end of a block; notes the ends of loads into LDS."""
        values = dict(before)
        compared: Instruction | None = None
        for index in range(block.first, block.last):
            instruction, effects = self._instructions[index], self._effects[index]
            if effects.to_lds:
                start = values.get(M0, ANYTHING).high + instruction.number("offset")
                ends[index] = start + LANES * access_size(instruction)
            found = self._result(instruction, values, compared)
            if effects.unit is Unit.SCALAR and instruction.name not in _KEEP_SCC:
                compared = instruction if instruction.name.startswith("s_cmp_") else None
            written = effects.writes >> NUM_VECTOR & ((1 << NUM_SCALAR) - 1)
            if compared is not None and written and _names_any(compared, written):
                compared = None
            while written:
                lowest = (written & -written).bit_length() - 1
                values.pop(lowest, None)
                written &= written - 1
                if found != ANYTHING and not written:
                    values[lowest] = found
        return values

    def _result(self, instruction: Instruction, values: Values, compared: Instruction | None) -> Bounds:
        if instruction.name == "s_cselect_b32":
            first, second = (_value(token, values) for token in instruction.operands[1:])
            if compared is not None:
                first = _if_true(compared, instruction.operands[1], first, values)
            return Bounds(min(first.low, second.low), max(first.high, second.high))
        compute = _OPS.get(instruction.name)
        if compute is None:
            return ANYTHING
        return compute(*(_value(token, values) for token in instruction.operands[1:]))


def _value(token: str, values: Values) -> Bounds:
    found = register(token)
    if found is not None:
        return ANYTHING if found.is_vector or found.count > 1 else values.get(found.index, ANYTHING)
    number = int(token, 0) & _LARGEST if token.lstrip("-")[:1].isdigit() and "." not in token else None
    return ANYTHING if number is None else Bounds(number, number)


def _if_true(compared: Instruction, token: str, bounds: Bounds, values: Values) -> Bounds:
    """The bounds of an operand of the comparison where that is true: s_cmp_lt of a small number is enough here."""
    if compared.operands[0] != token or not compared.name.startswith("s_cmp_lt_"):
        return bounds
    limit = _value(compared.operands[1], values)
    # Signed comparison of numbers that are not negative.
    if limit.high >= 1 << 31 or bounds.high >= 1 << 31 or limit.high <= bounds.low:
        return bounds
    return Bounds(bounds.low, min(bounds.high, limit.high - 1))


def _names_any(compared: Instruction, written: int) -> bool:
    named = [register(token) for token in compared.operands]
    return any(found is not None and written >> found.index & 1 for found in named)


def _join(a: Values, b: Values) -> Values:
    return {
        name: Bounds(min(a[name].low, b[name].low), max(a[name].high, b[name].high)) for name in a.keys() & b.keys()
    }
