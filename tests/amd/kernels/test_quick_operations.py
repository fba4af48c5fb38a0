"""Results that tests make Triton's interpreter remember: numbers that are equal but not the same, types, and shapes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _numbers_kernel(floats_ptr, ints_ptr, out_ptr, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    floats = tl.load(floats_ptr + at)
    ints = tl.load(ints_ptr + at)
    tl.store(out_ptr + at, floats * 0.0)
    tl.store(out_ptr + n + at, floats * -0.0)
    tl.store(out_ptr + 2 * n + at, ints + 1)
    tl.store(out_ptr + 3 * n + at, ints + 1.0 - 0.5)
    tl.store(out_ptr + 4 * n + at, 7 - ints)
    tl.store(out_ptr + 5 * n + at, ints - 7)
    tl.store(out_ptr + 6 * n + at, (ints // 2) / 2)
    tl.store(out_ptr + 7 * n + at, floats + ints)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_numbers_beside_tensors_keep_their_type_and_their_sign(dtype: torch.dtype, kernel_device: torch.device) -> None:
    for n in (16, 32, 16):  # results of the first run are there for the third
        floats = torch.linspace(0.5, 3.5, n, dtype=dtype, device=kernel_device)
        ints = torch.arange(n, dtype=torch.int32, device=kernel_device)
        out = torch.full((8, n), float("nan"), device=kernel_device)
        _numbers_kernel[(1,)](floats, ints, out, n)
        want = [floats * 0.0, floats * -0.0, ints + 1, ints + 0.5, 7 - ints, ints - 7, (ints // 2) / 2, floats + ints]
        for found, row in zip(out, want, strict=True):
            assert torch.equal(found, row.float())
        assert not torch.signbit(out[0]).any()
        assert torch.signbit(out[1]).all()


@triton.jit  # type: ignore[untyped-decorator]
def _shapes_kernel(rows_ptr, columns_ptr, out_ptr, m: tl.constexpr, n: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, m), tl.arange(0, n)
    rows, columns = tl.load(rows_ptr + row), tl.load(columns_ptr + column)
    added = rows[:, None] + columns[None, :]
    tl.store(out_ptr + row[:, None] * n + column[None, :], added * added - columns[None, :])


def test_rows_and_columns_meet_in_one_shape_either_way_round(kernel_device: torch.device) -> None:
    for m, n in ((4, 8), (8, 4), (4, 4), (1, 8), (4, 8)):
        rows, columns = (torch.arange(1, size + 1, dtype=torch.float32, device=kernel_device) for size in (m, n))
        out = torch.full((m, n), float("nan"), device=kernel_device)
        _shapes_kernel[(1,)](rows, columns, out, m, n)
        assert torch.equal(out, (rows[:, None] + columns) ** 2 - columns)
