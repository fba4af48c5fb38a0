"""may_overlap: whether two tensors may share memory, by their strides."""

from __future__ import annotations

from torch import Tensor


def may_overlap(one: Tensor, other: Tensor) -> bool:
    """Whether some element of one tensor may lie where one of the other does.

    Rows of one buffer that lie side by side do not overlap: K and the output as columns of one tensor.
    """
    (begin, end), (other_begin, other_end) = _span(one), _span(other)
    if end <= other_begin or other_end <= begin or not one.numel() or not other.numel():
        return False
    pitch = one.stride(0) * one.element_size()
    if pitch <= 0 or pitch != other.stride(0) * other.element_size():
        return True
    (begin, end), (other_begin, other_end) = _span(one[0]), _span(other[0])
    first = (other_begin - begin) % pitch
    return first < end - begin or first + other_end - other_begin > pitch


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
