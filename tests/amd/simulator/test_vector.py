"""Common properties of vector instructions: EXEC, constants, modifiers, SDWA, DPP, masks; and moves between lanes."""

from collections.abc import Callable

import numpy as np
import pytest

from rocm_lab.simulator.core import POISON, VCC
from rocm_lab.simulator.faults import UnknownInstruction
from tests.amd.simulator.snippet import ALL_LANES, LANE, bits, execute, floats

TOP = 1 << 31
MINUS_1 = (1 << 32) - 1
RANDOM = np.random.default_rng(0)


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
    ("operand", "value"),
    [("-v0", -2.5), ("|v1|", 1.5), ("-|v1|", -1.5), ("-s0", -8.0), ("-1.0", -1.0), ("neg(2.0)", -2.0)],
)
def test_float_sources_are_negated_and_made_absolute(operand: str, value: float) -> None:
    core = execute(f"v_add_f32_e64 v2, {operand}, 0", vector={0: bits(2.5), 1: bits(-1.5)}, scalar={0: bits(8.0)})
    assert set(floats(core, 2).tolist()) == {value}


@pytest.mark.parametrize(("name", "expected"), [("v_sub_u32", 0), ("v_add_u32", None)])
def test_clamp_saturates_where_it_is_known_and_is_an_error_elsewhere(name: str, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(UnknownInstruction, match="clamp"):
            execute(f"{name}_e64 v1, v0, 9 clamp", vector={0: 3})
    else:
        assert set(execute(f"{name}_e64 v1, v0, 9 clamp", vector={0: 3}).vector[1].tolist()) == {expected}


def test_select_by_mask() -> None:
    core = execute("v_cndmask_b32_e64 v2, v0, -v1, s[0:1]", vector={0: 1, 1: bits(3.0)}, scalar={0: 0b101, 1: TOP})
    assert [lane for lane in range(64) if core.vector[2][lane] == bits(-3.0)] == [0, 2, 63]
    assert [lane for lane in range(64) if core.vector[2][lane] == 1] == [
        lane for lane in LANE if lane not in (0, 2, 63)
    ]


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


def test_halves_of_registers_are_half_precision_numbers() -> None:
    for part, result in (("WORD_0", 1.5), ("WORD_1", -2.0)):
        line = f"v_cvt_f32_f16_sdwa v1, v0 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:{part}"
        assert set(execute(line, vector={0: 0xC0003E00}).vector[1].tolist()) == {bits(result)}


def test_comparisons_look_at_the_chosen_parts() -> None:
    line = "v_cmp_eq_u16_sdwa vcc, v0, v1 src0_sel:BYTE_2 src1_sel:BYTE_0"
    assert execute(line, vector={0: 0x00330000, 1: 0x33}).read_pair(VCC) == ALL_LANES
    assert execute(line, vector={0: 0x00000033, 1: 0x33}).read_pair(VCC) == 0


def test_a_select_of_parts_still_reads_its_mask() -> None:
    line = "v_cndmask_b32_sdwa v2, v0, v1, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1"
    core = execute(line, vector={0: 7, 1: 0x00090000}, scalar={VCC: 0b10, VCC + 1: 0})
    assert core.vector[2].tolist() == [7, 9] + [7] * 62


# Lane -> the lane that it reads from, or None.
DPP_SOURCES: dict[str, Callable[[int], int | None]] = {
    "row_shl:3": lambda lane: lane + 3 if lane % 16 + 3 < 16 else None,
    "row_shr:4": lambda lane: lane - 4 if lane % 16 >= 4 else None,
    "wave_shl:1": lambda lane: lane + 1 if lane < 63 else None,
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
            expected = 5 + (1000 + source if source is not None and has_source else 0)
        assert int(core.vector[2][lane]) == expected, lane


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


def test_a_permutation_gives_a_lane_the_last_value_that_was_sent_to_it() -> None:
    to = np.where(LANE < 4, 60, LANE - 4).astype(np.uint32)
    core = execute("ds_permute_b32 v2, v0, v1", vector={0: to * 4, 1: LANE + 100, 2: 7}, exec_mask=ALL_LANES ^ 1 << 5)
    # Lane 5, which is not active, sends nothing to lane 1, and receives nothing.
    want = [LANE[lane] + 104 for lane in range(60)] + [103, 0, 0, 0]
    want[1], want[5] = 0, 7
    assert core.vector[2].tolist() == want


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
def test_swizzles(offset: str, source: Callable[[int], int]) -> None:
    value = offset if "(" in offset else str(int(offset, 0))
    core = execute(f"ds_swizzle_b32 v1, v0 offset:{value}", vector={0: LANE})
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
        "v_add_u32_sdwa v0, v1, v2 dst_sel:BYTE_1 dst_unused:UNUSED_SEXT src0_sel:DWORD src1_sel:DWORD",
        "v_mov_b32_dpp v0, v1 wave_shr:1 row_mask:0xf bank_mask:0xf",
        "v_pk_mul_f32 v[0:1], v[2:3], 2.0",
        "buffer_atomic_fmin v0, v1, s[0:3], 0 offen",
        'ds_swizzle_b32 v0, v1 offset:swizzle(BITMASK_PERM,"00p11")',
        "s_load_dword s0, s[2:3], 0x0 glc",
    ],
)
def test_what_is_not_known_is_an_error(line: str) -> None:
    with pytest.raises(UnknownInstruction):
        execute(line)
