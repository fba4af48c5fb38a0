"""No row costs much more than a candidate would, by the model of tile_cost.py: `bash scripts/test.sh tuning`.

Without llvm-mca these tests fail and say how to get it.
"""

from __future__ import annotations

import pytest

from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from tests.amd.offline.compiling import AMD_ARCHS
from tests.amd.offline.hot_loop import HotLoop
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import loop_cycles
from tests.amd.offline.tile_candidates import TOLERANCE, Kind, rank
from tests.amd.offline.tuning_table import layers, words

pytestmark = pytest.mark.llvm_mca

LOAD = "buffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen"
ADD = "v_add_f32_e32 v8, v8, v0"


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_the_model_waits_for_a_load_as_long_as_it_is_told(arch: str) -> None:
    near, far = (loop_cycles(HotLoop((LOAD, "s_waitcnt vmcnt(0)", ADD)), arch, latency).alone for latency in (100, 400))
    assert 290 < far - near < 310


@pytest.mark.parametrize("arch", AMD_ARCHS)
def test_a_load_that_nobody_waits_for_costs_its_issue(arch: str) -> None:
    cycles = loop_cycles(HotLoop((LOAD, *["v_add_f32_e32 v8, v8, v8"] * 8)), arch, 1)
    assert cycles.issue == 8
    assert cycles.alone < 20


@pytest.mark.parametrize(
    "instruction",
    [
        "v_permlane32_swap_b32_e32 v14, v15",
        "v_mad_u64_u32 v[60:61], s[16:17], v65, s42, v[78:79]",
        "v_mad_u64_u32 v[60:61], vcc, s42, v65, 0",
        "v_mad_u64_u32 v[60:61], s[16:17], v65, 24, s[78:79]",
    ],
)
def test_two_operations_of_an_instruction_take_two_cycles_and_do_not_hang_the_tool(instruction: str) -> None:
    """Beside a matrix instruction, where llvm-mca 22 stalls at some of them."""
    product = "v_mfma_f32_16x16x32_bf16 v[108:111], v[108:111], v[104:107], 0"
    lds = ("ds_read_b128 v[228:231], v138", "s_mov_b32 s61, s60")
    assert loop_cycles(HotLoop((*lds, instruction, instruction, product)), "gfx950", 1).issue == 4


@pytest.mark.parametrize(
    ("row", "kind"), [pytest.param(row, kind, id=f"{kind.__name__}-{row}") for row, kind in layers()]
)
def test_no_row_costs_much_more_than_its_cheapest_candidate(row: Row, kind: Kind) -> None:
    ranking = rank(row, kind)
    assert isinstance(ranking.chosen.tiles, DecodeTiles | ExtendTiles)
    assert ranking.chosen.spills == 0
    assert ranking.excess <= TOLERANCE, f"{words(ranking.cheapest.tiles)} costs {ranking.excess:.0%} less"
