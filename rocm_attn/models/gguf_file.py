"""GGUFFile: the metadata and the tensors of a GGUF file, dequantised."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.family_values import TENSOR_NAMES
from rocm_attn.models.fields import shown
from rocm_attn.models.tensors import Shape

if TYPE_CHECKING:
    import gguf

Float32Array = npt.NDArray[np.float32]

# Exceptions that the gguf package raises on invalid bytes.
_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError, RecursionError)

_HF_NAMES = TENSOR_NAMES["gguf"]
_ROPE_DIVISORS = "rope_freqs.weight"
_HEADS_FIELD = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}


class GGUFFile:
    """A TensorSource over a GGUF file, with its metadata.

    metadata: every key of the file -> int, float, bool, str or a list of them

    Opening maps the file and reads its header. Raises BadModel for a file that is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        # Imported here, because only users of such files need the package.
        import gguf

        from rocm_attn.models.gguf_reader import ArrayReader

        self.name = str(path)
        self._dequantize, self._float32 = gguf.dequantize, gguf.GGMLQuantizationType.F32
        try:
            reader = ArrayReader(path)
            self.metadata: dict[str, object] = {name: field.contents() for name, field in reader.fields.items()}
        except _DAMAGE as error:
            raise BadModel(f"{path} is not a whole GGUF file ({error}); download it again") from error
        self._interleaved = self.metadata.get("general.architecture") == "llama"
        self._tensors: dict[str, gguf.ReaderTensor] = {}
        for tensor in reader.tensors:
            other = self._tensors.setdefault(_hf_name(tensor.name), tensor)
            if other is not tensor:
                raise BadModel(f"{path} holds one weight twice, as {shown(other.name)} and as {shown(tensor.name)}")

    def shapes(self) -> Mapping[str, Shape]:
        """Hugging Face's name -> shape of every tensor in the file that is a weight."""
        # GGUF writes the fastest axis first
        return {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
            if name != _ROPE_DIVISORS
        }

    def read(self, name: str, *where: slice) -> Tensor:
        """Like TensorSource.read, in float32, rows in Hugging Face's order. Raises BadModel.

        For a part, only its rows are dequantised. Columns lie in blocks, and are cut afterwards.
        """
        tensor, shape = self._tensors[name], self.shapes()[name]
        rows_of_head = self._rows_of_head(tensor, shape)
        start, stop = 0, shape[0]
        if where and len(shape) > 1:  # rows that turn together lie in one head
            start = where[0].start // rows_of_head * rows_of_head
            stop = -(-where[0].stop // rows_of_head) * rows_of_head
        try:
            values = self._dequantize(tensor.data[start:stop] if len(shape) > 1 else tensor.data, tensor.tensor_type)
        except (NotImplementedError, *_DAMAGE) as error:
            raise BadModel(f"{self.name}: {tensor.name} cannot be dequantised ({error})") from error
        values = values.reshape(stop - start, *shape[1:])
        if rows_of_head > 1:
            values = _halves_from_pairs(values, rows_of_head)
        if where:
            where = (slice(where[0].start - start, where[0].stop - start), *where[1:])
            values = values[where]
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def _rows_of_head(self, tensor: gguf.ReaderTensor, shape: Shape) -> int:
        """Rows of q or k that belong to one head, if their order is not Hugging Face's; 1 if it is."""
        field = _HEADS_FIELD.get(tensor.name.split(".")[-2]) if self._interleaved else None
        if field is None:
            return 1
        num_heads = self.metadata.get(field, self.metadata[_HEADS_FIELD["attn_q"]])
        assert isinstance(num_heads, int)
        return shape[0] // num_heads

    def rope_divisors(self) -> tuple[float, ...] | None:
        """The divisor of each rotary frequency, if the file has them (Llama 3's scaling)."""
        tensor = self._tensors.get(_ROPE_DIVISORS)
        if tensor is None:
            return None
        if tensor.tensor_type != self._float32 or len(tensor.shape) != 1:
            raise BadModel(f"{self.name}: {_ROPE_DIVISORS} must be one row in float32")
        return tuple(float(value) for value in tensor.data)


def _hf_name(name: str) -> str:
    """Hugging Face's name of a tensor. An unknown name is kept, and is refused as unexpected."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _HF_NAMES:
        return name
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_HF_NAMES[match[2]]}.{match[3]}"


def _halves_from_pairs(rows: Float32Array, rows_of_head: int) -> Float32Array:
    """q or k rows of whole heads in Hugging Face's order.

    In llama files the two rows that turn together are adjacent; in Hugging Face's they are half a head apart. The wrong
    order raises no error: the model then writes meaningless text.
    """
    pairs = rows.reshape(-1, rows_of_head // 2, 2, *rows.shape[1:])
    halves: Float32Array = pairs.swapaxes(1, 2).reshape(rows.shape)
    return halves
