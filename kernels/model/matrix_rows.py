"""Rows of a matrix that a program multiplies with a row that it holds: by tiles of a few outputs.

With a gate, see gate.py, an output has two rows, which make the tile's two sides: the gate's lines come first.
"""

import triton
import triton.language as tl

from rocm_attn.kernels.model.gate import gated

# Elements of a warp, at most, and the fewest warps of a program.
_ELEMENTS_OF_WARP, _LEAST_WARPS = 1024, 4


@triton.jit
def _rows_of_tile(tile, OUT: tl.constexpr, SIDES: tl.constexpr, ROWS: tl.constexpr):
    """The outputs of a tile's lines, and their rows of the matrix."""
    line = tl.arange(0, SIDES * ROWS)
    output = tile * ROWS + line % ROWS
    return output, output + line // ROWS * OUT


@triton.jit
def lines_of_tile(weight, tile, element, OUT: tl.constexpr, IN: tl.constexpr, SIDES: tl.constexpr, ROWS: tl.constexpr):
    """The rows of the matrix for a tile of outputs; zeros beyond the last one."""
    output, row = _rows_of_tile(tile, OUT, SIDES, ROWS)
    places = weight + row[:, None].to(tl.int64) * IN + element[None, :]
    return tl.load(places, mask=(output < OUT)[:, None] & (element < IN)[None, :], other=0.0)


@triton.jit
def store_outputs(lines, x, bias, out, tile, OUT: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr):
    """Stores a tile's outputs. x: the row, float32; bias: of the matrix's rows, or None"""
    SIDES: tl.constexpr = 1 if GATE is None else 2
    found = tl.sum(lines.to(tl.float32) * x[None, :], 1)
    if bias is not None:
        output, row = _rows_of_tile(tile, OUT, SIDES, ROWS)
        found += tl.load(bias + row, mask=output < OUT, other=0.0).to(tl.float32)
    if GATE is not None:
        gate, up = tl.split(tl.trans(tl.reshape(found, (2, ROWS))))
        found = gated(gate, up, GATE.kind, GATE.limit, GATE.alpha)
    at = tile * ROWS + tl.arange(0, ROWS)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=at < OUT)


def warps_of(elements: int) -> int:
    """Warps of a program that reads this number of elements of a row, or of several rows, at a time."""
    return max(_LEAST_WARPS, elements // _ELEMENTS_OF_WARP)
