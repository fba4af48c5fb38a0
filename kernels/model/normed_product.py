"""Adds an output to one row of the residual, normalises the sum, and multiplies it with a matrix.

The sum and its norm are those of add_norm.py. Each program computes both for itself, which takes less time for a short
row than a launch that computes them for all, and the first one stores them. It then takes rows of the matrix in turn,
and loads the next ones while it multiplies. With a gate, see gate.py, the products of a row of each half are combined.
The first rows are loaded while the launch before still runs, if this one may start early (early.py): no launch writes
weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.model.add_norm import NormedSum, normed_row
from rocm_attn.kernels.model.gate import GateForm
from rocm_attn.kernels.model.matrix_rows import lines_of_tile, store_outputs, warps_of
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# A program holds the whole row. Launches that start early cost little by themselves: H200, decode steps of one request
# with this kernel and without: 792 and 845 us of a model of 1.1B (2048 elements), 566 and 582 of 8 layers of a
# Qwen3-30B-A3B (2048), and 4,390 and 4,182 of one of 8B (4096).
_MOST_WIDTH, _MOST_WIDTH_IF_EARLY = 8192, 2048
# Rows of the matrix that a program reads at a time, and programs of a processor. H200, the same steps of 1.1B and 30B:
# with 8 warps, 4 programs and 2 or 4 rows 813 and 793, 566 and 567; with 12 programs 810, 566.
_LINES, _PROGRAMS = 2, 8
# Tiles of outputs, at most: their numbers stay far below 32 bits.
MOST_TILES = 1 << 28


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["bias", "out"])
def _normed_product_kernel(
    residual,
    output,
    factors,
    summed,
    normed,
    weight,
    bias,
    out,
    tiles,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
    EPS: tl.constexpr,
    GATE: tl.constexpr,
    LINES: tl.constexpr,
    EARLY: tl.constexpr,
):
    SIDES: tl.constexpr = 1 if GATE is None else 2
    ROWS: tl.constexpr = LINES // SIDES
    program = tl.program_id(0)
    element = tl.arange(0, BLOCK)
    is_element = element < IN
    coming = lines_of_tile(weight, program, element, OUT, IN, SIDES, ROWS)
    factor = tl.load(factors + element, mask=is_element, other=0.0)
    wait_for_launch(EARLY)
    x = tl.load(residual + element, mask=is_element, other=0.0).to(tl.float32)
    x += FACTOR * tl.load(output + element, mask=is_element, other=0.0).to(tl.float32)
    total = x.to(summed.dtype.element_ty)
    given = normed_row(total, factor, IN, EPS).to(normed.dtype.element_ty)
    if program == 0:
        tl.store(summed + element, total, mask=is_element)
        tl.store(normed + element, given, mask=is_element)
    x = given.to(tl.float32)
    for tile in range(program, tiles, tl.num_programs(0)):
        lines = coming
        coming = lines_of_tile(weight, tile + tl.num_programs(0), element, OUT, IN, SIDES, ROWS)
        store_outputs(lines, x, bias, out, tile, OUT, GATE, ROWS)


_variant = repeated_launches(_normed_product_kernel)


def pays_off(width: int, device: torch.device) -> bool:
    """True if launch_normed_product() takes less time than launches for the sum, its product and its gate."""
    return width <= (_MOST_WIDTH_IF_EARLY if starts_early(device) else _MOST_WIDTH)


@only_launches
def launch_normed_product(
    row: NormedSum, weight: Tensor, bias: Tensor | None, out: Tensor, compute_units: int, gate: GateForm | None = None
) -> None:
    """Writes the sum, its norm, and the products of the norm with each row of a matrix; sums are float32.

    row:           of one row with one part, at most 8,192 elements, of one dtype with the others
    weight:        [out, width]; with a gate [2 * out, width], the gate's rows first
    bias:          [out] or [2 * out]
    out:           [1, out], written
    compute_units: of the GPU
    All are contiguous, and weight begins at a multiple of 16 bytes.
    """
    row.check()
    (rows, width), num_out, sides = row.residual.shape, out.shape[1], 1 if gate is None else 2
    assert rows == len(out) == row.num_parts == 1
    assert width <= _MOST_WIDTH
    assert weight.shape == (sides * num_out, width)
    assert all(tensor is None or tensor.is_contiguous() for tensor in (weight, bias, out))
    assert weight.data_ptr() % 16 == 0
    assert row.residual.dtype == row.output.dtype == weight.dtype == out.dtype
    tiles, block, early = triton.cdiv(num_out, _LINES // sides), next_power_of_2(width), starts_early(out.device)
    assert tiles <= MOST_TILES
    _variant(weight.dtype, row.weight.dtype, bias is None, num_out, width, row.factor, row.eps, gate)(
        out.device,
        (min(tiles, _PROGRAMS * compute_units), 1, 1),
        *row.tensors,
        weight,
        bias,
        out,
        tiles,
        num_out,
        width,
        block,
        row.factor,
        row.eps,
        gate,
        _LINES,
        early,
        num_warps=warps_of(block),
        **early_options(early),
    )
