"""Arithmetic: the norms and sums of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_serve.models.linears import Linears
from rocm_serve.models.weights import OwnInput


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
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)

    def plain_norm(self, x: Tensor) -> Tensor:
        """RMS norm over the last dimension without weights, in float32."""
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)

    def add(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
        """residual + factor * (x @ weight.T + bias). The product is normalised first if norm is given."""
        if norm is not None:
            return self.plus(residual, self.norm(self.linears.summed_linear(x, weight, bias), norm))
        return self.linears.add_summed_linear(residual, x, weight, bias, self.residual_factor)

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + factor * x."""
        return torch.add(residual, x, alpha=self.residual_factor)

    def add_own_input(self, residual: Tensor, given: Tensor, weights: OwnInput) -> Tensor:
        """The residual plus the output that a layer computes from its own input. given: that input, [tokens, dim]"""
        gate = F.gelu(self.linears.linear(residual, weights.gate), approximate="tanh")
        return residual + self.norm(self.linears.linear(gate * given, weights.out), weights.out_norm)
