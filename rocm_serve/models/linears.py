"""Linear layers whose result for a row does not depend on other rows.

A BLAS picks its kernel, and with it the order of a sum, by the number of rows. In deterministic mode rows are therefore
computed in blocks of a fixed size, and the last block is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.models.gates import Gate, ReluSquared
from rocm_serve.models.expert_products import expert_products
from rocm_serve.models.gated import fill_a_gpu, mixed, multiplied_and_mixed
from rocm_serve.ranks import Ranks

# Rows per block. 16 fill a matrix instruction; more would be wasted on small batches.
ROWS = 16


class Linears(Protocol):
    """x [rows, in] @ weight [out, in] transposed, plus bias [out], with variants that sum over ranks.

    If ranks share a model, linear() is for matrices that each rank has whole or a part of `out` of. The methods that
    sum are for matrices of which each rank has a part of `in`; they return the whole sum on every rank.
    """

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias."""
        ...

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        """[rows, inner]: the products of linear(), combined; see mixed()."""
        ...

    def summed_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T, summed over ranks, + bias."""
        ...

    def of_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """[rows, heads, out]: x [rows, heads, in] @ weight [heads, in, out] per head, for a rank's own heads."""
        ...

    def of_experts(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
        """[pairs, out]: a row of x for each pair of a token and an expert; see launch_expert_product."""
        ...

    def summed(self, x: Tensor) -> Tensor:
        """x, summed over ranks in place."""
        ...


class AllRows:
    """Computes all rows in one product, on one rank."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.shape[0] != 1 or x.device.type == "cpu" or not _is_one_row(x, weight):
            return F.linear(x, weight, bias)
        from rocm_attn.kernels.model.row_product import launch_row_product

        out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
        launch_row_product(x, weight, bias, out)
        return out

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        if not x.is_cuda:  # a CPU has one way to multiply rows, and looks at nothing first
            return mixed(gate, F.linear(x, weight, bias))
        if bias is None and not isinstance(gate, ReluSquared) and fill_a_gpu(x, weight):
            return multiplied_and_mixed(gate, x, weight)
        return mixed(gate, self.linear(x, weight, bias))

    def summed_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.linear(x, weight, bias)

    def of_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)

    def of_experts(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
        return expert_products(x, weight, bias, groups, rows=ROWS, fixed=False)

    def summed(self, x: Tensor) -> Tensor:
        return x


def _is_one_row(x: Tensor, weight: Tensor) -> bool:
    """True if x and the matrix lie as launch_row_product takes them."""
    lies_right = all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (x, weight))
    return x.dim() == 2 and x.dtype == weight.dtype and lies_right


class BlocksOfRows(AllRows):
    """Computes blocks of ROWS rows, one product each, on one rank."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        filled = F.pad(x, (0, 0, 0, -rows % ROWS))
        blocks = torch.split(filled, ROWS)
        return torch.cat([F.linear(block, weight, bias) for block in blocks])[:rows]

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        return mixed(gate, self.linear(x, weight, bias))

    def of_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.shape[0]
        filled = F.pad(x, (0, 0, 0, 0, 0, -rows % ROWS)).transpose(0, 1)
        return torch.cat([torch.bmm(block, weight) for block in torch.split(filled, ROWS, 1)], 1)[:, :rows].transpose(
            0, 1
        )

    def of_experts(self, x: Tensor, weight: Tensor, bias: Tensor | None, groups: ExpertGroups) -> Tensor:
        return expert_products(x, weight, bias, groups, rows=ROWS, fixed=True)


class OverRanks:
    """Computes one rank's products. `sum_of` sums them over all ranks; biases are added once."""

    def __init__(self, own: Linears, sum_of: Callable[[Tensor], Tensor]) -> None:
        self.linear, self.gated = own.linear, own.gated
        self.of_heads = own.of_heads
        self.of_experts = own.of_experts
        self.summed = sum_of

    def summed_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        summed = self.summed(self.linear(x, weight))
        return summed if bias is None else summed.add_(bias)


def linears_over(ranks: Ranks, *, deterministic: bool) -> Linears:
    """The linear layers of a model that ranks share. deterministic: a row's result does not depend on other rows"""
    own: Linears = BlocksOfRows() if deterministic else AllRows()
    if ranks.shard.num_ranks == 1:
        return own
    return OverRanks(own, ranks.sum_in_order if deterministic else ranks.sum)
