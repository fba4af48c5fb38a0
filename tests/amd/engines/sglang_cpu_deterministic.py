"""A CPU substitute for matrix products that SGLang's deterministic flag needs, which are kernels for a GPU.

SGLang refuses to start with the flag without a GPU. Here torch multiplies each row by itself, so that a token's result
depends on no other token of its step. Names are those of SGLang 0.5.23 (sglang/srt/batch_invariant_ops).
"""

from typing import Any

import torch
from torch import Tensor

# torch undoes a registration when its owner is gone.
_OWNERS: list[object] = []


def multiply_rows_by_themselves() -> None:
    """Replaces the operations that SGLang switches on for the flag."""
    from sglang.srt import batch_invariant_ops

    def enable() -> None:
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # of torch
        library.impl("aten::mm", product, "CPU")
        library.impl("aten::addmm", sum_with_product, "CPU")
        _OWNERS.append(library)

    batch_invariant_ops.enable_batch_invariant_mode = enable


def product(a: Tensor, b: Tensor) -> Tensor:
    """Returns [M, K] times [K, N], with each row of a multiplied by itself."""
    out = a.new_empty(a.shape[0], b.shape[1])
    for row, values in zip(out, a, strict=True):
        torch.mv(b.t(), values, out=row)
    return out


def sum_with_product(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Returns beta * bias + alpha * a @ b."""
    return beta * bias + alpha * product(a, b)
