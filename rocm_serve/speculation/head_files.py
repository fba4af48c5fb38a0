"""Loads the tensors of a draft head from its files, or makes random ones."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rocm_attn.errors import BadModel
from rocm_attn.models.config import ModelConfig
from rocm_attn.models.tensors import Shape, TensorSource
from rocm_serve.models.renamed_tensors import RenamedTensors
from rocm_serve.models.safetensors_file import SafetensorsFiles
from rocm_serve.models.weights import may_be_ignored

FC = "fc.weight"
# The head's one layer, as the layer of a model is named, and its names in files.
LAYER = "model.layers.0."
_LAYERS_OF_FILES = ("midlayer.", "layers.0.")
# A standard deviation with which random layers pass on roughly their input.
_STD = 0.02


class HeadFiles(RenamedTensors):
    """A head's files. Names may begin with `model.` there.

    ones: name -> shape of tensors that files may lack: they are ones then
    Raises BadModel.
    """

    def __init__(self, directory: Path, ones: Mapping[str, Shape]) -> None:
        if not directory.is_dir():
            raise BadModel(f"{directory} is not a directory; give an EAGLE head's directory with model.safetensors")
        self._files, self._ones = SafetensorsFiles(directory), ones
        super().__init__(self._files, _ours)

    def shapes(self) -> Mapping[str, Shape]:
        return {**self._ones, **super().shapes()}

    def read(self, name: str, *where: slice) -> Tensor:
        return super().read(name, *where) if name in self._names else torch.ones(self._ones[name])[where]

    def read_integers(self, name: str) -> Tensor:
        """A whole tensor of integers, as int64. Raises BadModel."""
        return self._files.read_integers(self._names[name])


class SeededHead:
    """A TensorSource of random weights of these shapes, always the same ones. fc passes on the last of its rows."""

    name = "the seeded head"

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._random = torch.Generator().manual_seed(0)

    def shapes(self) -> Mapping[str, Shape]:
        return self._shapes

    def read(self, name: str, *where: slice) -> Tensor:
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape)[where]
        random = torch.randn(shape, generator=self._random) * _STD
        if name == FC:
            random[:, -shape[0] :] += torch.eye(shape[0])
        return random[where]


def require_shapes(
    source: TensorSource, shapes: Mapping[str, Shape], kind: str, config: ModelConfig, others: Collection[str]
) -> None:
    """Raises BadModel if a head lacks a tensor, has one of another shape, or one that it does not use.

    kind:   such as EAGLE-1
    config: of its one layer
    others: names of tensors that it may have in addition
    """
    found = source.shapes()
    for name, shape in shapes.items():
        shown = name.removeprefix("model.")
        if name not in found:
            raise BadModel(f"{source.name} lacks {shown}; it is not an {kind} head of this model")
        if found[name] != shape:
            raise BadModel(
                f"{source.name}: {shown} has shape {list(found[name])}; a head of this model has {list(shape)}"
            )
    unknown = [name for name in found if name not in {*others, *shapes} and not may_be_ignored(config, name)]
    if unknown:
        raise BadModel(f"{source.name} has {min(unknown)}, which an {kind} head of this model does not use")


def _ours(name: str) -> str:
    name = name.removeprefix("model.")
    for layer in _LAYERS_OF_FILES:
        if name.startswith(layer):
            return LAYER + name.removeprefix(layer)
    return name
