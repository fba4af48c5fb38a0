"""SafetensorsFiles: the tensors of a directory with one safetensors file, or many and an index."""

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.fields import read_json, shown
from rocm_attn.models.tensors import Shape

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class SafetensorsFiles:
    """A TensorSource over `model.safetensors`, or over the files that `model.safetensors.index.json` names.

    The index names the file that a tensor is read from; other tensors in the files are not part of the model. Opening
    reads the headers of all files. Raises BadModel for a file that is missing, damaged or cut short, and for one that
    lacks a tensor of the index.
    """

    def __init__(self, directory: Path) -> None:
        self.name = str(directory)
        self._shapes: dict[str, Shape] = {}
        self._file_of: dict[str, Path] = {}
        if (directory / _SINGLE).is_file():
            with _opened(directory / _SINGLE) as file:
                self._take(file, directory / _SINGLE, file.keys())
            return
        for path, names in _indexed(directory).items():
            with _opened(path) as file:
                missing = set(names).difference(file.keys())
                if missing:
                    raise BadModel(f"{path} lacks {shown(min(missing))}, which {_INDEX} lists; download it again")
                self._take(file, path, names)

    def shapes(self) -> Mapping[str, Shape]:
        """name -> shape of every tensor in the files."""
        return self._shapes

    def read(self, name: str, *where: slice) -> Tensor:
        """Like TensorSource.read, in the dtype of its file. Reads only the part. Raises BadModel."""
        tensor = self._read(name, *where)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise BadModel(
                f"{self._file_of[name]}: {name} holds {tensor.dtype}; the runner reads float32, float16 and bfloat16"
            )
        return tensor

    def read_integers(self, name: str) -> Tensor:
        """A whole tensor of integers, as int64. Raises BadModel."""
        tensor = self._read(name)
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype.itemsize < 4:
            raise BadModel(f"{self._file_of[name]}: {name} holds {tensor.dtype}; it must hold integers")
        return tensor.long()

    def _read(self, name: str, *where: slice) -> Tensor:
        with _opened(self._file_of[name]) as file:
            tensor: Tensor = file.get_slice(name)[where] if where else file.get_tensor(name)
        return tensor

    def _take(self, file: Any, path: Path, names: Iterable[str]) -> None:
        """Records the tensors of an opened file, whose package has no types."""
        for name in names:
            self._shapes[name] = tuple(file.get_slice(name).get_shape())
            self._file_of[name] = path


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadModel(f"{path} is not a whole safetensors file ({error}); download it again") from error


def _indexed(directory: Path) -> dict[Path, list[str]]:
    """file -> the tensors that the index places in it. Raises BadModel."""
    index = directory / _INDEX
    if not index.is_file():
        raise BadModel(
            f"{directory} has neither {_SINGLE} nor {_INDEX}; download the model again, or let transformers load and "
            "save it if its weights are in files of another kind"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadModel(f"{index} is not a safetensors index (weight_map is {shown(weight_map)})")
    names_in: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        names_in.setdefault(directory / _within(index, file), []).append(name)
    for path in names_in:
        if not _is_file(path):
            raise BadModel(f"{index} names {shown(path.name)}, which is not in {directory}")
    return names_in


def _within(index: Path, file: object) -> str:
    """A file's name in the index, which must not lead out of its folder. Links in the folder may: caches use them.

    Raises BadModel.
    """
    if not isinstance(file, str):
        raise BadModel(f"{index} is not a safetensors index (weight_map holds {shown(file)})")
    if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
        raise BadModel(
            f"{index} names {shown(file)}, which is outside of its folder; only files in the folder are read"
        )
    return file


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no file can have that name
        return False
