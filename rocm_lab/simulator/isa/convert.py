"""Conversions between number formats; ISA sections 12.8 and 12.10 (VOP1, VOP3), to the nearest even."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rocm_lab.simulator.arrays import F16, F32, F64, I16, I32, U16, U32, Array
from rocm_lab.simulator.isa.vector import VectorOp, builders_of


def from_bfloat16(codes: Array) -> Array:
    """The bits of bfloat16, uint16, to float32."""
    return (codes.astype(U32) << np.uint32(16)).view(F32)


def to_bfloat16(values: Array) -> Array:
    """float32 to the bits of bfloat16, uint32."""
    bits = np.ascontiguousarray(values).view(U32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), bits >> np.uint32(16) | np.uint32(0x40), rounded)


def to_float16(values: Array) -> Array:
    """float32 to the bits of float16, uint32."""
    return values.astype(F16).view(np.uint16).astype(U32)


def _to_float16_near_zero(values: Array) -> Array:
    """The same, rounded towards zero: what is too large becomes the largest finite number."""
    nearest = values.astype(F16)
    is_beyond = np.abs(nearest.astype(F32)) > np.abs(values)
    return np.where(is_beyond, np.nextafter(nearest, F16.type(0)), nearest).view(U16).astype(U32)


def _pair(convert: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: convert(a) | convert(b) << np.uint32(16)


def _to_integer(dtype: np.dtype[Any]) -> Callable[[Array], Array]:
    """Towards zero; what does not fit becomes the nearest that does, NaN becomes 0."""
    limits = np.iinfo(dtype)

    def convert(values: Array) -> Array:
        wide = np.nan_to_num(np.trunc(values.astype(np.float64)), nan=0.0)
        return np.clip(wide, limits.min, limits.max).astype(np.int64).astype(dtype)

    return convert


def _byte(number: int) -> Callable[[Array], Array]:
    return lambda a: (a >> np.uint32(8 * number) & np.uint32(255)).astype(F32)


OPS: dict[str, VectorOp] = {
    "v_cvt_f32_u32": VectorOp(F32, (U32,), lambda a: a.astype(F32)),
    "v_cvt_f32_i32": VectorOp(F32, (I32,), lambda a: a.astype(F32)),
    "v_cvt_u32_f32": VectorOp(U32, (F32,), _to_integer(U32)),
    "v_cvt_i32_f32": VectorOp(I32, (F32,), _to_integer(I32)),
    "v_cvt_f64_f32": VectorOp(F64, (F32,), lambda a: a.astype(F64)),
    "v_cvt_f64_i32": VectorOp(F64, (I32,), lambda a: a.astype(F64)),
    "v_cvt_f64_u32": VectorOp(F64, (U32,), lambda a: a.astype(F64)),
    "v_cvt_f32_f64": VectorOp(F32, (F64,), lambda a: a.astype(F32)),
    "v_cvt_u32_f64": VectorOp(U32, (F64,), _to_integer(U32)),
    "v_cvt_i32_f64": VectorOp(I32, (F64,), _to_integer(I32)),
    "v_cvt_u16_f16": VectorOp(U16, (F16,), _to_integer(U16)),
    "v_cvt_i16_f16": VectorOp(I16, (F16,), _to_integer(I16)),
    "v_cvt_f16_u16": VectorOp(F16, (U16,), lambda a: a.astype(F16)),
    "v_cvt_f16_i16": VectorOp(F16, (I16,), lambda a: a.astype(F16)),
    "v_cvt_f16_f32": VectorOp(F16, (F32,), lambda a: a.astype(F16)),
    "v_cvt_f32_f16": VectorOp(F32, (F16,), lambda a: a.astype(F32)),
    "v_cvt_pk_bf16_f32": VectorOp(U32, (F32, F32), _pair(to_bfloat16)),
    "v_cvt_pk_f16_f32": VectorOp(U32, (F32, F32), _pair(to_float16)),
    "v_cvt_pkrtz_f16_f32": VectorOp(U32, (F32, F32), _pair(_to_float16_near_zero)),
    **{f"v_cvt_f32_ubyte{number}": VectorOp(F32, (U32,), _byte(number)) for number in range(4)},
}


BUILDERS = builders_of(OPS)
