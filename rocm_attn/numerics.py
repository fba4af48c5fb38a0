"""How far results may lie from a float64 reference: one table, for every test and for the soak.

A bound is on |result - reference|, in units of 1 for values of standard deviation 1: atol + rtol * |reference|.
bf16 has 8 bits of mantissa: half a unit in the last place is 2**-9 relative. The kernels round twice where a plain
computation rounds once: the probabilities before the second product, and the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
