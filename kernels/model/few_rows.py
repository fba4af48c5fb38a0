"""Multiplies 2 to 64 rows with a matrix: x @ weight.T + bias, or gate(x @ weight.T + bias), see gate.py.

A BLAS starts when the launch before it has ended, and leaves the gate to a launch of its own. These programs start
early (early.py) and load the first elements of their rows of the matrix, which no launch writes, before they wait; and
each combines what it has multiplied. Matrices with few outputs are cut into parts of `in` too, so that all processors
read them: then the result is one product for each part, whose sum is left to who reads them.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.model.gate import GateForm, gated
from rocm_attn.kernels.tuning.tiles import next_power_of_2

MOST_ROWS = 64
# Outputs of a program, and elements of each product at a time.
OUTPUTS, STEP = 64, 64
# Bytes of a row of the matrix that are on their way: more where each processor has one program. H200, products of 4 to
# 32 rows, 4096 outputs of 14,336 elements in two parts: 30.7 us by 8 blocks of 16-bit elements and 32.5 by 6; 10,240
# outputs of 8,192: 50.0 and 42.6.
_BYTES_AHEAD, _MORE_AHEAD, _BYTES_ELSEWHERE = 6 * 2 * STEP, 8 * 2 * STEP, 2 * 2 * STEP
# Bytes that a program loads before it waits. H200, decode steps of a model of 1.1B with them and without: 1,074 and
# 1,090 us of 32 requests, 967 and 996 of 8; in deterministic mode 1,312 and 1,444 of 32, 1,111 and 1,167 of one.
_FIRST_BYTES = 1 << 15
_WARPS, _WARPS_ELSEWHERE = 4, 8


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["bias"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    GATE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    first_output, part = tl.program_id(0) * OUTPUTS, tl.program_id(1)
    # A gate has rows of the matrix first, then those of up.
    SIDES: tl.constexpr = 1 if GATE is None else 2
    of_both = tl.arange(0, SIDES * OUTPUTS)
    weight_row = first_output + of_both % OUTPUTS + of_both // OUTPUTS * OUT
    row, element, of_first = tl.arange(0, ROWS), tl.arange(0, STEP)[None, :], tl.arange(0, FIRST)[None, :]
    is_row = (row < rows)[:, None]
    begin = part * (IN // PARTS)
    weights = weight + weight_row[:, None].to(tl.int64) * IN + begin
    inputs = x + row[:, None].to(tl.int64) * IN + begin
    first_weights = tl.load(weights + of_first)
    wait_for_launch(EARLY)
    first_inputs = tl.load(inputs + of_first, mask=is_row, other=0.0)
    acc = tl.dot(first_weights, tl.trans(first_inputs), input_precision="ieee")
    for at in tl.range(FIRST, IN // PARTS, STEP, num_stages=STAGES):
        given = tl.load(inputs + at + element, mask=is_row, other=0.0)
        acc = tl.dot(tl.load(weights + at + element), tl.trans(given), acc, input_precision="ieee")
    # Where the loop is empty, Triton takes a product plus a bias for a product that starts with the bias. A transposed
    # product it leaves, so a sum has one order.
    acc = tl.trans(acc)
    if bias is not None:
        # Parts have one sum.
        acc += tl.load(bias + weight_row, mask=of_both >= part * SIDES * OUTPUTS, other=0.0).to(tl.float32)[None, :]
    if GATE is not None:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, OUTPUTS)), (0, 2, 1)))
        acc = gated(gate, up, GATE.kind, GATE.limit, GATE.alpha)
    at = (part * rows + row)[:, None].to(tl.int64) * OUT + (first_output + tl.arange(0, OUTPUTS))[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_row)


_variant = repeated_launches(_few_rows_kernel)


@only_launches
def launch_few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, compute_units: int, gate: GateForm | None = None
) -> None:
    """Writes the products of some rows with a matrix, or with parts of it; sums are float32.

    x:             [rows, in], float32, float16 or bfloat16; 1 to MOST_ROWS rows
    weight:        [out, in], of that dtype; with a gate [2 * out, in], the gate's rows first; `out` is a multiple of
                   OUTPUTS
    bias:          [out] or [2 * out], of that dtype
    out:           [parts, rows, out], written: of that dtype if there is one part, else float32. `in` is a multiple of
                   parts * STEP; one part with a gate
    compute_units: of the GPU
    All are contiguous and begin at a multiple of 16 bytes, except bias.
    """
    (rows, num_in), (parts, _, num_out) = x.shape, out.shape
    assert 0 < rows <= MOST_ROWS
    assert weight.shape == (num_out * (1 if gate is None else 2), num_in)
    assert out.shape == (parts, rows, num_out)
    assert num_out % OUTPUTS == num_in % (parts * STEP) == 0
    assert parts == 1 or gate is None
    given = x, weight, bias, out
    assert all(tensor is None or tensor.is_contiguous() for tensor in given)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, out))
    early, block, grid = starts_early(x.device), max(16, next_power_of_2(rows)), (num_out // OUTPUTS, parts, 1)
    ahead = _MORE_AHEAD if gate is None and grid[0] * parts <= compute_units else _BYTES_AHEAD
    stages = (ahead if early else _BYTES_ELSEWHERE) // (STEP * x.element_size())
    most = _FIRST_BYTES // (x.element_size() * len(weight) // num_out * OUTPUTS) if early else STEP
    first = min(most, 1 << (num_in // parts).bit_length() - 1)
    _variant(x.dtype, bias is None, num_out, num_in, parts, gate, block, stages)(
        x.device,
        grid,
        *given,
        rows,
        num_out,
        num_in,
        parts,
        gate,
        OUTPUTS,
        block,
        first,
        STEP,
        stages,
        early,
        num_warps=_WARPS if early else _WARPS_ELSEWHERE,
        **early_options(early),
    )
