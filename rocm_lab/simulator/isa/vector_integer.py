"""Vector arithmetic on integers and bits; ISA sections 12.8 to 12.10 (VOP1, VOP2, VOP3).

NumPy wraps unsigned integers around as the hardware does; signed ones only in arrays, which all sources are.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from rocm_lab.simulator.arrays import I16, I32, I64, U16, U32, U64, Array
from rocm_lab.simulator.assembly import Instruction
from rocm_lab.simulator.isa.step import Builder, Context, Step
from rocm_lab.simulator.isa.vector import MASK, VectorOp, build, builders_of
from rocm_lab.simulator.operands import all_lanes

_5_BITS, _6_BITS = np.uint32(31), np.uint32(63)
_24_BITS = np.uint32(0xFFFFFF)


def _shift_left(a: Array, by: Array) -> Array:
    return a << (by & _5_BITS)


def _wide(a: Array) -> Array:
    return a.astype(U64)


def _high_product(a: Array, b: Array, wide: np.dtype[Any]) -> Array:
    return (a.astype(wide) * b.astype(wide) >> wide.type(32)).astype(a.dtype)


def _signed_24(a: Array) -> Array:
    return (a << np.uint32(8)).view(I32) >> np.int32(8)


def _reverse_bits(a: Array) -> Array:
    bits = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(U32)[:, 0]


def _first_bit(a: Array) -> Array:
    """Counts from the top; all ones if there is none."""
    bit_length = np.frexp(a.astype(np.float64))[1]
    return np.where(a == 0, -1, 32 - bit_length).astype(I32).view(U32)


def _first_bit_unlike_the_sign(a: Array) -> Array:
    return _first_bit(a ^ (a.view(I32) >> 31).view(U32))


def _field(a: Array, offset: Array, width: Array) -> Array:
    return a >> (offset & _5_BITS) & ((np.uint32(1) << (width & _5_BITS)) - np.uint32(1))


def _signed_field(a: Array, offset: Array, width: Array) -> Array:
    width = width & _5_BITS
    sign = np.where(width > 0, np.uint32(1) << (width - np.uint32(1) & _5_BITS), np.uint32(0))
    field: Array = _field(a, offset, width)
    return (field ^ sign) - sign


def _permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """Byte i of the result is byte selector[i] of (a, b), b below a; 8 to 11 are signs, 12 is 0, above it is 255."""
    pair = np.concatenate([_bytes(b), _bytes(a)], axis=1)
    signs = np.where(pair[:, 1::2] >> 7, np.uint8(255), np.uint8(0))
    zeros = np.zeros((len(pair), 1), np.uint8)
    choices = np.concatenate([pair, signs, zeros, ~zeros], axis=1)
    picked = np.take_along_axis(choices, np.minimum(_bytes(selector), 13).astype(np.intp), axis=1)
    return picked.view(U32)[:, 0]


def _bytes(a: Array) -> Array:
    return np.ascontiguousarray(all_lanes(a)).view(np.uint8).reshape(-1, 4)


def _align_bits(a: Array, b: Array, by: Array) -> Array:
    return ((_wide(a) << np.uint64(32) | _wide(b)) >> _wide(by & _5_BITS)).astype(U32)


def _lanes_below(half: int) -> Callable[[Array, Array], Array]:
    """Adds the set bits of a mask's half that belong to lanes below each lane."""

    def count(mask: Array, base: Array) -> Array:
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
        below = np.arange(32) < np.arange(-32 * half, 64 - 32 * half)[:, None]
        counted: Array = (bits * below).sum(1).astype(U32)
        return counted + base

    return count


def _carry_add(a: Array, b: Array, carry: Array | bool = False) -> tuple[Array, Array]:
    total = _wide(a) + _wide(b) + np.asarray(carry).astype(U64)
    return total.astype(U32), total > 0xFFFFFFFF


def _borrow_subtract(a: Array, b: Array, borrow: Array | bool = False) -> tuple[Array, Array]:
    taken = _wide(b) + np.asarray(borrow).astype(U64)
    return (_wide(a) - taken).astype(U32), taken > _wide(a)


def _reversed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b, *rest: function(b, a, *rest)


def _mad_64(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """The carry out of 64 bits, which Triton's code does not use, is not computed."""
    return a.astype(c.dtype) * b.astype(c.dtype) + c, np.zeros(1, np.bool_)


def _three_way(truth_table: int, a: Array, b: Array, c: Array) -> Array:
    """Bit by bit, bit 4a + 2b + c of the truth table."""
    result = np.zeros_like(a)
    for row in range(8):
        if truth_table >> row & 1:
            result = result | (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _subtract_to_zero(a: Array, b: Array) -> Array:
    return np.where(a > b, a - b, a.dtype.type(0))


def _op(compute: Callable[..., Any], *sources: np.dtype[Any]) -> VectorOp:
    return VectorOp(sources[0], sources, compute)


def _unsigned(compute: Callable[..., Any], count: int = 2, clamped: Callable[..., Any] | None = None) -> VectorOp:
    return VectorOp(U32, (U32,) * count, compute, clamped=clamped)


_16_BIT: dict[str, Callable[..., Array]] = {
    "add": operator.add,
    "sub": operator.sub,
    "subrev": _reversed(operator.sub),
    "mul_lo": operator.mul,
    "max": np.maximum,
    "min": np.minimum,
}

# Operations on three numbers, of any type.
_OF_THREE: dict[str, Callable[..., Array]] = {
    "max3": lambda a, b, c: np.maximum(np.maximum(a, b), c),
    "min3": lambda a, b, c: np.minimum(np.minimum(a, b), c),
    "med3": lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c)),
}

OPS: dict[str, VectorOp] = {
    "v_mov_b32": _unsigned(lambda a: a, 1),
    "v_mov_b64": _op(lambda a: a, U64),
    "v_accvgpr_read_b32": _unsigned(lambda a: a, 1),
    "v_accvgpr_write_b32": _unsigned(lambda a: a, 1),
    "v_accvgpr_mov_b32": _unsigned(lambda a: a, 1),
    "v_cndmask_b32": _op(lambda a, b, mask: np.where(mask, b, a), U32, U32, MASK),
    "v_not_b32": _unsigned(operator.invert, 1),
    "v_bfrev_b32": _unsigned(_reverse_bits, 1),
    "v_ffbh_u32": _unsigned(_first_bit, 1),
    "v_ffbh_i32": _unsigned(_first_bit_unlike_the_sign, 1),
    "v_add_u32": _unsigned(operator.add),
    "v_sub_u32": _unsigned(operator.sub, clamped=_subtract_to_zero),
    "v_subrev_u32": _unsigned(_reversed(operator.sub)),
    "v_add3_u32": _unsigned(lambda a, b, c: a + b + c, 3),
    "v_add_lshl_u32": _unsigned(lambda a, b, c: _shift_left(a + b, c), 3),
    "v_lshl_add_u32": _unsigned(lambda a, b, c: _shift_left(a, b) + c, 3),
    "v_lshl_or_b32": _unsigned(lambda a, b, c: _shift_left(a, b) | c, 3),
    "v_and_or_b32": _unsigned(lambda a, b, c: a & b | c, 3),
    "v_or3_b32": _unsigned(lambda a, b, c: a | b | c, 3),
    "v_xad_u32": _unsigned(lambda a, b, c: (a ^ b) + c, 3),
    "v_and_b32": _unsigned(operator.and_),
    "v_or_b32": _unsigned(operator.or_),
    "v_xor_b32": _unsigned(operator.xor),
    "v_bfi_b32": _unsigned(lambda a, b, c: a & b | ~a & c, 3),
    "v_bfm_b32": _unsigned(lambda width, offset: _shift_left(_shift_left(np.uint32(1), width) - np.uint32(1), offset)),
    "v_bfe_u32": _unsigned(_field, 3),
    "v_bfe_i32": _unsigned(_signed_field, 3),
    "v_perm_b32": _unsigned(_permute_bytes, 3),
    "v_alignbit_b32": _unsigned(_align_bits, 3),
    "v_lshlrev_b32": _unsigned(_reversed(_shift_left)),
    "v_lshrrev_b32": _unsigned(lambda by, a: a >> (by & _5_BITS)),
    "v_ashrrev_i32": _op(lambda by, a: a >> (by & np.int32(31)), I32, I32),
    "v_lshlrev_b64": VectorOp(U64, (U32, U64), lambda by, a: a << _wide(by & _6_BITS)),
    "v_lshrrev_b64": VectorOp(U64, (U32, U64), lambda by, a: a >> _wide(by & _6_BITS)),
    "v_ashrrev_i64": VectorOp(I64, (U32, I64), lambda by, a: a >> (by & _6_BITS).astype(I64)),
    "v_lshl_add_u64": VectorOp(U64, (U64, U32, U64), lambda a, by, c: (a << _wide(by & np.uint32(7))) + c),
    "v_mul_lo_u32": _unsigned(operator.mul),
    "v_mul_hi_u32": _unsigned(partial(_high_product, wide=U64)),
    "v_mul_hi_i32": _op(partial(_high_product, wide=I64), I32, I32),
    "v_mul_u32_u24": _unsigned(lambda a, b: (a & _24_BITS) * (b & _24_BITS)),
    "v_mul_i32_i24": _unsigned(lambda a, b: (_signed_24(a) * _signed_24(b)).view(U32)),
    "v_mul_hi_u32_u24": _unsigned(lambda a, b: _high_product(a & _24_BITS, b & _24_BITS, U64)),
    "v_mul_hi_i32_i24": _unsigned(lambda a, b: _high_product(_signed_24(a), _signed_24(b), I64).view(U32)),
    "v_mad_u32_u24": _unsigned(lambda a, b, c: (a & _24_BITS) * (b & _24_BITS) + c, 3),
    "v_mad_i32_i24": _unsigned(lambda a, b, c: (_signed_24(a) * _signed_24(b)).view(U32) + c, 3),
    "v_mad_u64_u32": VectorOp(U64, (U32, U32, U64), _mad_64, has_mask=True),
    "v_mad_i64_i32": VectorOp(I64, (I32, I32, I64), _mad_64, has_mask=True),
    "v_add_co_u32": VectorOp(U32, (U32, U32), _carry_add, has_mask=True),
    "v_addc_co_u32": VectorOp(U32, (U32, U32, MASK), _carry_add, has_mask=True),
    "v_sub_co_u32": VectorOp(U32, (U32, U32), _borrow_subtract, has_mask=True),
    "v_subrev_co_u32": VectorOp(U32, (U32, U32), _reversed(_borrow_subtract), has_mask=True),
    "v_subb_co_u32": VectorOp(U32, (U32, U32, MASK), _borrow_subtract, has_mask=True),
    "v_subbrev_co_u32": VectorOp(U32, (U32, U32, MASK), _reversed(_borrow_subtract), has_mask=True),
    "v_max_i32": _op(np.maximum, I32, I32),
    "v_min_i32": _op(np.minimum, I32, I32),
    "v_max_u32": _unsigned(np.maximum),
    "v_min_u32": _unsigned(np.minimum),
    "v_bcnt_u32_b32": _unsigned(lambda bits, more: np.bitwise_count(bits).astype(np.uint32) + more),
    "v_mbcnt_lo_u32_b32": _unsigned(_lanes_below(0)),
    "v_mbcnt_hi_u32_b32": _unsigned(_lanes_below(1)),
    **{
        f"v_{name}_{type_name}": _op(compute, dtype, dtype)
        for name, compute in _16_BIT.items()
        for type_name, dtype in (("u16", U16), ("i16", I16))
    },
    **{
        f"v_{name}_{type_name}": _op(compute, dtype, dtype, dtype)
        for name, compute in _OF_THREE.items()
        for type_name, dtype in (("u16", U16), ("i16", I16), ("u32", U32), ("i32", I32))
    },
    "v_sub_u16": VectorOp(U16, (U16, U16), operator.sub, clamped=_subtract_to_zero),
    "v_lshlrev_b16": _op(lambda by, a: a << (by & np.uint16(15)), U16, U16),
    "v_lshrrev_b16": _op(lambda by, a: a >> (by & np.uint16(15)), U16, U16),
    "v_ashrrev_i16": _op(lambda by, a: a >> (by & np.int16(15)), I16, I16),
    "v_pack_b32_f16": VectorOp(U32, (U16, U16), lambda a, b: a.astype(U32) | b.astype(U32) << np.uint32(16)),
}


def _with_truth_table(context: Context, instruction: Instruction) -> Step:
    dtype = U32 if instruction.name == "v_bitop3_b32" else U16
    return build(context, instruction, _op(partial(_three_way, instruction.number("bitop3")), dtype, dtype, dtype))


BUILDERS: dict[str, Builder] = {
    **builders_of(OPS),
    "v_bitop3_b32": _with_truth_table,
    "v_bitop3_b16": _with_truth_table,
}
