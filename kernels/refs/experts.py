"""Torch twin of the product of rows with the matrices of their experts, for tensors on the host.

It reads how many rows an expert has, so it is for CPUs; there a recorder notes it as one launch, which reads anew.
"""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups


def expert_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: ExpertGroups,
    source: Tensor | None,
    out: Tensor,
    *,
    rows: int,
) -> None:
    """Does the same as `launch_expert_product`.

    rows: of each product, an expert's last one filled up with zeros, so that a row's bits depend on no other row;
          0: all of an expert's rows in one product
    """
    for expert, (first, end) in enumerate(pairwise(groups.indptr.tolist())):
        own_bias = None if bias is None else bias[expert]
        at_once = rows or max(1, end - first)
        for begin in range(first, end, at_once):
            pairs = slice(begin, min(end, begin + at_once))
            block = x[pairs if source is None else source[pairs]]
            filled = F.pad(block, (0, 0, 0, at_once - len(block)))
            out[pairs] = F.linear(filled, weight[expert], own_bias)[: len(block)]
