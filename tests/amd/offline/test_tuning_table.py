"""No row is much worse than a candidate would be, by the model of tile_cost.py: `bash scripts/test.sh tuning`.

Without llvm-mca these tests fail and say how to get it.
"""

from __future__ import annotations

import pytest

from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from rocm_lab.cycles.loops import Loop
from rocm_lab.simulator.assembly import parse_instruction
from tests.amd.offline.compiling import AMD_ARCHS
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import LoopCycles, loop_cycles
from tests.amd.offline.tile_candidates import TOLERANCE, Kind, layers, rank

pytestmark = pytest.mark.llvm_mca

LOADS = (
    "buffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen",
    "global_load_dwordx4 v[0:3], v[4:5], off offset:16",
    "global_load_dwordx4 v[0:3], v4, s[4:5]",
    "global_load_dwordx4 a[0:3], v[4:5], off",
)
ADD = "v_add_f32_e32 v8, v8, v0"


def cycles_of(arch: str, *lines: str) -> LoopCycles:
    return loop_cycles(Loop("", tuple(map(parse_instruction, lines))), arch)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_a_load_that_is_waited_for_takes_one_latency(load: str, arch: str) -> None:
    cycles = cycles_of(arch, load, "s_waitcnt vmcnt(0)", ADD)
    assert cycles.latencies == pytest.approx(1, abs=0.05)
    assert cycles.own < 20


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_a_load_that_is_not_waited_for_costs_its_issue(load: str, arch: str) -> None:
    """With a 64-bit address too, which llvm-mca alone would have the next access of LDS wait for."""
    lds = ("ds_read_b32 v20, v21", "s_waitcnt lgkmcnt(0)")
    cycles = cycles_of(arch, load, *lds, *["v_add_f32_e32 v8, v8, v8"] * 8)
    assert cycles.issue == cycles.vector == 8
    assert cycles.latencies < 0.1


@pytest.mark.parametrize("arch", AMD_ARCHS)
@pytest.mark.parametrize("slow", ["v_exp_f32_e32 v8, v9", "v_rsq_f32_e32 v8, v9", "v_mul_lo_u32 v8, v9, s4"])
def test_slow_instructions_take_four_cycles(slow: str, arch: str) -> None:
    assert cycles_of(arch, slow, ADD).vector == 5


@pytest.mark.parametrize(
    "instruction",
    [
        "v_permlane32_swap_b32_e32 v14, v15",
        "v_mad_u64_u32 v[60:61], s[16:17], v65, s42, v[78:79]",
        "v_mad_u64_u32 v[60:61], vcc, s42, v65, 0",
        "v_mad_u64_u32 v[60:61], s[16:17], v65, 24, s[78:79]",
    ],
)
def test_instructions_of_two_operations_do_not_hang_the_tool(instruction: str) -> None:
    """llvm-mca 22 stalls at some of them after a matrix instruction. Products of 32 bits are slow ones."""
    matrix_op = "v_mfma_f32_16x16x32_bf16 v[108:111], v[108:111], v[104:107], 0"
    lds = ("ds_read_b128 v[228:231], v138", "s_mov_b32 s61, s60")
    cycles = cycles_of("gfx950", *lds, instruction, instruction, matrix_op)
    assert cycles.vector == (8 if "mad" in instruction else 4)
    assert cycles.matrix == 4


@pytest.mark.parametrize(
    ("row", "kind"), [pytest.param(row, kind, id=f"{kind.__name__}-{row}") for row, kind in layers()]
)
def test_no_row_is_much_worse_than_its_best_candidate(row: Row, kind: Kind) -> None:
    ranking = rank(row, kind)
    assert isinstance(ranking.chosen.tiles, DecodeTiles | ExtendTiles)
    assert ranking.chosen.spills == 0
    assert ranking.excess <= TOLERANCE, f"{ranking.best.tiles} is {ranking.excess:.0%} better"
