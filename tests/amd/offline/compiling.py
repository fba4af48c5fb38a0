"""Compile rows of the matrix, and choose those that a test runs with."""

from __future__ import annotations

import functools

import pytest
import triton
from triton.compiler import CompiledKernel

from rocm_attn.problem import KVEncoding
from tests.amd.offline.matrix import ROWS, Row, launch_all
from tests.amd.offline.offline_driver import compiled_by

AMD_ARCHS = ("gfx942", "gfx950")
NVIDIA_ARCHS = ("sm_80", "sm_90")


# On CDNA 3 heads of 128 and latent pages, on Hopper latent pages, on CDNA 3 and 4 codes too; the simulator executes
# plain and latent pages on CDNA 4. The rest is long, as are float32, which no model is served in, and heads of 192 and
# more. A plain row takes a core for a minute, mostly inside LLVM, and two archs rarely disagree on what one layer does;
# a row of codes launches only what reads and writes pages, a third of it.
IN_EVERY_RUN = frozenset(
    {
        "gfx942-32x8-128-128-bfloat16-page16-below_2gib",
        "gfx942-32x8-128-128-bfloat16-e4m3fnuz_token-page16-below_2gib",
        "gfx942-16x1-576-512-latent-bfloat16-page64-below_2gib",
        "gfx950-64x8-64-64-bfloat16-e4m3fn_head-page16-below_2gib",
        "sm_90-16x1-576-512-latent-bfloat16-page64-below_2gib",
    }
)

OLDEST_TRITON = "3.6.0"
# The arch that the oldest Triton compiles for in every run: of these rows the first variant of each kernel
# (test_oldest.py). Whole rows, whose variants have budgets, are long with it.
OLDEST_ARCH = "gfx942"
FIRST_ON_OLDEST = tuple(
    row for row in ROWS if row.on_oldest and row.arch == OLDEST_ARCH and row.kv is KVEncoding.LIKE_Q
)


def is_long(row: Row) -> bool:
    """Whether every run leaves a row to the night, with the Triton at hand."""
    return str(row) not in IN_EVERY_RUN or triton.__version__ == OLDEST_TRITON


def rows_for(archs: tuple[str, ...]) -> pytest.MarkDecorator:
    """Runs a test with every row for these archs; rows that the oldest Triton compiles too are marked so."""
    return pytest.mark.parametrize(
        "row",
        [
            pytest.param(
                row,
                id=str(row),
                marks=[pytest.mark.xdist_group(str(row))]
                + [pytest.mark.oldest_triton] * row.on_oldest
                + [pytest.mark.long] * is_long(row),
            )
            for row in ROWS
            if row.arch in archs
        ],
    )


@functools.cache
def compiled_kernels(row: Row) -> tuple[CompiledKernel, ...]:
    """The distinct kernels that a row launches, in order of launch."""
    kernels = compiled_by(lambda: launch_all(row), row.arch)
    return tuple({kernel.hash: kernel for kernel in kernels}.values())
