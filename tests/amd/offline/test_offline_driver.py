"""The stand-in driver compiles for the given GPU, executes nothing and leaves Triton unchanged."""

import pytest
import torch
from triton.compiler import CompiledKernel
from triton.runtime import driver as active_driver
from triton.runtime.errors import OutOfResources

from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.offline_driver import GPU_TARGETS, compiled_by, first_compiled_by, offline
from tests.amd.offline.small_kernels import launch_copy, launch_gather_product


def gather_product(arch: str, *, num_rows: int = 64, tile: int = 64, **options: int) -> CompiledKernel:
    """The gather kernel, compiled for arch over a table of num_rows rows; none of the memory is touched."""
    rows = torch.empty(num_rows, tile, dtype=torch.float16)
    row_ids = torch.empty(tile, dtype=torch.int32)
    out = torch.empty(tile, tile)
    (compiled,) = compiled_by(lambda: launch_gather_product(rows, row_ids, out, **options), arch)
    return compiled


@pytest.mark.parametrize("arch", GPU_TARGETS)
def test_a_launch_compiles_for_the_chosen_arch(arch: str) -> None:
    assert gather_product(arch).metadata.target == GPU_TARGETS[arch]


def test_one_process_compiles_one_kernel_for_several_archs_in_turn() -> None:
    for arch in ("gfx942", "gfx950", "gfx942"):
        assert f"gfx{arch[3:]}" in gather_product(arch).asm["amdgcn"]


def test_only_the_first_variant_of_each_kernel_is_compiled_where_no_other_is_asked_for() -> None:
    def launch_both() -> None:
        for tile in (16, 32):
            rows, ids = torch.empty(64, tile, dtype=torch.float16), torch.empty(tile, dtype=torch.int32)
            launch_gather_product(rows, ids, torch.empty(tile, tile))
        launch_copy(torch.zeros(1000), torch.zeros(1000))

    first = first_compiled_by(launch_both, "gfx942")
    every = compiled_by(launch_both, "gfx942")
    assert [kernel.hash for kernel in first.values()] == [every[0].hash, every[2].hash]
    assert every[1].hash != every[0].hash


def test_a_launch_executes_nothing() -> None:
    out = torch.full((1000,), float("nan"))
    assert len(compiled_by(lambda: launch_copy(torch.zeros(1000), out), "gfx942")) == 1
    assert out.isnan().all()


def test_a_tensor_above_2_gib_takes_the_code_path_with_64_bit_addresses() -> None:
    rows_in_2_gib = 2**31 // (64 * 2)
    below = read_amd_code(gather_product("gfx942", num_rows=rows_in_2_gib - 1))
    above = read_amd_code(gather_product("gfx942", num_rows=rows_in_2_gib))
    assert below.global_loads == 0
    assert below.buffer_loads > 0
    assert above.global_loads > 0
    assert above.buffer_loads < below.buffer_loads


def test_a_program_that_needs_more_lds_than_the_arch_has_is_refused() -> None:
    # 128 KiB: more than the 64 KiB of gfx942.
    with pytest.raises(OutOfResources, match="shared memory, Required: 131072, Hardware limit: 65536"):
        gather_product("gfx942", tile=256)


def test_the_driver_is_put_back_even_after_an_error() -> None:
    before = active_driver._active
    archs_inside = []

    def fail_inside() -> None:
        archs_inside.append(active_driver.active.get_current_target().arch)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compiled_by(fail_inside, "gfx942")
    assert archs_inside == ["gfx942"]
    assert active_driver._active is before


def test_the_interpreter_cannot_pass_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(AssertionError, match="another process"), offline("gfx942"):
        pass
