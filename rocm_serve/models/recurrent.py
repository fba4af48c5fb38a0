"""Recurrent layers (linear attention, state space models): weights, convolution, recurrence, gated norm.

KINDS has the kinds. Each reads a rank's part of its weights, and computes the rows [T, value_heads * value_dim] that
the output's matrix takes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rocm_attn.kernels.states.arguments import GatedForm
from rocm_attn.models.config import GatedNorm, RecurrentConfig
from rocm_attn.models.hf_recurrent import GATED_DELTA, KIMI_DELTA, STATE_SPACE
from rocm_attn.models.recurrent import Rule
from rocm_attn.models.shards import GroupedRows, Shard, ShardRange
from rocm_attn.models.tensors import Shape, TensorPart, TensorReader
from rocm_attn.step.step import Part
from rocm_serve.models.arithmetic import Arithmetic, CosSin
from rocm_serve.models.layer_input import LayerInput
from rocm_serve.models.recurrent_gates import RowGate, gated_norm, gated_norm_of_torch, gates
from rocm_serve.models.recurrent_parts import RecurrentMixer, RecurrentTensors


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetWeights:
    """Weights of a gated delta net, or a rank's part of them: then the heads are the rank's. A matrix is [out, in].

    first:        [channels + value_heads * (value_dim + 2), hidden]; rows of q, k and v, which are the convolution's
                  channels, then of the gate, of beta and of the decay
    convolution:  [channels, width]
    decay_factor: float32 [value_heads], below 0
    decay_bias:   float32 [value_heads]
    norm:         float32 [value_dim], on each head of the output
    out:          [hidden, value_heads * value_dim]
    """

    first: Tensor
    convolution: Tensor
    decay_factor: Tensor
    decay_bias: Tensor
    norm: Tensor
    out: Tensor
    out_bias: None = None


class GatedDeltaNet(RecurrentMixer[DeltaNetWeights]):
    """A gated delta net (arXiv 2412.06464), as transformers' Qwen3NextGatedDeltaNet computes it.

    decay = decay_factor * softplus(a + decay_bias)        beta = sigmoid(b)
    out   = norm(recurrence) * silu(gate)                  for each head
    """

    __slots__ = ()

    def attended(self, step: Part, given: LayerInput, cos_sin: CosSin) -> Tensor:
        """[T, value_heads * value_dim]; see OverHeads."""
        form, weights = self.form, self.weights
        heads, values = form.num_value_heads, form.num_value_heads * form.value_dim
        rows = given.linear(weights.first)
        inputs, gate, b, a = torch.split(rows, [form.conv_channels, values, heads, heads], 1)
        q, k, v = self.convolved(step, inputs, weights.convolution, None)
        decay, beta = gates(a, b, weights.decay_bias, weights.decay_factor)
        out = self.recurred(step, q, k, v, decay, beta)
        return gated_norm(out, gate, RowGate(weights.norm, heads, GatedForm(self.arithmetic.eps)))


def _read_delta(part: RecurrentTensors) -> DeltaNetWeights:
    layer, reader, of_heads = part.layer, part.reader, (part.layer.num_value_heads,)
    first = reader.join(*(_delta_by_key_head if part.projections.by_key_head else _delta_by_kind)(part))
    channels = _delta_channels(part, "conv1d.weight", (layer.conv_channels, 1, layer.conv_width))
    return DeltaNetWeights(
        first=first,
        convolution=reader.join(*channels).squeeze(1),
        decay_factor=part.decay_factor(of_heads, part.heads.q),
        decay_bias=part.in_float32("dt_bias", of_heads, part.heads.q),
        norm=part.in_float32("norm.weight", (layer.value_dim,)),
        out=part.output("out_proj.weight"),
    )


def _delta_channels(part: RecurrentTensors, name: str, whole: Shape) -> Iterator[TensorPart]:
    """Rows of q, of k and of v, of a tensor that holds those of all heads in this order."""
    keys, values = part.heads.kv.of_elements(part.layer.key_dim), part.heads.q.of_elements(part.layer.value_dim)
    of_all = part.layer.num_key_heads * part.layer.key_dim
    for begin, span in ((0, keys), (of_all, keys), (2 * of_all, values)):
        yield part.piece(name, whole, span.after(begin))


def _delta_by_kind(part: RecurrentTensors) -> Iterator[TensorPart]:
    """The rows of DeltaNetWeights.first, of tensors for each kind of row."""
    yield from _delta_channels(part, "in_proj_qkv.weight", (part.layer.conv_channels, part.hidden))
    values = part.heads.q.of_elements(part.layer.value_dim)
    yield part.piece("in_proj_z.weight", (part.num_values, part.hidden), values)
    for name in "ba":
        yield part.piece(f"in_proj_{name}.weight", (part.layer.num_value_heads, part.hidden), part.heads.q)


def _delta_by_key_head(part: RecurrentTensors) -> Iterator[TensorPart]:
    """The rows of DeltaNetWeights.first, of tensors with the rows of a key head, then those of the next one."""
    key_dim, value_dim, (values, keys) = part.layer.key_dim, part.layer.value_dim, (part.heads.q, part.heads.kv)
    group = part.layer.num_value_heads // part.layer.num_key_heads
    of_values, rows = group * value_dim, 2 * (key_dim + group * value_dim)
    of_key = [(keys, GroupedRows(1, rows, begin, key_dim)) for begin in (0, key_dim)]
    begins = (2 * key_dim, 2 * key_dim + of_values)
    of_value = [(values, GroupedRows(group, rows, begin, value_dim)) for begin in begins]
    for heads, grouped in (*of_key, *of_value):
        for span in heads.of_each(grouped):
            whole = (part.layer.conv_channels + part.num_values, part.hidden)
            yield part.piece("in_proj_qkvz.weight", whole, span)
    for begin in (0, group):
        for span in values.of_each(GroupedRows(group, 2 * group, begin, 1)):
            yield part.piece("in_proj_ba.weight", (2 * part.layer.num_value_heads, part.hidden), span)


@dataclass(frozen=True, slots=True, eq=False)
class StateSpaceWeights:
    """Weights of a Mamba2 layer, or a rank's part of them, as in DeltaNetWeights. A bias that the model lacks is None.

    first:            [channels + value_heads * (value_dim + 1), hidden]; rows of C, B and x, which are q, k and v and
                      the convolution's channels, then of the gate and of the step size
    convolution:      [channels, width], convolution_bias: [channels]
    decay_factor:     float32 [value_heads], below 0; A
    step_bias:        float32 [value_heads]
    skip:             float32 [value_heads, 1]; D
    norm:             float32 [value_heads * value_dim], over the heads of a group
    num_normed:       elements of a group, over all ranks
    out:              [hidden, value_heads * value_dim]
    """

    first: Tensor
    first_bias: Tensor | None
    convolution: Tensor
    convolution_bias: Tensor | None
    decay_factor: Tensor
    step_bias: Tensor
    skip: Tensor
    norm: Tensor | None
    num_normed: int
    out: Tensor
    out_bias: Tensor | None


class StateSpace(RecurrentMixer[StateSpaceWeights]):
    """A Mamba2 layer (arXiv 2405.21060), as transformers' BambaMixer, NemotronHMamba2Mixer and FalconH1Mixer have it.

    step  = softplus(dt + step_bias)        decay = decay_factor * step
    out   = norm((recurrence + skip * x) * silu(gate))        over the heads of each group; see GatedNorm
    """

    __slots__ = ()

    def attended(self, step: Part, given: LayerInput, cos_sin: CosSin) -> Tensor:
        """[T, value_heads * value_dim]; see OverHeads."""
        form, weights = self.form, self.weights
        heads, values = form.num_value_heads, form.num_value_heads * form.value_dim
        rows = given.linear(weights.first, weights.first_bias)
        inputs, gate, dt = torch.split(rows, [form.conv_channels, values, heads], 1)
        q, k, v = self.convolved(step, inputs, weights.convolution, weights.convolution_bias)
        decay, size = gates(dt, None, weights.step_bias, weights.decay_factor)
        out = self.recurred(step, q, k, v, decay, size)
        gate_first, groups = self.projections.norm is not GatedNorm.BEFORE_GATE, form.num_key_heads
        row_gate = RowGate(weights.norm, groups, GatedForm(self.arithmetic.eps, gate_first=gate_first))
        if weights.norm is None or values == groups * weights.num_normed:
            return gated_norm(out, gate, row_gate, weights.skip, v)
        # Ranks share the one group.
        return gated_norm_of_torch(out, gate, row_gate, weights.skip, v, self._mean_of_ranks)

    def _mean_of_ranks(self, squares: Tensor) -> Tensor:
        """[T, groups, 1]: the mean of a group's squares [T, groups, elements]."""
        return self.arithmetic.linears.summed(squares.sum(-1, keepdim=True)) / self.weights.num_normed


def _read_state_space(part: RecurrentTensors) -> StateSpaceWeights:
    layer, projections, reader, heads = part.layer, part.projections, part.reader, part.heads.q
    channels, of_heads = layer.conv_channels, (layer.num_value_heads,)
    of_first = channels + part.num_values + layer.num_value_heads
    first = reader.join(*_state_space_rows(part, "in_proj.weight", (of_first, part.hidden)))
    first_bias = reader.join(*_state_space_rows(part, "in_proj.bias", (of_first,))) if projections.in_bias else None
    convolution = reader.join(*_state_space_rows(part, "conv1d.weight", (channels, 1, layer.conv_width)))
    of_bias = _state_space_rows(part, "conv1d.bias", (channels,))
    of_norm = (part.num_values,), heads.of_elements(layer.value_dim)
    return StateSpaceWeights(
        first=first,
        first_bias=first_bias,
        convolution=convolution.squeeze(1),
        convolution_bias=reader.join(*of_bias) if projections.convolved_bias else None,
        decay_factor=part.decay_factor(of_heads, heads),
        step_bias=part.in_float32("dt_bias", of_heads, heads),
        skip=part.in_float32("D", of_heads, heads)[:, None],
        num_normed=layer.num_value_heads // layer.num_key_heads * layer.value_dim,
        norm=part.in_float32("norm.weight", *of_norm) if projections.norm is not GatedNorm.NONE else None,
        out=part.output("out_proj.weight"),
        out_bias=part.join("out_proj.bias", (part.hidden,)) if projections.out_bias else None,
    )


def _state_space_rows(part: RecurrentTensors, name: str, whole: Shape) -> Iterator[TensorPart]:
    """The rows of StateSpaceWeights.first or .convolution; files have those of the gate first, and then x, B, C."""
    layer, heads = part.layer, part.heads
    values, keys = heads.q.of_elements(layer.value_dim), heads.kv.of_elements(layer.key_dim)
    of_values, of_keys = part.num_values, layer.num_key_heads * layer.key_dim
    is_first = name.startswith("in_proj")
    x = of_values * is_first
    for begin, span in ((x + of_values + of_keys, keys), (x + of_values, keys), (x, values)):
        yield part.piece(name, whole, span.after(begin))
    if is_first:
        yield part.piece(name, whole, values)
        yield part.piece(name, whole, heads.q.after(x + layer.conv_channels))


@dataclass(frozen=True, slots=True, eq=False)
class KimiDeltaWeights:
    """Weights of Kimi delta attention, or a rank's part of them, as in DeltaNetWeights. dim: of a row of q, k and v

    first:        [channels + 2 * dim + heads, hidden]; rows of q, k and v, which the convolution takes, then of
                  the inputs of decay and gate, whole on every rank, and of beta
    decay_factor: float32 [heads, 1], below 0
    decay:        [heads * dim, dim], decay_bias: float32 [heads * dim]
    gate:         [heads * dim, dim]
    norm:         float32 [dim], on each head of the output
    """

    first: Tensor
    convolution: Tensor
    decay_factor: Tensor
    decay: Tensor
    decay_bias: Tensor
    gate: Tensor
    norm: Tensor
    out: Tensor
    out_bias: None = None


class KimiDelta(RecurrentMixer[KimiDeltaWeights]):
    """Kimi delta attention (arXiv 2510.26692), as transformers' KimiLinearDeltaAttention computes it.

    decay = decay_factor * softplus(decay @ a + decay_bias)        for each element of k; beta = sigmoid(b)
    out   = norm(recurrence) * sigmoid(gate @ g)                   for each head
    """

    __slots__ = ()

    def attended(self, step: Part, given: LayerInput, cos_sin: CosSin) -> Tensor:
        """[T, value_heads * value_dim]; see OverHeads."""
        form, weights, linears = self.form, self.weights, self.arithmetic.linears
        heads, dim = form.num_value_heads, form.value_dim
        rows = given.linear(weights.first)
        inputs, a, g, b = torch.split(rows, [form.conv_channels, dim, dim, heads], 1)
        q, k, v = self.convolved(step, inputs, weights.convolution, None)
        decay, beta = gates(linears.linear(a, weights.decay), b, weights.decay_bias, weights.decay_factor)
        out = self.recurred(step, q, k, v, decay.view(v.shape), beta)
        row_gate = RowGate(weights.norm, heads, GatedForm(self.arithmetic.eps, silu=False))
        return gated_norm(out, linears.linear(g, weights.gate), row_gate)


def _read_kimi(part: RecurrentTensors) -> KimiDeltaWeights:
    reader, heads, dim, width = part.reader, part.heads.q, part.layer.value_dim, part.layer.conv_width
    num_heads, rows, one = part.layer.num_value_heads, heads.of_elements(dim), ShardRange.whole(1)
    projected = [part.piece(f"{name}_proj.weight", (part.num_values, part.hidden), rows) for name in "qkv"]
    inputs = [part.piece(f"{name}_a_proj.weight", (dim, part.hidden)) for name in "fg"]
    beta = part.piece("b_proj.weight", (num_heads, part.hidden), heads)
    factor = part.decay_factor((1, 1, num_heads, 1), one, one, heads)
    first = reader.join(*projected, *inputs, beta)
    convolved = (part.piece(f"{name}_conv1d.weight", (part.num_values, 1, width), rows) for name in "qkv")
    return KimiDeltaWeights(
        first=first,
        convolution=reader.join(*convolved).squeeze(1),
        decay_factor=factor.view(-1, 1),
        decay=part.join("f_b_proj.weight", (part.num_values, dim), rows),
        decay_bias=part.in_float32("dt_bias", (part.num_values,), rows),
        gate=part.join("g_b_proj.weight", (part.num_values, dim), rows),
        norm=part.in_float32("o_norm.weight", (dim,)),
        out=part.output("o_proj.weight"),
    )


RecurrentWeights = DeltaNetWeights | StateSpaceWeights | KimiDeltaWeights
AnyRecurrentMixer = GatedDeltaNet | StateSpace | KimiDelta


class Kind(NamedTuple):
    """A kind of recurrent layer in models that run here.

    prefix: the start of its tensors' names, within the layer
    read:   reads a rank's part of its weights
    mixer:  takes those, and what else a RecurrentMixer has
    """

    prefix: str
    read: Callable[[RecurrentTensors], RecurrentWeights]
    mixer: Callable[..., AnyRecurrentMixer]


KINDS: Mapping[Rule, Kind] = {
    GATED_DELTA: Kind("linear_attn.", _read_delta, GatedDeltaNet),
    STATE_SPACE: Kind("mamba.", _read_state_space, StateSpace),
    KIMI_DELTA: Kind("self_attn.", _read_kimi, KimiDelta),
}


def read_recurrent(
    reader: TensorReader, layer: RecurrentConfig, prefix: str, shard: Shard, hidden: int
) -> RecurrentWeights:
    """Reads a rank's part of the weights around a recurrence. Raises BadModel.

    layer:  of the whole model
    prefix: the start of the layer's names
    hidden: elements of a token
    """
    kind = KINDS[layer.recurrent.rule]
    return kind.read(RecurrentTensors(reader, prefix + kind.prefix, shard, hidden, layer.recurrent, layer.projections))


def recurrent_mixer(number: int, layer: RecurrentConfig, weights: object, arithmetic: Arithmetic) -> AnyRecurrentMixer:
    """The recurrence of layer `number` among the recurrent layers, with the weights that were read for it."""
    return KINDS[layer.recurrent.rule].mixer(number, layer.recurrent, layer.projections, weights, arithmetic)
