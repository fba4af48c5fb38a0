"""The compile gate of sparse attention: its kernels compile for every arch, spill nothing and fit."""

from __future__ import annotations

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.kernels.tuning.sparse_tiles import INDEXER_CHOICES, SELECTED_CHOICES
from rocm_attn.machine.target import known_target
from tests.amd.offline.code_object import read_amd_code, read_nvidia_code
from tests.amd.offline.sparse_matrix import ARCHS, ROWS, SparseRow, compiled_sparse_kernels
from tests.amd.offline.test_compiles import names_of_sparse_kernels, too_few_waves

# One row of each kind in every run; the others in the nightly one.
_QUICK = (
    "gfx942-latent_16",
    "gfx942-segments_128",
    "gfx950-64_heads",
    "sm_90-latent_16",
)
_MATRIX_KERNELS = ("_index_scores_kernel", "_selected_attention_kernel")


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
def test_kernels_of_sparse_attention_fit_and_spill_nothing(row: SparseRow) -> None:
    kernels = compiled_sparse_kernels(row)
    found = [complaint for kernel in kernels for complaint in complaints_of(row, kernel)]
    assert kernels
    assert not found, "\n".join(found)


def complaints_of(row: SparseRow, kernel: CompiledKernel) -> list[str]:
    """Returns the faults of a kernel's machine code."""
    found = []
    lds_bytes = known_target(row.arch).lds_bytes
    if row.arch.startswith("sm_"):
        nvidia = read_nvidia_code(kernel)
        spilled, lds, matrix_ops = nvidia.stack_bytes + nvidia.local_bytes, nvidia.shared_bytes, nvidia.matrix_ops
    else:
        amd = read_amd_code(kernel)
        spilled, lds, matrix_ops = amd.vgpr_spills + amd.sgpr_spills + amd.scratch_bytes, amd.lds_bytes, amd.matrix_ops
        found += [f"{kernel.name}: {each}" for each in too_few_waves(kernel.name, amd)]
        if not row.is_large and not amd.buffer_loads:
            found.append(f"{kernel.name}: no buffer loads, though all tensors are below 2 GiB")
        if row.is_large and kernel.name in _MATRIX_KERNELS and not amd.global_loads:
            found.append(f"{kernel.name}: no 64-bit loads, though pages are above 2 GiB")
    if spilled:
        found.append(f"{kernel.name}: {spilled} registers or bytes spilled")
    if lds > lds_bytes:
        found.append(f"{kernel.name}: {lds} bytes of LDS, {row.arch} has {lds_bytes}")
    is_exact = row.arch.startswith("sm_") and row.dtype == torch.float32
    if kernel.name in _MATRIX_KERNELS and not matrix_ops and not is_exact:
        found.append(f"{kernel.name}: a product without matrix instructions")
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_of_sparse_attention_is_compiled(arch: str) -> None:
    assert {
        kernel.name for row in ROWS if row.arch == arch for kernel in compiled_sparse_kernels(row)
    } == names_of_sparse_kernels()


def test_no_two_rows_have_one_name() -> None:
    assert len({str(row) for row in ROWS}) == len(ROWS)


def test_every_arch_of_the_matrix_has_tiles() -> None:
    assert set(ARCHS) <= {row.arch for row in INDEXER_CHOICES} & {row.arch for row in SELECTED_CHOICES}
