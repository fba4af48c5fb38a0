"""Bounds of the values in registers: unsigned numbers of 32 bits, the least, the largest, and the bits they may have.

A value that is not known, or that may exceed 32 bits, has no bounds: it can be anything.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rocm_lab.simulator.assembly import Instruction

LARGEST = (1 << 32) - 1


class Bounds(NamedTuple):
    """The least and the largest value, both included, and the bits that can be 1 in a value."""

    low: int
    high: int
    ones: int = LARGEST


ANYTHING = Bounds(0, LARGEST)
_NOTHING = Bounds(0, 0, 0)


def within(low: int, high: int, ones: int = LARGEST) -> Bounds:
    """The bounds, written in one way only; any, if a number is too large."""
    if not 0 <= low <= high <= LARGEST:
        return ANYTHING
    ones &= high | (1 << (low ^ high).bit_length()) - 1
    return Bounds(low, min(high, ones), ones)


def exactly(number: int) -> Bounds:
    """The bounds of a number that is known."""
    return within(number, number)


def hull(a: Bounds, b: Bounds) -> Bounds:
    """The bounds of a value that is one of two."""
    return within(min(a.low, b.low), max(a.high, b.high), a.ones | b.ones)


def _unit(bounds: Bounds) -> int:
    """The largest power of 2 of which all values are multiples; 0 if the only value is 0."""
    return bounds.ones & -bounds.ones


def _add(*terms: Bounds) -> Bounds:
    units = [_unit(term) for term in terms if term.ones]
    low, high = sum(term.low for term in terms), sum(term.high for term in terms)
    # A negative number is added as one that is 2^32 larger: every sum wraps then.
    wrapped = low & ~LARGEST
    return within(low - wrapped, high - wrapped, -min(units, default=0))


def _multiply(a: Bounds, b: Bounds) -> Bounds:
    return within(a.low * b.low, a.high * b.high, -_unit(a) * _unit(b))


def _shift(a: Bounds, by: Bounds) -> Bounds:
    count = by.low & 31
    return within(a.low << count, a.high << count, a.ones << count) if by.low == by.high else ANYTHING


def _shift_down(a: Bounds, by: Bounds) -> Bounds:
    count = by.low & 31
    return within(a.low >> count, a.high >> count, a.ones >> count) if by.low == by.high else within(0, a.high)


def _bitwise(table: int, a: Bounds, b: Bounds, c: Bounds = _NOTHING) -> Bounds:
    """Bit by bit: bit 4 a + 2 b + c of table is the result for these three bits, as v_bitop3_b32 has it."""
    zeros = (~each.low | (1 << (each.low ^ each.high).bit_length()) - 1 for each in (a, b, c))
    can_be = [*zip(zeros, (a.ones, b.ones, c.ones), strict=True)]
    results = [0, 0]
    for row in range(8):
        results[table >> row & 1] |= can_be[0][row >> 2] & can_be[1][row >> 1 & 1] & can_be[2][row & 1]
    return within(~results[0] & LARGEST, results[1] & LARGEST, results[1])


def _and(a: Bounds, b: Bounds) -> Bounds:
    found = _bitwise(0xC0, a, b)
    return within(found.low, min(a.high, b.high, found.high), found.ones)


def _or(a: Bounds, b: Bounds, c: Bounds = _NOTHING) -> Bounds:
    found = _bitwise(0xFE, a, b, c)
    return within(max(a.low, b.low, c.low, found.low), found.high, found.ones)


def _xor(a: Bounds, b: Bounds) -> Bounds:
    return _bitwise(0x3C, a, b)


def _field(a: Bounds, where: Bounds) -> Bounds:
    is_known = where.low >> 16 == where.high >> 16
    return _field_of_width(a, _NOTHING, exactly(where.low >> 16 & 127) if is_known else ANYTHING)


def _field_of_width(a: Bounds, offset: Bounds, width: Bounds) -> Bounds:
    return within(0, (1 << width.low) - 1) if width.low == width.high and width.low < 32 else ANYTHING


# By instruction, from the bounds of the sources in the order of the operands.
OPS: dict[str, Callable[..., Bounds]] = {
    **dict.fromkeys(("s_mov_b32", "v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32"), lambda a: a),
    "s_movk_i32": lambda a: a if a.high < 1 << 15 else ANYTHING,
    # The first source of these two is what they write.
    "s_addk_i32": lambda a, b: _add(a, b) if b.high < 1 << 15 else ANYTHING,
    "s_mulk_i32": lambda a, b: _multiply(a, b) if b.high < 1 << 15 else ANYTHING,
    **dict.fromkeys(("s_add_i32", "s_add_u32", "v_add_u32", "v_add3_u32"), _add),
    **dict.fromkeys(("s_mul_i32", "v_mul_lo_u32"), _multiply),
    "v_mul_u32_u24": lambda a, b: _multiply(a, b) if max(a.high, b.high) < 1 << 24 else ANYTHING,
    "s_lshl_b32": _shift,
    "s_lshr_b32": _shift_down,
    "v_lshlrev_b32": lambda by, a: _shift(a, by),
    "v_lshrrev_b32": lambda by, a: _shift_down(a, by),
    **dict.fromkeys(("s_and_b32", "v_and_b32"), _and),
    **dict.fromkeys(("s_or_b32", "v_or_b32", "v_or3_b32"), _or),
    **dict.fromkeys(("s_xor_b32", "v_xor_b32"), _xor),
    "s_bfe_u32": _field,
    "v_bfe_u32": _field_of_width,
    "v_and_or_b32": lambda a, b, c: _or(_and(a, b), c),
    "v_lshl_or_b32": lambda a, by, c: _or(_shift(a, by), c),
    "v_lshl_add_u32": lambda a, by, c: _add(_shift(a, by), c),
    "v_add_lshl_u32": lambda a, b, by: _shift(_add(a, b), by),
    **{
        f"s_lshl{shift}_add_u32": (lambda by: lambda a, b: _add(_shift(a, by), b))(exactly(shift))
        for shift in (1, 2, 3, 4)
    },
    "s_cselect_b32": hull,
    "v_cndmask_b32": lambda a, b, mask: hull(a, b),
}


def result_of(instruction: Instruction, sources: Sequence[Bounds]) -> Bounds:
    """The bounds of what an instruction writes, from those of its sources; of a vector register in the active lanes."""
    if instruction.name == "v_bitop3_b32" and [*instruction.modifiers] == ["bitop3"]:
        return _bitwise(instruction.number("bitop3"), *sources)
    compute = OPS.get(instruction.name)
    if compute is None or instruction.encoding in ("dpp", "sdwa") or instruction.modifiers:
        return ANYTHING
    return compute(*sources)
