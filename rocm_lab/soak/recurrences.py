"""Recurrent layers of the tester's model, and what they give in float64: written from the papers, token by token.

In each head, with a state S of [k_dim, v_dim] that is 0 at first, and v heads that share k and q heads in order:

    q, k, v = silu(bias + sum_j weight_j x_(t + 1 - width + j))       if there is a convolution, each channel by itself
    q, k    = q / sqrt(sum q^2 + 1e-6), likewise k                    if the layer normalises
    S <- diag(exp(decay)) S + k (beta (v - (diag(exp(decay)) S)^T k))^T    Gated Delta Networks, arXiv 2412.06464, (10);
                                                                      Kimi Linear, arXiv 2510.26692, (1)
    S <- exp(decay) S + k (beta v)^T                                  Mamba 2, arXiv 2405.21060, section 2
    out = scale S^T q
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rocm_attn.kernels.states.arguments import Update
from rocm_attn.oracle.numerics import BOUNDS
from rocm_attn.recurrence import Convolution, Recurrence, tensors_of
from rocm_attn.step.step import Part
from rocm_lab.soak.oracle import FLOAT32_ROUNDING, UNKNOWN, Answer, Floats, Tokens


def recurrent_forms(dtype: torch.dtype) -> tuple[Recurrence, ...]:
    """Returns a gated delta net, KDA and Mamba2; two of them have a convolution."""
    return (
        Recurrence(4, 2, 8, 16, dtype, convolution=Convolution(2 * 2 * 8 + 4 * 16, 4), normalises=True, scale=0.4),
        Recurrence(2, 2, 8, 8, dtype, channel_decay=True, normalises=True),
        Recurrence(
            4, 1, 8, 8, dtype, update=Update.SUM, convolution=Convolution(2 * 8 + 4 * 8, 3, silu=False), scale=0.5
        ),
    )


@dataclass(frozen=True, slots=True)
class RecurrentRows:
    """One recurrent layer: its inputs by what a token looks up, and what it gave.

    x:           [entries, 2 * k_heads * k_dim + heads * v_dim], q, k and v side by side, in the layer's dtype
    decay, beta: float32 [entries, heads (, k_dim)], [entries, heads]
    weight:      [channels, width]; bias: [channels]; empty if there is no convolution
    out:         [most tokens, heads, v_dim]
    """

    form: Recurrence
    x: Tensor
    decay: Tensor
    beta: Tensor
    weight: Tensor
    bias: Tensor
    out: Tensor

    @classmethod
    def random(
        cls, form: Recurrence, entries: int, pads: int, most_tokens: int, generator: torch.Generator
    ) -> RecurrentRows:
        """Returns a layer on the CPU that gave nothing yet. pads: entries that pads look up, the first ones: NaN"""

        def rows(*shape: int) -> Tensor:
            values = torch.randn(entries, *shape, generator=generator)
            values[:pads] = float("nan")
            return values

        width, channels = form.convolution.width, form.convolution.channels
        return cls(
            form,
            rows(2 * form.num_k_heads * form.k_dim + form.num_heads * form.v_dim).to(form.dtype),
            -rows(*tensors_of(form)["decay"].shape).exp() / 4,
            rows(form.num_heads).sigmoid(),
            (torch.randn(channels, width, generator=generator) / 2).to(form.dtype),
            (torch.randn(channels, generator=generator) / 4).to(form.dtype),
            torch.zeros(most_tokens, form.num_heads, form.v_dim, dtype=form.dtype),
        )

    def to(self, device: torch.device) -> RecurrentRows:
        """Returns the same layer on another device."""
        names = ("x", "decay", "beta", "weight", "bias", "out")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def convolve(self, part: Part, number: int, entry: Tensor) -> Tensor:
        """Returns q, k and v of a step's tokens, as the recurrence takes them, side by side: [T, channels]."""
        x = self.x[entry]
        if not self.form.convolution.channels:
            return x
        out = torch.empty_like(x)
        part.states.convolve(number, x, self.weight, self.bias, out)
        return out

    def recur(self, part: Part, number: int, entry: Tensor, convolved: Tensor) -> Tensor:
        """Runs the recurrence over what convolve() has given. Returns [T, heads, v_dim]."""
        form, out = self.form, convolved.new_empty(len(convolved), *self.out.shape[1:])
        keys = form.num_k_heads * form.k_dim
        q, k, v = torch.split(convolved, [keys, keys, form.num_heads * form.v_dim], 1)
        heads = (-1, form.num_k_heads, form.k_dim)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(-1, form.num_heads, form.v_dim)
        part.states.recur(number, q, k, v, self.decay[entry], self.beta[entry], out)
        return out

    def run(self, part: Part, number: int, entry: Tensor) -> Tensor:
        """Runs the layer, and keeps what it gave; float32 [S, ...] of it, each sequence's last token."""
        out = self.recur(part, number, entry, self.convolve(part, number, entry))
        self.out[part.tokens] = out
        return out[part.last_token_of_seq.long()].flatten(1).float()

    def for_oracle(self) -> RecurrentLayer:
        """The layer as the oracle knows it."""
        form = self.form

        def exact(side: Tensor) -> Floats:
            return side.double().cpu().numpy()

        return RecurrentLayer(
            exact(self.x),
            exact(self.decay.reshape(len(self.decay), form.num_heads, -1)),
            exact(self.beta),
            exact(self.weight),
            exact(self.bias),
            heads=form.num_heads,
            k_heads=form.num_k_heads,
            k_dim=form.k_dim,
            v_dim=form.v_dim,
            dtype=form.dtype,
            silu=form.convolution.silu,
            delta=form.update is Update.DELTA,
            normalises=form.normalises,
            scale=form.scale,
        )


@dataclass(slots=True)
class RecurrentLayer:
    """One recurrent layer of the model; its tables are those of RecurrentRows, in float64."""

    x: Floats
    decay: Floats
    beta: Floats
    weight: Floats
    bias: Floats
    heads: int
    k_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    silu: bool
    delta: bool
    normalises: bool
    scale: float
    slopes: Floats = field(default_factory=lambda: np.zeros(1))

    @property
    def shape(self) -> tuple[int, int]:
        """The heads and dim of an output."""
        return self.heads, self.v_dim

    def answer(self, stored: Sequence[int], tokens: Tokens) -> Answer:
        """Returns the layer's results for the last of these tokens. stored: what each looks up, from the first on"""
        entries, first = np.array(stored, np.int64), len(stored) - len(tokens.looked_up)
        x, decay, beta = self.x[entries], np.exp(self.decay[entries]), self.beta[entries]
        # A token sees all tokens before it, so that it is not compared after one that is not known or not finite.
        known = np.logical_and.accumulate((entries != UNKNOWN) & np.isfinite(x).all(1))
        x[~known] = 0
        convolved, sizes = self._convolved(x)
        keys = self.k_heads * self.k_dim
        group, count = self.heads // self.k_heads, len(entries)
        q, k = (
            np.repeat(convolved[:, at : at + keys].reshape(count, self.k_heads, self.k_dim), group, 1)
            for at in (0, keys)
        )
        v = convolved[:, 2 * keys :].reshape(count, self.heads, self.v_dim)
        sharp = 1.0
        if self.normalises:
            norms = [np.sqrt((side**2).sum(2, keepdims=True) + 1e-6) for side in (q, k)]
            q, k = q / norms[0], k / norms[1]
            sharp = max(1.0, float(sizes / min(side.min() for side in norms)))
        state, largest = np.zeros((self.heads, self.k_dim, self.v_dim)), 0.0
        out = np.zeros((count, self.heads, self.v_dim))
        for at in range(count):
            state = state * decay[at][:, :, None]
            new = v[at] - (k[at][:, None] @ state)[:, 0] if self.delta else v[at]
            step = k[at][:, :, None] * (beta[at][:, None] * new)[:, None]
            state = state + step
            largest = max(largest, float(np.abs(state).max()), float(np.abs(step).max()), float(np.abs(new).max()))
            out[at] = self.scale * (q[at][:, None] @ state)[:, 0]
        # A state of the delta rule moves no further than its inputs, because |k| = 1 and beta < 1: errors of tokens
        # add up. Each token's are those of sums of k_dim and of a convolution's width, and of an exponential.
        roundings = count * (self.k_dim + self.weight.shape[-1] + 24) * FLOAT32_ROUNDING * sharp
        bound = roundings * self.scale * np.abs(q).sum(2, keepdims=True) * largest
        if self.dtype is not torch.float32:
            # The recurrence takes and gives rounded rows.
            rounded = BOUNDS[self.dtype].out
            bound = bound + rounded.atol * max(1.0, float(np.abs(out).max(initial=0.0))) + rounded.rtol * np.abs(out)
        nothing = np.zeros(0)
        new_ones = slice(first, None)
        bounds = np.broadcast_to(bound, out.shape)[new_ones]
        return Answer(out[new_ones], nothing, bounds, nothing, known[new_ones], known[new_ones])

    def _convolved(self, x: Floats) -> tuple[Floats, float]:
        """The outputs of the convolution, and the largest sum of |weight * x|."""
        if not self.weight.size:
            return x, float(np.abs(x).max(initial=0.0))
        width = self.weight.shape[1]
        padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
        seen = np.stack([padded[at : at + len(x)] for at in range(width)], 2)
        sums = self.bias + (seen * self.weight).sum(2)
        sizes = float((np.abs(seen * self.weight).sum(2) + np.abs(self.bias)).max(initial=0.0))
        sums = sums / (1 + np.exp(-sums)) if self.silu else sums
        # The recurrence takes what the convolution has stored.
        return torch.from_numpy(sums).to(self.dtype).double().numpy(), sizes
