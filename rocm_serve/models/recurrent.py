"""Layers that fold tokens into a state in place of attention: projections, convolution, recurrence, gated norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.models.recurrent import RecurrentLayer
from rocm_serve.models.arithmetic import Arithmetic
from rocm_serve.models.attention import CosSin
from rocm_serve.models.recurrent_weights import DeltaNetWeights
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
        normed = self.arithmetic.norm(out.float(), weights.norm.float())
        return (normed * F.silu(gate.float().view(out.shape))).to(out.dtype).flatten(1)


RecurrentMixer = GatedDeltaNet


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


def recurrent_layer(number: int, form: RecurrentLayer, weights: MixerWeights, arithmetic: Arithmetic) -> RecurrentMixer:
    """The recurrence of layer `number` among the recurrent layers."""
    assert isinstance(weights, DeltaNetWeights), "weights are read by their config"
    return GatedDeltaNet(number, form, weights, arithmetic)
