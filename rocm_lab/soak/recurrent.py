"""Recurrent layers of a soak: a gated delta net, KDA and Mamba2, and what they give in float64.

The reference follows Gated Delta Networks (arXiv 2412.06464, equation 10), Kimi Linear (arXiv 2510.26692, equation 1)
and Mamba 2 (arXiv 2405.21060, section 2), token after token. It knows no slot and no chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.batch.step_batch import Int32Array
from rocm_attn.kernels.states.arguments import Update
from rocm_attn.recurrence import Convolution, Recurrence, tensors_of
from rocm_attn.step.step import Part

Floats = npt.NDArray[np.float64]
# States after the first tokens of a sequence that a reference remembers.
_MOST_STATES = 500


def soak_recurrences(dtype: torch.dtype) -> tuple[Recurrence, ...]:
    """Returns a layer of each kind; two have a convolution."""
    delta = Recurrence(4, 2, 8, 16, dtype, convolution=Convolution(2 * 2 * 8 + 4 * 16, 4), normalises=True, scale=0.4)
    channels = Recurrence(2, 2, 8, 8, dtype, channel_decay=True, normalises=True)
    sums = Recurrence(
        4, 1, 8, 8, dtype, update=Update.SUM, convolution=Convolution(2 * 8 + 4 * 8, 3, silu=False), scale=0.5
    )
    return delta, channels, sums


@dataclass(frozen=True, slots=True)
class RecurrentTables:
    """A layer's inputs by the entry that a token looks up.

    x:      [entries, 2 * k_heads * k_dim + heads * v_dim], q, k and v side by side, in the layer's dtype
    decay, beta: float32 [entries, heads (, k_dim)], [entries, heads]
    weight: [channels, width]; bias: [channels]; empty if there is no convolution
    """

    form: Recurrence
    x: Tensor
    decay: Tensor
    beta: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def random(cls, form: Recurrence, entries: int, pads: int, generator: torch.Generator) -> RecurrentTables:
        """Returns tables on the CPU. pads: entries that padding looks up, the first ones; they are NaN"""

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
        )

    def to(self, device: torch.device) -> RecurrentTables:
        """Returns the same tables on another device."""
        sides = (self.x, self.decay, self.beta, self.weight, self.bias)
        return RecurrentTables(self.form, *(side.to(device) for side in sides))

    def convolve(self, part: Part, layer: int, entry: Tensor) -> Tensor:
        """Returns q, k and v of a step's tokens, as the recurrence takes them, side by side: [T, channels]."""
        x = self.x[entry]
        if not self.form.convolution.channels:
            return x
        out = torch.empty_like(x)
        part.states.convolve(layer, x, self.weight, self.bias, out)
        return out

    def recur(self, part: Part, layer: int, entry: Tensor, convolved: Tensor, out: Tensor) -> None:
        """Runs the recurrence over what convolve() has given. out: [T, heads, v_dim], written"""
        form = self.form
        keys = form.num_k_heads * form.k_dim
        q, k, v = torch.split(convolved, [keys, keys, form.num_heads * form.v_dim], 1)
        heads = (-1, form.num_k_heads, form.k_dim)
        q, k, v = q.reshape(heads), k.reshape(heads), v.reshape(-1, form.num_heads, form.v_dim)
        part.states.recur(layer, q, k, v, self.decay[entry], self.beta[entry], out)


@dataclass(slots=True)
class RecurrentReference:
    """The outputs of a layer in float64.

    tables:     on the CPU
    max_kv_len: positions of the tables
    """

    tables: RecurrentTables
    max_kv_len: int
    _states: OrderedDict[bytes, Floats] = field(default_factory=OrderedDict)

    def outputs(self, token_ids: Int32Array, q_len: int) -> Tensor:
        """Returns those of the last q_len tokens of a sequence, float64 [q_len, heads, v_dim]."""
        form, first = self.tables.form, len(token_ids) - q_len
        begin = first
        while begin and token_ids[:begin].tobytes() not in self._states:
            begin -= 1
        state = (
            self._states[token_ids[:begin].tobytes()] if begin else np.zeros((form.num_heads, form.k_dim, form.v_dim))
        )
        q, k, v, decay, beta = self._inputs(token_ids, begin)
        out = np.empty((len(token_ids) - begin, form.num_heads, form.v_dim))
        for at in range(len(out)):
            state = state * decay[at][:, :, None]
            new = v[at]
            if form.update is Update.DELTA:
                new = new - (k[at][:, None] @ state)[:, 0]
            state = state + k[at][:, :, None] * (beta[at][:, None] * new)[:, None]
            out[at] = form.scale * (q[at][:, None] @ state)[:, 0]
            self._states[token_ids[: begin + at + 1].tobytes()] = state
        while len(self._states) > _MOST_STATES:
            self._states.popitem(last=False)
        return torch.from_numpy(out[first - begin :])

    def _inputs(self, token_ids: Int32Array, begin: int) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """q, k, v, decay and beta of the tokens from `begin` on, q and k for each head of v."""
        form, tables = self.tables.form, self.tables
        entry = torch.from_numpy(token_ids).long() * self.max_kv_len + torch.arange(len(token_ids))

        def exact(side: Tensor) -> Floats:
            return side.double().numpy()

        x, width = exact(tables.x[entry]), form.convolution.width
        if form.convolution.channels:
            padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
            weight = exact(tables.weight)
            x = exact(tables.bias) + sum(padded[at : at + len(x)] * weight[:, at] for at in range(width))
            x = x / (1 + np.exp(-x)) if form.convolution.silu else x
            x = exact(torch.from_numpy(x).to(form.dtype))  # the recurrence takes what the convolution has stored
        x, entry = x[begin:], entry[begin:]
        keys, group = form.num_k_heads * form.k_dim, form.num_heads // form.num_k_heads
        q, k = (x[:, at : at + keys].reshape(len(x), form.num_k_heads, form.k_dim) for at in (0, keys))
        if form.normalises:
            q, k = (side / np.sqrt((side * side).sum(2, keepdims=True) + 1e-6) for side in (q, k))
        q, k = (np.repeat(side, group, 1) for side in (q, k))
        decay = np.exp(exact(tables.decay[entry]).reshape(len(x), form.num_heads, -1))
        return q, k, x[:, 2 * keys :].reshape(len(x), form.num_heads, form.v_dim), decay, exact(tables.beta[entry])
