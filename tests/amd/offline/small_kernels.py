"""Small kernels of known cost, to test the machinery of the compile gate itself."""

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


@triton.jit
def _looped_product_kernel(source_ptr, out_ptr, times, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    at = lane[:, None] * SIZE + lane[None, :]
    tile = tl.load(source_ptr + at)
    found = tl.zeros([SIZE, SIZE], tl.float32)
    for _ in range(times):
        found = tl.dot(tile, tile, found)
    tl.store(out_ptr + at, found)


@triton.jit
def _saying_kernel(source_ptr, out_ptr, ASSERTS: tl.constexpr):
    value = tl.load(source_ptr)
    if ASSERTS:
        tl.device_assert(value > 0, "positive")
    else:
        tl.device_print("value", value)
    tl.store(out_ptr, value)


@triton.jit
def _scaled_product_kernel(a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, out_ptr, SIZE: tl.constexpr, DEPTH: tl.constexpr):
    row, depth, block = tl.arange(0, SIZE), tl.arange(0, DEPTH), tl.arange(0, DEPTH // 32)
    a = tl.load(a_ptr + row[:, None] * DEPTH + depth[None, :])
    b = tl.load(b_ptr + depth[:, None] * SIZE + row[None, :])
    at = row[:, None] * (DEPTH // 32) + block[None, :]
    product = tl.dot_scaled(a, tl.load(a_scale_ptr + at), "e4m3", b, tl.load(b_scale_ptr + at), "e4m3")
    tl.store(out_ptr + row[:, None] * SIZE + row[None, :], product)
