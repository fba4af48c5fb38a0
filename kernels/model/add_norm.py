"""Adds an output to the residual and normalises the sum, in one pass.

    summed = residual + factor * output          output: the sum of its parts
    normed = summed / sqrt(mean(summed ** 2) + eps) * weight

A program has a row. Sums are float32, and normed is made of summed as it is stored.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Elements of a thread, at 64 threads a warp: 16 bytes of a 16-bit dtype, which one instruction loads.
_ELEMENTS = 8


@triton.jit
def normed_row(summed, factors, WIDTH: tl.constexpr, EPS: tl.constexpr):
    """The norm of a row as it is stored, in float32; elements beyond it are 0."""
    x = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + EPS)
    return x * scale * factors.to(tl.float32)


@triton.jit
def _add_norm_kernel(
    residual,
    output,
    weight,
    summed,
    normed,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
    EPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    factors = tl.load(weight + column, mask=is_column, other=0.0)
    wait_for_launch(EARLY)
    x = tl.load(residual + row + column, mask=is_column, other=0.0).to(tl.float32)
    y = tl.load(output + row + column, mask=is_column, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        of_part = (part * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * WIDTH
        y += tl.load(output + of_part + column, mask=is_column, other=0.0)
    x += FACTOR * y
    stored = x.to(summed.dtype.element_ty)
    tl.store(summed + row + column, stored, mask=is_column)
    y = normed_row(stored, factors, WIDTH, EPS)
    tl.store(normed + row + column, y.to(normed.dtype.element_ty), mask=is_column)


_variant = repeated_launches(_add_norm_kernel)


@dataclass(frozen=True, slots=True, eq=False)
class NormedSum:
    """The tensors of a sum and of its norm.

    residual:       [rows, width], float32, float16 or bfloat16
    output:         [rows, width], of that dtype; or parts of it, float32 [parts, rows, width]
    weight:         [width], of any of these dtypes
    summed, normed: [rows, width], of the residual's dtype, written; neither overlaps an input
    All are contiguous and begin at a multiple of 16 bytes.
    """

    residual: Tensor
    output: Tensor
    weight: Tensor
    summed: Tensor
    normed: Tensor
    factor: float
    eps: float

    @property
    def num_parts(self) -> int:
        """The parts of the output."""
        return len(self.output) if self.output.dim() == 3 else 1

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order in which kernels take them."""
        return self.residual, self.output, self.weight, self.summed, self.normed

    def check(self) -> None:
        """Raises AssertionError for tensors that kernels do not take."""
        assert all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in self.tensors)


@only_launches
def launch_add_norm(args: NormedSum) -> None:
    """Writes the sum of each row, and the row normalised."""
    args.check()
    rows, width = args.residual.shape
    if rows:
        block, early = next_power_of_2(width), starts_early(args.residual.device)
        _variant(args.residual.dtype, args.weight.dtype, args.num_parts, width, args.factor, args.eps)(
            args.residual.device,
            (rows, 1, 1),
            *args.tensors,
            args.num_parts,
            width,
            block,
            args.factor,
            args.eps,
            early,
            num_warps=min(16, max(1, block // (64 * _ELEMENTS))),
            **early_options(early),
        )
