"""Programs, waves and barriers; the values that a launch passes to a kernel; the text that it is read from."""

import numpy as np
import pytest
import torch

from rocm_attn.errors import BadSetting, BadTensor
from rocm_lab.simulator import kernel
from rocm_lab.simulator.assembly import Argument, Assembly, Instruction, parse_assembly, parse_instruction
from rocm_lab.simulator.core import POISON
from rocm_lab.simulator.faults import SimulationFault, UnknownInstruction
from rocm_lab.simulator.kernel import Launch, SimulatedKernel
from rocm_lab.simulator.launcher import ARCHS, simulated
from tests.amd.offline.offline_driver import compiled_by
from tests.amd.offline.small_kernels import _copy_kernel, launch_copy, launch_gather_product
from tests.amd.simulator.snippet import allocation

every_arch = pytest.mark.parametrize("arch", ARCHS)

DESCRIPTOR = {
    "private_segment_fixed_size": 0,
    "user_sgpr_kernarg_segment_ptr": 1,
    "user_sgpr_kernarg_preload_length": 0,
    "user_sgpr_count": 2,
    "system_sgpr_workgroup_id_x": 1,
    "system_sgpr_workgroup_id_y": 1,
    "system_sgpr_workgroup_id_z": 0,
}


def simulated_kernel(*lines: str, descriptor: dict[str, int] = DESCRIPTOR) -> SimulatedKernel:
    """A kernel of these lines; a line that ends with a colon is a label."""
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        else:
            instructions.append(parse_instruction(line))
    return SimulatedKernel(Assembly("snippet", tuple(instructions), labels, descriptor, ()), "gfx942")


def test_every_program_and_wave_runs_once_with_its_own_numbers() -> None:
    """Each lane adds 1 to a word that is its own: of 2 x 3 programs, 2 waves each."""
    counted = np.zeros(6 * 128, np.uint32)
    pointer = counted.ctypes.data.to_bytes(8, "little")
    lines = [
        "s_load_dwordx2 s[4:5], s[0:1], 0x0",
        "s_lshl_b32 s3, s3, 1",
        "s_add_u32 s3, s3, s2",
        "s_lshl_b32 s3, s3, 7",
        "v_add_lshl_u32 v1, v0, s3, 2",
        "global_load_dword v2, v1, s[4:5]",
        "v_add_u32_e32 v2, 1, v2",
        "global_store_dword v1, v2, s[4:5]",
        "s_endpgm",
    ]
    launch = Launch((2, 3, 1), 2, 0, pointer, [allocation(counted)])
    executed = simulated_kernel(*lines).run(launch)
    assert set(counted.tolist()) == {1}
    assert executed == 6 * 2 * len(lines)


def test_arguments_are_preloaded_where_the_descriptor_says_so() -> None:
    words = np.zeros(64, np.uint32)
    arguments = words.ctypes.data.to_bytes(8, "little") + (77).to_bytes(4, "little")
    descriptor = {**DESCRIPTOR, "user_sgpr_kernarg_preload_length": 3, "user_sgpr_count": 5}
    store = simulated_kernel(
        "v_lshlrev_b32_e32 v0, 2, v0",
        "v_mov_b32_e32 v1, s4",
        "global_store_dword v0, v1, s[2:3]",
        "s_endpgm",
        descriptor=descriptor,
    )
    store.run(Launch((1, 1, 1), 1, 0, arguments, [allocation(words)]))
    assert set(words.tolist()) == {77}


def test_waves_meet_at_barriers() -> None:
    """The last wave writes data that the first one reads after the barrier."""
    words = np.zeros(128, np.uint32)
    lines = [
        "s_load_dwordx2 s[4:5], s[0:1], 0x0",
        "v_lshlrev_b32_e32 v1, 2, v0",
        "v_xor_b32_e32 v2, 0x100, v1",
        "ds_write_b32 v2, v0",
        "s_barrier",
        "ds_read_b32 v3, v1",
        "global_store_dword v1, v3, s[4:5]",
        "s_endpgm",
    ]
    launch = Launch((1, 1, 1), 2, 512, words.ctypes.data.to_bytes(8, "little"), [allocation(words)])
    simulated_kernel(*lines).run(launch)
    assert words.tolist() == [*range(64, 128), *range(64)]
    with pytest.raises(SimulationFault, match=r"program \(0, 0, 0\), wave 0, 'ds_read_b32 v3, v1': reads LDS that"):
        simulated_kernel(*(line for line in lines if line != "s_barrier")).run(launch)


def test_a_wave_that_ends_while_others_wait_is_a_fault() -> None:
    lines = ["v_readfirstlane_b32 s4, v0", "s_cmp_eq_u32 s4, 0", "s_cbranch_scc1 end", "s_barrier", "end:", "s_endpgm"]
    with pytest.raises(SimulationFault, match="a wave ended, others wait"):
        simulated_kernel(*lines).run(Launch((1, 1, 1), 2, 0, b"", []))


@pytest.mark.parametrize("lines", [[], ["s_barrier"]], ids=["plain", "with a barrier"])
def test_a_loop_without_an_end_is_a_fault(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MAX_STEPS_OF_A_WAVE", 1000)
    with pytest.raises(SimulationFault, match=r"no end after 100\d instructions"):
        simulated_kernel("again:", *lines, "s_branch again").run(Launch((1, 1, 1), 1, 0, b"", []))


def test_what_is_unknown_is_an_error_when_it_is_reached() -> None:
    unknown = simulated_kernel("s_endpgm", "v_mystery_f32 v0, v1")
    assert unknown.run(Launch((1, 1, 1), 1, 0, b"", [])) == 1
    with pytest.raises(UnknownInstruction, match="wave 0, 'v_mystery_f32 v0, v1': v_mystery_f32 of"):
        simulated_kernel("v_mystery_f32 v0, v1").run(Launch((1, 1, 1), 1, 0, b"", []))


def test_a_kernel_that_starts_with_other_registers_is_refused() -> None:
    descriptor = {**DESCRIPTOR, "user_sgpr_count": 9}
    with pytest.raises(UnknownInstruction, match="other scalar registers"):
        simulated_kernel("s_endpgm", descriptor=descriptor).run(Launch((1, 1, 1), 1, 0, b"", []))


def test_each_wave_has_scratch_memory_of_its_own() -> None:
    words = np.zeros((2, 128), np.uint32)
    lines = [
        "s_load_dwordx2 s[4:5], s[0:1], 0x0",
        "scratch_store_dword off, v0, off offset:4",
        "s_barrier",
        "scratch_load_dwordx2 v[2:3], off, off",
        "v_lshlrev_b32_e32 v1, 2, v0",
        "global_store_dword v1, v2, s[4:5]",
        "global_store_dword v1, v3, s[4:5] offset:512",
        "s_endpgm",
    ]
    spilling = simulated_kernel(*lines, descriptor={**DESCRIPTOR, "private_segment_fixed_size": 8})
    spilling.run(Launch((1, 1, 1), 2, 0, words.ctypes.data.to_bytes(8, "little"), [allocation(words)]))
    assert set(words[0].tolist()) == {POISON}
    assert words[1].tolist() == list(range(128))
    with pytest.raises(SimulationFault, match="a lane has 0 bytes of scratch memory"):
        simulated_kernel("scratch_load_dword v0, off, off").run(Launch((1, 1, 1), 1, 0, b"", []))


@every_arch
def test_a_copy_copies(arch: str) -> None:
    source, out = torch.randn(1000), torch.full((1008,), 5.0)
    with simulated(arch) as simulation:
        launch_copy(source, out[:1000])
    assert torch.equal(out[:1000], source)
    assert (out[1000:] == 5.0).all()
    assert simulation.kernels == ["_copy_kernel"]


@every_arch
def test_a_kernel_is_executed_whoever_launches_it(arch: str) -> None:
    """Other libraries launch theirs without rocm_attn."""
    source, out = torch.randn(100), torch.empty(100)
    with simulated(arch) as simulation:
        _copy_kernel[(1,)](source, out, 100, BLOCK=128)
    assert torch.equal(out, source)
    assert simulation.kernels == ["_copy_kernel"]


def test_what_is_not_simulated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadSetting, match="arch 'sm_90' is not simulated; choose gfx942 or gfx950"), simulated("sm_90"):
        pass
    elsewhere = torch.empty(100, device="meta")
    with pytest.raises(BadTensor, match="source_ptr is on meta; the simulator reads"), simulated("gfx942"):
        _copy_kernel[(1,)](elsewhere, torch.empty(100), 100, BLOCK=128)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BadSetting, match="use a process without it"), simulated("gfx942"):
        pass


@every_arch
def test_a_read_past_a_tensors_storage_is_a_fault(arch: str) -> None:
    rows = torch.randn(8, 32, dtype=torch.float32).half()
    row_ids = torch.arange(32, dtype=torch.int32) % 8
    row_ids[17] = 8
    message = r"_gather_product_kernel, program \(0, 0, 0\).*the start of rows_ptr, which has 512"
    with pytest.raises(SimulationFault, match=message), simulated(arch):
        launch_gather_product(rows, row_ids, torch.empty(32, 32))


@every_arch
def test_a_product_is_a_product(arch: str) -> None:
    rows, row_ids, out = torch.randn(64, 32).half(), torch.randperm(64).int()[:32], torch.empty(32, 32)
    with simulated(arch):
        launch_gather_product(rows, row_ids, out)
    tile = rows[row_ids.long()].double()
    torch.testing.assert_close(out.double(), tile @ tile, atol=1e-4, rtol=1e-4)


@every_arch
def test_the_text_of_a_kernel_is_read_whole(arch: str) -> None:
    (compiled,) = compiled_by(lambda: launch_copy(torch.empty(1000), torch.empty(1000)), arch)
    assembly = parse_assembly(compiled.asm["amdgcn"])
    assert assembly.name == "_copy_kernel"
    assert assembly.instructions[-1].name == "s_endpgm"
    assert assembly.descriptor["system_sgpr_workgroup_id_x"] == 1
    assert assembly.arguments[:3] == (
        Argument(0, 8, "global_buffer"),
        Argument(8, 8, "global_buffer"),
        Argument(16, 4, "by_value"),
    )
    lines = [line.split(";")[0].split() for line in compiled.asm["amdgcn"].splitlines()]
    emitted = [words[0] for words in lines if words and words[0].startswith(("v_", "s_", "ds_", "buffer_", "global_"))]
    assert len(assembly.instructions) == len(emitted)


def test_the_kernel_is_read_and_not_a_function_before_it() -> None:
    def code(name: str, line: str) -> str:
        return f"{name}:\t; @{name}\n\t{line}\n\ts_endpgm\n\t.section\t.rodata\n"

    text = f"{code('helper', 's_nop 0')}{code('kernel', 's_nop 1')}\t.amdhsa_kernel kernel\n\t.end_amdhsa_kernel\n"
    assembly = parse_assembly(f"{text}\t.amdgpu_metadata\n\t.end_amdgpu_metadata\n")
    assert (assembly.name, [each.text for each in assembly.instructions]) == ("kernel", ["s_nop 1", "s_endpgm"])


def test_operands_and_modifiers_are_reported_apart() -> None:
    read = parse_instruction("v_pk_fma_f32 v[0:1], s[2:3], -v[4:5], |v6| op_sel_hi:[1,0,1] neg_lo:[0,0,1]")
    assert (read.name, read.encoding) == ("v_pk_fma_f32", "")
    assert read.operands == ("v[0:1]", "s[2:3]", "-v[4:5]", "|v6|")
    assert read.bits("op_sel_hi", ()) == (1, 0, 1)
    read = parse_instruction("ds_swizzle_b32 v0, v1 offset:swizzle(SWAP,16)")
    assert read.modifiers == {"offset": "swizzle(SWAP,16)"}
    read = parse_instruction("v_add_u32_dpp v1, v2, v3 quad_perm:[1,0,3,2] row_mask:0xf bound_ctrl:1")
    assert (read.name, read.encoding, read.operands) == ("v_add_u32", "dpp", ("v1", "v2", "v3"))
    assert (read.bits("quad_perm", ()), read.number("row_mask")) == ((1, 0, 3, 2), 15)
