"""Sums with norms, and gates of an MLP, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.elementwise.add_norm import launch_add_norm
from rocm_attn.kernels.elementwise.gate import CLAMPED, GELU, SILU, GateForm, launch_gate
from tests.amd.tolerances import assert_attention_close

FORMS = (GateForm(SILU), GateForm(GELU), GateForm(CLAMPED, 0.7, 1.3))
FACTOR, EPS = 0.7, 1e-5
Put = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class SumOfRows:
    """residual and output [rows, width] in one dtype, and a norm's weight [width]."""

    residual: Tensor
    output: Tensor
    weight: Tensor

    def assert_served(self, put: Put = Tensor.clone) -> None:
        """Checks both results of the kernel. put: where a tensor lies"""
        given = [put(each) for each in (self.residual, self.output, self.weight)]
        summed, normed = (put(torch.full_like(self.residual, float("nan"))) for _ in range(2))
        launch_add_norm(*given, summed, normed, factor=FACTOR, eps=EPS)
        residual, output, weight = (each.double() for each in (self.residual, self.output, self.weight))
        assert_attention_close(summed, residual + FACTOR * output, self.residual.dtype)
        stored = summed.double()  # the norm is of the rows that later layers read
        exact = stored / (stored.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
        assert_attention_close(normed, exact, self.residual.dtype)


def sum_of_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> SumOfRows:
    """Returns random rows; each has a size of its own."""
    random = torch.Generator().manual_seed(rows + 100 * width)
    sizes = torch.logspace(-2, 1, rows)[:, None]
    residual, output = (torch.randn(rows, width, generator=random) * sizes for _ in range(2))
    weight = torch.rand(width, generator=random) + 0.5
    return SumOfRows(residual.to(device, dtype), output.to(device, dtype), weight.to(device, dtype))


def assert_gated(
    rows: int,
    inner: int,
    form: GateForm,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    put: Put = Tensor.clone,
) -> None:
    """Checks the kernel over random rows, some of them beyond the gate's limit. put: where a tensor lies"""
    random = torch.Generator().manual_seed(inner)
    both = torch.randn(rows, 2 * inner, generator=random).to(device, dtype)
    given, out = put(both), put(torch.full((rows, inner), float("nan"), dtype=dtype, device=device))
    launch_gate(given, out, form)
    assert_attention_close(out, exact_gate(both.double(), form), dtype)


def exact_gate(both: Tensor, form: GateForm) -> Tensor:
    """The gate in float64, from the definitions in GLU Variants (arXiv:2002.05202) and gpt-oss's model card."""
    gate, up = both.chunk(2, -1)
    if form.kind == SILU:
        return gate / (1 + (-gate).exp()) * up
    if form.kind == GELU:
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + inner.tanh()) * up
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return gate / (1 + (-form.alpha * gate).exp()) * (up + 1)
