"""How far results may lie from a float64 reference: one table, for every test and for the soak.

A bound is on |result - reference|, in units of 1 for values of standard deviation 1: atol + rtol * |reference|.
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
    """atol and rtol of an attention output, and of its log-sum-exp."""

    atol: float
    rtol: float
    lse_atol: float
    lse_rtol: float = 1e-5


BOUNDS = {
    torch.bfloat16: Bound(atol=1e-2, rtol=1e-2, lse_atol=2e-3),
    torch.float16: Bound(atol=2e-3, rtol=2e-3, lse_atol=1e-3),
    torch.float32: Bound(atol=4e-6, rtol=4e-6, lse_atol=4e-6),
    torch.float64: Bound(atol=1e-12, rtol=1e-12, lse_atol=1e-12),
}


def sum_error(num_terms: int, size: Tensor) -> Tensor:
    """How far a sum of products may lie from the exact one when it is computed in float32, in whatever order.

    num_terms: of the sum
    size:      the sum of the terms' magnitudes, of any shape
    Every partial result is rounded by at most size * FLOAT32_ROUNDING. As the errors of num_terms roundings are
    independent, they add up like a random walk: sqrt(num_terms) of that is a standard deviation at most. Higham and
    Mary, A new approach to probabilistic rounding error analysis, SIAM J. Sci. Comput. 41(5), 2019.
    """
    return _STANDARD_DEVIATIONS * math.sqrt(num_terms) * FLOAT32_ROUNDING * size
