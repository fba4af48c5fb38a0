"""The gate reads the cost of a kernel, and detects spills, scratch and missing matrix products."""

import re

import pytest
import torch

from tests.amd.offline.code_object import read_amd_code, read_nvidia_code
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.small_kernels import launch_copy
from tests.amd.offline.test_offline_driver import gather_product

AMD_ARCHS = ("gfx942", "gfx950")


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_a_small_product_uses_matrix_units_and_spills_nothing(arch: str) -> None:
    code = read_amd_code(gather_product(arch))
    assert code.has_dot
    assert code.matrix_ops > 0
    assert (code.vgpr_spills, code.sgpr_spills, code.scratch_bytes) == (0, 0, 0)
    assert 8 < code.vgprs <= 256
    assert 8 < code.sgprs <= 102
    assert code.lds_bytes == 64 * 64 * 2
    assert code.code_bytes > 500


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_registers_agree_with_the_kernel_descriptor(arch: str) -> None:
    """The hardware allocates by the descriptor: in units of 8 registers on both archs."""
    compiled = gather_product(arch)
    code = read_amd_code(compiled)
    (allocated,) = re.findall(r"\.amdhsa_next_free_vgpr (\d+)", compiled.asm["amdgcn"])
    assert code.vgprs == int(allocated)


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_a_copy_has_no_matrix_product(arch: str) -> None:
    (compiled,) = compiled_by(lambda: launch_copy(torch.empty(1000), torch.empty(1000)), arch)
    code = read_amd_code(compiled)
    assert not code.has_dot
    assert code.matrix_ops == 0
    assert code.lds_bytes == 0
    assert code.buffer_loads == 1


def test_spills_and_scratch_are_seen_on_amd() -> None:
    # 8 waves a SIMD leave 64 of 512 registers to a lane, too few for a 128 x 128 tile of fp32.
    code = read_amd_code(gather_product("gfx942", tile=128, waves_per_eu=8))
    assert code.vgpr_spills > 0
    assert code.scratch_bytes > 0


def test_a_small_product_uses_matrix_units_and_no_stack_on_nvidia() -> None:
    code = read_nvidia_code(gather_product("sm_90"))
    assert code.has_dot
    assert code.matrix_ops > 0
    assert (code.stack_bytes, code.local_bytes) == (0, 0)
    assert 16 < code.registers <= 255
    assert code.shared_bytes > 0


def test_spills_are_seen_on_nvidia() -> None:
    code = read_nvidia_code(gather_product("sm_90", tile=128, maxnreg=128))
    assert code.registers <= 128
    assert code.stack_bytes > 0
