"""Bounds of registers, by which loads into LDS are told from reads, hold what the simulator computes."""

import random
import re
from functools import reduce

import numpy as np
import pytest

from rocm_lab.simulator.assembly import parse_instruction
from rocm_lab.simulator.core import LANES, VCC
from rocm_lab.waits.bounds import ANYTHING, OPS, Bounds, exactly, hull, result_of
from rocm_lab.waits.effects import WITH_A_CONSTANT
from tests.amd.simulator.snippet import execute

_THREE = ("add3", "or3", "bfe", "and_or", "lshl_or", "lshl_add", "add_lshl", "bitop3")
# Their operands are no registers of 32 bits.
_OTHERS = ("v_cndmask_b32", "s_movk_i32", *WITH_A_CONSTANT)


def drawn(draw: random.Random) -> list[int]:
    """A value for each lane: multiples of a power of 2, from a number on, in few or in many bits."""
    mask = (1 << draw.choice((0, 1, 4, 9, 16, 24, 32))) - 1 & -1 << draw.choice((0, 0, 2, 6))
    first = draw.getrandbits(draw.choice((1, 5, 12, 31)))
    return [first + (draw.getrandbits(32) & mask) & 0xFFFFFFFF for _ in range(LANES)]


def holds(bounds: Bounds, value: int) -> bool:
    return bounds.low <= value <= bounds.high and not value & ~bounds.ones


@pytest.mark.parametrize("name", [*(name for name in OPS if name not in _OTHERS), "v_bitop3_b32"])
def test_what_is_computed_lies_within_the_bounds(name: str) -> None:
    draw = random.Random(name)
    count = 3 if any(f"v_{each}_" in name for each in _THREE) else 1 if re.search("_(mov|accvgpr)_", name) else 2
    are_known = 0
    for _ in range(60):
        values = [drawn(draw) for _ in range(count)]
        if draw.random() < 0.5:  # shifts and widths are constants mostly
            values = [each if draw.random() < 0.5 else [draw.randrange(24)] * LANES for each in values]
        kind = name[0]
        table = f" bitop3:{draw.randrange(256):#x}" if "bitop3" in name else ""
        line = f"{name} {kind}9, {', '.join(f'{kind}{n}' for n in range(count))}{table}"
        found = result_of(parse_instruction(line), [reduce(hull, map(exactly, each)) for each in values])
        are_known += found != ANYTHING
        if kind == "v":
            core = execute(line, vector={n: np.array(each, np.uint32) for n, each in enumerate(values)})
            results = core.vector[9].tolist()
        else:
            runs = [execute(line, scalar={n: each[lane] for n, each in enumerate(values)}) for lane in range(2)]
            results = [int(core.scalar[9]) for core in runs]
        assert all(holds(found, result) for result in results), (line, values, found)
    assert are_known > 10


def test_a_choice_of_lanes_is_either() -> None:
    line = "v_cndmask_b32_e32 v9, v0, v1, vcc"
    found = result_of(parse_instruction(line), [exactly(64), exactly(80), ANYTHING])
    assert found == Bounds(64, 80, 80)
    results = execute(line, vector={0: 64, 1: 80}, scalar={VCC: 5, VCC + 1: 0}).vector[9]
    assert all(holds(found, result) for result in results.tolist())


@pytest.mark.parametrize("name", WITH_A_CONSTANT)
def test_a_constant_meets_the_number_that_is_written_over(name: str) -> None:
    line = f"{name} s9, 0x6440"
    assert result_of(parse_instruction(line), [exactly(64), exactly(0x6440)]) == exactly(
        int(execute(line, scalar={9: 64}).scalar[9])
    )
    assert result_of(parse_instruction(f"{name} s9, 0xffff"), [exactly(64), exactly(0xFFFF)]) == ANYTHING


def test_a_field_has_a_width_only_if_all_its_bits_are_known() -> None:
    """The least and the largest of these places have the same width, 0."""
    line, places = "s_bfe_u32 s9, s0, s1", (0, 24 << 16, 128 << 16)
    found = result_of(parse_instruction(line), [exactly(0xABCD), reduce(hull, map(exactly, places))])
    assert all(holds(found, int(execute(line, scalar={0: 0xABCD, 1: place}).scalar[9])) for place in places)
    assert result_of(parse_instruction(line), [ANYTHING, exactly(8 | 4 << 16)]) == Bounds(0, 15, 15)


def test_a_negative_number_is_added() -> None:
    found = result_of(parse_instruction("s_add_i32 m0, s43, 0xffff9ea0"), [Bounds(67936, 75616), exactly(0xFFFF9EA0)])
    assert (found.low, found.high) == (67936 - 24928, 75616 - 24928)
    assert result_of(parse_instruction("s_add_i32 s0, s1, s2"), [Bounds(0, 1), exactly(0xFFFFFFFF)]) == ANYTHING
