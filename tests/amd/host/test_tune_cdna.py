"""`rocm-attn tune` where decode for CDNA serves: its tiles and paged decode's are compared with it; one row is kept."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.cli.tile_choices import tile_choices
from rocm_attn.kernels.tuning.cdna_tiles import KEY_BLOCKS
from rocm_attn.kernels.tuning.measured import MeasuredTileChoice, Tiles, TileTable, refusal
from rocm_attn.kernels.tuning.tiles import CdnaTiles, DecodeTiles
from rocm_attn.machine.measured_choices import sorted_for
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import known_target
from rocm_attn.machine.tuning_file import TuningFile
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.select import select
from rocm_attn.providers.tiles import decode_tiles_of, layer_of
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.tune import command
from rocm_lab.tune.candidates import candidates
from rocm_lab.tune.jobs import jobs_of
from tests.amd.host.test_tune import Cost, FakeBench, options, plain

TRITON = "3.9.0"
GFX942, GFX950 = (
    replace(known_target(arch), releases=Releases(triton=Release.of(TRITON))) for arch in ("gfx942", "gfx950")
)


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "triton_version", lambda: TRITON)


def layer() -> Problem:
    (problem,) = command.problems_of(options(), GFX942)
    return problem


def search(place: Path, cost: Cost, wrong: Callable[[Tiles], str] = lambda tiles: "") -> FakeBench:
    bench = FakeBench(cost, wrong)
    command.tune(options("--output", str(place)), GFX942, "a GPU", bench)
    return bench


def only_row(place: Path) -> MeasuredTileChoice:
    (row,) = TuningFile.read(place).rows
    return row


def serving(row: MeasuredTileChoice) -> str:
    """Returns the name of the kernel that decodes the layer with the row."""
    found = sorted_for(GFX942, [row])
    assert found.serving == (row,)
    kernel = select(layer(), replace(GFX942, measured=found.serving), "triton").kernel(StepKind.DECODE)
    assert str(row.tiles) in kernel.bound.describe()
    return kernel.entry.name


def cdna_is_best(tiles: Tiles, layer: Problem) -> float:
    """Returns a cost that is lowest for blocks of 32 keys; paged decode is worse with any tiles."""
    if isinstance(tiles, CdnaTiles):
        return 80.0 - 10.0 * (tiles.key_block == 32)
    return 100.0 - 15.0 * (plain(tiles).key_block == 64)


def paged_is_best(tiles: Tiles, layer: Problem) -> float:
    return cdna_is_best(tiles, layer) if isinstance(tiles, CdnaTiles) else 75.0 - 15.0 * (plain(tiles).key_block == 64)


@pytest.mark.parametrize(
    ("arch", "apart"),
    [("gfx942", 12), *(pytest.param(arch, 1, marks=pytest.mark.nightly) for arch in ("gfx942", "gfx950"))],
)
def test_both_kernels_are_searched_and_compared_with_the_one_that_serves(arch: str, apart: int) -> None:
    """apart: of candidates that are checked, from one to the next"""
    target = replace(known_target(arch), releases=GFX942.releases)
    ours, paged = jobs_of([layer()], target, [BatchSpec.parse("4d1k")])[0]
    assert (ours.table, paged.table) == (TileTable.CDNA_DECODE, TileTable.DECODE)
    assert isinstance(ours.tiles, CdnaTiles)
    assert ours.tiles == ours.in_use == paged.in_use
    assert paged.tiles == decode_tiles_of(layer(), target)
    of_ours, of_paged = ([each.tiles for each in candidates(job, target)] for job in (ours, paged))
    assert {plain(each).num_stages for each in of_ours} == {1}
    assert {plain(each).key_block for each in of_ours} == set(KEY_BLOCKS[arch]), "whole products"
    assert of_paged[0] == paged.tiles, "the table's row is a candidate where it does not serve"
    for job, found in ((ours, of_ours), (paged, of_paged)):
        assert len(found) == len(set(found)) > 20
        assert not any(refusal(job.table, each, layer_of(layer())) for each in found[::apart])
        assert {type(each) for each in found} == {job.table.tiles}


def test_its_best_tiles_are_found_and_bound(tmp_path: Path) -> None:
    place = tmp_path / "t.json"
    search(place, cdna_is_best)
    row = only_row(place)
    assert row.table is TileTable.CDNA_DECODE
    assert plain(row.tiles).key_block == 32
    assert row.measured.gain == pytest.approx(1 / 8)
    assert serving(row) == "triton.cdna_decode"
    selection = select(layer(), replace(GFX942, measured=(row,)), "triton")
    found = next(each for each in tile_choices(selection) if each.what == "cdna_decode")
    assert found.is_measured
    assert found.tiles == row.tiles


def test_paged_decode_serves_where_it_beats_the_best_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "t.json"
    search(place, paged_is_best)
    row = only_row(place)
    assert row.table is TileTable.DECODE
    assert row.measured.gain == pytest.approx(0.25), "of the time of the kernel that served"
    assert serving(row) == "triton.decode"
    assert "1 rows written" in capsys.readouterr().out


def test_where_it_is_wrong_paged_decode_is_searched_by_itself(tmp_path: Path) -> None:
    place = tmp_path / "t.json"
    bench = search(place, cdna_is_best, lambda tiles: "wrong: off" if isinstance(tiles, CdnaTiles) else "")
    row = only_row(place)
    assert row.table is TileTable.DECODE
    assert isinstance(row.tiles, DecodeTiles)
    assert row.measured.gain == pytest.approx(0.15)
    assert not any(isinstance(tiles, CdnaTiles) for tiles in bench.timed)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_warps": 2},
        {"key_block": 128},
        {"num_stages": 2},
        {"transposed": True},
        {"heads_per_row": 2},
        {"max_registers": 168},
    ],
)
def test_tiles_that_it_does_not_take_are_refused(changed: dict[str, int]) -> None:
    tiles = jobs_of([layer()], GFX942, [BatchSpec.parse("4d1k")])[0][0].tiles
    assert refusal(TileTable.CDNA_DECODE, tiles, layer_of(layer())) == ""
    assert refusal(TileTable.CDNA_DECODE, replace(tiles, **changed), layer_of(layer()))  # type: ignore[arg-type]
    assert "are DecodeTiles, not CdnaTiles" in refusal(TileTable.DECODE, tiles, layer_of(layer()))


def test_measured_tiles_of_the_other_arch_do_not_serve(tmp_path: Path) -> None:
    """Their blocks are no whole matrix products of this arch."""
    place = tmp_path / "t.json"
    search(place, cdna_is_best)
    row = only_row(place)
    forged = replace(row, tiles=replace(plain(row.tiles), key_block=16))
    selection = select(layer(), replace(GFX950, measured=(forged,)), "triton")
    assert selection.kernel(StepKind.DECODE).entry.name == "triton.decode"
    reasons = {each.reason for each in selection.refusals}
    assert "its measured tiles have blocks of 16 keys, and gfx950 takes 32 or 64 or 96" in reasons


def test_blocks_of_codes_are_whole_products_of_codes() -> None:
    coded = replace(layer(), head_dim=128, v_head_dim=128, kv_encoding=KVEncoding.E4M3FNUZ, kv_scales=Scales.HEAD)
    job = jobs_of([coded], GFX942, [BatchSpec.parse("4d1k")])[0][0]
    assert job.table is TileTable.CDNA_DECODE
    assert {plain(each.tiles).key_block for each in candidates(job, GFX942)} == {32, 64, 96}


def test_steps_that_extend_for_cdna_serves_are_not_searched() -> None:
    """Its tiles are not searched, and those of triton.extend would be timed in steps that they do not serve."""
    gfx950 = replace(known_target("gfx950"), releases=GFX942.releases)
    llama = replace(layer(), num_q_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128)
    small, large = BatchSpec.parse("1x2k+6k"), BatchSpec.parse("8x512+4k")
    for target, searched in ((GFX942, {small, large}), (gfx950, {small})):
        jobs, left_out = jobs_of([llama], target, [small, large])
        assert {shape for job in jobs for shape in job.shapes} == searched
        assert left_out == [f"{layer_of(llama)}: no row is for {large} alone"] * (large not in searched)
