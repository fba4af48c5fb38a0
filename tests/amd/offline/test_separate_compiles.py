"""The compile gate of sparse attention and of recurrent states, whose rows are in matrices of their own."""

import functools

import pytest
from triton.compiler import CompiledKernel

from rocm_attn.kernels.tuning.sparse_tiles import INDEXER_CHOICES, SELECTED_CHOICES
from rocm_attn.machine.releases import triton_version
from tests.amd.offline import sparse_matrix, state_matrix
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.sparse_matrix import SparseRow
from tests.amd.offline.state_matrix import StateRow
from tests.amd.offline.test_compiles import complaints_of, names_of_sparse_kernels, names_of_state_kernels

ROWS = (*sparse_matrix.ROWS, *state_matrix.ROWS)
# One row of each kind, and of states on each arch, in every run; the others in the nightly one. With the oldest Triton
# every run compiles states for one arch.
_QUICK = (
    "gfx942-latent_16",
    "gfx942-segments_128",
    "gfx950-64_heads",
    "sm_90-latent_16",
    "gfx942-kimi_linear",
    "gfx950-mamba_2",
    "sm_90-mamba_2",
)

# Complaints about rows that Triton 3.6 alone compiles worse.
_NO_BUFFER_LOADS = {
    f"_chunk_{name}_kernel: no buffer loads, though all tensors are below 2 GiB" for name in ("rows", "walk")
}
_OF_TRITON_3_6 = {
    "gfx950-extend": {"_index_scores_kernel: 0 VGPRs and 3 SGPRs spilled, 0 bytes of scratch, at 216 VGPRs"},
    "gfx942-exact": _NO_BUFFER_LOADS,
    "gfx950-exact": _NO_BUFFER_LOADS,
}


@functools.cache
def compiled_kernels(row: SparseRow | StateRow) -> tuple[CompiledKernel, ...]:
    """The distinct kernels that a row launches, in order of launch."""
    return tuple({kernel.hash: kernel for kernel in compiled_by(row.launch, row.arch)}.values())


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
def test_kernels_fit_and_spill_nothing(row: SparseRow | StateRow) -> None:
    kernels = compiled_kernels(row)
    assert kernels
    if isinstance(row, StateRow):
        # With the Triton that Hopper's own kernels are for, these stand in for others.
        assert {kernel.name.replace("_hopper_", "_") for kernel in kernels} == names_of_state_kernels()
        kernels = tuple(kernel for kernel in kernels if "_hopper_" not in kernel.name)
    found = {f"{kernel.name}: {each}" for kernel in kernels for each in complaints_of(row, kernel)}
    known = _OF_TRITON_3_6.get(str(row), set()) if triton_version().startswith("3.6.") else set()
    assert found == known, "\n".join(found ^ known)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", sparse_matrix.ARCHS)
def test_every_kernel_of_sparse_attention_is_compiled(arch: str) -> None:
    rows = [row for row in sparse_matrix.ROWS if row.arch == arch]
    assert {kernel.name for row in rows for kernel in compiled_kernels(row)} == names_of_sparse_kernels()


def test_no_two_rows_have_one_name() -> None:
    assert len({str(row) for row in ROWS}) == len(ROWS)


def test_every_arch_of_the_matrix_has_tiles() -> None:
    assert set(sparse_matrix.ARCHS) <= {row.arch for row in INDEXER_CHOICES} & {row.arch for row in SELECTED_CHOICES}


def test_every_arch_has_a_row_of_states_in_every_run() -> None:
    assert {str(row) for row in ROWS} >= set(_QUICK)
    assert {row.arch for row in state_matrix.ROWS if str(row) in _QUICK} == set(state_matrix.ARCHS)
