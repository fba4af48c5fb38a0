"""Compile rows of the matrix, and choose those that a test runs with."""

from __future__ import annotations

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.problem import KVEncoding, PoolKind
from tests.amd.offline.matrix import ROWS, Row, launch_all
from tests.amd.offline.offline_driver import compiled_by

AMD_ARCHS = ("gfx942", "gfx950")
NVIDIA_ARCHS = ("sm_80", "sm_90")


def rows_for(archs: tuple[str, ...]) -> pytest.MarkDecorator:
    """Runs a test with every row for these archs; rows that the oldest Triton compiles too are marked so.

    Large pools are long, as the simulator runs code for them too, and so are the NVIDIA GPU that is not the target and
    other dtypes than bfloat16, in which most models are served, on other archs than the first. So is float16, whose
    code is bfloat16's but for conversions. Rows of 512 are compiled in every run for the first arch alone,
    and codes with heads of 128 alone.
    """
    return pytest.mark.parametrize(
        "row",
        [
            pytest.param(
                row,
                id=str(row),
                marks=[pytest.mark.oldest_triton] * row.on_oldest + [pytest.mark.long] * _is_long(row),
            )
            for row in ROWS
            if row.arch in archs
        ],
    )


def _is_long(row: Row) -> bool:
    is_rare = row.dtype != torch.bfloat16 and (row.arch != AMD_ARCHS[0] or row.dtype == torch.float16)
    is_wide = max(row.dims) > 256 and row.arch != AMD_ARCHS[0]
    if row.pool is PoolKind.LATENT:
        is_wide = row.heads[0] != 16 or row.arch == AMD_ARCHS[1]
    is_odd_code = row.kv is not KVEncoding.LIKE_Q and (row.dims != (128, 128) or row.arch == "sm_90")
    return row.is_large or row.arch == "sm_80" or is_rare or is_wide or is_odd_code


def compile_row(row: Row) -> None:
    """Leave a row's kernels in Triton's cache."""
    compiled_kernels(row)


def compiled_kernels(row: Row) -> list[CompiledKernel]:
    """The distinct kernels that a row launches, in order of launch."""
    kernels = compiled_by(lambda: launch_all(row), row.arch)
    return list({kernel.hash: kernel for kernel in kernels}.values())
