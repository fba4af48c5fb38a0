"""Vector arithmetic, and what is common to it: EXEC, constants, modifiers, SDWA, DPP, masks."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.amd.simulator.arrays import Array
from tests.amd.simulator.core import POISON, VCC
from tests.amd.simulator.faults import UnknownInstruction
from tests.amd.simulator.snippet import ALL_LANES, LANE, bits, execute, floats

TOP = 1 << 31
MINUS_1 = (1 << 32) - 1
RANDOM = np.random.default_rng(0)


def random_words() -> Array:
    return RANDOM.integers(0, 1 << 32, 64, np.uint32)


def random_floats(scale: float = 1.0) -> Array:
    return (RANDOM.standard_normal(64) * scale).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "sources", "result"),
    [
        ("v_mov_b32", [7], 7),
        ("v_not_b32", [0], MINUS_1),
        ("v_bfrev_b32", [0b1101], 0b1011 << 28),
        ("v_add_u32", [MINUS_1, 3], 2),
        ("v_sub_u32", [1, 3], MINUS_1 - 1),
        ("v_subrev_u32", [1, 3], 2),
        ("v_add3_u32", [1, 2, MINUS_1], 2),
        ("v_add_lshl_u32", [1, 2, 33], 6),
        ("v_lshl_add_u32", [3, 4, 5], 53),
        ("v_lshl_or_b32", [1, 4, 17], 17),
        ("v_and_or_b32", [12, 10, 1], 9),
        ("v_or3_b32", [1, 2, 4], 7),
        ("v_xad_u32", [6, 3, 10], 15),
        ("v_bfi_b32", [0xF0, 0xAA, 0x55], 0xA5),
        ("v_bfe_u32", [0xABCD, 8, 4], 0xB),
        ("v_bfe_i32", [0xABCD, 8, 4], MINUS_1 - 4),
        ("v_bfe_i32", [0xABCD, 8, 0], 0),
        ("v_perm_b32", [0x77665544, 0x33221100, 0x07050200], 0x77552200),
        ("v_perm_b32", [0x80000000, 0x00008000, 0x0D0C0B08], 0xFF00FFFF),
        ("v_alignbit_b32", [0x11223344, 0x55667788, 8], 0x44556677),
        ("v_lshlrev_b32", [33, 3], 6),
        ("v_lshrrev_b32", [31, TOP], 1),
        ("v_ashrrev_i32", [31, TOP], MINUS_1),
        ("v_mul_lo_u32", [MINUS_1, 3], MINUS_1 - 2),
        ("v_mul_hi_u32", [MINUS_1, 3], 2),
        ("v_mul_hi_i32", [MINUS_1, 3], MINUS_1),
        ("v_mul_u32_u24", [0xFF000002, 3], 6),
        ("v_mad_u32_u24", [0xFF000002, 3, 1], 7),
        ("v_mad_i32_i24", [0xFFFFFF, 3, 1], MINUS_1 - 1),
        ("v_max_i32", [MINUS_1, 3], 3),
        ("v_min_i32", [MINUS_1, 3], MINUS_1),
        ("v_max_u32", [MINUS_1, 3], MINUS_1),
        ("v_min_u32", [MINUS_1, 3], 3),
        ("v_med3_i32", [MINUS_1, 0, 9], 0),
        ("v_med3_i32", [5, 0, 9], 5),
        ("v_med3_i32", [50, 0, 9], 9),
        ("v_add_u16", [0xABCDFFFF, 3], 2),
        ("v_mul_lo_u16", [0x100, 0x101], 0x100),
        ("v_max_i16", [0xFFFF, 1], 1),
        ("v_lshlrev_b16", [17, 3], 6),
        ("v_ashrrev_i16", [15, 0x8000], 0xFFFF),
        ("v_pack_b32_f16", [0x11112222, 0x33334444], 0x44442222),
        ("v_cvt_f32_u32", [MINUS_1], bits(2.0**32)),
        ("v_cvt_f32_i32", [MINUS_1], bits(-1.0)),
        ("v_cvt_f32_ubyte2", [0x00070000], bits(7.0)),
        ("v_cvt_u32_f32", [bits(-3.0)], 0),
        ("v_cvt_u32_f32", [bits(1e20)], MINUS_1),
        ("v_cvt_u32_f32", [bits(math.nan)], 0),
        ("v_cvt_i32_f32", [bits(-3.7)], MINUS_1 - 2),
    ],
)
def test_arithmetic_of_a_lane(name: str, sources: list[int], result: int) -> None:
    tokens = ", ".join(f"v{index}" for index in range(len(sources)))
    core = execute(f"{name}_e64 v9, {tokens}", vector=dict(enumerate(sources)))
    assert set(core.vector[9].tolist()) == {result}


@pytest.mark.parametrize("truth_table", [0x00, 0xFF, 0xF8, 0x96, 0xCA])
def test_three_way_bit_operations_follow_their_truth_table(truth_table: int) -> None:
    a, b, c = random_words(), random_words(), random_words()
    core = execute(f"v_bitop3_b32 v3, v0, v1, v2 bitop3:{truth_table:#x}", vector={0: a, 1: b, 2: c})
    for bit in range(32):
        row = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
        assert ((core.vector[3] >> bit & 1) == (truth_table >> row & 1)).all()


def test_inactive_lanes_keep_what_they_have() -> None:
    core = execute("v_add_u32_e32 v0, v0, v1", vector={0: LANE, 1: 100}, exec_mask=0b1010)
    assert core.vector[0].tolist() == [1 * lane + 100 * (lane in (1, 3)) for lane in range(64)]


@pytest.mark.parametrize(
    ("operand", "value"),
    [("s3", 77), ("5", 5), ("-16", MINUS_1 - 15), ("1.0", bits(1.0)), ("-4.0", bits(-4.0)), ("0x3e22f983", 0x3E22F983)],
)
def test_scalars_and_constants_are_the_same_in_every_lane(operand: str, value: int) -> None:
    core = execute(f"v_mov_b32_e32 v0, {operand}", scalar={3: 77})
    assert set(core.vector[0].tolist()) == {value}


@pytest.mark.parametrize(
    ("operand", "value"), [("-v0", -2.5), ("|v1|", 1.5), ("-|v1|", -1.5), ("-s0", -8.0), ("-1.0", -1.0)]
)
def test_float_sources_are_negated_and_made_absolute(operand: str, value: float) -> None:
    core = execute(f"v_add_f32_e64 v2, {operand}, 0", vector={0: bits(2.5), 1: bits(-1.5)}, scalar={0: bits(8.0)})
    assert set(floats(core, 2).tolist()) == {value}


def test_64_bit_results_take_two_registers() -> None:
    a, b, c = random_words(), random_words(), RANDOM.integers(0, 1 << 63, 64, np.uint64)
    halves = {2: (c & MINUS_1).astype(np.uint32), 3: (c >> np.uint64(32)).astype(np.uint32)}
    core = execute(
        "v_mad_u64_u32 v[4:5], s[0:1], v0, v1, v[2:3]",
        "v_lshl_add_u64 v[6:7], v[2:3], 3, v[4:5]",
        "v_ashrrev_i64 v[8:9], 8, v[2:3]",
        "v_mov_b64_e32 v[10:11], s[4:5]",
        vector={0: a, 1: b, **halves},
        scalar={4: 1, 5: 2},
    )

    def pairs(index: int) -> list[int]:
        low, high = core.vector[index].tolist(), core.vector[index + 1].tolist()
        return [x | y << 32 for x, y in zip(low, high, strict=True)]

    whole = [x * y + z for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    assert pairs(4) == [x & ALL_LANES for x in whole]
    assert pairs(6) == [(z * 8 + x) & ALL_LANES for x, z in zip(whole, c.tolist(), strict=True)]
    assert pairs(8) == [z >> 8 for z in c.tolist()]
    assert set(pairs(10)) == {1 | 2 << 32}


def test_signed_64_bit_products_are_signed() -> None:
    core = execute("v_mad_i64_i32 v[2:3], s[0:1], v0, v1, 0", vector={0: MINUS_1, 1: 5})
    assert set(core.vector[2].tolist()) == {(1 << 32) - 5}
    assert set(core.vector[3].tolist()) == {MINUS_1}


def test_carries_travel_in_masks() -> None:
    a, b = random_words(), random_words()
    core = execute(
        "v_add_co_u32_e32 v2, vcc, v0, v1",
        "v_addc_co_u32_e32 v3, vcc, 0, v4, vcc",
        "v_sub_co_u32_e64 v5, s[0:1], v0, v1",
        "v_subb_co_u32_e64 v6, s[2:3], v4, v4, s[0:1]",
        vector={0: a, 1: b, 4: MINUS_1},
    )
    carry, borrow = (a.astype(np.uint64) + b) >> np.uint64(32), (b > a).astype(np.uint32)
    assert (core.vector[2] == a + b).all()
    assert (core.vector[3] == (MINUS_1 + carry) % (1 << 32)).all()
    assert (core.read_mask(VCC) == carry.astype(bool)).all()
    assert (core.vector[6] == 0 - borrow).all()
    assert (core.read_mask(2) == borrow.astype(bool)).all()


@pytest.mark.parametrize(("name", "expected"), [("v_sub_u32", 0), ("v_add_u32", None)])
def test_clamp_saturates_where_it_is_known_and_is_an_error_elsewhere(name: str, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(UnknownInstruction, match="clamp"):
            execute(f"{name}_e64 v1, v0, 9 clamp", vector={0: 3})
    else:
        assert set(execute(f"{name}_e64 v1, v0, 9 clamp", vector={0: 3}).vector[1].tolist()) == {expected}


def test_lanes_below_are_counted() -> None:
    mask = int(RANDOM.integers(0, 1 << 63))
    core = execute(
        "v_mbcnt_lo_u32_b32 v0, s0, 0", "v_mbcnt_hi_u32_b32 v0, s1, v0", scalar={0: mask & MINUS_1, 1: mask >> 32}
    )
    assert core.vector[0].tolist() == [(mask & ((1 << lane) - 1)).bit_count() for lane in range(64)]


# --- floats


def test_fma_rounds_once() -> None:
    a, b = random_floats(), random_floats()
    c = -(a * b)
    core = execute(
        "v_fma_f32 v3, v0, v1, v2", vector={0: a.view(np.uint32), 1: b.view(np.uint32), 2: c.view(np.uint32)}
    )
    exact = [
        float(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))) for x, y, z in zip(a, b, c, strict=True)
    ]
    assert (floats(core, 3) == np.array(exact, np.float32)).all()
    assert (floats(core, 3) != 0).any()


def test_fmac_adds_to_its_destination() -> None:
    core = execute("v_fmac_f32_e32 v0, v1, v2", vector={0: bits(1.0), 1: bits(2.0), 2: bits(3.0)})
    assert set(floats(core, 0).tolist()) == {7.0}


@pytest.mark.parametrize(
    ("numerator", "denominator"), [(1.0, 3.0), (-7.0, 0.0), (0.0, 0.0), (1e-38, 1e10), (3e38, 1e-10), (math.inf, 2.0)]
)
def test_the_division_sequence_divides_as_ieee_does(numerator: float, denominator: float) -> None:
    """The instructions that LLVM makes of a division, with n in v0 and d in v1."""
    core = execute(
        "v_div_scale_f32 v2, s[0:1], v1, v1, v0",
        "v_rcp_f32_e32 v3, v2",
        "v_div_scale_f32 v4, vcc, v0, v1, v0",
        "v_fma_f32 v5, -v2, v3, 1.0",
        "v_fmac_f32_e32 v3, v5, v3",
        "v_mul_f32_e32 v5, v4, v3",
        "v_fma_f32 v6, -v2, v5, v4",
        "v_fmac_f32_e32 v5, v6, v3",
        "v_fma_f32 v2, -v2, v5, v4",
        "v_div_fmas_f32 v2, v2, v3, v5",
        "v_div_fixup_f32 v2, v2, v1, v0",
        vector={0: bits(numerator), 1: bits(denominator)},
    )
    with np.errstate(all="ignore"):
        expected = np.float32(numerator) / np.float32(denominator)
    np.testing.assert_array_equal(floats(core, 2), np.full(64, expected))


def test_maximum_and_minimum_prefer_numbers_to_nan() -> None:
    core = execute(
        "v_max_f32_e32 v2, v0, v1",
        "v_max3_f32 v3, v0, v1, v0",
        "v_min_f32_e32 v4, v1, v0",
        vector={0: bits(math.nan), 1: bits(-2.0)},
    )
    assert [set(floats(core, index).tolist()) for index in (2, 3, 4)] == [{-2.0}] * 3


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("v_exp_f32", 3.0, 8.0),
        ("v_exp_f32", -math.inf, 0.0),
        ("v_log_f32", 8.0, 3.0),
        ("v_log_f32", 0.0, -math.inf),
        ("v_rcp_f32", 4.0, 0.25),
        ("v_rsq_f32", 4.0, 0.5),
        ("v_sqrt_f32", 9.0, 3.0),
        ("v_rndne_f32", 2.5, 2.0),
        ("v_floor_f32", -2.5, -3.0),
        ("v_trunc_f32", -2.5, -2.0),
    ],
)
def test_functions_of_one_float(name: str, value: float, expected: float) -> None:
    assert set(floats(execute(f"{name}_e32 v1, v0", vector={0: bits(value)}), 1).tolist()) == {expected}


def test_ldexp_scales_by_powers_of_two() -> None:
    core = execute("v_ldexp_f32 v2, v0, v1", vector={0: bits(1.5), 1: (LANE - 32).astype(np.uint32)})
    assert (floats(core, 2) == 1.5 * 2.0 ** (LANE - 32)).all()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_conversions_to_16_bits_round_as_torch_does(name: str, dtype: torch.dtype) -> None:
    a, b = random_floats(100), random_floats(1e-3)
    a[:3] = [math.inf, 65520.0, -0.0]
    core = execute(f"v_cvt_pk_{name}_f32 v2, v0, v1", vector={0: a.view(np.uint32), 1: b.view(np.uint32)})
    for half, values in ((0, a), (1, b)):
        expected = torch.from_numpy(values).to(dtype).view(torch.int16).numpy().view(np.uint16)
        assert (core.vector[2].view(np.uint16)[half::2] == expected).all()


def test_half_precision_clears_the_upper_half_of_its_destination() -> None:
    core = execute("v_cvt_f16_f32_e32 v1, v0", "v_cvt_f32_f16_e32 v2, v1", vector={0: bits(0.1), 1: MINUS_1})
    assert set(core.vector[1].tolist()) == {int(np.float16(0.1).view(np.uint16))}
    assert set(floats(core, 2).tolist()) == {float(np.float16(0.1))}


NAN = bits(math.nan)


@pytest.mark.parametrize(
    ("condition", "a", "b", "holds"),
    [
        ("lt_i32", MINUS_1, 1, True),
        ("lt_u32", MINUS_1, 1, False),
        ("ge_u32", MINUS_1, 1, True),
        ("ne_u32", 1, 1, False),
        ("eq_u16", 0x10001, 1, True),
        ("gt_f32", bits(2.0), bits(1.0), True),
        ("eq_f32", NAN, NAN, False),
        ("neq_f32", NAN, NAN, True),
        ("lg_f32", NAN, bits(1.0), False),
        ("nlt_f32", NAN, bits(1.0), True),
        ("nge_f32", bits(2.0), bits(1.0), False),
        ("o_f32", NAN, bits(1.0), False),
        ("u_f32", NAN, bits(1.0), True),
    ],
)
def test_comparisons_write_a_mask_in_which_inactive_lanes_are_0(condition: str, a: int, b: int, holds: bool) -> None:
    core = execute(f"v_cmp_{condition}_e64 s[4:5], v0, v1", vector={0: a, 1: b}, exec_mask=0xFF00)
    assert core.read_pair(4) == (0xFF00 if holds else 0)


def test_select_by_mask() -> None:
    core = execute("v_cndmask_b32_e64 v2, v0, -v1, s[0:1]", vector={0: 1, 1: bits(3.0)}, scalar={0: 0b101, 1: TOP})
    assert [lane for lane in range(64) if core.vector[2][lane] == bits(-3.0)] == [0, 2, 63]
    assert [lane for lane in range(64) if core.vector[2][lane] == 1] == [
        lane for lane in LANE if lane not in (0, 2, 63)
    ]


# --- packed


def test_packed_floats_choose_halves_and_signs() -> None:
    values = {0: bits(1.0), 1: bits(2.0), 2: bits(10.0), 3: bits(20.0)}
    plain = execute("v_pk_add_f32 v[4:5], v[0:1], v[2:3]", vector=values)
    crossed = execute("v_pk_add_f32 v[4:5], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]", vector=values)
    low_twice = execute("v_pk_mul_f32 v[4:5], v[0:1], v[2:3] op_sel_hi:[1,0]", vector=values)
    negated = execute("v_pk_fma_f32 v[4:5], v[0:1], v[2:3], v[0:1] neg_lo:[0,0,1] neg_hi:[1,0,0]", vector=values)
    found = [(float(floats(core, 4)[0]), float(floats(core, 5)[0])) for core in (plain, crossed, low_twice, negated)]
    assert found == [(11.0, 22.0), (12.0, 21.0), (10.0, 20.0), (9.0, -38.0)]


def test_a_packed_result_may_lie_on_its_sources() -> None:
    core = execute("v_pk_mov_b32 v[0:1], v[0:1], v[0:1] op_sel:[1,0]", vector={0: 5, 1: 6})
    assert (core.vector[0][0], core.vector[1][0]) == (6, 5)


def test_packed_halves() -> None:
    core = execute("v_pk_max_i16 v2, v0, v1", vector={0: 0x0003FFFF, 1: 0x00020001})
    assert set(core.vector[2].tolist()) == {0x00030001}


# --- SDWA and DPP


def test_parts_of_registers_are_zero_or_sign_extended() -> None:
    values = {0: 0x89ABCDEF, 1: 1}
    rows = {
        "v_add_u32_sdwa v2, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:DWORD": 0xCE,
        "v_add_u32_sdwa v2, v1, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1": 0x89AC,
        "v_add_u32_sdwa v2, sext(v0), v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:DWORD": (
            0xFFFFFF8A
        ),
    }
    for line, result in rows.items():
        assert set(execute(line, vector=values).vector[2].tolist()) == {result}


def test_comparisons_look_at_the_chosen_parts() -> None:
    line = "v_cmp_eq_u16_sdwa vcc, v0, v1 src0_sel:BYTE_2 src1_sel:BYTE_0"
    assert execute(line, vector={0: 0x00330000, 1: 0x33}).read_pair(VCC) == ALL_LANES
    assert execute(line, vector={0: 0x00000033, 1: 0x33}).read_pair(VCC) == 0


def test_a_select_of_parts_still_reads_its_mask() -> None:
    line = "v_cndmask_b32_sdwa v2, v0, v1, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1"
    core = execute(line, vector={0: 7, 1: 0x00090000}, scalar={VCC: 0b10, VCC + 1: 0})
    assert core.vector[2].tolist() == [7, 9] + [7] * 62


DPP_SOURCES = {
    "row_shl:3": lambda lane: lane + 3 if lane % 16 + 3 < 16 else None,
    "row_shr:4": lambda lane: lane - 4 if lane % 16 >= 4 else None,
    "row_ror:8": lambda lane: lane ^ 8,
    "quad_perm:[1,0,3,2]": lambda lane: lane ^ 1,
    "row_half_mirror": lambda lane: lane // 8 * 8 + 7 - lane % 8,
    "row_mirror": lambda lane: lane // 16 * 16 + 15 - lane % 16,
    "row_bcast:15": lambda lane: lane // 16 * 16 - 1 if lane >= 16 else None,
    "row_bcast:31": lambda lane: 31 if lane >= 32 else None,
    "row_newbcast:5": lambda lane: lane // 16 * 16 + 5,
}


@pytest.mark.parametrize("reads_zero", [True, False])
@pytest.mark.parametrize("exec_mask", [ALL_LANES, 0xFFFF_00FF_F0F0_FFFE])
@pytest.mark.parametrize("control", DPP_SOURCES)
def test_dpp_reads_other_lanes(control: str, exec_mask: int, reads_zero: bool) -> None:
    masks = "row_mask:0xb bank_mask:0x7" + (" bound_ctrl:1" if reads_zero else "")
    core = execute(f"v_add_u32_dpp v2, v0, v1 {control} {masks}", vector={0: LANE + 1000, 1: 5}, exec_mask=exec_mask)
    for lane in range(64):
        source = DPP_SOURCES[control](lane)
        has_source = source is not None and exec_mask >> source & 1
        is_written = exec_mask >> lane & 1 and 0xB >> lane // 16 & 1 and 0x7 >> lane % 16 // 4 & 1
        expected = POISON
        if is_written and (has_source or reads_zero):
            expected = 5 + (1000 + source if has_source else 0)
        assert int(core.vector[2][lane]) == expected, lane


# --- between lanes


def test_values_travel_between_lanes_and_scalars() -> None:
    core = execute(
        "v_readfirstlane_b32 s0, v0",
        "v_readlane_b32 s1, v0, 9",
        "v_writelane_b32 v1, s1, 2",
        vector={0: LANE * 3, 1: 0},
        exec_mask=0xF0,
    )
    assert (int(core.scalar[0]), int(core.scalar[1])) == (12, 27)
    assert core.vector[1].tolist() == [0, 0, 27] + [0] * 61


def test_bpermute_gathers_and_gives_0_for_inactive_lanes() -> None:
    lanes = RANDOM.permutation(64)
    core = execute("ds_bpermute_b32 v2, v0, v1", vector={0: lanes * 4, 1: LANE + 100}, exec_mask=ALL_LANES ^ 1 << 5)
    assert core.vector[2].tolist() == [
        POISON if lane == 5 else 0 if source == 5 else source + 100 for lane, source in enumerate(lanes.tolist())
    ]


@pytest.mark.parametrize(
    ("offset", "source"),
    [
        ("swizzle(SWAP,16)", lambda lane: lane ^ 16),
        ("swizzle(REVERSE,8)", lambda lane: lane ^ 7),
        ("0x041f", lambda lane: lane ^ 1),
    ],
)
def test_swizzles(offset: str, source: object) -> None:
    value = offset if "(" in offset else str(int(offset, 0))
    core = execute(f"ds_swizzle_b32 v1, v0 offset:{value}", vector={0: LANE})
    assert callable(source)
    assert core.vector[1].tolist() == [source(lane) for lane in range(64)]


@pytest.mark.parametrize("group", [16, 32])
def test_permlane_swaps_groups_of_two_registers(group: int) -> None:
    core = execute(f"v_permlane{group}_swap_b32_e32 v0, v1", vector={0: LANE, 1: LANE + 100})
    for lane in range(64):
        is_odd = bool(lane & group)
        assert int(core.vector[0][lane]) == (lane - group + 100 if is_odd else lane)
        assert int(core.vector[1][lane]) == (lane + 100 if is_odd else lane + group)


def test_what_gfx942_lacks_is_unknown_there() -> None:
    for line in ("v_permlane32_swap_b32_e32 v0, v1", "v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], 0"):
        with pytest.raises(UnknownInstruction, match="on gfx942"):
            execute(line, arch="gfx942")


@pytest.mark.parametrize(
    "line",
    [
        "v_mystery_f32 v0, v1",
        "v_add_f32_e64 v0, v1, v2 mul:2",
        "v_add_u32_e32 v0, v1",
        "v_add_u32_e32 v0, ttmp3, v1",
        "v_add_u32_sdwa v0, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
        "v_mov_b32_dpp v0, v1 wave_shr:1 row_mask:0xf bank_mask:0xf",
        "v_pk_mul_f32 v[0:1], v[2:3], 2.0",
        "buffer_atomic_add v0, v1, s[0:3], 0 offen",
        'ds_swizzle_b32 v0, v1 offset:swizzle(BITMASK_PERM,"00p11")',
        "s_load_dword s0, s[2:3], 0x0 glc",
    ],
)
def test_what_is_not_known_is_an_error(line: str) -> None:
    with pytest.raises(UnknownInstruction):
        execute(line)
