"""Recurrent states and convolutions of whole sequences in float64, token by token, written from the papers.

Gated Delta Networks (arXiv 2412.06464, equation 10), Kimi Linear (arXiv 2510.26692, equation 1) and Mamba 2 (arXiv
2405.21060, section 2) give the recurrences. The reference knows no slots, and shares no code with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layer:
    """Sizes and form of a layer: v heads for each q and k head, and whether each channel decays by itself."""

    k_heads: int
    ratio: int
    dk: int
    dv: int
    channels: bool = False
    delta: bool = True
    normalises: bool = False
    scale: float = 0.5

    @property
    def heads(self) -> int:
        return self.k_heads * self.ratio


@dataclass
class Drawn:
    """Inputs of one sequence's tokens: q and k [n, k_heads, dk], v [n, heads, dv], decay and beta [n, heads (, dk)]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    @classmethod
    def of(cls, layer: Layer, num_tokens: int, dtype: torch.dtype, generator: torch.Generator) -> Drawn:
        """Rows of q and k have a norm of 1, or any if the layer divides by it; decays are now and then strong."""

        def random(*shape: int) -> Tensor:
            return torch.randn(num_tokens, *shape, generator=generator)

        q, k = (random(layer.k_heads, layer.dk) for _ in range(2))
        if not layer.normalises:
            q, k = (rows / rows.norm(dim=-1, keepdim=True) for rows in (q, k))
        channels = (layer.dk,) * layer.channels
        decay = -torch.nn.functional.softplus(2 * random(layer.heads, *channels) - 2) * 2
        beta = torch.sigmoid(random(layer.heads))
        return cls(q.to(dtype), k.to(dtype), random(layer.heads, layer.dv).to(dtype), decay, beta)

    def cut(self, first: int, end: int) -> Drawn:
        """The inputs of the tokens [first, end)."""
        return Drawn(*(side[first:end] for side in vars(self).values()))


def recurrent(layer: Layer, drawn: Drawn, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, dv] and the states after each token [n + 1, heads, dk, dv], the one before all of them first.

    state: the state before all tokens; None is zero
    """
    heads = torch.arange(layer.heads) // layer.ratio
    q, k = drawn.q.double()[:, heads], drawn.k.double()[:, heads]
    if layer.normalises:
        q, k = (rows / (rows.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for rows in (q, k))
    first = torch.zeros(layer.heads, layer.dk, layer.dv, dtype=torch.float64) if state is None else state.double()
    states, outs = [first], []
    for t in range(len(q)):
        alpha = torch.exp(drawn.decay[t].double()).reshape(layer.heads, -1).expand(layer.heads, layer.dk)
        now = torch.einsum("hk,hkv->hkv", alpha, states[-1])
        new = drawn.v[t].double()
        if layer.delta:
            new = new - torch.einsum("hkv,hk->hv", now, k[t])
        now = now + torch.einsum("h,hk,hv->hkv", drawn.beta[t].double(), k[t], new)
        states.append(now)
        outs.append(layer.scale * torch.einsum("hkv,hk->hv", now, q[t]))
    return torch.stack(outs) if outs else torch.zeros(0, layer.heads, layer.dv).double(), torch.stack(states)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """Outputs of a sequence's tokens: x [n, channels], weight [channels, width]."""
    channels, width = weight.shape
    padded = torch.cat([torch.zeros(width - 1, channels, dtype=torch.float64), x.double()])
    sums = torch.nn.functional.conv1d(padded.T[None], weight.double()[:, None], groups=channels)[0].T
    sums = sums if bias is None else sums + bias.double()
    return torch.nn.functional.silu(sums) if silu else sums
