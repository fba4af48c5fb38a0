"""Costs follow their formula, and the figures that predictions are made from are of the rows that serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles
from rocm_lab.cost.static_figures import PAGED, LoopFigures, StaticFigures
from rocm_lab.cycles.loops import Loop
from rocm_lab.simulator.assembly import parse_instruction
from tests.amd.house.source_tree import ROOT
from tests.amd.offline import tile_candidates
from tests.amd.offline.candidate_kernels import plain_kernel
from tests.amd.offline.code_object import read_amd_code
from tests.amd.offline.cost_page import rewritten
from tests.amd.offline.matrix import Row
from tests.amd.offline.mca import CLOCKS_PER_CYCLE, LoopCycles
from tests.amd.offline.tile_candidates import DECODE_LAYERS, KEPT, Estimate, chosen_tiles, layers, rank
from tests.amd.offline.tile_cost import cost_of_loop, loop_figures, lower_bound_clocks

LINES = ("ds_read_b128 v[0:3], v9", "buffer_load_dwordx4 v[0:3], v9, s[4:7], 0 offen")
LOOP = Loop("", tuple(map(parse_instruction, LINES)))
CYCLES = LoopCycles(own=200, latencies=1, issue=150, matrix=100, vector=150)
ROW = next(row for row in DECODE_LAYERS if row.arch == "gfx942" and row.dims == (128, 128))


def test_decode_costs_clocks_a_token() -> None:
    cost = cost_of_loop(ROW, DecodeTiles(32, 4, 2, 3), LOOP, CYCLES, waves_per_simd=4)
    assert (cost.programs, cost.issue, cost.waits) == (3, 18.75, 25.0), "three programs, although four would fit"
    assert (cost.lds, cost.loads) == (1.0, 2.0)


def test_break_even_is_the_latency_at_which_the_programs_ask_for_what_hbm_delivers() -> None:
    lower_bound, programs, keys, clock = lower_bound_clocks(ROW, DecodeTiles), 3, 32, 2.1e3
    cost = cost_of_loop(ROW, DecodeTiles(keys, 4, 2, programs), LOOP, CYCLES, waves_per_simd=4)
    clocks = CLOCKS_PER_CYCLE * CYCLES.alone(cost.break_even * clock / CLOCKS_PER_CYCLE)
    assert clocks / (programs * keys) == pytest.approx(lower_bound)


def test_two_latencies_in_series_halve_it() -> None:
    once, twice = (
        cost_of_loop(ROW, DecodeTiles(32, 4, 2, 3), LOOP, replace(CYCLES, latencies=number), 4) for number in (1, 2)
    )
    assert twice.break_even == once.break_even / 2


def test_a_unit_that_is_slower_than_hbm_leaves_no_latency() -> None:
    slow = replace(CYCLES, issue=600)
    assert cost_of_loop(ROW, DecodeTiles(32, 4, 2, 3), LOOP, slow, 4).break_even == 0.0


def test_two_heads_a_row_are_twice_the_work() -> None:
    one, two = (
        cost_of_loop(ROW, DecodeTiles(32, 4, 2, 3, heads_per_row=heads), LOOP, CYCLES, waves_per_simd=4)
        for heads in (1, 2)
    )
    assert (two.issue, two.waits) == (one.issue / 2, one.waits / 2)


def test_waves_fill_waits_but_not_a_busy_unit() -> None:
    tiles = ExtendTiles(128, 32, 4, 1)
    few, many = (cost_of_loop(ROW, tiles, LOOP, CYCLES, waves_per_simd=waves) for waves in (1, 8))
    assert few.clocks == few.waits == 8 * many.waits
    assert many.clocks == many.issue == few.issue


def test_a_program_of_eight_waves_takes_two_of_a_simd() -> None:
    assert cost_of_loop(ROW, ExtendTiles(128, 32, 8, 1), LOOP, CYCLES, waves_per_simd=4).programs == 2


def test_the_page_of_cost_says_what_the_figures_say() -> None:
    """If a row has changed: python -m tests.amd.offline.cost_figures docs."""
    page = (ROOT / "docs" / "cost.md").read_text()
    assert page == rewritten(page)
    assert page.count("<!-- made by") == page.count("<!-- end -->") > 0


def test_the_figures_are_of_the_rows_that_serve() -> None:
    """If a row has changed: python -m tests.amd.offline.cost_figures docs."""
    rows = [row for row, kind in layers() if kind is DecodeTiles]
    paged = [each for each in StaticFigures.read().decodes if each.kernel == PAGED]
    served = [(row.arch, row.dims[0], chosen_tiles(row, DecodeTiles)) for row in rows]
    assert [(each.arch, each.head_dim, each.tiles) for each in paged] == served


def test_figures_of_a_loop_are_those_of_its_cost() -> None:
    figures = loop_figures(cost_of_loop(ROW, DecodeTiles(32, 4, 2, 3), LOOP, CYCLES, waves_per_simd=4))
    assert figures == LoopFigures(programs=3, own=200, latencies=1, units=18.8), "the busiest unit, rounded"


def test_only_the_best_candidates_are_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are those that would be best if all were."""
    cost = cost_of_loop(ROW, DecodeTiles(32, 4, 2, 3), LOOP, CYCLES, waves_per_simd=4)
    code = read_amd_code(plain_kernel(ROW, chosen_tiles(ROW, DecodeTiles)))
    shapes = [DecodeTiles(16, 1, 1, place) for place in range(1, 41)]
    compiled: list[int] = []

    def break_even(place: int, whole: bool) -> float:
        # Every third one spills, and of the others each fifth loses half.
        if whole and place % 3 == 0:
            return 0.0
        return place / (2 if whole and place % 5 == 0 else 1)

    def estimate(row: Row, tiles: DecodeTiles, *, whole: bool, given_programs: bool = False) -> Estimate:
        place = tiles.programs_per_cu
        if whole and not given_programs:
            compiled.append(place)
        return Estimate(tiles, code, 2, 0, replace(cost, break_even=break_even(place, whole)))

    monkeypatch.setattr(tile_candidates, "decode_shapes", lambda row: shapes)
    monkeypatch.setattr(tile_candidates, "estimate", estimate)
    monkeypatch.setattr(tile_candidates, "chosen_tiles", lambda row, kind: DecodeTiles(16, 1, 1, 1))
    best = sorted(range(1, 41), key=lambda place: -break_even(place, whole=True))[:KEPT]
    assert [found.tiles.programs_per_cu for found in rank(ROW, DecodeTiles).candidates] == [*best, 1]
    assert sorted(compiled) == list(range(min(best), 41)), "those whose plain kernels are better than the worst kept"
