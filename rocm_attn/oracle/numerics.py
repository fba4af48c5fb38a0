"""How far results may lie from a float64 reference: one table and one comparison for all checks of the package.

A bound is on |result - reference|, in units of 1 for values of standard deviation 1: atol + rtol * |reference|.
Comparisons of values of another size give that size.
bf16 has 8 bits of mantissa: half a unit in the last place is 2**-9 relative. The kernels round twice where a plain
computation rounds once: the probabilities before the second product, and the output.

The bounds hold for scores of standard deviation 1, which the usual scale gives. Larger scores lose more of their
fraction in float32, and exp turns that absolute error into a relative one: see sum_error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# float32 has 24 bits of mantissa: half a unit in the last place.
FLOAT32_ROUNDING = 2.0**-24
# Standard deviations that are allowed for an error that is a sum of many independent ones.
_STANDARD_DEVIATIONS = 4


@dataclass(frozen=True, slots=True)
class Bound:
    """|result - reference| may be atol + rtol * |reference|."""

    atol: float
    rtol: float

    def widened(self, by: float) -> Bound:
        """The same bound with `by` added to atol."""
        return Bound(self.atol + by, self.rtol)


@dataclass(frozen=True, slots=True)
class ErrorBounds:
    """The bounds of attention for inputs of one dtype: for its output, and for its log-sum-exp."""

    out: Bound
    lse: Bound


BOUNDS = {
    torch.bfloat16: ErrorBounds(out=Bound(1e-2, 1e-2), lse=Bound(2e-3, 1e-5)),
    torch.float16: ErrorBounds(out=Bound(2e-3, 2e-3), lse=Bound(1e-3, 1e-5)),
    torch.float32: ErrorBounds(out=Bound(4e-6, 4e-6), lse=Bound(4e-6, 1e-5)),
    torch.float64: ErrorBounds(out=Bound(1e-12, 1e-12), lse=Bound(1e-12, 1e-5)),
}


# For kernels that round the weights of values to eight bits, or q in a way of their own: to three bits after the first
# one, so that a factor is off by a sixteenth at most. AITER's tests of them allow 0.055 to 0.06.
EIGHT_BIT_PRODUCTS = ErrorBounds(out=Bound(0.12, 6e-2), lse=Bound(0.12, 1e-5))


def bounds_of(dtype: torch.dtype, *, eight_bit_products: bool) -> ErrorBounds:
    """The bounds of a kernel's results. eight_bit_products: True if it rounds its operands"""
    return EIGHT_BIT_PRODUCTS if eight_bit_products else BOUNDS[dtype]


def eight_bit_queries(q: Tensor, encoding: torch.dtype) -> Tensor:
    """The values of q that a kernel uses if q is in eight bits with a scale of 1; NaN stays NaN."""
    largest = torch.finfo(encoding).max
    return q.float().clamp(-largest, largest).to(encoding).to(q.dtype)


def error_parts(result: Tensor, reference: Tensor, bound: Bound, *, size: float | Tensor = 1.0) -> Tensor:
    """The error of each element relative to its bound: up to 1 is close enough.

    result, reference: of one shape and any floating dtypes
    size:              the value that corresponds to a standard deviation of 1; atol is in units of it
    Returns float64 of that shape. Equal values, infinities among them, are 0; an element is inf if one of the two is
    NaN, or if they are not equal and one is infinite.
    """
    result, reference = result.double(), reference.double()
    part = (result - reference).abs() / (bound.atol * size + bound.rtol * reference.abs())
    return torch.where(result == reference, 0.0, part.nan_to_num(math.inf, math.inf))


def sum_error(num_terms: int, size: Tensor) -> Tensor:
    """How far a sum of products may lie from the exact one if it is computed in float32, in any order.

    num_terms: number of terms
    size:      the sum of the terms' magnitudes, of any shape
    Every partial result is rounded by at most size * FLOAT32_ROUNDING. Since the errors of num_terms roundings are
    independent, they add up like a random walk: sqrt(num_terms) of that is a standard deviation at most. Higham and
    Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019.
    """
    return _STANDARD_DEVIATIONS * math.sqrt(num_terms) * FLOAT32_ROUNDING * size
