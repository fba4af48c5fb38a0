"""The compiler test of every run: the first variant of each kernel fits, spills nothing, and waits for what it uses.

So does, on gfx942, the last variant of decode and of extend, for a layer with a window and a cap. The other kernels of
gfx942 are compiled with the oldest supported Triton; with the installed one the simulator executes them, and the night
compiles all of their variants.
"""

from collections.abc import Iterable

import pytest
from triton.compiler import CompiledKernel

from rocm_attn.problem import KVEncoding, PoolKind
from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.waits.check import Word, check_waits
from tests.amd.offline.compiling import AMD_ARCHS, IN_EVERY_RUN, ONLY_OLDEST, compiled_kernels, first_kernels, rows_for
from tests.amd.offline.matrix import ROWS, Row, launch_all
from tests.amd.offline.offline_driver import last_compiled_by
from tests.amd.offline.test_compiles import LATENT, complaints_of, names_of_all_kernels, names_of_separate_kernels

ROWS_OF_EVERY_RUN = [row for row in ROWS if str(row) in IN_EVERY_RUN]
# Those of one arch, without codes or latents: the night has a row of each.
ON_OLDEST = [
    row for row in ROWS_OF_EVERY_RUN if row.on_oldest and row.kv is KVEncoding.LIKE_Q and row.pool is PoolKind.SPLIT
]

# The last launch of each of these kernels by this row: a layer with a window and a cap, whose extend shares a prefix.
SCORED_ROW = "gfx942-32x8-128-128-bfloat16-page16-below_2gib"
LAST_OF = {"_decode_kernel", "_extend_kernel"}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(row), marks=[pytest.mark.xdist_group(str(row)), *(ONLY_OLDEST * (row in ON_OLDEST))])
        for row in ROWS_OF_EVERY_RUN
    ],
)
def test_the_first_variant_of_every_kernel_compiles_and_fits(row: Row) -> None:
    kernels = first_kernels(row)
    latent = names_of_all_kernels(LATENT)
    if row.pool is PoolKind.LATENT:
        assert kernels.keys() >= latent
    elif row.kv is KVEncoding.LIKE_Q:
        assert kernels.keys() == names_of_all_kernels() - latent - names_of_separate_kernels()
    assert kernels
    found = [f"{name}: {complaint}" for name, kernel in kernels.items() for complaint in complaints_of(row, kernel)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=ONLY_OLDEST) for row in ROWS_OF_EVERY_RUN if row.pool is PoolKind.LATENT], ids=str
)
def test_the_oldest_triton_compiles_kernels_of_latents(row: Row) -> None:
    """Functions of its language return no tuple with None in it."""
    assert first_kernels(row).keys() >= names_of_all_kernels(LATENT)


def test_what_gfx942_launches_last_of_decode_and_extend_fits() -> None:
    (row,) = (row for row in ROWS_OF_EVERY_RUN if str(row) == SCORED_ROW)
    kernels = last_compiled_by(lambda: launch_all(row), row.arch, LAST_OF)
    assert kernels.keys() == LAST_OF
    assert not [each for kernel in kernels.values() for each in complaints_of(row, kernel)]


def test_with_the_oldest_triton_each_kind_of_pages_has_a_row() -> None:
    assert {row.pool for row in ROWS if row.on_oldest} == {row.pool for row in ROWS}
    assert {row.arch for row in ON_OLDEST} == {"gfx942"}


IN_THIS_RUN = [row for row in ROWS_OF_EVERY_RUN if row not in ON_OLDEST and row.arch in AMD_ARCHS]


def unproved(kernels: Iterable[CompiledKernel], arch: str) -> list[str]:
    """The kernels that the check does not prove, with its first reason for each."""
    found = []
    for kernel in kernels:
        verdict = check_waits(parse_assembly(kernel.asm["amdgcn"]), arch)
        if verdict.word is not Word.PROVED:
            said = [fault.line() for fault in verdict.faults] + list(verdict.reasons)
            found.append(f"{verdict.kernel} ({kernel.hash}): {said[0]}")
    return found


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=pytest.mark.xdist_group(str(row))) for row in IN_THIS_RUN]
)
def test_the_first_variant_of_every_kernel_waits_for_what_it_uses(row: Row) -> None:
    assert not unproved(first_kernels(row).values(), row.arch)


@rows_for(AMD_ARCHS)
def test_every_kernel_waits_for_what_it_uses(row: Row) -> None:
    assert not unproved(compiled_kernels(row), row.arch)
