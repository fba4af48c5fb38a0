"""Measured rows: the file format, the GPUs that its rows serve, and their precedence over the table's rows."""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.hopper_tiles import hopper_tiles
from rocm_attn.kernels.tuning.latent_tiles import HOPPER_LATENT_TILES
from rocm_attn.kernels.tuning.measured import MeasuredTileChoice, Provenance, ShapeTimes, Tiles, TileTable, refusal
from rocm_attn.kernels.tuning.tiles import ANY_ROWS, DecodeTiles, ExtendTiles
from rocm_attn.machine import measured_choices, settings
from rocm_attn.machine.measured_choices import default_place, sorted_for, with_measured_choices
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.settings import read_settings
from rocm_attn.machine.target import Target, known_target
from rocm_attn.machine.tuning_file import VERSION, TuningFile, as_json
from rocm_attn.problem import KVEncoding, PoolKind, Problem
from rocm_attn.providers.by_tokens import KernelByTokens
from rocm_attn.providers.contract import SMALLEST_POOL
from rocm_attn.providers.select import select
from rocm_attn.providers.tiles import decode_tiles_of, extend_choices_of, layer_of
from rocm_attn.selection.kernels import choose_kernels

TRITON = "3.7.1"
GFX942 = replace(known_target("gfx942"), releases=Releases(triton=Release.of(TRITON)))
LAYER = Problem(32, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
LATENT = Problem(128, 1, 576, torch.bfloat16, 64, v_head_dim=512, scale=576**-0.5, pool=PoolKind.LATENT)
META = torch.device("meta")
MEASURED = Provenance(
    "AMD Instinct MI300X", "gfx942", 304, TRITON, "2.11.0", "7.2.4", "1.0", "0123456789ab", "2026-11-21T20:00:00+00:00",
    (ShapeTimes("64x4095+1", 300.0, 270.0),), 15, 0.1, 0.08, 0.12, 0,
)  # fmt: skip
TUNED = DecodeTiles(32, 4, 2, 4, row_cost=1)


def row_of(
    problem: Problem = LAYER, table: TileTable = TileTable.DECODE, tiles: Tiles = TUNED, max_rows: int = ANY_ROWS
) -> MeasuredTileChoice:
    return MeasuredTileChoice(table, layer_of(problem), max_rows, tiles, MEASURED)


def with_rows(*rows: MeasuredTileChoice) -> Target:
    return replace(GFX942, measured=rows)


def described(problem: Problem, target: Target, kind: StepKind) -> str:
    return select(problem, target, "triton").kernel(kind).bound.describe()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = (
        row_of(),
        row_of(table=TileTable.EXTEND, tiles=ExtendTiles(64, 32, 4, 2)),
        row_of(table=TileTable.HOPPER_EXTEND, tiles=hopper_tiles(128, 128, 16, coded=False)),
        row_of(LATENT, TileTable.HOPPER_LATENT_DECODE, HOPPER_LATENT_TILES),
    )
    file = reduce(TuningFile.with_choice, rows, TuningFile())
    place = tmp_path / "not there yet" / "t.json"
    file.write(place)
    assert TuningFile.read(place) == file
    assert sorted(path.name for path in place.parent.iterdir()) == ["t.json"]


def test_a_row_takes_the_place_of_what_was_measured_before() -> None:
    later = replace(row_of(), tiles=replace(TUNED, num_warps=2))
    elsewhere = replace(row_of(), measured=replace(MEASURED, triton="3.8.0"))
    file = TuningFile().with_choice(row_of()).with_choice(elsewhere).with_choice(later)
    assert file.rows == (elsewhere, later)


def test_a_measured_row_beats_the_tables_in_the_steps_that_it_was_measured_in() -> None:
    target = with_rows(row_of())
    assert decode_tiles_of(LAYER, GFX942) != TUNED
    assert decode_tiles_of(LAYER, target) == TUNED
    for kind in (StepKind.DECODE, StepKind.MIXED, StepKind.SHARED):
        assert str(TUNED) in described(LAYER, target, kind)


def test_rows_are_merged_by_a_launch_of_its_own_where_barriers_do_not_order_memory() -> None:
    """This holds whatever a file says: otherwise a program would merge parts that are not yet written."""
    merging = row_of(tiles=replace(TUNED, merge_group=16))
    assert decode_tiles_of(LAYER, with_rows(merging)) == TUNED
    sm_90 = replace(known_target("sm_90"), releases=GFX942.releases, measured=(merging,))
    assert decode_tiles_of(LAYER, sm_90).merge_group == 16


@pytest.mark.parametrize(
    "other",
    [
        replace(LAYER, page_size=64),
        replace(LAYER, window_left=1023),
        replace(LAYER, num_q_heads=64),
        replace(LAYER, dtype=torch.float16),
        replace(LAYER, has_sinks=True),
        replace(LAYER, logits_soft_cap=30.0),
    ],
    ids=["page", "window", "heads", "dtype", "sinks", "cap"],
)
def test_another_layer_keeps_the_tables_row(other: Problem) -> None:
    assert decode_tiles_of(other, with_rows(row_of())) == decode_tiles_of(other, GFX942)


def test_a_row_of_extend_serves_its_class_of_steps_and_never_masked_ones() -> None:
    tiles = ExtendTiles(64, 32, 4, 1, programs_per_cu=1)
    target = with_rows(row_of(table=TileTable.EXTEND, tiles=tiles))
    assert extend_choices_of(LAYER, target)[-1].tiles == tiles
    masked = replace(LAYER, custom_mask=True)
    assert str(tiles) in described(masked, target, StepKind.EXTEND)
    assert str(tiles) in described(masked, target, StepKind.MIXED)
    assert described(masked, target, StepKind.MASKED) == described(masked, GFX942, StepKind.MASKED)
    # On sm_90 steps with few new tokens have rows of their own.
    sm_90 = replace(known_target("sm_90"), releases=GFX942.releases)
    rows = extend_choices_of(LAYER, sm_90)
    few = replace(sm_90, measured=(row_of(table=TileTable.EXTEND, tiles=tiles, max_rows=rows[0].max_rows),))
    assert [row.tiles for row in extend_choices_of(LAYER, few)] == [tiles, *(row.tiles for row in rows[1:])]


def test_rows_of_another_triton_or_gpu_are_passed_over_with_a_sentence() -> None:
    other = replace(GFX942, releases=Releases(triton=Release.of("3.6.0")))
    found = sorted_for(other, [row_of()])
    assert not found.serving
    assert found.passed_over == (
        "1 of 1 measured choices are not used: measured with Triton 3.7.1, and the installed one is 3.6.0"
    )
    parted = sorted_for(replace(GFX942, compute_units=38), [row_of()])
    assert "measured on 304 compute units, and this GPU has 38" in parted.passed_over
    assert not sorted_for(known_target("gfx942"), [row_of()]).serving, "a Triton that is not known is none"
    assert sorted_for(known_target("gfx950"), [row_of()]).passed_over == "", "a file may be of several machines"
    assert sorted_for(GFX942, [row_of()]).serving == (row_of(),)


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    """Returns a file with one row, changed by hand."""
    content = {"version": VERSION, "rows": [as_json(row_of())]}
    change(content)
    return json.dumps(content)


BAD_FILES = {
    "empty": ("", "Expecting value"),
    "cut off": (edited(lambda file: None)[:200], "Unterminated string|Expecting|delimiter"),
    "a list": ("[]", "it is not a JSON object with a version"),
    "deep": ("[" * 100_000, "recursion|nested|Expecting"),
    "another version": (edited(lambda file: file.update(version=1)), "its version is 1, and this release reads 2"),
    "an unknown field": (edited(lambda file: file.update(note="mine")), "the file has unknown fields note"),
    "no rows": (edited(lambda file: file.pop("rows")), "the file has no rows"),
    "rows of a kind": (edited(lambda file: file.update(rows={})), "rows is not a list"),
    "an unknown table": (
        edited(lambda file: file["rows"][0].update(table="prefill")),
        "row 0: table is 'prefill', not one of decode, cdna_decode, extend",
    ),
    "an unknown field of tiles": (
        edited(lambda file: file["rows"][0]["tiles"].update(block_m=64)),
        "row 0, tiles.block_m is no field of DecodeTiles",
    ),
    "a text for a number": (
        edited(lambda file: file["rows"][0]["tiles"].update(num_warps="4")),
        "row 0, tiles.num_warps is '4'; it must be of type int",
    ),
    "a bool for a number": (
        edited(lambda file: file["rows"][0]["tiles"].update(num_warps=True)),
        "is True; it must be of type int",
    ),
    "no number": (
        edited(lambda file: file["rows"][0]["measured"].update(gain=float("nan"))),
        "it must be a finite number",
    ),
    "tiles of no kernel": (
        edited(lambda file: file["rows"][0]["tiles"].update(key_block=48)),
        "no kernel takes its tiles: key_block 48 is not a power of two from 16 to 256",
    ),
    "no heads": (
        edited(lambda file: file["rows"][0]["layer"].update(num_kv_heads=0)),
        "heads, dims and rows must be at",
    ),
    "other tiles than measured": (
        edited(lambda file: file["rows"][0]["tiles"].update(num_warps=8)),
        "row 0 was changed after it was measured: its digest differs",
    ),
    "another gain": (edited(lambda file: file["rows"][0]["measured"].update(gain=0.5)), "its digest differs"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_with_a_sentence_and_stops_no_runtime(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text, sentence = BAD_FILES[name]
    place = tmp_path / "t.json"
    place.write_text(text)
    with pytest.raises(BadSetting, match=sentence) as refused:
        TuningFile.read(place)
    assert "\n" not in str(refused.value)
    served_with(monkeypatch, str(place))
    with caplog.at_level(logging.WARNING):
        (chosen,) = choose_kernels([LAYER], GFX942, "triton", SMALLEST_POOL, device=META)
    assert chosen == select(LAYER, GFX942, "triton")
    (record,) = caplog.records
    assert record.getMessage().endswith("; the built-in tiles are used")


def served_with(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """Behaves as if ROCM_ATTN_TUNING were `named`."""
    chosen = read_settings({settings.TUNING: named})
    monkeypatch.setattr(measured_choices, "settings", lambda: chosen)
    measured_choices._warn_once.cache_clear()


def test_a_runtime_takes_the_rows_of_the_file_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "t.json"
    TuningFile((row_of(),)).write(place)
    served_with(monkeypatch, str(place))
    (chosen,) = choose_kernels([LAYER], GFX942, "triton", SMALLEST_POOL, device=META)
    assert str(TUNED) in chosen.kernel(StepKind.DECODE).bound.describe()
    served_with(monkeypatch, "off")
    assert with_measured_choices(GFX942) == GFX942
    served_with(monkeypatch, str(tmp_path / "missing.json"))
    assert with_measured_choices(GFX942) == GFX942
    assert "missing.json; name one that `rocm-attn tune` wrote, or off" in caplog.text
    served_with(monkeypatch, str(place))
    other = replace(GFX942, releases=Releases(triton=Release.of("3.6.0")))
    for _ in range(2):
        assert with_measured_choices(other) == other
    assert caplog.text.count("measured choices are not used") == 1


def test_a_cache_that_is_closed_to_the_user_stops_no_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    served_with(monkeypatch, "")
    place, stat = default_place(), os.stat

    def closed(path: Any, **more: Any) -> Any:
        if not isinstance(path, int) and Path(path) == place:
            raise PermissionError(13, "closed", str(path))
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", closed)
    assert with_measured_choices(GFX942) == GFX942


@pytest.mark.parametrize("named", ["", "~no-such-user/tuning.json"])
def test_a_user_without_a_home_stops_no_runtime(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987654)
    monkeypatch.chdir(tmp_path)
    served_with(monkeypatch, named)
    assert with_measured_choices(GFX942) == GFX942
    assert ("there is no tuning file ~no-such-user/tuning.json" in caplog.text) is bool(named)


@pytest.mark.parametrize("named", ["", " ", "cache", "./cache", "~/cache"])
def test_the_cache_is_the_same_from_every_folder(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles measured in one folder were not found by a server in another one."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert default_place() == tmp_path / "home/.cache/rocm_attn/tuning.json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_place() == tmp_path / "rocm_attn/tuning.json"


def test_tiles_that_no_kernel_takes_have_a_reason() -> None:
    layer, odd = layer_of(LAYER), layer_of(replace(LAYER, num_q_heads=3, num_kv_heads=3))
    assert refusal(TileTable.DECODE, TUNED, layer) == ""
    assert "go with a multiple of 2" in refusal(TileTable.DECODE, replace(TUNED, heads_per_row=2), odd)
    assert refusal(TileTable.DECODE, replace(TUNED, heads_per_row=3), odd) == ""
    coded = replace(odd, kv_encoding=KVEncoding.E4M3FN.name)
    assert "two by two" in refusal(TileTable.DECODE, replace(TUNED, heads_per_row=3), coded)
    extend = ExtendTiles(16, 16, 4, 1, heads_per_row=3)
    assert refusal(TileTable.EXTEND, extend, odd) == ""
    assert "go with a multiple of 3" in refusal(TileTable.EXTEND, extend, layer)
    assert "without codes" in refusal(TileTable.EXTEND, extend, coded)
    assert "cannot fill a block" in refusal(TileTable.EXTEND, replace(extend, fills=True), odd)
    assert refusal(TileTable.EXTEND, replace(extend, heads_per_row=1, fills=True), odd) == ""
    for field, least, most in (("num_stages", 1, 8), ("whole_blocks", 0, 64)):
        for number in (-3, least - 1, most + 1, 10**6):
            wrong: dict[str, Any] = {field: number}
            words = refusal(TileTable.DECODE, replace(TUNED, **wrong), layer)
            assert words == f"{field} {number} is not {least} to {most}"
        largest: dict[str, Any] = {field: most}
        assert refusal(TileTable.DECODE, replace(TUNED, **largest), layer) == ""
    assert "merge_group 4 is not 0 or 8 to 1024" in refusal(TileTable.DECODE, replace(TUNED, merge_group=4), layer)
    assert "not transposed" in refusal(TileTable.DECODE, replace(TUNED, paired=True, transposed=True), layer)
    assert "no pairs of codes" in refusal(TileTable.DECODE, replace(TUNED, dim_block=64, paired=True), layer)
    several = replace(TUNED, dim_block=256, heads_per_row=3)
    assert refusal(TileTable.DECODE, several, odd) == ""
    assert "two blocks of columns at most" in refusal(TileTable.DECODE, replace(several, dim_block=128), odd)
    assert "are ExtendTiles, not DecodeTiles" in refusal(TileTable.EXTEND, TUNED, layer)
    uneven = layer_of(replace(LAYER, v_head_dim=32))
    assert "not as wide in K as in V" in refusal(TileTable.DECODE, replace(TUNED, dim_block=64), uneven)


def test_masked_steps_keep_whole_tiles_of_64_rows_at_most() -> None:
    """Heads of 320 have tiles of 128 rows for steps of up to 512 rows, halved like those of larger steps."""
    layer = replace(LAYER, head_dim=320, v_head_dim=320, custom_mask=True)
    masked = select(layer, known_target("sm_90"), "triton").kernel(StepKind.MASKED).bound
    assert isinstance(masked, KernelByTokens)
    tiles = {sized.steps.max_q_len * layer.gqa_ratio: sized.kernel.kernel.tiles for sized in masked.short}  # type: ignore[attr-defined]
    rows = {row.max_rows: row.tiles for row in extend_choices_of(layer, known_target("sm_90"))}
    assert [tiles[most].query_rows for most in (16, 32, 64, 512)] == [16, 32, 64, 64]
    assert [tiles[most] == rows[most] for most in (16, 32, 64, 512)] == [True, True, True, False]
