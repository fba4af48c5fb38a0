"""Assertions that results are as close to a float64 reference as rocm_attn.numerics demands."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.numerics import BOUNDS


def assert_attention_close(out: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """out, computed from inputs of this dtype, is as close to the float64 reference as the table demands."""
    bound = BOUNDS[dtype]
    torch.testing.assert_close(out.double(), reference, atol=bound.atol, rtol=bound.rtol)


def assert_lse_close(lse: Tensor, reference: Tensor, dtype: torch.dtype) -> None:
    """Likewise for log-sum-exp; -inf only where the reference has it."""
    bound = BOUNDS[dtype]
    torch.testing.assert_close(lse.double(), reference, atol=bound.lse_atol, rtol=bound.lse_rtol)
