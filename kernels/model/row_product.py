"""Multiplies one row with a matrix: out = weight @ x + bias.

A BLAS pads the row to a tile, and reads the matrix at 57 to 87 % of a GPU's bandwidth (H100, 2048 x 2048 to 32000 x
2048, bfloat16); these programs read whole rows of it, a few each, at 58 to 99 %. They load its first block while the
launch before still runs, if it may (early.py): no launch writes weights. A row's bits depend on nothing else.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Outputs of a program: twice as many where a GPU's processors have several programs each still. H200, launches that
# start early, products of 8B in turn: 4.26 TB/s by 4 and 4.02 by 2; products of 1.1B: 3.46 and 3.62.
_ROWS, _MANY_OUTPUTS = 2, 4096
# Elements of a row that a program reads at a time, and elements of a thread.
_STEP, _ELEMENTS = 2048, 8


@triton.jit(do_not_specialize_on_alignment=["bias", "out"])
def _row_product_kernel(
    x,
    weight,
    bias,
    out,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < OUT
    rows = weight + row[:, None].to(tl.int64) * IN
    element = tl.arange(0, STEP)
    is_element = element < IN
    w = tl.load(rows + element[None, :], mask=is_row[:, None] & is_element[None, :], other=0.0)
    wait_for_launch(EARLY)
    acc = w.to(tl.float32) * tl.load(x + element, mask=is_element, other=0.0).to(tl.float32)[None, :]
    for first in range(STEP, IN, STEP):
        element = first + tl.arange(0, STEP)
        is_element = element < IN
        w = tl.load(rows + element[None, :], mask=is_row[:, None] & is_element[None, :], other=0.0)
        acc += w.to(tl.float32) * tl.load(x + element, mask=is_element, other=0.0).to(tl.float32)[None, :]
    total = tl.sum(acc, 1)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=is_row)


_variant = repeated_launches(_row_product_kernel)


@only_launches
def launch_row_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Writes the products of one row with each row of a matrix; sums are float32.

    x:      [1, in], of one dtype with the others: float32, float16 or bfloat16
    weight: [out, in]
    bias:   [out]
    out:    [1, out], written
    All are contiguous; x and weight begin at a multiple of 16 bytes.
    """
    num_out, num_in = weight.shape
    assert x.shape == (1, num_in)
    given = (x, weight, weight if bias is None else bias, out)
    assert all(tensor.is_contiguous() for tensor in given)
    assert x.data_ptr() % 16 == weight.data_ptr() % 16 == 0
    step = min(_STEP, next_power_of_2(num_in))
    rows, early = _ROWS * (1 + (num_out >= _MANY_OUTPUTS)), starts_early(x.device)
    _variant(x.dtype, num_out, num_in, bias is None)(
        x.device,
        (triton.cdiv(num_out, rows), 1, 1),
        *given,
        num_out,
        num_in,
        bias is not None,
        rows,
        step,
        early,
        num_warps=max(1, step // (32 * _ELEMENTS)),
        **early_options(early),
    )
