"""How far results may lie from a float64 reference: one table and one comparison, for all that the package checks.

A bound is on |result - reference|, in units of 1 for values of standard deviation 1: atol + rtol * |reference|. What
compares values of another size says that size.
bf16 has 8 bits of mantissa: half a unit in the last place is 2**-9 relative. The kernels round twice where a plain
computation rounds once: the probabilities before the second product, and the output.

The bounds hold for scores of standard deviation 1, which the usual scale gives. Larger scores lose more of their
fraction in float32, and exp makes a relative error of that absolute one: sum_error says how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# float32 has 24 bits of mantissa: half a unit in the last place.
FLOAT32_ROUNDING = 2.0**-24
# Of an error that is a sum of many independent ones.
_STANDARD_DEVIATIONS = 4


@dataclass(frozen=True, slots=True)
class Bound:
    """|result - reference| may be atol + rtol * |reference|."""

    atol: float
    rtol: float

    def widened(self, by: float) -> Bound:
        """The same with `by` more of atol."""
        return Bound(self.atol + by, self.rtol)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what attention computes from inputs of one dtype: its output, and its log-sum-exp."""

    out: Bound
    lse: Bound


BOUNDS = {
    torch.bfloat16: Bounds(out=Bound(1e-2, 1e-2), lse=Bound(2e-3, 1e-5)),
    torch.float16: Bounds(out=Bound(2e-3, 2e-3), lse=Bound(1e-3, 1e-5)),
    torch.float32: Bounds(out=Bound(4e-6, 4e-6), lse=Bound(4e-6, 1e-5)),
    torch.float64: Bounds(out=Bound(1e-12, 1e-12), lse=Bound(1e-12, 1e-5)),
}


# Where what values are weighted with is rounded to eight bits, or q is in a way of the kernel's own: to three bits
# after the first one, so that a factor is off by a sixteenth at most. AITER's tests of them allow 0.055 to 0.06.
EIGHT_BIT_PRODUCTS = Bounds(out=Bound(0.12, 6e-2), lse=Bound(0.12, 1e-5))


def bounds_of(dtype: torch.dtype, *, eight_bit_products: bool) -> Bounds:
    """The bounds of a kernel's results. eight_bit_products: whether it rounds what it multiplies"""
    return EIGHT_BIT_PRODUCTS if eight_bit_products else BOUNDS[dtype]


def eight_bit_queries(q: Tensor, encoding: torch.dtype) -> Tensor:
    """q as a kernel multiplies it that is given q in eight bits with a factor of 1; NaN stays NaN."""
    largest = torch.finfo(encoding).max
    return q.float().clamp(-largest, largest).to(encoding).to(q.dtype)


def error_parts(result: Tensor, reference: Tensor, bound: Bound, *, size: float | Tensor = 1.0) -> Tensor:
    """How far each element lies from its reference, as a part of what is allowed: up to 1 is close enough.

    result, reference: of one shape and any floating dtypes
    size:              what a standard deviation of 1 is in these values; atol is in units of it
    Returns float64 of that shape. Equal values, infinities among them, are 0; an element is inf where one of the two is
    NaN, or they are not equal and one is infinite.
    """
    result, reference = result.double(), reference.double()
    part = (result - reference).abs() / (bound.atol * size + bound.rtol * reference.abs())
    return torch.where(result == reference, 0.0, part.nan_to_num(math.inf, math.inf))


def sum_error(num_terms: int, size: Tensor) -> Tensor:
    """How far a sum of products may lie from the exact one when it is computed in float32, in whatever order.

    num_terms: of the sum
    size:      the sum of the terms' magnitudes, of any shape
    Every partial result is rounded by at most size * FLOAT32_ROUNDING. As the errors of num_terms roundings are
    independent, they add up like a random walk: sqrt(num_terms) of that is a standard deviation at most. Higham and
    Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019.
    """
    return _STANDARD_DEVIATIONS * math.sqrt(num_terms) * FLOAT32_ROUNDING * size
