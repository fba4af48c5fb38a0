"""Layers that fold tokens into a state in place of attention: projections, convolution, recurrence, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.models.config import GatedNorm, RecurrentConfig
from rocm_attn.models.recurrent import RecurrentLayer
from rocm_serve.models.arithmetic import Arithmetic
from rocm_serve.models.attention import CosSin
from rocm_serve.models.recurrent_weights import DeltaNetWeights, KimiDeltaWeights, StateSpaceWeights
from rocm_serve.models.step_calls import StepCalls
from rocm_serve.models.weights import MixerWeights


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaNet:
    """A gated delta net (arXiv 2412.06464), as transformers' Qwen3NextGatedDeltaNet computes it.

        decay = decay_factor * softplus(a + decay_bias)        beta = sigmoid(b)
        out   = norm(recurrence) * silu(gate)                  for each head

    number: among the recurrent layers
    form:   of the rank's part
    """

    number: int
    form: RecurrentLayer
    weights: DeltaNetWeights
    arithmetic: Arithmetic

    def attended(self, step: StepCalls, x: Tensor, cos_sin: CosSin) -> Tensor:
        """[T, value_heads * value_dim]; see OverHeads."""
        form, weights = self.form, self.weights
        heads, values = form.num_value_heads, form.num_value_heads * form.value_dim
        rows = self.arithmetic.linears.linear(x, weights.first)
        inputs, gate, b, a = torch.split(rows, [form.conv_channels, values, heads, heads], 1)
        q, k, v = convolved(step, self.number, form, inputs, weights.convolution, None)
        decay = weights.decay_factor * F.softplus(a.float() + weights.decay_bias)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        step.states.recur(self.number, q, k, v, decay, b.float().sigmoid(), out)
        normed = self.arithmetic.norm(out.float(), weights.norm)
        return (normed * F.silu(gate.float().view(out.shape))).to(out.dtype).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class StateSpace:
    """A Mamba2 layer (arXiv 2405.21060), as transformers' BambaMixer, NemotronHMamba2Mixer and FalconH1Mixer have it.

        step  = softplus(dt + step_bias)        decay = decay_factor * step
        out   = norm((recurrence + skip * x) * silu(gate))        over the heads of each group; see GatedNorm

    number, form: see GatedDeltaNet
    """

    number: int
    form: RecurrentLayer
    norm: GatedNorm
    weights: StateSpaceWeights
    arithmetic: Arithmetic

    def attended(self, step: StepCalls, x: Tensor, cos_sin: CosSin) -> Tensor:
        """[T, value_heads * value_dim]; see OverHeads."""
        form, weights = self.form, self.weights
        heads, values = form.num_value_heads, form.num_value_heads * form.value_dim
        rows = self.arithmetic.linears.linear(x, weights.first, weights.first_bias)
        inputs, gate, dt = torch.split(rows, [form.conv_channels, values, heads], 1)
        q, k, v = convolved(step, self.number, form, inputs, weights.convolution, weights.convolution_bias)
        size = F.softplus(dt.float() + weights.step_bias)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        step.states.recur(self.number, q, k, v, weights.decay_factor * size, size, out)
        gate, rows = F.silu(gate.float()), torch.addcmul(out.float(), weights.skip, v.float()).flatten(1)
        if weights.norm is None:
            return (rows * gate).to(x.dtype)
        if self.norm is GatedNorm.BEFORE_GATE:
            return (self._normed(rows) * weights.norm * gate).to(x.dtype)
        return (self._normed(rows * gate) * weights.norm).to(x.dtype)

    def _normed(self, rows: Tensor) -> Tensor:
        """[T, value_heads * value_dim]: each group divided by the root of its mean square. rows: float32"""
        groups = rows.view(rows.shape[0], self.form.num_key_heads, -1)
        squares = groups.square().sum(-1, keepdim=True)
        if groups.shape[2] < self.weights.num_normed:  # ranks share the one group
            squares = self.arithmetic.linears.summed(squares)
        return (groups * torch.rsqrt(squares / self.weights.num_normed + self.arithmetic.eps)).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class KimiDelta:
    """Kimi delta attention (arXiv 2510.26692), as transformers' KimiLinearDeltaAttention computes it.

        decay = decay_factor * softplus(decay @ a + decay_bias)        for each element of k; beta = sigmoid(b)
        out   = norm(recurrence) * sigmoid(gate @ g)                   for each head

    number, form: see GatedDeltaNet
    """

    number: int
    form: RecurrentLayer
    weights: KimiDeltaWeights
    arithmetic: Arithmetic

    def attended(self, step: StepCalls, x: Tensor, cos_sin: CosSin) -> Tensor:
        """[T, value_heads * value_dim]; see OverHeads."""
        form, weights, linears = self.form, self.weights, self.arithmetic.linears
        heads, dim = form.num_value_heads, form.value_dim
        rows = linears.linear(x, weights.first)
        inputs, a, g, b = torch.split(rows, [form.conv_channels, dim, dim, heads], 1)
        q, k, v = convolved(step, self.number, form, inputs, weights.convolution, None)
        rates = F.softplus(linears.linear(a, weights.decay).float() + weights.decay_bias)
        decay = weights.decay_factor * rates.view(v.shape)
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        step.states.recur(self.number, q, k, v, decay, b.float().sigmoid(), out)
        gate = linears.linear(g, weights.gate).float().sigmoid().view(v.shape)
        return (self.arithmetic.norm(out.float(), weights.norm) * gate).to(out.dtype).flatten(1)


RecurrentMixer = GatedDeltaNet | StateSpace | KimiDelta


def convolved(
    step: StepCalls, number: int, form: RecurrentLayer, inputs: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [T, key_heads, key_dim], and v [T, value_heads, value_dim], after the convolution of a layer.

    inputs: [T, channels]; weight, bias: see StateCalls.convolve
    """
    out = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    step.states.convolve(number, inputs, weight, bias, out)
    keys, num_tokens = form.num_key_heads * form.key_dim, inputs.shape[0]
    q, k, v = torch.split(out, [keys, keys, form.conv_channels - 2 * keys], 1)
    q, k = (side.view(num_tokens, form.num_key_heads, form.key_dim) for side in (q, k))
    return q, k, v.view(num_tokens, form.num_value_heads, form.value_dim)


def recurrent_layer(
    number: int, layer: RecurrentConfig, weights: MixerWeights, arithmetic: Arithmetic
) -> RecurrentMixer:
    """The recurrence of layer `number` among the recurrent layers."""
    form = layer.recurrent
    if isinstance(weights, StateSpaceWeights):
        return StateSpace(number, form, layer.projections.norm, weights, arithmetic)
    if isinstance(weights, KimiDeltaWeights):
        return KimiDelta(number, form, weights, arithmetic)
    assert isinstance(weights, DeltaNetWeights), "weights are read by their config"
    return GatedDeltaNet(number, form, weights, arithmetic)
