"""Our compiled kernels wait for all that they use: the static check proves each.

Every run checks the first variants that test_first_variants.py compiles with the installed Triton, and one variant of
each kernel that the simulator executes (tests/amd/simulator/test_kernels.py); the night checks every variant.
The latent decode would not, if it took its maxima after a branch (docs/waits.md, "A fault of the compiler").
"""

from collections.abc import Iterable

import pytest
from triton.compiler import CompiledKernel

from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.waits.check import Word, check_waits
from tests.amd.offline.compiling import AMD_ARCHS, compiled_kernels, first_kernels, rows_for
from tests.amd.offline.matrix import Row
from tests.amd.offline.test_first_variants import ON_OLDEST, ROWS_OF_EVERY_RUN

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
