"""TensorChecks: checks the shapes, dtypes, strides and device of the tensors that a forward passes to a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.kernels.attention.arguments import rows_are_contiguous


class TensorChecks:
    """The base of layers, whose tensors are all on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises BadTensor for another shape, dtype or device, or a last dimension that is not contiguous."""
        # One check if all is well, because this runs at every layer of every step.
        is_right = tensor.shape == shape and tensor.dtype is dtype and tensor.stride(-1) == 1
        if is_right and tensor.device == self._device:
            return
        if tuple(tensor.shape) != shape:
            raise BadTensor(f"{name} has shape {list(tensor.shape)}; this step and layer need {list(shape)}")
        if tensor.dtype != dtype:
            raise BadTensor(f"{name} is {tensor.dtype}; the layer works in {dtype}")
        if tensor.device != self._device:
            raise BadTensor(f"{name} is on {tensor.device}; the runtime is on {self._device}")
        if not rows_are_contiguous(tensor):
            raise BadTensor(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous there")
