"""Scalar arithmetic, SCC, branches on it, and EXEC; examples from the ISA document, worked out by hand."""

import pytest

from rocm_lab.simulator.assembly import Assembly, parse_instruction
from rocm_lab.simulator.core import EXEC, POISON, VCC, Core
from rocm_lab.simulator.isa.instructions import build_step
from rocm_lab.simulator.isa.step import AT_BARRIER, AT_END, Context
from rocm_lab.simulator.memory import Memory
from tests.amd.simulator.snippet import ALL_LANES, execute

TOP = 1 << 31
MINUS_1 = (1 << 32) - 1


@pytest.mark.parametrize(
    ("name", "a", "b", "result", "scc"),
    [
        ("s_add_u32", MINUS_1, 1, 0, 1),
        ("s_add_u32", 5, 7, 12, 0),
        ("s_sub_u32", 5, 7, MINUS_1 - 1, 1),
        ("s_add_i32", TOP - 1, 1, TOP, 1),
        ("s_add_i32", MINUS_1, 1, 0, 0),
        ("s_sub_i32", TOP, 1, TOP - 1, 1),
        ("s_mul_i32", MINUS_1, 7, (1 << 32) - 7, None),
        ("s_mul_hi_u32", MINUS_1, MINUS_1, MINUS_1 - 1, None),
        ("s_mul_hi_i32", MINUS_1, 7, MINUS_1, None),
        ("s_min_i32", MINUS_1, 3, MINUS_1, 1),
        ("s_max_i32", MINUS_1, 3, 3, 0),
        ("s_min_u32", MINUS_1, 3, 3, 0),
        ("s_max_u32", MINUS_1, 3, MINUS_1, 1),
        ("s_and_b32", 12, 10, 8, 1),
        ("s_and_b32", 12, 3, 0, 0),
        ("s_or_b32", 12, 3, 15, 1),
        ("s_xor_b32", 12, 12, 0, 0),
        ("s_andn2_b32", 12, 10, 4, 1),
        ("s_orn2_b32", 0, MINUS_1, 0, 0),
        ("s_lshl_b32", 3, 33, 6, 1),
        ("s_lshr_b32", TOP, 31, 1, 1),
        ("s_ashr_i32", TOP, 31, MINUS_1, 1),
        ("s_lshl1_add_u32", TOP, 1, 1, 1),
        ("s_lshl4_add_u32", 2, 3, 35, 0),
        ("s_bfe_u32", 0xABCD, 8 | 4 << 16, 0xB, 1),
        ("s_bfe_i32", 0xABCD, 8 | 4 << 16, MINUS_1 - 4, 1),
        ("s_bfe_u32", 0xABCD, 8, 0, 0),
        ("s_bfm_b32", 4, 8, 0xF00, None),
        ("s_pack_ll_b32_b16", 0x11112222, 0x33334444, 0x44442222, None),
        ("s_pack_lh_b32_b16", 0x11112222, 0x33334444, 0x33332222, None),
        ("s_pack_hh_b32_b16", 0x11112222, 0x33334444, 0x33331111, None),
    ],
)
def test_32_bit_arithmetic(name: str, a: int, b: int, result: int, scc: int | None) -> None:
    for before in (0, 1):
        core = execute(f"{name} s2, s0, s1", scalar={0: a, 1: b}, scc=before)
        assert (int(core.scalar[2]), core.scc) == (result, before if scc is None else scc)


@pytest.mark.parametrize(
    ("name", "a", "result", "scc"),
    [
        ("s_not_b32", 0, MINUS_1, 1),
        ("s_brev_b32", 0b1101, 0b1011 << 28, None),
        ("s_abs_i32", MINUS_1, 1, 1),
        ("s_sext_i32_i8", 0x180, MINUS_1 - 127, None),
        ("s_sext_i32_i16", 0x18000, MINUS_1 - 0x7FFF, None),
        ("s_bcnt1_i32_b32", 0xF0F, 8, 1),
        ("s_ff1_i32_b32", 0x50, 4, None),
        ("s_ff1_i32_b32", 0, MINUS_1, None),
        ("s_flbit_i32_b32", 0x50, 25, None),
        ("s_flbit_i32_b32", 0, MINUS_1, None),
        ("s_flbit_i32", 0x50, 25, None),
        ("s_flbit_i32", MINUS_1 - 0x50, 25, None),
        ("s_flbit_i32", MINUS_1, MINUS_1, None),
        ("s_mov_b32", 9, 9, None),
    ],
)
def test_instructions_with_one_source(name: str, a: int, result: int, scc: int | None) -> None:
    core = execute(f"{name} s2, s0", scalar={0: a}, scc=0)
    assert (int(core.scalar[2]), core.scc) == (result, scc or 0)


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("s_bitset0_b32 s0, 31", 0x7FFFFFFF),
        ("s_bitset0_b32 s0, s1", MINUS_1 - 2),
        ("s_bitset1_b32 s1, 4", 49),
        ("s_bitset1_b32 s1, s0", 33 | TOP),
    ],
)
def test_bits_are_set_and_the_others_stay(line: str, result: int) -> None:
    core = execute(line, scalar={0: MINUS_1, 1: 33}, scc=1)
    assert (int(core.scalar[int(line[15])]), core.scc) == (result, 1)


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("s_lshl_b64 s[4:5], s[0:1], 36", 0x1_2345_6789 << 36 & ALL_LANES),
        ("s_lshr_b64 s[4:5], s[0:1], 4", 0x1234_5678),
        ("s_and_b64 s[4:5], s[0:1], -1", 0x1_2345_6789),
        ("s_andn2_b64 s[4:5], -1, s[0:1]", 0x1_2345_6789 ^ ALL_LANES),
        ("s_mov_b64 s[4:5], s[0:1]", 0x1_2345_6789),
        ("s_mov_b64 s[4:5], -2", ALL_LANES - 1),
        ("s_not_b64 s[4:5], s[0:1]", 0x1_2345_6789 ^ ALL_LANES),
        ("s_or_b64 s[4:5], s[0:1], 8", 0x1_2345_6789 | 8),
        ("s_xor_b64 s[4:5], s[0:1], s[0:1]", 0),
        ("s_orn2_b64 s[4:5], 1, s[0:1]", 0x1_2345_6789 ^ ALL_LANES | 1),
        ("s_ashr_i64 s[4:5], -16, 3", ALL_LANES - 1),
        ("s_bcnt1_i32_b64 s4, s[0:1]", POISON << 32 | (0x1_2345_6789).bit_count()),
        ("s_ff1_i32_b64 s4, s[0:1]", POISON << 32),
        ("s_flbit_i32_b64 s4, s[0:1]", POISON << 32 | 31),
    ],
)
def test_64_bit_arithmetic(line: str, result: int) -> None:
    assert execute(line, scalar={0: 0x23456789, 1: 1}).read_pair(4) == result


def test_carries_make_64_bit_sums_of_32_bit_halves() -> None:
    a, b = 0xFFFFFFFF_FFFFFFF0, 0x1_00000020
    halves = {0: a & MINUS_1, 1: a >> 32, 2: b & MINUS_1, 3: b >> 32}
    core = execute("s_add_u32 s4, s0, s2", "s_addc_u32 s5, s1, s3", scalar=halves)
    assert (core.read_pair(4), core.scc) == ((a + b) & ALL_LANES, 1)
    core = execute("s_sub_u32 s4, s2, s0", "s_subb_u32 s5, s3, s1", scalar=halves)
    assert (core.read_pair(4), core.scc) == ((b - a) & ALL_LANES, 1)


def test_constants_of_16_bits_are_signed() -> None:
    core = execute(
        "s_movk_i32 s0, 0xfffe", "s_mulk_i32 s0, 0x3", "s_addk_i32 s0, 0xffff", "s_cmpk_lt_i32 s0, 0xfffa", scc=0
    )
    assert (int(core.scalar[0]), core.scc) == (MINUS_1 - 6, 1)


OPERATORS = {"eq": "==", "lg": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("kind", ["i32", "u32", "u64"])
@pytest.mark.parametrize("condition", OPERATORS)
def test_every_comparison(condition: str, kind: str) -> None:
    for a in (0, 3, -5):
        for b in (0, 3, -5):
            mask = (1 << int(kind[1:])) - 1
            x, y = (a, b) if kind[0] == "i" else (a & mask, b & mask)
            expected = eval(f"{x} {OPERATORS[condition]} {y}")
            assert execute(f"s_cmp_{condition}_{kind} {a}, {b}").scc == expected
            if kind != "u64" and b >= 0:
                assert execute(f"s_cmpk_{condition}_{kind} s0, {b}", scalar={0: a}).scc == expected


@pytest.mark.parametrize(
    ("line", "scc"),
    [
        ("s_cmp_lt_i32 s0, s1", 1),
        ("s_cmp_lt_u32 s0, s1", 0),
        ("s_cmp_ge_u32 s0, s1", 1),
        ("s_cmp_lg_u32 s0, s1", 1),
        ("s_cmp_eq_u32 s0, -1", 1),
        ("s_cmp_eq_u64 s[0:1], s[0:1]", 1),
        ("s_cmp_lg_u64 s[0:1], 0", 1),
        ("s_bitcmp0_b32 s1, 1", 1),
        ("s_bitcmp1_b32 s1, 0", 1),
        ("s_cmpk_gt_u32 s0, 0xffff", 1),
    ],
)
def test_comparisons_set_scc(line: str, scc: int) -> None:
    for before in (0, 1):
        assert execute(line, scalar={0: MINUS_1, 1: 1}, scc=before).scc == scc


def test_select_takes_the_first_source_when_scc_is_set() -> None:
    for scc, expected in ((1, ALL_LANES), (0, 0)):
        assert execute("s_cselect_b64 s[0:1], -1, 0", scc=scc).read_pair(0) == expected


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("s_and_saveexec_b64", 0b0100),
        ("s_or_saveexec_b64", 0b0111),
        ("s_xor_saveexec_b64", 0b0011),
        ("s_andn2_saveexec_b64", 0b0010),
        ("s_orn2_saveexec_b64", ALL_LANES ^ 0b0001),
    ],
)
def test_saveexec_keeps_the_old_mask_and_sets_the_new_one(name: str, result: int) -> None:
    core = execute(f"{name} s[0:1], s[2:3]", scalar={2: 0b0110, 3: 0}, exec_mask=0b0101)
    assert (core.read_pair(0), core.read_pair(EXEC), core.scc) == (0b0101, result, 1)
    assert core.active.tolist() == [bool(result >> lane & 1) for lane in range(64)]


@pytest.mark.parametrize(
    ("name", "changes", "is_taken"),
    [
        ("s_branch", {}, True),
        ("s_cbranch_scc0", {"scc": 1}, False),
        ("s_cbranch_scc1", {"scc": 1}, True),
        ("s_cbranch_vccz", {"vcc": 0}, True),
        ("s_cbranch_vccnz", {"vcc": 0}, False),
        ("s_cbranch_vccnz", {"vcc": 1 << 40}, True),
        ("s_cbranch_execz", {"exec": 0}, True),
        ("s_cbranch_execnz", {"exec": 0}, False),
    ],
)
def test_branches(name: str, changes: dict[str, int], is_taken: bool) -> None:
    core = Core(Memory([]))
    core.scc = changes.get("scc", 0)
    core.write_pair(VCC, changes.get("vcc", 0))
    core.write_pair(EXEC, changes.get("exec", ALL_LANES))
    context = Context(core, Assembly("snippet", (), {".LBB0_1": 7}, {}, ()), "gfx942")
    assert build_step(context, parse_instruction(f"{name} .LBB0_1"))() == (7 if is_taken else None)


def test_barrier_and_end_are_reported_apart() -> None:
    context = Context(Core(Memory([])), Assembly("snippet", (), {}, {}, ()), "gfx942")
    assert build_step(context, parse_instruction("s_barrier"))() == AT_BARRIER
    assert build_step(context, parse_instruction("s_endpgm"))() == AT_END
