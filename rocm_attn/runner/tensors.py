"""TensorSource: the tensors of a model file. TensorReader: how they become the weights of a dtype on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rocm_attn.errors import BadModel

Shape = tuple[int, ...]


class TensorSource(Protocol):
    """The tensors of a model file, under Hugging Face's names."""

    @property
    def name(self) -> str:
        """What a message calls the file."""

    def shapes(self) -> Mapping[str, Shape]:
        """name -> shape of every tensor in the file."""

    def read(self, name: str) -> Tensor:
        """One tensor, of any floating dtype, on the CPU. Raises BadModel."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorReader:
    """Reads tensors into joined ones, so that no more than one tensor exists twice.

    shapes: name -> shape of every tensor that may be asked for
    dtype:  of what is read, but where a method says otherwise
    """

    source: TensorSource
    shapes: Mapping[str, Shape]
    dtype: torch.dtype
    device: torch.device

    def join(self, *names: str) -> Tensor:
        """The named tensors below each other. Raises BadModel where one is not finite."""
        rows = [self.shapes[name][0] for name in names]
        joined = torch.empty((sum(rows), *self.shapes[names[0]][1:]), dtype=self.dtype, device=self.device)
        end = 0
        for name, num_rows in zip(names, rows, strict=True):
            end += num_rows
            joined[end - num_rows : end] = self.source.read(name)
        self._check(joined, *names)
        return joined

    def in_float32(self, name: str) -> Tensor:
        """One tensor in float32. Raises BadModel where it is not finite."""
        tensor = self.source.read(name).to(self.device, torch.float32).contiguous()
        self._check(tensor, name)
        return tensor

    def copy_into(self, target: Tensor, name: str) -> None:
        """Read one tensor to its place in a larger one. Raises BadModel where it is not finite."""
        target.copy_(self.source.read(name))
        self._check(target, name)

    def _check(self, tensor: Tensor, *names: str) -> None:
        if not torch.isfinite(tensor).all():
            raise BadModel(
                f"{self.source.name}: {' or '.join(names)} holds NaN or infinity as {tensor.dtype}; "
                "the file is damaged, or the dtype too narrow for it"
            )
