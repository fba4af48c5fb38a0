"""Arithmetic: the norms and sums of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.runner.linears import Linears
from rocm_attn.runner.weights import OwnInput


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """linears: how linear layers are computed

    eps:             of every norm
    residual_factor: on what attention and MLP give before it is added to the residual
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
        """residual + factor * (x @ weight.T + bias), the product normalised where there is a norm for it."""
        if norm is not None:
            return self.plus(residual, self.norm(self.linears.summed_linear(x, weight, bias), norm))
        return self.linears.add_summed_linear(residual, x, weight, bias, self.residual_factor)

    def plus(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + factor * x."""
        return torch.add(residual, x, alpha=self.residual_factor)

    def add_own_input(self, residual: Tensor, given: Tensor, weights: OwnInput) -> Tensor:
        """The residual with what a layer makes of what it is given beside it. given: [tokens, dim]"""
        gate = F.gelu(self.linears.linear(residual, weights.gate), approximate="tanh")
        return residual + self.norm(self.linears.linear(gate * given, weights.out), weights.out_norm)
