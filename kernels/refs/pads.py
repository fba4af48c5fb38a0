"""Torch twin of kernels/attention/pads: same signature, same result, fixed shapes, no host synchronisation."""

import torch
from torch import Tensor


def clear_pads(counts: Tensor, out: Tensor, lse: Tensor | None, row_of_token: Tensor | None) -> None:
    """Twin of launch_clear_pads."""
    padded = torch.arange(out.shape[0], device=out.device) >= counts[1]
    if row_of_token is not None:
        padded |= row_of_token == 0
    out.masked_fill_(padded[:, None, None], 0)
    if lse is not None:
        lse.masked_fill_(padded[:, None], float("-inf"))
