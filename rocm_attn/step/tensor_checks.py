"""TensorChecks: checks the shapes, dtypes, strides and device of the tensors that a forward passes to a layer."""

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.kernels.attention.arguments import rows_are_contiguous
from rocm_attn.machine.devices import require_tensor


class TensorChecks:
    """The base of layers, whose tensors are all on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Raises BadTensor for another shape, dtype, device or stride of the last dimension, and for a negated view."""
        # One check if all is well, because this runs at every layer of every step.
        try:
            is_right = tensor.shape == shape and tensor.dtype is dtype and tensor.stride(-1) == 1
        except AttributeError:  # it is no tensor
            is_right = False
        if is_right and tensor.device == self._device:
            return
        require_tensor(name, tensor)
        if tuple(tensor.shape) != shape:
            raise BadTensor(f"{name} has shape {list(tensor.shape)}; this step and layer need {list(shape)}")
        if tensor.dtype != dtype:
            raise BadTensor(f"{name} is {tensor.dtype}; the layer works in {dtype}")
        if tensor.device != self._device:
            raise BadTensor(f"{name} is on {tensor.device}; the runtime is on {self._device}")
        if not rows_are_contiguous(tensor):
            raise BadTensor(f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous there")
        # Imaginary parts of conj() have gaps between elements, which are no gaps only in rows of one.
        if tensor.is_neg():
            raise BadTensor(f"{name} is a view whose memory holds the opposite signs; give {name}.resolve_neg()")

    def _check_written(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Does the same for a tensor that a launch writes, whose elements must be memory of their own."""
        try:
            is_right = tensor.shape == shape and tensor.dtype is dtype and tensor.device == self._device
        except AttributeError:  # it is no tensor
            is_right = False
        if is_right and tensor.is_contiguous():
            return
        self._check(name, tensor, shape, dtype)
        if not _has_room(tensor):
            raise BadTensor(
                f"{name} has strides {list(tensor.stride())} for shape {list(shape)}, so some of its elements are the "
                "same memory; give it memory of its own"
            )


def require_apart(name: str, written: Tensor, other: str, read: Tensor) -> None:
    """Raises BadTensor for a written tensor in the memory of a read one: a program may write before another reads."""
    if may_overlap(written, read):
        raise BadTensor(f"{name} shares memory with {other}, which is read while it is written; give it its own")


def may_overlap(one: Tensor, other: Tensor) -> bool:
    """True unless no element of one tensor lies in the memory of the other. Columns of one tensor do not overlap.

    The last stride of both is 1. Rows of different strides overlap if their tensors' first and last bytes do.
    """
    try:
        begin, other_begin = one.data_ptr(), other.data_ptr()
    except AttributeError:  # one is no tensor, which the call's checks refuse
        return True
    size, other_size = one.dtype.itemsize, other.dtype.itemsize
    end, other_end = begin + size, other_begin + other_size
    for count, stride in zip(one.shape, one.stride(), strict=False):
        end += (count - 1) * stride * size
    for count, stride in zip(other.shape, other.stride(), strict=False):
        other_end += (count - 1) * stride * other_size
    if end <= other_begin or other_end <= begin or not (one.numel() and other.numel()):
        return False
    row = one.stride(0) * size
    if min(one.dim(), other.dim()) < 2 or row == 0 or row != other.stride(0) * other_size:
        return True
    after, last, other_last = (other_begin - begin) % row, (len(one) - 1) * row, (len(other) - 1) * row
    return after < end - begin - last or after + other_end - other_begin - other_last > row


def _has_room(tensor: Tensor) -> bool:
    """True if each step along a dimension passes all elements of the dimensions with smaller strides."""
    elements = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < elements:
                return False
            elements += (size - 1) * stride
    return True
