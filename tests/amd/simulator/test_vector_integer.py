"""Vector arithmetic on integers and bits; examples from the ISA document, worked out by hand."""

import math

import numpy as np
import pytest

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.core import VCC
from tests.amd.simulator.snippet import ALL_LANES, bits, execute

TOP = 1 << 31
MINUS_1 = (1 << 32) - 1
RANDOM = np.random.default_rng(0)


def random_words() -> Array:
    """uint32 [64]."""
    return RANDOM.integers(0, 1 << 32, 64, np.uint32)


@pytest.mark.parametrize(
    ("name", "sources", "result"),
    [
        ("v_mov_b32", [7], 7),
        ("v_not_b32", [0], MINUS_1),
        ("v_bfrev_b32", [0b1101], 0b1011 << 28),
        ("v_ffbh_i32", [1], 31),
        ("v_ffbh_i32", [MINUS_1 - 4], 29),
        ("v_ffbh_i32", [0x40000000], 1),
        ("v_ffbh_i32", [0x80000000], 1),
        ("v_ffbh_i32", [0], MINUS_1),
        ("v_ffbh_i32", [MINUS_1], MINUS_1),
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
        ("v_bfm_b32", [4, 40], 0xF00),
        ("v_bfm_b32", [0, 3], 0),
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
        ("v_max3_i32", [MINUS_1, 9, 3], 9),
        ("v_max3_u32", [MINUS_1, 9, 3], MINUS_1),
        ("v_bcnt_u32_b32", [0xF0F00001, 5], 14),
        ("v_min3_i32", [3, 9, MINUS_1], MINUS_1),
        ("v_min3_u32", [3, 9, MINUS_1], 3),
        ("v_max3_i16", [0xFFFF, 9, 3], 9),
        ("v_min3_u16", [0xFFFF, 9, 3], 3),
        ("v_med3_i16", [0xFFFF, 9, 3], 3),
        ("v_ffbh_u32", [0x00800001], 8),
        ("v_ffbh_u32", [0], MINUS_1),
        ("v_max_u32", [MINUS_1, 3], MINUS_1),
        ("v_min_u32", [MINUS_1, 3], 3),
        ("v_med3_i32", [MINUS_1, 0, 9], 0),
        ("v_med3_i32", [5, 0, 9], 5),
        ("v_med3_i32", [50, 0, 9], 9),
        ("v_and_b32", [12, 10], 8),
        ("v_or_b32", [12, 3], 15),
        ("v_xor_b32", [12, 10], 6),
        ("v_mul_i32_i24", [0xFFFFFF, 3], MINUS_1 - 2),
        ("v_mul_hi_i32_i24", [0xFFFFFF, 3], MINUS_1),
        ("v_mul_hi_u32_u24", [0xABFFFFFF, 0xFFFFFF], 0xFFFF),
        ("v_accvgpr_read_b32", [7], 7),
        ("v_add_u16", [0xABCDFFFF, 3], 2),
        ("v_sub_u16", [1, 3], 0xFFFE),
        ("v_subrev_u16", [3, 1], 0xFFFE),
        ("v_max_u16", [0xFFFF, 1], 0xFFFF),
        ("v_min_u16", [0xFFFF, 1], 1),
        ("v_min_i16", [0xFFFF, 1], 0xFFFF),
        ("v_lshrrev_b16", [15, 0xFFFF8000], 1),
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
        ("v_cvt_i16_f16", [0xC380], 0xFFFD),  # -3.75
        ("v_cvt_i16_f16", [0x7C00], 0x7FFF),  # infinity
        ("v_cvt_f16_i16", [0xFFFD], 0xC200),  # -3
        ("v_cvt_f16_u16", [0xFFFF], 0x7C00),
        ("v_cvt_u16_f16", [0xC380], 0),
        ("v_frexp_exp_i32_f32", [bits(-12.0)], 4),
        ("v_frexp_exp_i32_f32", [bits(math.inf)], 0),
        ("v_frexp_mant_f32", [bits(-12.0)], bits(-0.75)),
        ("v_frexp_mant_f32", [bits(math.inf)], bits(math.inf)),
    ],
)
def test_arithmetic_of_a_lane(name: str, sources: list[int], result: int) -> None:
    tokens = ", ".join(f"v{index}" for index in range(len(sources)))
    core = execute(f"{name}_e64 v9, {tokens}", vector=dict(enumerate(sources)))
    assert set(core.vector[9].tolist()) == {result}


def test_a_difference_of_16_bits_stops_at_zero_if_it_is_clamped() -> None:
    sdwa = "v_sub_u16_sdwa v3, v0, v1 clamp dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:DWORD"
    vector: dict[int, Array | int] = {0: np.arange(64, dtype=np.uint32), 1: 9}
    core = execute("v_sub_u16_e64 v2, v0, v1 clamp", sdwa, vector=vector)
    for index in (2, 3):
        assert core.vector[index].tolist() == [max(lane - 9, 0) for lane in range(64)]


@pytest.mark.parametrize("truth_table", [0x00, 0xFF, 0xF8, 0x96, 0xCA])
def test_three_way_bit_operations_follow_their_truth_table(truth_table: int) -> None:
    a, b, c = random_words(), random_words(), random_words()
    core = execute(f"v_bitop3_b32 v3, v0, v1, v2 bitop3:{truth_table:#x}", vector={0: a, 1: b, 2: c})
    for bit in range(32):
        row = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
        assert ((core.vector[3] >> bit & 1) == (truth_table >> row & 1)).all()


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


def test_lanes_below_are_counted() -> None:
    mask = int(RANDOM.integers(0, 1 << 63))
    core = execute(
        "v_mbcnt_lo_u32_b32 v0, s0, 0", "v_mbcnt_hi_u32_b32 v0, s1, v0", scalar={0: mask & MINUS_1, 1: mask >> 32}
    )
    assert core.vector[0].tolist() == [(mask & ((1 << lane) - 1)).bit_count() for lane in range(64)]


@pytest.mark.parametrize("name", ["max_u16", "min_i16", "add_u16", "sub_u16", "mul_lo_u16", "lshlrev_b16", "add_f16"])
def test_packed_halves_are_two_of_the_plain_kind(name: str) -> None:
    a, b = (RANDOM.integers(0, 0x7800, (2, 64), np.uint32) for _ in range(2))
    core = execute(
        f"v_pk_{name} v2, v0, v1",
        f"v_{name}_e32 v3, v4, v5",
        f"v_{name}_e32 v6, v7, v8",
        vector={0: a[0] | a[1] << 16, 1: b[0] | b[1] << 16, 4: a[0], 5: b[0], 7: a[1], 8: b[1]},
    )
    assert (core.vector[2] == core.vector[3] | core.vector[6] << 16).all()


def test_packed_halves_are_signed_where_they_say_so() -> None:
    core = execute("v_pk_max_i16 v2, v0, v1", vector={0: 0x0003FFFF, 1: 0x00020001})
    assert set(core.vector[2].tolist()) == {0x00030001}
