"""How far results may lie from a float64 reference: one table for every test.

A bound is on |result - reference|, in units of 1 for values of standard deviation 1: atol + rtol * |reference|.
bf16 has 8 bits of mantissa: half a unit in the last place is 2**-9 relative. The kernels round twice where a plain
computation rounds once: the probabilities before the second product, and the output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bound:
    """atol and rtol of an attention output, and atol of its log-sum-exp."""

    atol: float
    rtol: float
    lse_atol: float


BOUNDS = {
    torch.bfloat16: Bound(atol=1e-2, rtol=1e-2, lse_atol=2e-3),
    torch.float16: Bound(atol=2e-3, rtol=2e-3, lse_atol=1e-3),
    torch.float32: Bound(atol=4e-6, rtol=4e-6, lse_atol=4e-6),
    torch.float64: Bound(atol=1e-12, rtol=1e-12, lse_atol=1e-12),
}


def assert_attention_close(out: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """out, computed from inputs of this dtype, is as close to the float64 reference as the table demands."""
    bound = BOUNDS[dtype]
    torch.testing.assert_close(out.double(), reference, atol=bound.atol, rtol=bound.rtol)


def assert_lse_close(lse: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """Likewise for log-sum-exp; -inf only where the reference has it."""
    torch.testing.assert_close(lse.double(), reference, atol=BOUNDS[dtype].lse_atol, rtol=1e-5)
