"""The search for tiles of Hopper's kernels, without a GPU: candidates from the description, the file, the selection."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.cli.tile_choices import tile_choices
from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.hopper_tiles import DIMS, HopperTiles, hopper_tiles
from rocm_attn.kernels.tuning.latent_tiles import HOPPER_LATENT_TILES, HopperLatentTiles
from rocm_attn.kernels.tuning.measured import TileTable, refusal
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import known_target
from rocm_attn.machine.tuning_file import VERSION, TuningFile, as_json
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.select import select
from rocm_attn.providers.tiles import hopper_tiles_of, layer_of
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.tune import hopper
from rocm_lab.tune.bench import JobSteps, edges_of, kernel_of
from rocm_lab.tune.candidates import candidates
from rocm_lab.tune.jobs import TuneJob, jobs_of, kind_of
from tests.amd.host.test_measured_rows import LATENT, LAYER, row_of

TRITON = "3.6.0"
H200 = replace(known_target("sm_90"), releases=Releases(triton=Release.of(TRITON)))
CODED = replace(LAYER, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.HEAD)


def of_dims(dims: tuple[int, int], page_size: int, *, coded: bool = False) -> Problem:
    layer = replace(CODED if coded else LAYER, head_dim=dims[0], v_head_dim=dims[1], page_size=page_size)
    return replace(layer, scale=dims[0] ** -0.5)


ROWS = [
    *((dims, page_size, False) for dims in DIMS for page_size in (2, 16)),
    *(((dim, dim), 16, True) for dim in (64, 128, 192)),
]


def job_of(problem: Problem, batch: str = "1x2048+6144") -> TuneJob:
    (job,), left_out = jobs_of([problem], H200, [BatchSpec.parse(batch)])
    assert not left_out
    return job


@pytest.mark.parametrize(("dims", "page_size", "coded"), ROWS, ids=str)
def test_the_description_leads_to_the_layout_of_every_row_that_was_chosen_by_hand(
    dims: tuple[int, int], page_size: int, coded: bool
) -> None:
    """Keys of a block, stages and tiles of V were found by hand; the model has each of them among its first eight."""
    problem, by_hand = of_dims(dims, page_size, coded=coded), hopper_tiles(*dims, page_size, coded=coded)
    assert hopper.layout_of(by_hand) in hopper.layouts(by_hand, problem, H200.lds_bytes)
    assert hopper.fits(by_hand, problem, H200.lds_bytes)
    assert refusal(TileTable.HOPPER_EXTEND, by_hand, layer_of(problem)) == ""


@pytest.mark.parametrize("problem", [LAYER, CODED, of_dims((192, 128), 2), of_dims((72, 72), 64)], ids=str)
def test_every_candidate_serves_the_steps_that_are_timed_and_their_edges(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # none of it is read
    job = job_of(problem)
    assert job.table is TileTable.HOPPER_EXTEND
    found = candidates(job, H200)
    assert len({each.tiles for each in found}) == len(found) > 100
    assert job.in_use not in [each.tiles for each in found]
    for step in JobSteps(edges_of).of(job):
        empty = step.empty(problem)
        for each in (found[0], found[len(found) // 2], found[-1]):
            kernel = kernel_of(job, each.tiles, empty, H200)
            assert isinstance(each.tiles, HopperTiles)
            early = kind_of(step.batch) is not StepKind.MIXED
            bound = replace(each.tiles, extend=replace(each.tiles.extend, early=early))
            assert str(bound) in kernel.describe()


def test_a_users_row_beats_the_built_in_one_in_every_kind_of_step() -> None:
    tiles = replace(hopper_tiles(128, 128, 16, coded=False), registers=240, powers_by_products=3)
    target = replace(H200, measured=(row_of(LAYER, TileTable.HOPPER_EXTEND, tiles),))
    assert hopper_tiles_of(LAYER, H200) != tiles
    assert hopper_tiles_of(replace(LAYER, page_size=64), target) == hopper_tiles_of(LAYER, H200)
    for kind in (StepKind.EXTEND, StepKind.MIXED):
        described = select(LAYER, target, "triton").kernel(kind).bound.describe()
        assert "registers=240" in described
        assert "powers_by_products=3" in described
    choices = {choice.what: choice for choice in tile_choices(select(LAYER, target, "triton"))}
    assert choices["hopper_extend"].is_measured
    assert "registers 240" in choices["hopper_extend"].line()
    assert json.dumps(choices["hopper_extend"].as_json())


def test_deterministic_steps_keep_their_tiles_and_so_their_bits() -> None:
    tiles = replace(hopper_tiles(128, 128, 16, coded=False), registers=240)
    measured = replace(H200, measured=(row_of(LAYER, TileTable.HOPPER_EXTEND, tiles),))
    tuned, built_in = (select(LAYER, target, "triton", deterministic=True) for target in (measured, H200))
    for kind in (StepKind.EXTEND, StepKind.MIXED):
        assert tuned.kernel(kind).bound == built_in.kernel(kind).bound


def test_a_users_row_of_latent_decode_serves_one_new_token() -> None:
    tiles = replace(HOPPER_LATENT_TILES, score_registers=112)
    target = replace(H200, measured=(row_of(LATENT, TileTable.HOPPER_LATENT_DECODE, tiles),))
    kernel = select(LATENT, target, "triton").kernel(StepKind.DECODE).bound
    assert str(tiles) in kernel.describe()
    job = job_of(LATENT, "64d4k")
    assert job.table is TileTable.HOPPER_LATENT_DECODE
    assert all(isinstance(each.tiles, HopperLatentTiles) for each in candidates(job, H200))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"registers": 220}, "registers 220 is not a multiple of 8 from 24 to 240"),
        ({"registers": 240, "decoder_registers": 48}, "are for pages of eight bits"),
        ({"code_tiles": 4}, "are for pages of eight bits"),
        ({"value_keys": 32}, "tiles of V of all of them or half"),
        ({"powers_by_products": 5}, "powers_by_products 5 is not 0 to 4"),
        ({"segment_len": 1024, "scales_seldom": False}, "segment_len 1024 is not 0 except"),
        ({"num_stages": 9}, "num_stages 9 is not 1 to 8"),
        ({"query_rows": 64}, "has 128 rows in groups of four warps"),
        ({"early": True}, "a cut that differs in nothing else"),
        ({"value_tiles": 8}, "V's ring holds more steps than K's"),
        ({"key_block": 0}, "key_block 0 is not a power of two"),
    ],
    ids=str,
)
def test_a_file_with_tiles_that_the_kernel_does_not_take_is_refused(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    said = as_json(row_of(LAYER, TileTable.HOPPER_EXTEND, hopper_tiles(128, 128, 16, coded=False)))
    for name, value in changes.items():
        (said["tiles"]["extend"] if name in said["tiles"]["extend"] else said["tiles"])[name] = value
    place = tmp_path / "t.json"
    place.write_text(json.dumps({"version": VERSION, "rows": [said]}))
    with pytest.raises(BadSetting, match="is refused") as refused:
        TuningFile.read(place)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "tiles",
    [
        replace(HOPPER_LATENT_TILES, score_registers=240, loader_registers=240),
        replace(HOPPER_LATENT_TILES, score_registers=100),
        replace(HOPPER_LATENT_TILES, latent=replace(HOPPER_LATENT_TILES.latent, key_block=128)),
        replace(HOPPER_LATENT_TILES, latent=replace(HOPPER_LATENT_TILES.latent, num_warps=8)),
    ],
    ids=["all registers", "odd registers", "keys", "warps"],
)
def test_latent_tiles_that_the_kernel_does_not_take_have_a_reason(tiles: HopperLatentTiles) -> None:
    assert refusal(TileTable.HOPPER_LATENT_DECODE, HOPPER_LATENT_TILES, layer_of(LATENT)) == ""
    assert refusal(TileTable.HOPPER_LATENT_DECODE, tiles, layer_of(LATENT))


@pytest.mark.parametrize(("batches", "programs_per_cu"), [("256d576", 8), ("1d16k,256d576", 2), ("1d16k", 2)])
def test_decode_is_searched_around_the_tiles_that_serve_as_many_rows(batches: str, programs_per_cu: int) -> None:
    """In a table, steps of many rows may have tiles of their own."""
    (job,), _ = jobs_of([of_dims((64, 64), 16)], H200, list(map(BatchSpec.parse, batches.split(","))))
    assert isinstance(job.tiles, DecodeTiles)
    assert isinstance(job.in_use, DecodeTiles)
    assert (job.tiles.programs_per_cu, job.in_use.programs_per_cu) == (programs_per_cu, 2)
    first = candidates(job, H200)[0]
    assert (first.tiles == job.tiles) == (job.tiles != job.in_use)
