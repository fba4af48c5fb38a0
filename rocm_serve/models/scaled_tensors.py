"""ScaledTensors: a model's file, with factors that the model has on rows of its matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rocm_attn.models.config import RowFactors
from rocm_attn.models.tensors import Shape, TensorSource


class ScaledTensors:
    """A TensorSource over another. factors: on rows of tensors whose names end so"""

    def __init__(self, whole: TensorSource, factors: RowFactors) -> None:
        self.name = whole.name
        self._whole, self._factors, self._shapes = whole, factors, whole.shapes()

    def shapes(self) -> Mapping[str, Shape]:
        """Like TensorSource.shapes."""
        return self._shapes

    def read(self, name: str, *where: slice) -> Tensor:
        """Like TensorSource.read; in float32 if there are factors, so that the product is rounded once."""
        part = self._whole.read(name, *where)
        factors = next((factors for end, factors in self._factors.items() if name.endswith(end)), {})
        if not factors:
            return part
        of_row = torch.empty(self._shapes[name][0])
        for first, factor in factors.items():
            of_row[first:] = factor
        return part.float() * of_row[where[:1]].view(-1, *[1] * (part.dim() - 1))
