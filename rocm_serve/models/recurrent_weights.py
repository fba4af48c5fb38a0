"""The weights around a layer's recurrence, out of the tensors of a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rocm_attn.models.config import RecurrentTensors
from rocm_attn.models.recurrent import RecurrentLayer
from rocm_attn.models.shards import GroupedRows, HeadSpans, Shard, ShardRange
from rocm_attn.models.tensors import TensorPart, TensorReader
from rocm_serve.models.mlp_weights import Named


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetWeights:
    """Weights of a gated delta net, or a rank's part of them: then the heads are the rank's. A matrix is [out, in].

    first:        [channels + value_heads * (value_dim + 2), hidden]; rows of q, k and v, which are the convolution's
                  channels, then of the gate, of beta and of the decay
    convolution:  [channels, width]
    decay_factor: float32 [value_heads], below 0
    decay_bias:   float32 [value_heads]
    norm:         [value_dim], on each head of the output
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


RecurrentWeights = DeltaNetWeights


def recurrent_shapes(layer: RecurrentLayer, tensors: RecurrentTensors, hidden: int) -> Named:
    """Yields the name within a layer and the shape of every tensor around its recurrence, including its norm."""
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
    reader: TensorReader, layer: RecurrentLayer, tensors: RecurrentTensors, prefix: str, shard: Shard
) -> RecurrentWeights:
    """Reads a rank's part of the weights around a recurrence. Raises BadModel.

    layer:  of the whole model
    prefix: the start of the layer's names
    """
    part = _Part(layer, f"{prefix}linear_attn.", shard.heads(layer.num_value_heads, layer.num_key_heads))
    values = part.heads.q.of_elements(layer.value_dim)
    out = f"{part.prefix}out_proj.weight"
    rows = part.by_key_head() if tensors is RecurrentTensors.BY_KEY_HEAD else part.by_kind()
    return DeltaNetWeights(
        first=reader.join(*rows),
        convolution=reader.join(*part.channels("conv1d.weight")).squeeze(1),
        decay_factor=-reader.in_float32(part.piece("A_log", part.heads.q)).exp(),
        decay_bias=reader.in_float32(part.piece("dt_bias", part.heads.q)),
        norm=reader.join(part.piece("norm.weight")),
        out=reader.join(TensorPart(out, (ShardRange.whole(reader.shapes[out][0]), values))),
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
