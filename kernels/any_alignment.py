"""Kernels whose launches are kept: one variant serves tensors at any address."""

from typing import Any

import triton
from torch import Tensor
from triton.runtime.jit import JITFunction


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
