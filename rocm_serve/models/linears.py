"""Linear layers whose result for a row does not depend on other rows.

A BLAS picks its kernel, and with it the order of a sum, by the number of rows. In deterministic mode, kernels on a GPU
therefore add up in one order. On a CPU rows are computed in blocks of a fixed size, and the last block is padded with
zeros, as are few outputs.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.models.gates import Gate, ReluSquared
from rocm_serve.models.expert_products import Choice, expert_sums
from rocm_serve.models.gated import (
    heads_multiplied_in_one_order,
    lie_right,
    mixed,
    multiplied_and_mixed,
    multiplied_in_one_order,
    multiplied_in_parts,
    parts_of_few_rows,
)
from rocm_serve.models.mlp_weights import ExpertWeights
from rocm_serve.ranks import ONE_RANK, Ranks

# Rows per block. 16 fill a matrix instruction; more would be wasted on small batches.
ROWS = 16


class Linears:
    """x [rows, in] @ weight [out, in] transposed, plus bias [out], with variants that sum over ranks.

    If ranks share a model, linear() is for matrices that each rank has whole or a part of `out` of. The methods that
    sum are for matrices of which each rank has a part of `in`; they return the whole sum on every rank.

    This class computes all rows in one product.
    summed: x, summed over ranks in place
    """

    is_fixed: ClassVar = False  # whether a row's result depends on no other row

    def __init__(self, ranks: Ranks = ONE_RANK) -> None:
        self.summed = ranks.sum
        self._is_whole = ranks.shard.num_ranks == 1

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias."""
        if not x.is_cuda:  # a CPU has one way to multiply rows, and looks at nothing first
            return F.linear(x, weight, bias)
        return self._product(x, weight, bias, parts_of_few_rows(x, weight, len(weight)))

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: int) -> Tensor:
        """linear() on a GPU. parts: those of parts_of_few_rows"""
        if parts == 1:
            return multiplied_in_parts(x, weight, bias, 1)[0]
        if x.shape[0] != 1 or not lie_right(x, weight):
            return F.linear(x, weight, bias)
        from rocm_attn.kernels.model.row_product import launch_row_product

        out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device)
        launch_row_product(x, weight, bias, out)
        return out

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        """[rows, inner]: the products of linear(), combined; see mixed()."""
        if not x.is_cuda:
            return mixed(gate, F.linear(x, weight, bias))
        if not isinstance(gate, ReluSquared) and parts_of_few_rows(x, weight, len(weight) // 2) == 1:
            return multiplied_and_mixed(gate, x, weight, bias)
        return mixed(gate, self.linear(x, weight, bias))

    def summed_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x @ weight.T, summed over ranks, + bias, which is added once."""
        if self._is_whole:
            return self.linear(x, weight, bias)
        summed = self.summed(self.linear(x, weight))
        return summed if bias is None else summed.add_(bias)

    def terms(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """summed_linear(); or float32 [terms, rows, out], whose sum it is."""
        if not self._is_whole:
            return self.summed_linear(x, weight, bias)
        if not x.is_cuda:
            return F.linear(x, weight, bias)
        parts = parts_of_few_rows(x, weight, len(weight))
        return multiplied_in_parts(x, weight, bias, parts) if parts > 1 else self._product(x, weight, bias, parts)

    def of_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """[rows, heads, out]: x [rows, heads, in] @ weight [heads, out, in] per head, for a rank's own heads."""
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

    def sums_of_experts(
        self,
        x: Tensor,
        weights: ExpertWeights,
        chosen: Choice,
        gate: Gate,
        shared: Tensor | None = None,
        factor: Tensor | None = None,
    ) -> Tensor:
        """[tokens, width]: the sum of the outputs of a token's experts by its shares; see expert_sums."""
        return expert_sums(x, weights, chosen, gate, shared, factor, rows=ROWS, fixed=self.is_fixed)


class BatchInvariantLinears(Linears):
    """Computes each sum in one order, by kernels or in blocks of ROWS rows; and sums over ranks in their order."""

    is_fixed: ClassVar = True

    def __init__(self, ranks: Ranks = ONE_RANK) -> None:
        super().__init__(ranks)
        self.summed = ranks.sum_in_order

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.is_cuda:
            return multiplied_in_one_order(x, weight, bias)
        rows, few = x.shape[0], ROWS - weight.shape[0]
        if few > 0:  # with fewer than 12 outputs, MKL adds up every other row of a block in another order
            padded = self.linear(x, F.pad(weight, (0, 0, 0, few)), None if bias is None else F.pad(bias, (0, few)))
            return padded[:, :-few]
        filled = F.pad(x, (0, 0, 0, -rows % ROWS))
        blocks = torch.split(filled, ROWS)
        return torch.cat([F.linear(block, weight, bias) for block in blocks])[:rows]

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate) -> Tensor:
        if x.is_cuda and not isinstance(gate, ReluSquared):
            return multiplied_in_one_order(x, weight, bias, gate)
        return mixed(gate, self.linear(x, weight, bias))

    def terms(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.summed_linear(x, weight, bias)

    def of_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda:
            return heads_multiplied_in_one_order(x, weight)
        rows, few = x.shape[0], ROWS - weight.shape[1]
        if few > 0:  # see linear()
            return self.of_heads(x, F.pad(weight, (0, 0, 0, few)))[..., :-few]
        filled = F.pad(x, (0, 0, 0, 0, 0, -rows % ROWS))
        blocks = [super(BatchInvariantLinears, self).of_heads(block, weight) for block in torch.split(filled, ROWS)]
        return torch.cat(blocks)[:rows]


def linears_over(ranks: Ranks, *, deterministic: bool) -> Linears:
    """The linear layers of a model that ranks share. deterministic: a row's result does not depend on other rows"""
    return BatchInvariantLinears(ranks) if deterministic else Linears(ranks)
