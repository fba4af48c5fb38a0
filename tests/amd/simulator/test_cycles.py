"""The count of clocks: each issue rule alone, in loops whose clocks follow from the rule's own source by hand."""

import json
from itertools import repeat
from pathlib import Path

import pytest

from rocm_attn.cli import BAD_INPUT, DONE, main
from rocm_lab.cycles import rates
from rocm_lab.cycles.count import count_loop, waves_of
from rocm_lab.cycles.issue import Simd, slots_of
from rocm_lab.cycles.loops import hot_loop, innermost_loops, is_staggered, other_half
from rocm_lab.simulator.assembly import Assembly, parse_assembly, parse_instruction
from tests.amd.simulator.test_wait_files import assembly_text

# Results never feed the next product, so that nothing but issue counts.
PRODUCT = {
    "gfx942": "v_mfma_f32_32x32x8_bf16 v[0:15], v[64:65], v[66:67], v[16:31]",
    "gfx950": "v_mfma_f32_32x32x16_bf16 v[0:15], v[64:67], v[68:71], v[16:31]",
}
PLAIN = "v_add_f32_e32 v90, v91, v92"
PACKED = "v_pk_mul_f32 v[90:91], v[92:93], v[94:95]"
EXP = "v_exp_f32_e32 v90, v91"
READ_16 = "ds_read_b128 v[100:103], v104"
READ_8 = "ds_read_b64 v[100:101], v104"
WRITE_16 = "ds_write_b128 v104, v[100:103]"
LOAD_16 = "buffer_load_dwordx4 v[100:103], v104, s[0:3], 0 offen"
BOTH = ("gfx942", "gfx950")


def clocks(
    lines: list[str], arch: str = "gfx950", programs: tuple[int, ...] = (0,), *, staggered: bool = False
) -> float:
    return Simd(slots_of([parse_instruction(line) for line in lines], arch), programs, staggered).clocks(40)


def kernel(*lines: str) -> Assembly:
    """A kernel for gfx950 of these lines."""
    return parse_assembly(assembly_text(*(f"{line}\n" for line in lines), arch="gfx950"))


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("num", [1, 6, 16])
def test_products_follow_each_other_after_their_passes(arch: str, num: int) -> None:
    assert clocks([PRODUCT[arch]] * num, arch) == 32 * num
    assert clocks([PRODUCT[arch]] * num, arch, (0, 1)) == 2 * 32 * num


@pytest.mark.parametrize("arch", BOTH)
def test_six_vector_instructions_hide_beside_a_product_and_a_seventh_does_not(arch: str) -> None:
    assert clocks([PRODUCT[arch], *[PLAIN] * 6] * 4, arch) == 32 * 4
    assert clocks([PRODUCT[arch], *[PLAIN] * 7] * 4, arch) == 36 * 4


def optimum(products: int, units: int) -> int:
    """The least time of a region, by its published proof (mfma_coissue_scheduling.md, "Solution")."""
    left = max(0, units - 6 * products)
    tail = 4 * left - 4 * ((left - 3) // 2) if left >= 3 else 4 * left
    return 32 * products + tail


@pytest.mark.parametrize("units", range(24, 56))
def test_the_published_best_order_of_products_and_vector_work_takes_the_published_time(units: int) -> None:
    """A packed operation does two units: 6 units go beside each product, 3 come alone, and the others are packed."""
    products, left = 4, max(0, units - 24)
    tail = [PLAIN] * left if left < 3 else [*[PLAIN] * (3 + (left - 3) % 2), *[PACKED] * ((left - 3) // 2)]
    lines = [each for _ in range(products) for each in (PRODUCT["gfx950"], *[PLAIN] * 6)] + tail
    assert clocks(lines) == optimum(products, units)


def test_a_packed_operation_waits_for_the_matrix_unit_and_its_hazard() -> None:
    assert clocks([PRODUCT["gfx950"], PACKED]) == 32 + rates.PACKED_AFTER_MATRIX + 4
    assert clocks([PACKED] * 5) == 4 * 5


def test_a_packed_operation_holds_the_products_of_another_wave_too() -> None:
    assert clocks([PRODUCT["gfx950"], PACKED], programs=(0, 1)) == 2 * 32 + rates.PACKED_AFTER_MATRIX + 2 * 4


@pytest.mark.parametrize(("arch", "each"), [("gfx942", 16), ("gfx950", 8)])
def test_exp2_takes_a_quarter_of_the_rate_and_half_of_it_on_cdna_4(arch: str, each: int) -> None:
    assert clocks([EXP] * 8, arch) == 8 * each


@pytest.mark.parametrize(
    ("arch", "line", "each"),
    [
        ("gfx942", READ_16, 32),
        ("gfx950", READ_16, 16),
        ("gfx942", READ_8, 16),
        ("gfx950", READ_8, 8),
        ("gfx942", WRITE_16, 32),
        ("gfx950", WRITE_16, 32),
    ],
)
def test_a_quarter_of_lds_serves_a_simd(arch: str, line: str, each: int) -> None:
    assert clocks([line] * 20, arch) == 20 * each


def test_few_reads_of_lds_issue_without_waiting_for_it() -> None:
    """A queue takes them while vector instructions run."""
    assert clocks([*[READ_16] * rates.LDS_QUEUE, *[PLAIN] * 60]) == 4 * (rates.LDS_QUEUE + 60)


def test_a_wait_lasts_until_the_data_have_come() -> None:
    assert clocks([READ_16, "s_waitcnt lgkmcnt(0)"]) == rates.LDS_LATENCY + 4
    assert clocks([LOAD_16, "s_waitcnt vmcnt(0)"]) == rates.MEMORY_LATENCY + 64 + 4
    assert clocks(["s_load_dword s4, s[0:1], 0x0", "s_waitcnt lgkmcnt(0)"]) == rates.SCALAR_LATENCY + 4


def test_a_wait_for_all_but_one_lets_the_last_load_fly() -> None:
    one, none = ([LOAD_16, f"s_waitcnt vmcnt({left})", *[PLAIN] * 130] for left in (1, 0))
    assert clocks(one) == clocks([LOAD_16, *[PLAIN] * 131])
    assert clocks(none) == rates.MEMORY_LATENCY + 64 + 4 * 131


def test_vector_memory_delivers_a_load_of_16_bytes_in_64_clocks() -> None:
    assert clocks([*[LOAD_16] * 10, "s_waitcnt vmcnt(0)"]) == rates.MEMORY_LATENCY + 640 + 4


def test_no_ops_are_issue_slots() -> None:
    assert clocks(["s_nop 7", PLAIN]) == 8 * 4 + 4


def test_two_waves_fill_each_others_waits() -> None:
    """Alone, 8 products and 8 exchanges with LDS take both times; together, the products bound them."""
    lines = [*[PRODUCT["gfx950"]] * 8, READ_16, "s_waitcnt lgkmcnt(0)", *[PLAIN] * 20]
    assert clocks(lines) > 8 * 32 + 64
    assert clocks(lines, programs=(0, 1)) == 2 * 8 * 32


def test_vector_instructions_and_loads_of_two_waves_issue_in_the_same_clock() -> None:
    lines = [*[PLAIN] * 40, *[READ_8] * 20]
    alone, together = clocks(lines), clocks(lines, programs=(0, 1))
    assert alone > 4 * 40 + 8 * (20 - rates.LDS_QUEUE)
    assert together == pytest.approx(2 * 4 * 40, rel=0.03)


STAGES = [*[PRODUCT["gfx950"]] * 16, "s_barrier", *[READ_8] * 32, "s_waitcnt lgkmcnt(0)", "s_barrier"]


def test_waves_one_barrier_apart_take_turns() -> None:
    """While one computes the other reads, and hands over within the last product: the published floor is 4,105."""
    apart = clocks(STAGES, programs=(0, 0), staggered=True)
    assert apart == 2 * 16 * 32
    assert clocks(STAGES, programs=(0, 0)) > apart + 200


def test_a_barrier_of_one_program_does_not_hold_another() -> None:
    lines = [PRODUCT["gfx950"], "s_barrier", *[PLAIN] * 30]
    assert clocks(lines, programs=(0, 0)) > clocks(lines, programs=(0, 1))


def test_a_wave_of_higher_priority_issues_first() -> None:
    lines = ["s_setprio 1", *[PLAIN] * 8, "s_setprio 0", *[EXP] * 4]
    simd = Simd(slots_of([parse_instruction(line) for line in lines], "gfx950"), (0, 1), staggered=False)
    assert simd.clocks(40) >= 2 * (8 * 4 + 4 * 8)


MATRIX = PRODUCT["gfx950"]
BACK = ("s_add_u32 s4, s4, -1", "s_cbranch_scc1 .LBB0_1")


def test_a_loop_is_found_where_its_first_block_is_not_first_in_the_text() -> None:
    """LLVM rotates loops: the block that branches back may come before the one it branches to."""
    found = hot_loop(kernel("s_branch .LBB0_2", ".LBB0_1:", PLAIN, ".LBB0_2:", MATRIX, "s_cbranch_scc1 .LBB0_1"))
    assert found is not None
    assert [each.name for each in found.body] == ["v_mfma_f32_32x32x16_bf16", "s_cbranch_scc1", "v_add_f32"]


def test_the_hot_loop_is_the_innermost_with_the_most_matrix_instructions() -> None:
    inner = (".LBB0_1:", MATRIX, MATRIX, "s_cbranch_scc1 .LBB0_1")
    outer = (".LBB0_0:", MATRIX, MATRIX, MATRIX, *inner, "s_cbranch_scc1 .LBB0_0")
    other = (".LBB0_5:", MATRIX, "s_cbranch_scc1 .LBB0_5")
    assembly = kernel(*outer, *other)
    assert sorted(each.matrix_ops for each in innermost_loops(assembly)) == [1, 2]
    found = hot_loop(assembly)
    assert found is not None
    assert found.matrix_ops == 2


def test_a_kernel_without_products_in_a_loop_has_no_count() -> None:
    assert count_loop(kernel(MATRIX, ".LBB0_1:", PLAIN, *BACK), "gfx950", 2, 1) is None


def test_an_iteration_loads_what_it_can_and_skips_a_correction() -> None:
    skip = ("s_cbranch_execz .LBB0_3", *repeat(PLAIN, 9), ".LBB0_3:")
    load = ("s_cbranch_vccnz .LBB0_4", LOAD_16, ".LBB0_4:")
    found = hot_loop(kernel(".LBB0_1:", MATRIX, *skip, *load, *BACK))
    assert found is not None
    names = [each.name for each in found.body]
    assert "buffer_load_dwordx4" in names
    assert "v_add_f32" not in names


def test_waves_are_staggered_where_some_pass_a_barrier_alone() -> None:
    lines = ("s_cbranch_vccnz .LBB0_1", "s_barrier", ".LBB0_1:", MATRIX, "s_barrier", *BACK)
    assert is_staggered(kernel(*lines))
    assert not is_staggered(kernel(*lines[2:]))


def test_halves_of_a_program_may_run_two_loops() -> None:
    """So that one half's products hide the other's vector instructions, as in AITER's assembly."""
    products, rest = [*repeat(MATRIX, 8), "s_barrier"], [*repeat(PLAIN, 40), "s_barrier"]
    first = ("s_setprio 1", ".LBB0_1:", *products, *rest, *BACK)
    second = ("s_setprio 1", ".LBB0_3:", *rest, *products, "s_cbranch_scc1 .LBB0_3")
    parted = (".LBB0_0:", "s_cbranch_vccnz .LBB0_2", *first, "s_branch .LBB0_4", ".LBB0_2:", *second, ".LBB0_4:")
    apart, after = kernel(*parted, "s_cbranch_scc0 .LBB0_0"), kernel(*first, *second)
    halves, whole = count_loop(apart, "gfx950", 2, 2), count_loop(after, "gfx950", 2, 2)
    assert halves is not None
    assert whole is not None
    assert halves.matrix == whole.matrix == 2 * 8 * 32
    # Two phases, each as long as its products; whole: one wave's phases after the other's.
    assert 512 <= halves.clocks < 600
    assert whole.clocks > 512 + 2 * 40 * 4
    hot = hot_loop(apart)
    assert hot is not None
    other = other_half(apart, hot)
    assert other is not None
    assert (hot.priority, other.priority) == (1, 1)


@pytest.mark.parametrize(
    ("room", "num_warps", "waves"), [(2, 8, (2, 2)), (3, 8, (2, 2)), (4, 4, (4, 1)), (8, 1, (8, 1)), (1, 8, (2, 2))]
)
def test_waves_of_a_simd_are_whole_programs(room: int, num_warps: int, waves: tuple[int, int]) -> None:
    assert waves_of(room, num_warps) == waves


LOOP = ".LBB0_1:\n", f"\t{MATRIX}\n", *(f"\t{line}\n" for line in BACK)


def test_the_command_prints_clocks_and_the_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop.amdgcn").write_text(assembly_text(*LOOP, arch="gfx950"))
    (tmp_path / "none.s").write_text(assembly_text(arch="gfx942"))
    assert main(["cycles", str(tmp_path), "--waves", "1", "--num-warps", "4"]) == DONE
    first, second = capsys.readouterr().out.splitlines()
    # A product, an addition, and the branch back.
    assert first.startswith(
        "gfx950 kernel: 40 clocks an iteration of 1 waves a SIMD, 80.0% of the matrix units' ceiling"
    )
    assert second == "gfx942 kernel: no loop with matrix instructions"
    assert main(["cycles", str(tmp_path), "--json"]) == DONE
    (loop, none) = json.loads(capsys.readouterr().out)["kernels"]
    assert loop["count"]["matrix"] == 64
    assert none["count"] is None
    assert main(["cycles", str(tmp_path / "gone")]) == BAD_INPUT


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (assembly_text(LOOP[0], "\tv_unknown_b32 v1, v2\n", *LOOP[1:]), "v_unknown_b32"),
        (assembly_text().partition("\t.section")[0], "no kernel that ends at a .rodata section"),
        (assembly_text().partition("\t.amdgpu_metadata")[0], "no .amdgpu_metadata"),
    ],
    ids=["an instruction", "a cut kernel", "no arguments"],
)
def test_a_kernel_that_cannot_be_read_is_a_sentence(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "loop.s"
    file.write_text(text)
    assert main(["cycles", str(file)]) == BAD_INPUT
    said = capsys.readouterr().err
    assert f"the loops of {file} cannot be counted (" in said
    assert why in said
