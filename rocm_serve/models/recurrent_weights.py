"""The weights around a layer's recurrence, out of the tensors of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rocm_attn.models.config import GatedNorm, RecurrentProjections, RecurrentTensors
from rocm_attn.models.recurrent import RecurrentLayer
from rocm_attn.models.shards import GroupedRows, HeadSpans, Shard, ShardRange
from rocm_attn.models.tensors import Shape, TensorPart, TensorReader
from rocm_serve.models.layer_tensors import LayerTensors


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

    @property
    def out_bias(self) -> None:
        """The output has no bias."""
        return None


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

    @property
    def out_bias(self) -> None:
        """The output has no bias."""
        return None


RecurrentWeights = DeltaNetWeights | StateSpaceWeights | KimiDeltaWeights


def read_recurrent(
    reader: TensorReader,
    layer: RecurrentLayer,
    projections: RecurrentProjections,
    prefix: str,
    shard: Shard,
    hidden: int,
) -> RecurrentWeights:
    """Reads a rank's part of the weights around a recurrence. Raises BadModel.

    layer:  of the whole model
    prefix: the start of the layer's names
    hidden: elements of a token
    """
    if projections.tensors is RecurrentTensors.MAMBA:
        return _read_mamba(_Part(reader, f"{prefix}mamba.", shard, hidden, layer), projections)
    if projections.tensors is RecurrentTensors.KIMI:
        return _read_kimi(_Part(reader, f"{prefix}self_attn.", shard, hidden, layer))
    return _read_delta(_Part(reader, f"{prefix}linear_attn.", shard, hidden, layer), projections.tensors)


def _read_mamba(part: _Part, projections: RecurrentProjections) -> StateSpaceWeights:
    layer, reader, heads = part.layer, part.reader, part.heads.q
    channels, of_heads = layer.conv_channels, (layer.num_value_heads,)
    of_first = channels + part.num_values + layer.num_value_heads
    first = reader.join(*part.of_mamba("in_proj.weight", (of_first, part.hidden)))
    first_bias = reader.join(*part.of_mamba("in_proj.bias", (of_first,))) if projections.in_bias else None
    convolution = reader.join(*part.of_mamba("conv1d.weight", (channels, 1, layer.conv_width)))
    has_bias = projections.convolved_bias
    of_norm = (part.num_values,), heads.of_elements(layer.value_dim)
    return StateSpaceWeights(
        first=first,
        first_bias=first_bias,
        convolution=convolution.squeeze(1),
        convolution_bias=reader.join(*part.of_mamba("conv1d.bias", (channels,))) if has_bias else None,
        decay_factor=part.decay_factor(of_heads, heads),
        step_bias=part.in_float32("dt_bias", of_heads, heads),
        skip=part.in_float32("D", of_heads, heads)[:, None],
        num_normed=layer.num_value_heads // layer.num_key_heads * layer.value_dim,
        norm=part.in_float32("norm.weight", *of_norm) if projections.norm is not GatedNorm.NONE else None,
        out=part.output("out_proj.weight"),
        out_bias=part.join("out_proj.bias", (part.hidden,)) if projections.out_bias else None,
    )


def _read_kimi(part: _Part) -> KimiDeltaWeights:
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


def _read_delta(part: _Part, tensors: RecurrentTensors) -> DeltaNetWeights:
    layer, reader, of_heads = part.layer, part.reader, (part.layer.num_value_heads,)
    rows = part.by_key_head() if tensors is RecurrentTensors.BY_KEY_HEAD else part.by_kind()
    first = reader.join(*rows)
    channels = part.channels("conv1d.weight", (layer.conv_channels, 1, layer.conv_width))
    return DeltaNetWeights(
        first=first,
        convolution=reader.join(*channels).squeeze(1),
        decay_factor=part.decay_factor(of_heads, part.heads.q),
        decay_bias=part.in_float32("dt_bias", of_heads, part.heads.q),
        norm=part.in_float32("norm.weight", (layer.value_dim,)),
        out=part.output("out_proj.weight"),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Part(LayerTensors):
    """The tensors around a layer's recurrence that a rank holds. layer: of the whole model"""

    layer: RecurrentLayer

    @property
    def heads(self) -> HeadSpans:
        """The rank's value heads (q) and their key heads."""
        return self.shard.heads(self.layer.num_value_heads, self.layer.num_key_heads)

    @property
    def num_values(self) -> int:
        """Elements of v for a token, on all ranks."""
        return self.layer.num_value_heads * self.layer.value_dim

    def decay_factor(self, whole: Shape, *cut: ShardRange) -> Tensor:
        """Minus the exponential of the tensor A_log."""
        return self.reader.computed(lambda log: -log.exp(), self.in_float32("A_log", whole, *cut))

    def output(self, name: str) -> Tensor:
        """The output's matrix, with columns of the rank's value heads."""
        return self.out(name, self.num_values, self.heads.q.of_elements(self.layer.value_dim))

    def of_mamba(self, name: str, whole: Shape) -> Iterator[TensorPart]:
        """The rows of StateSpaceWeights.first or .convolution; files have those of the gate first, and then x, B, C."""
        layer = self.layer
        values, keys = self.heads.q.of_elements(layer.value_dim), self.heads.kv.of_elements(layer.key_dim)
        of_values, of_keys = self.num_values, layer.num_key_heads * layer.key_dim
        is_first = name.startswith("in_proj")
        x = of_values * is_first
        for begin, span in ((x + of_values + of_keys, keys), (x + of_values, keys), (x, values)):
            yield self.piece(name, whole, span.after(begin))
        if is_first:
            yield self.piece(name, whole, values)
            yield self.piece(name, whole, self.heads.q.after(x + layer.conv_channels))

    def channels(self, name: str, whole: Shape) -> Iterator[TensorPart]:
        """Rows of q, of k and of v, of a tensor that holds those of all heads in this order."""
        keys, values = self.heads.kv.of_elements(self.layer.key_dim), self.heads.q.of_elements(self.layer.value_dim)
        of_all = self.layer.num_key_heads * self.layer.key_dim
        for begin, span in ((0, keys), (of_all, keys), (2 * of_all, values)):
            yield self.piece(name, whole, span.after(begin))

    def by_kind(self) -> Iterator[TensorPart]:
        """The rows of DeltaNetWeights.first, of tensors that are BY_KIND."""
        yield from self.channels("in_proj_qkv.weight", (self.layer.conv_channels, self.hidden))
        values = self.heads.q.of_elements(self.layer.value_dim)
        yield self.piece("in_proj_z.weight", (self.num_values, self.hidden), values)
        for name in "ba":
            yield self.piece(f"in_proj_{name}.weight", (self.layer.num_value_heads, self.hidden), self.heads.q)

    def by_key_head(self) -> Iterator[TensorPart]:
        """The rows of DeltaNetWeights.first, of tensors that are BY_KEY_HEAD."""
        key_dim, value_dim, (values, keys) = self.layer.key_dim, self.layer.value_dim, (self.heads.q, self.heads.kv)
        group = self.layer.num_value_heads // self.layer.num_key_heads
        of_values, rows = group * value_dim, 2 * (key_dim + group * value_dim)
        of_key = [(keys, GroupedRows(1, rows, begin, key_dim)) for begin in (0, key_dim)]
        begins = (2 * key_dim, 2 * key_dim + of_values)
        of_value = [(values, GroupedRows(group, rows, begin, value_dim)) for begin in begins]
        for heads, grouped in (*of_key, *of_value):
            for span in heads.of_each(grouped):
                whole = (self.layer.conv_channels + self.num_values, self.hidden)
                yield self.piece("in_proj_qkvz.weight", whole, span)
        for begin in (0, group):
            for span in values.of_each(GroupedRows(group, 2 * group, begin, 1)):
                yield self.piece("in_proj_ba.weight", (2 * self.layer.num_value_heads, self.hidden), span)
