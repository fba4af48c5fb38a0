"""The compile gate of recurrent states: their kernels compile for every arch, spill nothing and fit."""

from __future__ import annotations

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.machine.target import known_target
from tests.amd.offline.code_object import read_amd_code, read_nvidia_code
from tests.amd.offline.state_matrix import ARCHS, ROWS, StateRow, compiled_state_kernels
from tests.amd.offline.test_compiles import names_of_state_kernels, too_few_waves

# One row of each arch in every run; the others in the nightly one.
_QUICK = ("gfx942-kimi_linear", "gfx950-qwen3_next", "sm_90-qwen3_next")
_MATRIX_KERNELS = ("_chunk_rows_kernel", "_chunk_walk_kernel")
_READS_SLOTS = ("_token_steps_kernel", "_chunk_walk_kernel", "_convolve_kernel")
# Bytes that kernels keep on the stack on sm_90, where they were faster than with more warps or fewer columns. In
# float32, which no model is served in, a product is three.
_SPILLED_ON_SM_90 = {"_token_steps_kernel": 40, "_chunk_rows_kernel": 96, "_chunk_walk_kernel": 96}
_SPILLED_IN_FLOAT32 = {"_chunk_rows_kernel": 220, "_chunk_walk_kernel": 970}
# Scalar registers that lie in lanes of vector registers, and not in memory: two dozen of a kernel's are addresses.
_SCALARS_MOVED = {"_token_steps_kernel": 10, "_chunk_rows_kernel": 38}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=str(row),
            marks=[pytest.mark.oldest_triton] * row.on_oldest + [pytest.mark.nightly] * (str(row) not in _QUICK),
        )
        for row in ROWS
    ],
)
def test_kernels_of_states_fit_and_spill_nothing(row: StateRow) -> None:
    kernels = compiled_state_kernels(row)
    assert {kernel.name for kernel in kernels} == names_of_state_kernels()
    found = [complaint for kernel in kernels for complaint in complaints_of(row, kernel)]
    assert not found, "\n".join(found)


def complaints_of(row: StateRow, kernel: CompiledKernel) -> list[str]:
    """Returns the faults of a kernel's machine code."""
    found: list[str] = []
    allowed = 0
    if row.arch.startswith("sm_"):
        nvidia = read_nvidia_code(kernel)
        spilled, lds, matrix_ops = nvidia.stack_bytes + nvidia.local_bytes, nvidia.shared_bytes, nvidia.matrix_ops
        allowed = (_SPILLED_IN_FLOAT32 if row.dtype == torch.float32 else _SPILLED_ON_SM_90).get(kernel.name, 0)
        found += nvidia.touched[:1]
    else:
        amd = read_amd_code(kernel)
        spilled, lds, matrix_ops = amd.vgpr_spills + amd.scratch_bytes, amd.lds_bytes, amd.matrix_ops
        found += too_few_waves(kernel.name, amd)
        if amd.sgpr_spills > _SCALARS_MOVED.get(kernel.name, 0):
            found.append(f"{amd.sgpr_spills} scalar registers spilled")
        if not row.is_large and not amd.buffer_loads:
            found.append("no buffer loads, though all tensors are below 2 GiB")
        if row.is_large and kernel.name in _READS_SLOTS and not amd.global_loads:
            found.append("no 64-bit loads, though slots are above 2 GiB")
    if spilled > allowed:
        found.append(f"{spilled} registers or bytes spilled")
    if lds > known_target(row.arch).lds_bytes:
        found.append(f"{lds} bytes of LDS, {row.arch} has {known_target(row.arch).lds_bytes}")
    if kernel.name in _MATRIX_KERNELS and not matrix_ops:
        found.append("a product without matrix instructions")
    return [f"{kernel.name}: {each}" for each in found]


def test_no_two_rows_have_one_name() -> None:
    assert len({str(row) for row in ROWS}) == len(ROWS)


def test_every_arch_has_a_row_in_every_run() -> None:
    assert {str(row) for row in ROWS} >= set(_QUICK)
    assert {row.arch for row in ROWS if str(row) in _QUICK} == set(ARCHS)
