"""No kernel exceeds its accepted cost by more than a tenth, with the oldest supported and the newest Triton."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton

from tests.amd.offline.budgets import (
    FOLDER,
    Cost,
    Variant,
    complaints,
    costs_of,
    read,
    rows_with_budgets,
)
from tests.amd.offline.compiling import AMD_ARCHS, OLDEST_TRITON, compiled_kernels, rows_for
from tests.amd.offline.matrix import Row

VARIANT = Variant("row", "_decode_kernel", 0)
COST = Cost(vgprs=100, agprs=20, lds_bytes=1000, code_bytes=5000, waves_per_simd=4, matrix_ops=40, buffer_loads=30)


@rows_for(AMD_ARCHS)
def test_no_kernel_exceeds_its_budget(row: Row) -> None:
    found = list(complaints(read(triton.__version__, row), costs_of(row, compiled_kernels(row))))
    assert not found, "\n".join([*found, "where this is meant to be: python -m tests.amd.offline.budgets"])


def test_the_oldest_and_the_newest_triton_have_budgets_for_every_row() -> None:
    versions = sorted((path.name for path in FOLDER.iterdir()), key=lambda name: [*map(int, name.split("."))])
    assert versions[0] == OLDEST_TRITON
    assert triton.__version__ in (versions[0], versions[-1])
    for version in versions:
        assert [str(row) for row in rows_with_budgets(version) if not read(version, row)] == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vgprs": 111}, "vgprs grew from 100 to 111"),
        ({"agprs": 23}, "agprs grew from 20 to 23"),
        ({"lds_bytes": 1101}, "lds_bytes grew"),
        ({"code_bytes": 5501}, "code_bytes grew"),
        ({"matrix_ops": 45}, "matrix_ops grew"),
        ({"waves_per_simd": 3}, "waves_per_simd fell from 4 to 3"),
        ({"buffer_loads": 26}, "buffer_loads fell from 30 to 26"),
    ],
)
def test_more_than_a_tenth_is_refused(change: dict[str, int], says: str) -> None:
    (found,) = complaints({VARIANT: COST}, {VARIANT: replace(COST, **change)})
    assert found.startswith("_decode_kernel variant 0")
    assert says in found


def test_a_tenth_passes_and_so_does_less() -> None:
    more = replace(COST, vgprs=110, agprs=22, lds_bytes=1100, code_bytes=5500, matrix_ops=44, buffer_loads=27)
    less = replace(COST, vgprs=50, agprs=0, lds_bytes=0, code_bytes=1, waves_per_simd=8, matrix_ops=1)
    for found in (more, less):
        assert list(complaints({VARIANT: COST}, {VARIANT: found})) == []


def test_variants_come_and_go_only_on_purpose() -> None:
    other = replace(VARIANT, number=1)
    assert list(complaints({VARIANT: COST}, {})) == ["_decode_kernel variant 0 has a budget and is not launched"]
    assert list(complaints({VARIANT: COST}, {VARIANT: COST, other: COST})) == ["_decode_kernel variant 1 has no budget"]
