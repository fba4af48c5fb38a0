"""The weights around a layer's recurrence, out of the tensors of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rocm_attn.models.config import GatedNorm, RecurrentProjections, RecurrentTensors
from rocm_attn.models.recurrent import RecurrentLayer
from rocm_attn.models.shards import GroupedRows, HeadSpans, Shard, ShardRange
from rocm_attn.models.tensors import TensorPart, TensorReader
from rocm_serve.models.mlp_weights import Named, with_bias


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


def recurrent_shapes(layer: RecurrentLayer, projections: RecurrentProjections, hidden: int) -> Named:
    """Yields the name within a layer and the shape of every tensor around its recurrence, including its norm."""
    if projections.tensors is RecurrentTensors.MAMBA:
        yield from _mamba_shapes(layer, projections, hidden)
    elif projections.tensors is RecurrentTensors.KIMI:
        yield from _kimi_shapes(layer, hidden)
    else:
        yield from _delta_shapes(layer, projections.tensors, hidden)


def _mamba_shapes(layer: RecurrentLayer, projections: RecurrentProjections, hidden: int) -> Named:
    values, heads = layer.num_value_heads * layer.value_dim, layer.num_value_heads
    yield from with_bias("mamba.in_proj", (layer.conv_channels + values + heads, hidden), projections.in_bias)
    yield from with_bias("mamba.conv1d", (layer.conv_channels, 1, layer.conv_width), projections.convolved_bias)
    for name in ("A_log", "dt_bias", "D"):
        yield f"mamba.{name}", (heads,)
    if projections.norm is not GatedNorm.NONE:
        yield "mamba.norm.weight", (values,)
    yield from with_bias("mamba.out_proj", (hidden, values), projections.out_bias)


def _kimi_shapes(layer: RecurrentLayer, hidden: int) -> Named:
    heads, dim = layer.num_value_heads, layer.value_dim
    for name in "qkv":
        yield f"self_attn.{name}_proj.weight", (heads * dim, hidden)
        yield f"self_attn.{name}_conv1d.weight", (heads * dim, 1, layer.conv_width)
    for name in "fg":
        yield f"self_attn.{name}_a_proj.weight", (dim, hidden)
        yield f"self_attn.{name}_b_proj.weight", (heads * dim, dim)
    yield "self_attn.b_proj.weight", (heads, hidden)
    yield "self_attn.A_log", (1, 1, heads, 1)
    yield "self_attn.dt_bias", (heads * dim,)
    yield "self_attn.o_norm.weight", (dim,)
    yield "self_attn.o_proj.weight", (hidden, heads * dim)


def _delta_shapes(layer: RecurrentLayer, tensors: RecurrentTensors, hidden: int) -> Named:
    values = layer.num_value_heads * layer.value_dim
    if tensors is RecurrentTensors.BY_KEY_HEAD:
        yield "linear_attn.in_proj_qkvz.weight", (layer.conv_channels + values, hidden)
        yield "linear_attn.in_proj_ba.weight", (2 * layer.num_value_heads, hidden)
    else:
        yield "linear_attn.in_proj_qkv.weight", (layer.conv_channels, hidden)
        yield "linear_attn.in_proj_z.weight", (values, hidden)
        for name in "ba":
            yield f"linear_attn.in_proj_{name}.weight", (layer.num_value_heads, hidden)
    yield "linear_attn.conv1d.weight", (layer.conv_channels, 1, layer.conv_width)
    for name in ("A_log", "dt_bias"):
        yield f"linear_attn.{name}", (layer.num_value_heads,)
    yield "linear_attn.norm.weight", (layer.value_dim,)
    yield "linear_attn.out_proj.weight", (hidden, values)


def read_recurrent(
    reader: TensorReader, layer: RecurrentLayer, projections: RecurrentProjections, prefix: str, shard: Shard
) -> RecurrentWeights:
    """Reads a rank's part of the weights around a recurrence. Raises BadModel.

    layer:  of the whole model
    prefix: the start of the layer's names
    """
    heads = shard.heads(layer.num_value_heads, layer.num_key_heads)
    if projections.tensors is RecurrentTensors.MAMBA:
        return _read_mamba(reader, _Part(layer, f"{prefix}mamba.", heads), projections)
    if projections.tensors is RecurrentTensors.KIMI:
        return _read_kimi(reader, _Part(layer, f"{prefix}self_attn.", heads))
    return _read_delta(reader, _Part(layer, f"{prefix}linear_attn.", heads), projections.tensors)


def _read_mamba(reader: TensorReader, part: _Part, projections: RecurrentProjections) -> StateSpaceWeights:
    first, first_bias, convolution, convolution_bias = (
        list(part.of_mamba(name)) if wanted else []
        for name, wanted in (
            ("in_proj.weight", True),
            ("in_proj.bias", projections.in_bias),
            ("conv1d.weight", True),
            ("conv1d.bias", projections.convolved_bias),
        )
    )
    heads = part.heads.q
    norm = part.piece("norm.weight", heads.of_elements(part.layer.value_dim))
    return StateSpaceWeights(
        first=reader.join(*first),
        first_bias=reader.join(*first_bias) if first_bias else None,
        convolution=reader.join(*convolution).squeeze(1),
        convolution_bias=reader.join(*convolution_bias) if convolution_bias else None,
        decay_factor=-reader.in_float32(part.piece("A_log", heads)).exp(),
        step_bias=reader.in_float32(part.piece("dt_bias", heads)),
        skip=reader.in_float32(part.piece("D", heads))[:, None],
        num_normed=part.layer.num_value_heads // part.layer.num_key_heads * part.layer.value_dim,
        norm=reader.in_float32(norm) if projections.norm is not GatedNorm.NONE else None,
        out=reader.join(part.out(reader, "out_proj.weight")),
        out_bias=reader.join(part.piece("out_proj.bias")) if projections.out_bias else None,
    )


def _read_kimi(reader: TensorReader, part: _Part) -> KimiDeltaWeights:
    heads, one = part.heads.q, ShardRange.whole(1)
    rows = heads.of_elements(part.layer.value_dim)
    projected = [part.piece(f"{name}_proj.weight", rows) for name in "qkv"]
    inputs = [part.piece(f"{name}_a_proj.weight") for name in "fg"]
    factor = reader.in_float32(part.piece("A_log", one, one, heads))
    return KimiDeltaWeights(
        first=reader.join(*projected, *inputs, part.piece("b_proj.weight", heads)),
        convolution=reader.join(*(part.piece(f"{name}_conv1d.weight", rows) for name in "qkv")).squeeze(1),
        decay_factor=-factor.view(-1, 1).exp(),
        decay=reader.join(part.piece("f_b_proj.weight", rows)),
        decay_bias=reader.in_float32(part.piece("dt_bias", rows)),
        gate=reader.join(part.piece("g_b_proj.weight", rows)),
        norm=reader.in_float32(part.piece("o_norm.weight")),
        out=reader.join(part.out(reader, "o_proj.weight")),
    )


def _read_delta(reader: TensorReader, part: _Part, tensors: RecurrentTensors) -> DeltaNetWeights:
    rows = part.by_key_head() if tensors is RecurrentTensors.BY_KEY_HEAD else part.by_kind()
    return DeltaNetWeights(
        first=reader.join(*rows),
        convolution=reader.join(*part.channels("conv1d.weight")).squeeze(1),
        decay_factor=-reader.in_float32(part.piece("A_log", part.heads.q)).exp(),
        decay_bias=reader.in_float32(part.piece("dt_bias", part.heads.q)),
        norm=reader.in_float32(part.piece("norm.weight")),
        out=reader.join(part.out(reader, "out_proj.weight")),
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The tensors around a layer's recurrence that a rank holds. heads: its value heads (q) and their key heads"""

    layer: RecurrentLayer
    prefix: str
    heads: HeadSpans

    def piece(self, name: str, *cut: ShardRange) -> TensorPart:
        """A tensor under its name within the recurrence, or a part of it."""
        return TensorPart(self.prefix + name, cut)

    def out(self, reader: TensorReader, name: str) -> TensorPart:
        """The output's matrix, with columns of the rank's value heads."""
        hidden = ShardRange.whole(reader.shapes[self.prefix + name][0])
        return self.piece(name, hidden, self.heads.q.of_elements(self.layer.value_dim))

    def of_mamba(self, name: str) -> Iterator[TensorPart]:
        """The rows of StateSpaceWeights.first or .convolution; files have those of the gate first, and then x, B, C."""
        layer = self.layer
        values, keys = self.heads.q.of_elements(layer.value_dim), self.heads.kv.of_elements(layer.key_dim)
        of_values, of_keys = layer.num_value_heads * layer.value_dim, layer.num_key_heads * layer.key_dim
        is_first = name.startswith("in_proj")
        x = of_values * is_first
        for begin, span in ((x + of_values + of_keys, keys), (x + of_values, keys), (x, values)):
            yield self.piece(name, span.after(begin))
        if is_first:
            yield self.piece(name, values)
            yield self.piece(name, self.heads.q.after(x + layer.conv_channels))

    def channels(self, name: str) -> Iterator[TensorPart]:
        """Rows of q, of k and of v, of a tensor that holds those of all heads in this order."""
        keys, values = self.heads.kv.of_elements(self.layer.key_dim), self.heads.q.of_elements(self.layer.value_dim)
        of_all = self.layer.num_key_heads * self.layer.key_dim
        for begin, span in ((0, keys), (of_all, keys), (2 * of_all, values)):
            yield self.piece(name, span.after(begin))

    def by_kind(self) -> Iterator[TensorPart]:
        """The rows of DeltaNetWeights.first, of tensors that are BY_KIND."""
        yield from self.channels("in_proj_qkv.weight")
        yield self.piece("in_proj_z.weight", self.heads.q.of_elements(self.layer.value_dim))
        for name in "ba":
            yield self.piece(f"in_proj_{name}.weight", self.heads.q)

    def by_key_head(self) -> Iterator[TensorPart]:
        """The rows of DeltaNetWeights.first, of tensors that are BY_KEY_HEAD."""
        key_dim, value_dim = self.layer.key_dim, self.layer.value_dim
        group = self.layer.num_value_heads // self.layer.num_key_heads
        qkvz, ba, (values, keys) = "in_proj_qkvz.weight", "in_proj_ba.weight", (self.heads.q, self.heads.kv)
        of_values, rows = group * value_dim, 2 * (key_dim + group * value_dim)
        for begin in (0, key_dim):
            yield from (self.piece(qkvz, span) for span in keys.of_each(GroupedRows(1, rows, begin, key_dim)))
        for begin in (2 * key_dim, 2 * key_dim + of_values):
            yield from (self.piece(qkvz, span) for span in values.of_each(GroupedRows(group, rows, begin, value_dim)))
        for begin in (0, group):
            yield from (self.piece(ba, span) for span in values.of_each(GroupedRows(group, 2 * group, begin, 1)))
