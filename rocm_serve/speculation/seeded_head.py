"""Random weights of draft heads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rocm_attn.models.tensors import Shape

FC = "fc.weight"
# A standard deviation with which random layers pass on roughly their input.
_STD = 0.02


class SeededHead:
    """A TensorSource of random weights of these shapes, always the same ones. fc passes on the last of its rows."""

    name = "the seeded head"

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes
        self._random = torch.Generator().manual_seed(0)

    def shapes(self) -> Mapping[str, Shape]:
        """Like TensorSource.shapes."""
        return self._shapes

    def read(self, name: str, *where: slice) -> Tensor:
        """Like TensorSource.read."""
        shape = self._shapes[name]
        if "norm" in name:
            return torch.ones(shape)[where]
        random = torch.randn(shape, generator=self._random) * _STD
        if name == FC:
            random[:, -shape[0] :] += torch.eye(shape[0])
        return random[where]
