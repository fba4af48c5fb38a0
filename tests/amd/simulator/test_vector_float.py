"""Vector arithmetic on floats, conversions and comparisons."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from rocm_lab.simulator.arrays import Array
from rocm_lab.simulator.core import Core
from tests.amd.simulator.snippet import ALL_LANES, LANE, bits, execute, floats

MINUS_1 = (1 << 32) - 1
RANDOM = np.random.default_rng(0)


def random_floats(scale: float = 1.0) -> Array:
    """float32 [64]."""
    return (RANDOM.standard_normal(64) * scale).astype(np.float32)


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


OPERATORS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}


@pytest.mark.parametrize("kind", ["i16", "u16", "f16", "i32", "u32", "f32", "i64", "u64", "f64"])
def test_every_comparison(kind: str) -> None:
    """Against Python's, for the conditions and their negations, which hold with NaN."""
    width, is_float = int(kind[1:]), kind[0] == "f"
    values = [0, 3, -5] if kind[0] == "i" else [0.0, 3.0, -5.0, math.nan] if is_float else [0, 3, 2**width - 5]
    conditions = dict(OPERATORS) | ({} if is_float else {"ne": "!="})
    for a in values:
        for b in values:
            bits_of = [int(np.array(x, f"{kind[0]}{width // 8}").view(f"u{width // 8}")) for x in (a, b)]
            words = {2 * i + j: bits_of[i] >> 32 * j & 0xFFFFFFFF for i in range(2) for j in range(2)}
            tokens = "v[0:1], v[2:3]" if width == 64 else "v0, v2"
            expected = {name: eval(f"a {sign} b", {"a": a, "b": b}) for name, sign in conditions.items()}
            if is_float:
                expected |= {f"n{name}": not holds for name, holds in expected.items() if name != "eq"}
                expected |= {"neq": a != b, "lg": a < b or a > b, "nlg": not (a < b or a > b)}
                expected |= {"u": a != a or b != b, "o": a == a and b == b}
            for name, holds in expected.items():
                core = execute(f"v_cmp_{name}_{kind}_e64 s[0:1], {tokens}", vector=words)
                assert core.read_pair(0) == (ALL_LANES if holds else 0), (name, a, b)


# In the order of the class mask's bits: a value of each class, as bits of a half, a float, and a double's upper half.
CLASSES = {
    "signaling NaN": (0x7C01, 0x7F800001, 0x7FF00001),
    "quiet NaN": (0x7E00, 0xFFC00000, 0xFFF80000),
    "-inf": (0xFC00, 0xFF800000, 0xFFF00000),
    "-normal": (0xFBFF, 0xFF7FFFFF, 0xFFEFFFFF),
    "-subnormal": (0x83FF, 0x807FFFFF, 0x800FFFFF),
    "-0": (0x8000, 0x80000000, 0x80000000),
    "+0": (0, 0, 0),
    "+subnormal": (1, 1, 1),
    "+normal": (0x0400, 0x00800000, 0x00100000),
    "+inf": (0x7C00, 0x7F800000, 0x7FF00000),
}


@pytest.mark.parametrize(("kind", "at"), [("f16", 0), ("f32", 1), ("f64", 2)])
def test_a_value_is_of_one_class(kind: str, at: int) -> None:
    for name, words in CLASSES.items():
        for bit, other in enumerate(CLASSES):
            for mask, expected in ((1 << bit, name == other), (0x3FF ^ 1 << bit, name != other)):
                vector = {0: 0, 1: words[at], 2: mask}
                core = execute(f"v_cmp_class_{kind}_e64 s[0:1], {'v[0:1]' if at == 2 else 'v1'}, v2", vector=vector)
                assert core.read_pair(0) == (ALL_LANES if expected else 0), (name, other)


def doubles(core: Core, index: int) -> list[float]:
    """The doubles of two registers."""
    low, high = core.vector[index].astype(np.uint64), core.vector[index + 1].astype(np.uint64)
    return (low | high << np.uint64(32)).view(np.float64).tolist()


def words_of(*values: float) -> dict[int, int]:
    """Doubles in registers from 0 on, two each."""
    return {index: int(word) for index, word in enumerate(np.array(values).view(np.uint32))}


def test_fma_of_doubles_rounds_once() -> None:
    a, b = 1 + 2.0**-52, 1 - 2.0**-52
    core = execute(
        "v_fma_f64 v[6:7], v[0:1], v[2:3], -1.0",
        "v_fmac_f64_e32 v[4:5], v[0:1], v[2:3]",
        "v_fma_f64 v[8:9], v[12:13], 0, 1.0",
        "v_fma_f64 v[10:11], v[14:15], 2.0, -v[14:15]",
        "v_fma_f64 v[16:17], v[14:15], 2.0, v[14:15]",
        vector={**words_of(a, b, -1.0), 12: 0, 13: 0x7FF00000, 14: 0, 15: 0x7FE00000},
    )
    assert {*doubles(core, 6), *doubles(core, 4)} == {-(2.0**-104)}
    assert all(math.isnan(value) for value in doubles(core, 8))
    assert (doubles(core, 10)[0], doubles(core, 16)[0]) == (2.0**1023, math.inf)


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("v_add_f64 v[4:5], v[0:1], |v[2:3]|", 14.5),
        ("v_add_f64 v[4:5], v[0:1], -|v[2:3]|", -9.5),
        ("v_mul_f64 v[4:5], v[0:1], 0x40080000", 7.5),
        ("v_max_f64 v[4:5], v[0:1], v[2:3]", 2.5),
        ("v_min_f64 v[4:5], v[0:1], v[2:3]", -12.0),
        ("v_rcp_f64_e32 v[4:5], v[0:1]", 0.4),
        ("v_trunc_f64_e64 v[4:5], -v[0:1]", -2.0),
        ("v_floor_f64_e64 v[4:5], -v[0:1]", -3.0),
        ("v_ceil_f64_e32 v[4:5], v[0:1]", 3.0),
        ("v_rndne_f64_e32 v[4:5], v[0:1]", 2.0),
        ("v_frexp_mant_f64_e32 v[4:5], v[2:3]", -0.75),
        ("v_ldexp_f64 v[4:5], v[0:1], -2", 0.625),
        ("v_cvt_f64_i32_e32 v[4:5], v6", -7.0),
        ("v_cvt_f64_u32_e32 v[4:5], v6", 2.0**32 - 7),
        ("v_cvt_f64_f32_e32 v[4:5], 0.5", 0.5),
    ],
)
def test_arithmetic_of_doubles(line: str, result: float) -> None:
    core = execute(line, vector={**words_of(2.5, -12.0), 6: -7 & 0xFFFFFFFF})
    assert set(doubles(core, 4)) == {result}


def test_doubles_are_narrowed() -> None:
    core = execute(
        "v_cvt_f32_f64_e32 v4, v[0:1]",
        "v_cvt_i32_f64_e32 v5, v[2:3]",
        "v_cvt_u32_f64_e32 v6, v[2:3]",
        "v_frexp_exp_i32_f64_e32 v7, v[2:3]",
        vector=words_of(1 + 2.0**-30, -12.75),
    )
    assert [int(core.vector[index][0]) for index in (4, 5, 6, 7)] == [bits(1.0), -12 & 0xFFFFFFFF, 0, 4]


def test_fma_with_a_literal() -> None:
    core = execute(
        "v_fmamk_f32 v2, v0, 0x41200000, v1",
        "v_fmaak_f32 v3, v0, v1, 0x41200000",
        "v_min3_f32 v4, v0, v1, 1.0",
        "v_subrev_f32_e32 v5, v0, v1",
        vector={0: bits(2.0), 1: bits(3.0)},
    )
    assert [float(floats(core, index)[0]) for index in (2, 3, 4, 5)] == [23.0, 16.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "max", "min"])
def test_half_precision_arithmetic_rounds_as_torch_does(name: str) -> None:
    a, b = (torch.from_numpy(random_floats()).half() for _ in range(2))
    core = execute(
        f"v_{name}_f16_e32 v2, v0, v1",
        vector={i: x.view(torch.int16).numpy().view(np.uint16) for i, x in enumerate((a, b))},
    )
    names = {"max": "maximum", "min": "minimum"}
    expected = getattr(torch, names.get(name, name))(a, b).view(torch.int16).numpy().view(np.uint16)
    assert (core.vector[2] == expected).all()


@pytest.mark.parametrize(
    ("name", "sources", "result"),
    [
        ("max3", (1, -2, math.nan), 1),
        ("min3", (1, -2, 3), -2),
        ("med3", (1, -2, 3), 1),
        ("med3", (math.nan, -2, 3), -2),
        ("div_fixup", (0.375, 8, 3), 0.375),
        ("div_fixup", (math.nan, 0, -3), -math.inf),
        ("div_fixup", (math.nan, math.inf, 3), 0),
        ("div_fixup", (7, 2.0**15, 1), 2.0**-15),
    ],
)
def test_half_precision_of_three(name: str, sources: tuple[float, ...], result: float) -> None:
    vector = {index: int(np.float16(value).view(np.uint16)) for index, value in enumerate(sources)}
    core = execute(f"v_{name}_f16 v3, v0, v1, v2", vector=vector)
    assert core.vector[3][:1].view(np.float16)[0] == result


def test_half_precision_fma_rounds_once() -> None:
    """(1 + 2 ** -10) ** 2 - 1 is 2 ** -9 + 2 ** -20; rounded twice, the last part is lost."""
    factor, one = 0x3C01, 0x3C00
    exact = int(np.float16(2**-9 + 2**-20).view(np.uint16))
    both, ones = factor | factor << 16, one | one << 16
    vector = {0: both, 1: ones, 2: ones | 0x80008000}
    core = execute(
        "v_fma_f16 v3, v0, v0, -v1",
        "v_fmac_f16_e32 v2, v0, v0",
        "v_pk_fma_f16 v4, v0, v0, v1 neg_lo:[0,0,1] neg_hi:[0,0,1]",
        "v_pk_add_f16 v5, v0, v1 neg_lo:[0,1] neg_hi:[1,0]",
        "v_pk_mul_f16 v6, v1, 2.0 op_sel_hi:[1,0] neg_lo:[0,1]",
        vector=vector,
    )
    assert [int(core.vector[index][0]) for index in (3, 2)] == [exact, exact]
    tiny = int(np.float16(2**-10).view(np.uint16))
    assert [int(core.vector[index][0]) for index in (4, 5, 6)] == [
        exact | exact << 16,
        tiny | (tiny | 0x8000) << 16,
        0xC000 | 0x4000 << 16,
    ]


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


def test_the_maximum_and_minimum_of_cdna_4_are_nan_if_one_of_three_is() -> None:
    core = execute(
        "v_maximum3_f32 v3, v1, v2, v1",
        "v_minimum3_f32 v4, v1, v2, v1",
        "v_maximum3_f32 v5, v0, v1, v2",
        "v_minimum3_f32 v6, v1, v2, v0",
        vector={0: bits(math.nan), 1: bits(-2.0), 2: bits(3.0)},
    )
    assert [set(floats(core, index).tolist()) for index in (3, 4)] == [{3.0}, {-2.0}]
    assert np.isnan([floats(core, index) for index in (5, 6)]).all()


@pytest.mark.parametrize(
    ("value", "expected"), [(-9.0, -2.0), (0.5, 0.5), (3.0, 2.0), (math.inf, 2.0), (math.nan, -2.0)]
)
def test_the_median_of_a_value_and_two_bounds_keeps_it_within_them(value: float, expected: float) -> None:
    core = execute("v_med3_f32 v3, v0, v1, v2", vector={0: bits(value), 1: bits(-2.0), 2: bits(2.0)})
    assert set(floats(core, 3).tolist()) == {expected}


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
        ("v_ceil_f32", -2.5, -2.0),
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


@pytest.mark.parametrize(
    ("number", "found"), [(1.0009, 1.0), (-1.0009, -1.0), (0.5, 0.5), (1e6, 65504.0), (-math.inf, -math.inf)]
)
def test_a_conversion_to_half_precision_towards_zero(number: float, found: float) -> None:
    core = execute("v_cvt_pkrtz_f16_f32 v2, v0, v1", vector={0: bits(number), 1: bits(-number)})
    assert set(core.vector[2].view(np.float16)[0::2].tolist()) == {found}
    assert set(core.vector[2].view(np.float16)[1::2].tolist()) == {-found}


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


@pytest.mark.parametrize("into", ["_f32", "lo_f16", "hi_f16"])
def test_a_mixed_fma_takes_either_width_and_leaves_the_other_half(into: str) -> None:
    """-|upper half of v0| * v1 + lower half of v2."""
    halves = random_floats().astype(np.float16), random_floats().astype(np.float16)
    b, c = random_floats(), random_floats().astype(np.float16)
    upper = halves[1].view(np.uint16).astype(np.uint32) << np.uint32(16)
    words = {
        0: halves[0].view(np.uint16) | upper,
        1: b.view(np.uint32),
        2: c.view(np.uint16).astype(np.uint32),
        3: np.full(64, 0x12345678, np.uint32),
    }
    text = f"v_fma_mix{into} v3, v0, v1, v2 op_sel:[1,0,0] op_sel_hi:[1,0,1] neg_lo:[1,0,0] neg_hi:[1,0,0]"
    core = execute(text, vector=words)
    a = -np.abs(halves[1].astype(np.float64))
    exact = (a * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)
    if into == "_f32":
        assert (floats(core, 3) == exact).all()
        return
    half = exact.astype(np.float16).view(np.uint16).astype(np.uint32)
    expected = 0x12340000 | half if into == "lo_f16" else half << np.uint32(16) | 0x5678
    assert (core.vector[3] == expected).all()
