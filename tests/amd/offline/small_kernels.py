"""Small kernels of known cost, to test the machinery of the compile gate itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_attn.kernels.launch import launch


@triton.jit
def _gather_product_kernel(rows_ptr, row_ids_ptr, out_ptr, TILE: tl.constexpr):
    lane = tl.arange(0, TILE)
    row_id = tl.load(row_ids_ptr + lane)
    tile = tl.load(rows_ptr + row_id[:, None] * TILE + lane[None, :])
    tl.store(out_ptr + lane[:, None] * TILE + lane[None, :], tl.dot(tile, tile))


@triton.jit
def constant_kernel(out_ptr, value: tl.constexpr):
    tl.store(out_ptr, value)


@triton.jit
def number_kernel(out_ptr):
    """Stores the program's number; several programs race."""
    tl.store(out_ptr, tl.program_id(0))


def launch_gather_product(rows: torch.Tensor, row_ids: torch.Tensor, out: torch.Tensor, **options: int) -> None:
    """out = X @ X, where X = rows[row_ids].

    rows:     float16 [num_rows, tile]
    row_ids:  int32 [tile]
    out:      float32 [tile, tile]
    options:  Triton's: num_warps, maxnreg, ...
    """
    launch(_gather_product_kernel, (1,), rows, row_ids, out, TILE=out.shape[0], **options)


@triton.jit
def _copy_kernel(source_ptr, out_ptr, size, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offset, tl.load(source_ptr + offset, mask=offset < size, other=0.0), mask=offset < size)


def launch_copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """out = source, two vectors of one dtype and length."""
    launch(_copy_kernel, (triton.cdiv(out.numel(), 256),), source, out, out.numel(), BLOCK=256)
