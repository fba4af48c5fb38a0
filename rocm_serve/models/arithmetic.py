"""Arithmetic: the norms and sums of a model. Residual: the rows that its layers add to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.models.rope import Rope
from rocm_serve.models.layer_input import LayerInput, input_of
from rocm_serve.models.linears import Linears

if TYPE_CHECKING:
    from rocm_attn.kernels.model.add_norm import NormedSum

# The cos and sin of each rope for index keys: [T, 2, dim], see rotate. The runtime turns all other rows.
CosSin = Mapping[Rope, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class OwnInput:
    """Weights with which a layer uses its own input of a token.

    gate:     [per_layer_dim, hidden]
    out:      [hidden, per_layer_dim]
    out_norm: [hidden]
    """

    gate: Tensor
    out: Tensor
    out_norm: Tensor


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Computes the norms and sums of a model.

    linears:         compute the linear layers
    eps:             of every norm
    residual_factor: multiplies the output of attention and MLP before it is added to the residual
    """

    linears: Linears
    eps: float
    residual_factor: float

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension, in the dtype of the weight if that is the wider one."""
        if x.dtype == weight.dtype:  # F.rms_norm() and conversions to the same dtype are calls of every layer
            return torch.rms_norm(x, weight.shape, weight, self.eps)
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)

    def plain_norm(self, x: Tensor) -> Tensor:
        """RMS norm over the last dimension without weights, in float32."""
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
        """x @ weight.T + bias [tokens, hidden], normalised if norm is given; or float32 [terms, tokens, hidden], whose
        sum it is.
        """
        if norm is None:
            return self.linears.terms(x, weight, bias)
        return self.norm(self.linears.summed_linear(x, weight, bias), norm)

    def normed_sum(self, residual: Tensor, output: Tensor, weight: Tensor) -> NormedSum:
        """sum(), and its RMS norm, which kernels of a GPU compute together."""
        from rocm_attn.kernels.model.add_norm import NormedSum

        summed, normed = torch.empty_like(residual), torch.empty_like(residual)
        return NormedSum(residual, output, weight, summed, normed, self.residual_factor, self.eps)

    def sum(self, residual: Tensor, output: Tensor) -> Tensor:
        """residual + factor * output(), or its sum."""
        if output.dim() == 3:
            output = output.sum(0).to(residual.dtype)
        return torch.add(residual, output, alpha=self.residual_factor)

    def add_own_input(self, residual: Tensor, given: Tensor, weights: OwnInput) -> Tensor:
        """The residual plus the output that a layer computes from its own input. given: that input, [tokens, dim]"""
        gate = F.gelu(self.linears.linear(residual, weights.gate), approximate="tanh")
        return residual + self.norm(self.linears.linear(gate * given, weights.out), weights.out_norm)


class Residual:
    """The residual of a step's tokens, [tokens, hidden]. A layer's output is added when the sum is needed.

    A norm comes after nearly every sum, and both are one pass over the rows then.
    """

    def __init__(self, arithmetic: Arithmetic, rows: Tensor) -> None:
        self._arithmetic, self._rows = arithmetic, rows
        self._coming: Tensor | None = None  # an output that is not added yet
        self._input: LayerInput | None = None  # it may be what makes _rows

    def add(self, output: Tensor) -> None:
        """Adds factor * output, [tokens, hidden], or the sum of its terms; see Arithmetic.output."""
        if self._coming is not None:
            self._rows = self.rows
        self._coming = output

    @property
    def rows(self) -> Tensor:
        """The sum of all outputs so far."""
        if self._input is not None:
            self._input.make()
        if self._coming is not None:
            self._rows, self._coming = self._arithmetic.sum(self._rows, self._coming), None
        return self._rows

    def normed(self, weight: Tensor) -> LayerInput:
        """The RMS norm of the sum."""
        arithmetic, output, self._coming = self._arithmetic, self._coming, None
        if self._input is not None:
            self._input.make()
        if output is not None and output.device.type != "cpu":
            made = arithmetic.normed_sum(self._rows, output, weight)
            self._rows, self._input = made.summed, input_of(arithmetic.linears, made)
            return self._input
        if output is not None:  # a CPU's have one term
            self._rows = torch.add(self._rows, output, alpha=arithmetic.residual_factor)
        return LayerInput(arithmetic.linears, arithmetic.norm(self._rows, weight))
