"""Torch twin of kernels/attention/merge_states.py."""

import torch
from torch import Tensor


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Twin of launch_merge_states. Computes in float32, or float64 if an output is float64."""
    compute = torch.promote_types(torch.promote_types(out_a.dtype, out_b.dtype), torch.float32)
    maximum = torch.maximum(lse_a, lse_b)
    base = torch.where(maximum == float("-inf"), 0.0, maximum)
    merged = torch.zeros(out.shape, dtype=compute, device=out.device)
    total = torch.zeros_like(base)
    for side, side_lse in ((out_a, lse_a), (out_b, lse_b)):
        share = (side_lse - base).exp()
        # A value with weight 0 may be NaN.
        merged += torch.where(share[..., None] > 0, side.to(compute), 0) * share[..., None]
        total = total + share
    out.copy_((merged / torch.where(total == 0, 1.0, total)[..., None]).to(out.dtype))
    lse.copy_(base + total.log())
