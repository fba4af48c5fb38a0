"""Torch twin of the product of rows with the matrices of their experts, for tensors on the host.

It reads how many rows an expert has, so it is for CPUs; there a recorder notes it as one launch, which reads anew.
"""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups


def expert_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, groups: ExpertGroups, out: Tensor, *, rows: int
) -> None:
    """Does the same as `launch_expert_product`.

    rows: of each product, an expert's last one filled up with zeros, so that a row's bits depend on no other row;
          0: all of an expert's rows in one product
    """
    pairs_of_row = out.shape[0] // max(1, x.shape[0])
    bounds = groups.indptr.tolist()
    for expert, (first, end) in enumerate(pairwise(bounds)):
        own_bias = None if bias is None else bias[expert]
        for pair in groups.order[first:end].split(rows or max(1, end - first)):
            block = x[pair // pairs_of_row]
            if rows:
                block = F.pad(block, (0, 0, 0, rows - len(pair)))
            out[pair] = F.linear(block, weight[expert], own_bias)[: len(pair)]
