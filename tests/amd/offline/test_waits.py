"""Our compiled kernels wait for all that they use: the static check proves each.

Every run checks the first variants that test_first_variants.py compiles; the night checks every variant.

LLVM forgets one hazard (docs/waits.md, "A fault of the compiler"): with Triton 3.9.0 the latent decode of every row for
gfx942 has it. No other fault passes.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from triton.compiler import CompiledKernel

from rocm_attn.problem import PoolKind
from rocm_lab.simulator.assembly import parse_assembly
from rocm_lab.waits.check import Word, check_waits
from rocm_lab.waits.hazards import MATRIX_WRITE
from tests.amd.offline.compiling import AMD_ARCHS, IN_EVERY_RUN, compiled_kernels, first_kernels, rows_for
from tests.amd.offline.matrix import ROWS, Row

IN_THIS_RUN = [row for row in ROWS if str(row) in IN_EVERY_RUN and row.arch in AMD_ARCHS]
FORGOTTEN_BY_LLVM = "_latent_decode_kernel"


def unproved(kernels: Iterable[CompiledKernel], arch: str) -> list[str]:
    """The kernels that the check does not prove, with its first reason for each."""
    found = []
    for kernel in kernels:
        verdict = check_waits(parse_assembly(kernel.asm["amdgcn"]), arch)
        if verdict.word is not Word.PROVED:
            said = [fault.line() for fault in verdict.faults] + list(verdict.reasons)
            found.append(f"{verdict.kernel} ({kernel.hash}): {said[0]}")
    return found


def is_forgotten(line: str) -> bool:
    """True for the fault of LLVM's: a matrix result, used behind a branch by the kernel that is known for it."""
    return line.startswith(FORGOTTEN_BY_LLVM) and MATRIX_WRITE.rule in line and "v_max_f32" in line


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=str(row), marks=pytest.mark.xdist_group(str(row))) for row in IN_THIS_RUN]
)
def test_the_first_variant_of_every_kernel_waits_for_what_it_uses(row: Row) -> None:
    assert not unproved(first_kernels(row).values(), row.arch)


@rows_for(AMD_ARCHS)
def test_every_kernel_waits_for_what_it_uses_but_where_llvm_forgets_it(row: Row) -> None:
    found = unproved(compiled_kernels(row), row.arch)
    may_have_it = row.arch == "gfx942" and row.pool is PoolKind.LATENT
    assert not [line for line in found if not (may_have_it and is_forgotten(line))]
