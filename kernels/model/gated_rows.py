"""Multiplies up to 64 rows with two halves of a matrix, and combines both products: gate(x @ weight.T), see gate.py.

A BLAS starts when the launch before it has ended, and leaves the gate to a launch of its own. These programs start
early (early.py), and each combines what it has multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rocm_attn.kernels.early import early_options, starts_early
from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.model.gate import GateForm, gated
from rocm_attn.kernels.tuning.tiles import next_power_of_2

MOST_ROWS = 64
# Outputs of a program, and elements of each product at a time.
OUTPUTS, STEP = 64, 64
# Bytes of a row of the matrix that are on their way. H200, products of a Llama of 1.1B and of 8B with 32 rows: 6 blocks
# of 16-bit elements were first.
_BYTES_AHEAD, _BYTES_ELSEWHERE = 6 * 2 * STEP, 2 * 2 * STEP
_WARPS, _WARPS_ELSEWHERE = 4, 8


@triton.jit(do_not_specialize=["rows"])
def _gated_rows_kernel(
    x,
    weight,
    out,
    rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    first = tl.program_id(0) * OUTPUTS
    # The gate's rows of the matrix, then those of up.
    of_both = tl.arange(0, 2 * OUTPUTS)
    weight_row = first + of_both % OUTPUTS + of_both // OUTPUTS * OUT
    row, element = tl.arange(0, ROWS), tl.arange(0, STEP)
    is_row = (row < rows)[:, None]
    weights = weight + weight_row[:, None].to(tl.int64) * IN + element[None, :]
    inputs = x + row[:, None].to(tl.int64) * IN + element[None, :]
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros((2 * OUTPUTS, ROWS), tl.float32)
    for begin in tl.range(0, IN, STEP, num_stages=STAGES):
        given = tl.load(inputs + begin, mask=is_row, other=0.0)
        acc = tl.dot(tl.load(weights + begin), tl.trans(given), acc, input_precision="ieee")
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUTPUTS, ROWS)), (1, 2, 0)))
    mixed = tl.trans(gated(gate, up, KIND, LIMIT, ALPHA))
    at = row[:, None].to(tl.int64) * OUT + (first + tl.arange(0, OUTPUTS))[None, :]
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=is_row)


_variant = repeated_launches(_gated_rows_kernel)


@only_launches
def launch_gated_rows(x: Tensor, weight: Tensor, out: Tensor, form: GateForm) -> None:
    """Writes the products of some rows with a matrix, combined; sums are float32.

    x:      [rows, in], float32, float16 or bfloat16; 1 to MOST_ROWS rows; `in` is a multiple of STEP
    weight: [2 * inner, in], of that dtype: the gate's rows, then those of up; `inner` is a multiple of OUTPUTS
    out:    [rows, inner], of that dtype, written
    All are contiguous and begin at a multiple of 16 bytes.
    """
    (rows, num_in), inner = x.shape, out.shape[1]
    assert 0 < rows <= MOST_ROWS
    assert weight.shape == (2 * inner, num_in)
    assert out.shape == (rows, inner)
    assert inner % OUTPUTS == num_in % STEP == 0
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (x, weight, out))
    early, block = starts_early(x.device), max(16, next_power_of_2(rows))
    _variant(x.dtype, inner, num_in, form, block)(
        x.device,
        (inner // OUTPUTS, 1, 1),
        x,
        weight,
        out,
        rows,
        inner,
        num_in,
        *form,
        OUTPUTS,
        block,
        STEP,
        (_BYTES_AHEAD if early else _BYTES_ELSEWHERE) // (STEP * x.element_size()),
        early,
        num_warps=_WARPS if early else _WARPS_ELSEWHERE,
        **early_options(early),
    )
