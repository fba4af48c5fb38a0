"""The gate reads the cost of a kernel and all bytes of its loads, and detects spills and missing matrix products."""

import re

import pytest
import torch

from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.step_data import empty_step
from rocm_lab.cycles.loops import Loop
from rocm_lab.simulator.assembly import parse_instruction
from tests.amd.offline.candidate_kernels import DECODE_LAYERS, chosen_tiles, plain_decode
from tests.amd.offline.code_object import read_amd_code, read_nvidia_code
from tests.amd.offline.hot_loop import hot_loop_of, lds_bytes, loaded_bytes
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


@pytest.mark.parametrize(
    ("instruction", "of_lds", "loaded"),
    [
        ("ds_read_b128 v[0:3], v9", 16, 0),
        ("ds_read2_b64 v[0:3], v9 offset1:4", 16, 0),
        ("ds_write2st64_b64 v9, v[0:1], v[2:3] offset1:8", 16, 0),
        ("ds_write_b32 v9, v0", 4, 0),
        ("ds_read_b64_tr_b16 v[0:1], v9", 8, 0),
        ("ds_read_u16_d16 v0, v9", 2, 0),
        ("ds_bpermute_b32 v0, v1, v2", 4, 0),
        ("buffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen", 0, 16),
        ("buffer_load_dwordx4 v9, s[4:7], 0 offen lds", 16, 16),
        ("global_load_dword v0, v[2:3], off", 0, 4),
        ("global_load_lds_dwordx4 v[2:3], off", 16, 16),
        ("buffer_load_ushort v0, v9, s[4:7], 0 offen", 0, 2),
        ("s_load_dwordx4 s[0:3], s[4:5], 0x0", 0, 0),
        ("v_add_f32_e32 v8, v8, v8", 0, 0),
    ],
)
def test_bytes_of_a_lane(instruction: str, of_lds: int, loaded: int) -> None:
    loop = Loop("", (parse_instruction(instruction),))
    assert (lds_bytes(loop), loaded_bytes(loop)) == (of_lds, loaded)


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.nightly)])
def test_the_hot_loop_of_decode_loads_a_tile_of_k_and_v(arch: str) -> None:
    row = next(row for row in DECODE_LAYERS if row.arch == arch and row.dims == (128, 128))
    tiles, loop = chosen_tiles(row), hot_loop_of(plain_decode(row))
    tile_bytes = tiles.key_block * sum(row.dims) * row.dtype.itemsize
    # Page ids are loaded too, a word or two for each lane that loads.
    loaded = loaded_bytes(loop) * tiles.num_warps * 64
    assert tile_bytes <= loaded <= 1.5 * tile_bytes
    assert loop.matrix_ops > 0


HEADS = 3


def loads_of_kernel(name: str, head_dim: int, batch: str) -> str:
    """Returns the PTX of a kernel of one layer on an sm_90."""
    problem = Problem(HEADS, HEADS, head_dim, torch.bfloat16, 16, v_head_dim=head_dim, scale=1.0)
    data = empty_step(problem, BatchSpec.parse(batch), 1)
    kernel = select(problem, known_target("sm_90"), "triton").kernel(data.kind).bound
    compiled = compiled_by(lambda: data.layer(kernel)(), "sm_90")
    text: str = next(each for each in compiled if each.metadata.name == name).asm["ptx"]
    return text


@pytest.mark.fast(1)
@pytest.mark.parametrize(("name", "batch"), [("_decode_kernel", "2d64"), ("_extend_kernel", "2x9+55")])
def test_rows_of_heads_of_40_are_loaded_by_16_bytes(name: str, batch: str) -> None:
    ptx = loads_of_kernel(name, 40, batch)
    assert not re.findall(r"ld\.global\S*\.b16", ptx), "elements are loaded one by one"
    assert re.search(r"cp\.async\S* .*, 0x10", ptx), "key blocks are not copied by 16 bytes"
