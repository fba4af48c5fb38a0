"""Products under Triton's interpreter as a matrix unit computes them: a row's bits depend only on the row.

The interpreter uses numpy's BLAS, whose order of summation depends on the row's place in the tile.
"""

import os
from typing import Any

import numpy as np
import pytest


def use_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every tl.dot sum over k from 0 on, one after the other. Without the interpreter nothing changes."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.language import core
    from triton.runtime import interpreter

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *rest: object) -> Any:
        assert a.dtype in (core.float32, core.float16), f"the interpreter gets {a.dtype} wrong"
        products = a.data.astype(np.float32)[:, :, None] * b.data.astype(np.float32)[None]
        total = d.data.copy()
        for k in range(products.shape[1]):
            total += products[:, k]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
