"""The gates of a recurrent layer, and its gated norm, in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.states.arguments import GatedForm
from rocm_attn.kernels.states.gated_norm import launch_gated_norm
from rocm_attn.kernels.states.gates import launch_gates
from tests.amd.tolerances import assert_attention_close

Put = Callable[[Tensor], Tensor]
EPS = 1e-6


def assert_gates(
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    put: Put = Tensor.clone,
    *,
    has_y: bool,
) -> None:
    """Checks decays and strengths of random tokens, from -40 to 40. sizes: tokens, heads, channels of a head"""
    num_tokens, heads, channels = sizes
    random = torch.Generator().manual_seed(sum(sizes))
    width = heads * channels
    # Both are parts of longer rows.
    both = ((torch.rand(num_tokens, width + heads + 3, generator=random) - 0.5) * 80).to(device, dtype)
    x, y = both[:, :width], both[:, width : width + heads]
    bias = torch.randn(width, generator=random).to(device)
    factor = -torch.rand(heads, 1, generator=random).to(device) - 0.1
    decay, beta = (put(torch.full((num_tokens, num), float("nan"), device=device)) for num in (width, heads))
    launch_gates(put(x), put(y) if has_y else None, put(bias), put(factor), decay, beta)
    biased = x.float().double() + bias.double()
    size = biased.clamp(min=0) + (-biased.abs()).exp().log1p()
    rates = (size.view(num_tokens, heads, channels) * factor.double()[None]).flatten(1)
    # The sum with the bias is rounded: half a unit of 64 at most, which is relative where a size is a power.
    torch.testing.assert_close(decay.double(), rates, rtol=1e-5, atol=0)
    strength = 1 / (1 + (-y.double()).exp()) if has_y else size
    torch.testing.assert_close(beta.double(), strength, rtol=1e-5, atol=0)


@dataclass(frozen=True)
class GatedCase:
    """Rows with a gate. sizes: tokens, heads, elements of a head

    by_row: whether the weight has an element for each of a row, and not of a group
    """

    sizes: tuple[int, int, int]
    num_groups: int
    form: GatedForm
    has_norm: bool = True
    by_row: bool = False
    has_skip: bool = False

    def assert_served(self, dtype: torch.dtype, device: torch.device | str = "cpu", put: Put = Tensor.clone) -> None:
        """Checks the kernel over random rows of different sizes."""
        num_tokens, heads, dim = self.sizes
        width = heads * dim
        random = torch.Generator().manual_seed(sum(self.sizes))
        rows = (torch.randn(self.sizes, generator=random) * torch.logspace(-1, 1, num_tokens)[:, None, None]).to(
            device, dtype
        )
        more = torch.randn(num_tokens, 2 * width + 8, generator=random).to(device, dtype)
        gate, v = more[:, :width], more[:, width : 2 * width].view(self.sizes)
        weight = torch.rand(width if self.by_row else width // self.num_groups, generator=random).to(device) + 0.5
        skip = torch.randn(heads, 1, generator=random).to(device)
        out = put(torch.full((num_tokens, width), float("nan"), dtype=dtype, device=device))
        launch_gated_norm(
            put(rows),
            put(gate),
            put(weight) if self.has_norm else None,
            put(skip) if self.has_skip else None,
            put(v),
            out,
            num_groups=self.num_groups,
            form=self.form,
        )
        x = rows.double() + (skip.double() * v.double() if self.has_skip else 0)
        groups, opened = x.view(num_tokens, self.num_groups, -1), gate.double()
        opened = (opened if self.form.silu else 1) / (1 + (-opened).exp())
        opened = opened.view(groups.shape)
        if self.form.gate_first:
            groups = groups * opened
        if self.has_norm:
            normed = groups / (groups.square().mean(-1, keepdim=True) + EPS).sqrt()
            groups = normed * weight.double().view(-1, groups.shape[2])
        if not self.form.gate_first:
            groups = groups * opened
        assert_attention_close(out, groups.flatten(1), dtype)


GATED = {
    "gated delta net": GatedCase((3, 5, 24), 5, GatedForm(EPS)),
    "KDA": GatedCase((2, 4, 32), 4, GatedForm(EPS, silu=False)),
    "Mamba2": GatedCase((3, 6, 8), 2, GatedForm(EPS, gate_first=True), by_row=True, has_skip=True),
    "norm before gate": GatedCase((2, 6, 200), 1, GatedForm(EPS), by_row=True, has_skip=True),
    "no norm": GatedCase((3, 4, 300), 1, GatedForm(EPS, gate_first=True), has_norm=False, has_skip=True),
}
