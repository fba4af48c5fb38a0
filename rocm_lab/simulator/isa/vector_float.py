"""Vector arithmetic on floats, and comparisons; ISA sections 12.7 to 12.10 (VOPC, VOP1, VOP2, VOP3).

Transcendental functions are NumPy's, correct to an ulp as on hardware but not to the same bits.
"""

import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from rocm_lab.simulator.arrays import F16, F32, F64, I16, I32, I64, U16, U32, U64, Array
from rocm_lab.simulator.isa.vector import MASK, VectorOp, builders_of


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding; the product is exact in float64, the sum is rounded there once more."""
    return (a.astype(np.float64) * b + c).astype(c.dtype)


def _fma_64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding, lane by lane in fractions."""
    result: Array = a * b + c  # right where one of them is infinite or NaN, or the sum is zero
    numbers = np.stack(np.broadcast_arrays(a, b, c), 1)
    for lane in np.flatnonzero(np.isfinite(numbers).all(1)):
        first, second, third = (Fraction(value) for value in numbers[lane].tolist())
        if exact := first * second + third:
            try:
                result[lane] = float(exact)
            except OverflowError:
                result[lane] = np.inf if exact > 0 else -np.inf
    return result


def _divide_scale(a: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """Returns the source unchanged, and no lane that needs scaling.

    Hardware scales if a quotient would leave the range of normal numbers; _divide_fixup gives the result for those.
    """
    return a, np.zeros(1, np.bool_)


def _divide_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The refined quotient, or IEEE's result if one of the three is zero, infinite, NaN or out of normal range."""
    ieee = numerator / denominator
    tiny = np.finfo(quotient.dtype).tiny
    is_normal = np.isfinite(quotient) & (np.abs(ieee) >= tiny) & np.isfinite(ieee)
    is_normal &= (np.abs(denominator) >= tiny) & (np.abs(numerator) >= tiny)
    return np.where(is_normal, quotient, ieee)


def _max3(a: Array, b: Array, c: Array) -> Array:
    return np.fmax(np.fmax(a, b), c)


def _min3(a: Array, b: Array, c: Array) -> Array:
    return np.fmin(np.fmin(a, b), c)


def _median(a: Array, b: Array, c: Array) -> Array:
    """The middle of three; if one is NaN, the smallest of the others."""
    middle = np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), _min3(a, b, c), middle)


def _scale_by_power_of_2(a: Array, exponent: Array) -> Array:
    return np.ldexp(a, np.clip(exponent, -4000, 4000)).astype(a.dtype)


def _float(compute: Callable[..., Array], count: int = 2) -> VectorOp:
    return VectorOp(F32, (F32,) * count, compute)


def _reciprocal(a: Array) -> Array:
    return a.dtype.type(1) / a


def _mantissa(a: Array) -> Array:
    return np.frexp(a)[0]


def _exponent(a: Array) -> Array:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32)


# Operations and the number of their operands, which have the result's type: one of these types.
_ALIKE: tuple[tuple[tuple[np.dtype[Any], ...], dict[str, tuple[Callable[..., Array], int]]], ...] = (
    (
        (F16, F32, F64),
        {
            "add": (operator.add, 2),
            "mul": (operator.mul, 2),
            "max": (np.fmax, 2),
            "min": (np.fmin, 2),
            "div_fixup": (_divide_fixup, 3),
        },
    ),
    (
        (F16, F32),
        {
            "sub": (operator.sub, 2),
            "fma": (fma, 3),
            "max3": (_max3, 3),
            "min3": (_min3, 3),
            "med3": (_median, 3),
        },
    ),
    (
        (F32, F64),
        {
            "rcp": (_reciprocal, 1),
            "rsq": (lambda a: _reciprocal(np.sqrt(a)), 1),
            "sqrt": (np.sqrt, 1),
            "rndne": (np.rint, 1),
            "floor": (np.floor, 1),
            "ceil": (np.ceil, 1),
            "trunc": (np.trunc, 1),
            "frexp_mant": (_mantissa, 1),
        },
    ),
)
_ARITHMETIC: dict[str, VectorOp] = {
    **{
        f"v_{name}_f{8 * dtype.itemsize}": VectorOp(dtype, (dtype,) * count, compute)
        for types, operations in _ALIKE
        for dtype in types
        for name, (compute, count) in operations.items()
    },
    "v_subrev_f32": _float(lambda a, b: b - a),
    "v_fmac_f32": VectorOp(F32, (F32, F32, F32), fma, accumulates=True),
    "v_fmamk_f32": _float(lambda a, k, c: fma(a, k, c), 3),
    "v_fmaak_f32": _float(fma, 3),
    # CDNA 4; a NaN among the three is the result.
    "v_maximum3_f32": _float(lambda a, b, c: np.maximum(np.maximum(a, b), c), 3),
    "v_minimum3_f32": _float(lambda a, b, c: np.minimum(np.minimum(a, b), c), 3),
    "v_exp_f32": _float(np.exp2, 1),
    "v_log_f32": _float(np.log2, 1),
    "v_rcp_iflag_f32": _float(_reciprocal, 1),
    "v_frexp_exp_i32_f32": VectorOp(I32, (F32,), _exponent),
    "v_ldexp_f32": VectorOp(F32, (F32, I32), _scale_by_power_of_2),
    "v_div_scale_f32": VectorOp(F32, (F32, F32, F32), _divide_scale, has_mask=True),
    "v_div_fmas_f32": _float(fma, 3),
    "v_fma_f64": VectorOp(F64, (F64, F64, F64), _fma_64),
    "v_fmac_f64": VectorOp(F64, (F64, F64, F64), _fma_64, accumulates=True),
    "v_frexp_exp_i32_f64": VectorOp(I32, (F64,), _exponent),
    "v_ldexp_f64": VectorOp(F64, (F64, I32), _scale_by_power_of_2),
    "v_div_scale_f64": VectorOp(F64, (F64, F64, F64), _divide_scale, has_mask=True),
    "v_div_fmas_f64": VectorOp(F64, (F64, F64, F64), _fma_64),
    "v_fmac_f16": VectorOp(F16, (F16, F16, F16), fma, accumulates=True),
}


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


_INTEGER_CONDITIONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
# If a side is NaN, the first five are false, and those that begin with n are true.
_FLOAT_CONDITIONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": operator.eq,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lg": lambda a, b: (a < b) | (a > b),
    "neq": operator.ne,
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "o": lambda a, b: ~_unordered(a, b),
    "u": _unordered,
}


def _is_of_class(a: Array, classes: Array) -> Array:
    """True if a value is of one of ten classes, a bit each, from signaling NaN to positive infinity."""
    bits = a.view(f"u{a.itemsize}")
    quiet_bit = 1 << {2: 9, 4: 22, 8: 51}[a.itemsize]
    is_nan, is_quiet = np.isnan(a), bits & quiet_bit != 0
    is_infinite, is_zero = np.isinf(a), a == 0
    is_subnormal = ~is_zero & (np.abs(a) < np.finfo(a.dtype).tiny)
    is_normal = ~(is_nan | is_infinite | is_zero | is_subnormal)
    by_size = is_infinite, is_normal, is_subnormal, is_zero
    negative, positive = ([which & (np.signbit(a) == sign) for which in by_size] for sign in (True, False))
    members = [is_nan & ~is_quiet, is_nan & is_quiet, *negative, *reversed(positive)]
    return np.logical_or.reduce([which & (classes >> bit & 1 != 0) for bit, which in enumerate(members)])


_INTEGERS = {"i16": I16, "u16": U16, "i32": I32, "u32": U32, "i64": I64, "u64": U64}
_FLOATS = {"f16": F16, "f32": F32, "f64": F64}

OPS: dict[str, VectorOp] = {
    **_ARITHMETIC,
    **{f"v_cmp_class_{type_name}": VectorOp(MASK, (dtype, U32), _is_of_class) for type_name, dtype in _FLOATS.items()},
    **{
        f"v_cmp_{condition}_{type_name}": VectorOp(MASK, (dtype, dtype), compute)
        for types, conditions in ((_INTEGERS, _INTEGER_CONDITIONS), (_FLOATS, _FLOAT_CONDITIONS))
        for type_name, dtype in types.items()
        for condition, compute in conditions.items()
    },
}


BUILDERS = builders_of(OPS)
