"""LayerTensors: the tensors of a part of a layer, under the names that they have within it."""

from dataclasses import dataclass

from torch import Tensor

from rocm_attn.models.shards import Shard, ShardRange
from rocm_attn.models.tensors import Shape, TensorPart, TensorReader


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """The tensors that a rank holds of attention, of a recurrence or of an MLP.

    prefix: the start of their names
    hidden: elements of a token
    """

    reader: TensorReader
    prefix: str
    shard: Shard
    hidden: int

    def piece(self, name: str, whole: Shape, *cut: ShardRange) -> TensorPart:
        """A tensor, or a part of it; see TensorPart. name: within the part of the layer"""
        return TensorPart(self.prefix + name, whole, cut)

    def join(self, name: str, whole: Shape, *cut: ShardRange) -> Tensor:
        """Reads piece()."""
        return self.reader.join(self.piece(name, whole, *cut))

    def in_float32(self, name: str, whole: Shape, *cut: ShardRange) -> Tensor:
        """Reads piece() in float32."""
        return self.reader.in_float32(self.piece(name, whole, *cut))

    def out(self, name: str, size: int, span: ShardRange) -> Tensor:
        """Reads the columns of a span of an output's matrix, which has `size` columns."""
        return self.join(name, (self.hidden, size), ShardRange.whole(self.hidden), span)
