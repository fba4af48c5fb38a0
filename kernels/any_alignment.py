"""Kernels whose launches are kept: one variant serves tensors at any address."""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

_INT32_BYTES = 2**31


def at_any_alignment(kernel: Any) -> Any:
    """Returns a jitted function that Triton does not compile again for another alignment of an argument.

    `RepeatedLaunch` and `FixedLaunch` need this. They also need that no variant depends on the value of a number, which
    the function's do_not_specialize has to say.
    """
    if not isinstance(kernel, JITFunction):  # the interpreter compiles nothing
        return kernel
    names = [param.name for param in kernel.params if not param.is_constexpr]
    return triton.jit(kernel.fn, do_not_specialize=kernel.do_not_specialize, do_not_specialize_on_alignment=names)


def begin_at_16(*tensors: Tensor) -> bool:
    """True if the address and the first two strides of each tensor are multiples of 16, which Triton compiles for."""
    return not any(each % 16 for tensor in tensors for each in (tensor.data_ptr(), *tensor.stride()[:2]))


def is_far(tensor: Tensor) -> bool:
    """True if a tensor takes 2 GiB or more, gaps included. Triton's variant of a smaller one may not reach all of it.

    On AMD GPUs places are then computed in 32 bits. So a kept launch is for either kind alone, if a caller's tensor may
    be as large.
    """
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.itemsize >= _INT32_BYTES
