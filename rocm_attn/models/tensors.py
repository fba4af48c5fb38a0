"""TensorSource: the tensors of a model file. TensorReader: makes them weights of a dtype on a device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.shards import ShardRange

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of a model file, under Hugging Face's names."""

    @property
    def name(self) -> str:
        """The name of the file in messages."""

    def shapes(self) -> Mapping[str, Shape]:
        """name -> shape of every tensor in the file."""

    def read(self, name: str, *where: slice) -> Tensor:
        """One tensor, of any floating dtype, on the CPU. Raises BadModel.

        where: the part of each of its first dimensions, start:stop within it; none: the whole tensor
        """


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A named tensor, or a part of it.

    whole: the tensor's shape, as the model's config asks for it
    cut:   the spans of its first dimensions; the other dimensions are whole, and all are if there is none
    """

    name: str
    whole: Shape
    cut: tuple[ShardRange, ...] = ()

    @property
    def shape(self) -> Shape:
        """Its shape, with padding."""
        return (*(span.size for span in self.cut), *self.whole[len(self.cut) :])


@dataclass(eq=False)
class TensorReader:
    """Reads pieces of tensors into joined ones, so that no more than one piece exists twice.

    source: has each tensor in the shape of TensorPart.whole
    dtype:  of the results, unless a method says otherwise
    """

    source: TensorSource
    dtype: torch.dtype
    device: torch.device

    def join(self, *pieces: TensorPart) -> Tensor:
        """The pieces joined along the first dimension. Raises BadModel if one is not finite.

        A CPU's float32 matrix lies column by column: its BLAS multiplies a few rows by one in half the time.
        """
        shapes = [piece.shape for piece in pieces]
        num_rows = sum(shape[0] for shape in shapes)
        if self.device.type == "cpu" and self.dtype == torch.float32 and len(shapes[0]) == 2:
            joined = torch.empty((shapes[0][1], num_rows), dtype=self.dtype).t()
        else:
            joined = self.empty((num_rows, *shapes[0][1:]), self.dtype)
        for piece, target in zip(pieces, torch.split(joined, [shape[0] for shape in shapes]), strict=True):
            self._copy(target, piece)
        self._check(joined, *pieces)
        return joined

    def table(self, piece: TensorPart) -> Tensor:
        """One piece, row by row, for look-ups of rows. Raises BadModel if it is not finite."""
        tensor = self.empty(piece.shape, self.dtype)
        self.copy_into(tensor, piece)
        return tensor

    def in_float32(self, piece: TensorPart) -> Tensor:
        """One piece in float32. Raises BadModel if it is not finite."""
        tensor = self.empty(piece.shape, torch.float32)
        self._copy(tensor, piece)
        self._check(tensor, piece)
        return tensor

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Memory for a tensor."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def computed(self, compute: Callable[[Tensor], Tensor], read: Tensor) -> Tensor:
        """Computes values of the same shape from a tensor that was read."""
        return compute(read)

    def copy_into(self, target: Tensor, piece: TensorPart) -> None:
        """Reads a piece to its place in a larger tensor. Raises BadModel if it is not finite."""
        self._copy(target, piece)
        self._check(target, piece)

    def _copy(self, target: Tensor, piece: TensorPart) -> None:
        if any(span.num_real < span.size for span in piece.cut):
            target.zero_()
        if all(span.num_real for span in piece.cut):
            is_cut = any(span.num_real < size for span, size in zip(piece.cut, piece.whole, strict=False))
            where = [slice(span.start, span.stop) for span in piece.cut] if is_cut else []
            target[tuple(slice(span.num_real) for span in piece.cut)] = self.source.read(piece.name, *where)

    def _check(self, tensor: Tensor, *pieces: TensorPart) -> None:
        if not torch.isfinite(tensor).all():
            names = " or ".join(piece.name for piece in pieces)
            raise BadModel(
                f"{self.source.name}: {names} holds NaN or infinity as {tensor.dtype}; the file is damaged, or the "
                "dtype has too small a range for it"
            )


class ShapesOfReads(TensorReader):
    """Reads nothing: notes the tensors that would be read, for results without memory.

    shapes: name -> shape of each of them
    most:   of them that a model may have
    """

    def __init__(self, most: int) -> None:
        super().__init__(_NO_FILE, torch.float32, torch.device("meta"))
        self.shapes: dict[str, Shape] = {}
        self._most = most

    def empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        """Like TensorReader.empty. Raises BadModel for a tensor that no memory can hold."""
        try:
            return super().empty(shape, dtype)
        except RuntimeError as error:  # its bytes are more than 64 bits count
            raise BadModel(f"the model's config asks for a tensor of shape {list(shape)}; check its sizes") from error

    def computed(self, compute: Callable[[Tensor], Tensor], read: Tensor) -> Tensor:
        """Returns what was read. Arithmetic without memory would import 900 modules of torch."""
        return read

    def _copy(self, target: Tensor, piece: TensorPart) -> None:
        self.shapes[piece.name] = piece.whole
        if len(self.shapes) > self._most:
            raise BadModel(f"the model's config asks for more than {self._most} tensors; check its layers and experts")

    def _check(self, tensor: Tensor, *pieces: TensorPart) -> None:
        """There are no values."""


class _NoFile:
    """A TensorSource without tensors."""

    name = "no file"

    def shapes(self) -> Mapping[str, Shape]:
        return {}

    def read(self, name: str, *where: slice) -> Tensor:
        raise AssertionError("nothing is read")


_NO_FILE = _NoFile()
