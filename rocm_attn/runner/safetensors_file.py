"""SafetensorsFiles: the tensors of a directory with one safetensors file, or many and an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.runner.tensors import Shape

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsFiles:
    """A TensorSource over `model.safetensors`, or over the files that `model.safetensors.index.json` names.

    Opening reads the headers of all files. Raises BadModel for a file that is missing, damaged or cut short.
    """

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self._shapes: dict[str, Shape] = {}
        self._file_of: dict[str, Path] = {}
        for path in _files(directory):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    self._shapes[name] = tuple(file.get_slice(name).get_shape())
                    self._file_of[name] = path

    def shapes(self) -> Mapping[str, Shape]:
        """name -> shape of every tensor in the files."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """One tensor in the dtype of its file. Raises BadModel."""
        with _opened(self._file_of[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise BadModel(
                f"{self._file_of[name]}: {name} holds {tensor.dtype}; the runner reads float32, float16 and bfloat16"
            )
        return tensor


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadModel(f"{path} is not a whole safetensors file ({error}); download it again") from error


def _files(directory: Path) -> list[Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    if not index.is_file():
        raise BadModel(f"{directory} has neither {_SINGLE} nor {_INDEX}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadModel(f"{index} is not a safetensors index ({error!r})") from error
    for name in names:
        if not (directory / str(name)).is_file():
            raise BadModel(f"{index} names {name}, which is not in {directory}")
    return [directory / str(name) for name in names]
