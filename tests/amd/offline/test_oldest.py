"""What every run asks of the oldest supported Triton: it compiles every kernel, which fits and spills nothing."""

from __future__ import annotations

import pytest
import triton

from rocm_attn.problem import PoolKind
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.compiling import FIRST_ON_OLDEST, OLDEST_TRITON
from tests.amd.offline.matrix import ROWS, Row, launch_all
from tests.amd.offline.offline_driver import first_compiled_by
from tests.amd.offline.test_compiles import LATENT, amd_complaints, names_of_all_kernels, names_of_sparse_kernels

# With another Triton rows of every run compile all variants of the same kernels.
pytestmark = [pytest.mark.oldest_triton] + [pytest.mark.long] * (triton.__version__ != OLDEST_TRITON)


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=pytest.mark.xdist_group(str(row))) for row in FIRST_ON_OLDEST]
)
def test_every_kernel_compiles_and_fits(row: Row) -> None:
    kernels = first_compiled_by(lambda: launch_all(row), row.arch)
    latent = names_of_all_kernels(LATENT)
    if row.pool is PoolKind.LATENT:
        assert kernels.keys() >= latent
    else:
        assert kernels.keys() == names_of_all_kernels() - latent - names_of_sparse_kernels()
    found = [
        f"{name}: {each}"
        for name, kernel in kernels.items()
        for each in amd_complaints(row, name, read_amd_code(kernel))
    ]
    assert not found, "\n".join(found)


def test_each_kind_of_pages_has_a_row() -> None:
    assert {row.pool for row in FIRST_ON_OLDEST} == {row.pool for row in ROWS}
