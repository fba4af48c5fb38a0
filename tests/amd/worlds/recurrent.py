"""Recurrent states and convolutions of whole sequences in float64, token by token, written from the papers.

Gated Delta Networks (arXiv 2412.06464, equation 10), Kimi Linear (arXiv 2510.26692, equation 1) and Mamba 2 (arXiv
2405.21060, section 2) give the recurrences. The reference knows no slots, and shares no code with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rocm_attn.kernels.states.arguments import Update
from rocm_attn.recurrence import Recurrence


@dataclass
class Drawn:
    """Inputs of one sequence's tokens: q and k [n, k_heads, dk], v [n, heads, dv], decay and beta [n, heads (, dk)]."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    @classmethod
    def of(cls, layer: Recurrence, num_tokens: int, generator: torch.Generator) -> Drawn:
        """Rows of q and k have a norm of 1, or any if the layer divides by it; decays are now and then strong."""

        def random(*shape: int) -> Tensor:
            return torch.randn(num_tokens, *shape, generator=generator)

        q, k = (random(layer.num_k_heads, layer.k_dim) for _ in range(2))
        if not layer.normalises:
            q, k = (rows / rows.norm(dim=-1, keepdim=True) for rows in (q, k))
        channels = (layer.k_dim,) * layer.channel_decay
        decay = -torch.nn.functional.softplus(2 * random(layer.num_heads, *channels) - 2) * 2
        beta = torch.sigmoid(random(layer.num_heads))
        v = random(layer.num_heads, layer.v_dim)
        return cls(q.to(layer.dtype), k.to(layer.dtype), v.to(layer.dtype), decay, beta)

    def cut(self, first: int, end: int) -> Drawn:
        """The inputs of the tokens [first, end)."""
        return Drawn(*(side[first:end] for side in vars(self).values()))


def recurrent(layer: Recurrence, drawn: Drawn, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Outputs [n, heads, dv] and the states after each token [n + 1, heads, dk, dv], the one before all of them first.

    state: the state before all tokens; None is zero
    """
    heads = torch.arange(layer.num_heads) // (layer.num_heads // layer.num_k_heads)
    q, k = drawn.q.double()[:, heads], drawn.k.double()[:, heads]
    if layer.normalises:
        q, k = (rows / (rows.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for rows in (q, k))
    first = torch.zeros(layer.num_heads, layer.k_dim, layer.v_dim).double() if state is None else state.double()
    states, outs = [first], []
    for t in range(len(q)):
        alpha = torch.exp(drawn.decay[t].double()).reshape(layer.num_heads, -1).expand(layer.num_heads, layer.k_dim)
        now = torch.einsum("hk,hkv->hkv", alpha, states[-1])
        new = drawn.v[t].double()
        if layer.update is Update.DELTA:
            new = new - torch.einsum("hkv,hk->hv", now, k[t])
        now = now + torch.einsum("h,hk,hv->hkv", drawn.beta[t].double(), k[t], new)
        states.append(now)
        outs.append(layer.scale * torch.einsum("hkv,hk->hv", now, q[t]))
    return torch.stack(outs) if outs else torch.zeros(0, layer.num_heads, layer.v_dim).double(), torch.stack(states)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """Outputs of a sequence's tokens: x [n, channels], weight [channels, width]."""
    channels, width = weight.shape
    padded = torch.cat([torch.zeros(width - 1, channels, dtype=torch.float64), x.double()])
    sums = torch.nn.functional.conv1d(padded.T[None], weight.double()[:, None], groups=channels)[0].T
    sums = sums if bias is None else sums + bias.double()
    return torch.nn.functional.silu(sums) if silu else sums
