"""Linear layers whose result for a row does not depend on the rows beside it.

A BLAS picks its kernel, and with it the order of a sum, by the number of rows. In deterministic mode rows therefore go
through in blocks of one number, the last one filled up with zeros.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of a block. 16 fill a matrix instruction; more would be wasted on small batches.
ROWS = 16


class Linears(Protocol):
    """x [rows, in] @ weight [out, in] transposed, plus bias [out] and what is left of it."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias."""
        ...

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """residual + x @ weight.T + bias."""
        ...


class AllRows:
    """All rows in one product."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # The sum with the residual costs no pass of its own.
        summed = torch.addmm(residual, x, weight.t())
        return summed if bias is None else summed.add_(bias)


class BlocksOfRows:
    """Blocks of ROWS rows, one product each."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        filled = F.pad(x, (0, 0, 0, -rows % ROWS))
        blocks = torch.split(filled, ROWS)
        return torch.cat([F.linear(block, weight, bias) for block in blocks])[:rows]

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return residual + self.linear(x, weight, bias)
