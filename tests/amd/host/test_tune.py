"""`rocm-attn tune` without a GPU: candidates, the search with made-up times, its file, its journal."""

import argparse
import fcntl
import json
import os
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from rocm_attn.cli import BAD_INPUT, main
from rocm_attn.cli.parser import build_parser
from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.measured import Tiles, TileTable, refusal
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import known_target
from rocm_attn.machine.tuning_file import TuningFile
from rocm_attn.problem import Problem
from rocm_attn.providers.tiles import layer_of
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.tune import command
from rocm_lab.tune.candidates import candidates
from rocm_lab.tune.jobs import TuneJob, jobs_of, shapes_named
from rocm_lab.tune.journal import Journal
from rocm_lab.tune.search import Judged, SearchEnded, Task, Times

# A release with which paged decode serves on CDNA.
TRITON = "3.8.0"
GFX942 = replace(known_target("gfx942"), releases=Releases(triton=Release.of(TRITON)))


Cost = Callable[[Tiles, Problem], float]


class FakeBench:
    """A bench with times from a formula, which records its calls.

    cost:            of tiles for a layer, in microseconds
    wrong:           tiles -> the reason why they are not right
    wrong_in_others: the reason why they are not right in steps of other kinds
    """

    def __init__(self, cost: Cost, wrong: Callable[[Tiles], str] = lambda tiles: "", wrong_in_others: str = "") -> None:
        self._cost, self._wrong, self._wrong_in_others = cost, wrong, wrong_in_others
        self.judged: list[Tiles] = []
        self.timed: list[Tiles] = []

    def expect(self, tasks: Sequence[Task]) -> None:
        """Does the same as `Bench.expect`."""

    def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
        """Does the same as `Bench.judge`."""
        self.judged.append(tiles)
        return Judged(self._wrong(tiles), spilled=3 if isinstance(tiles, DecodeTiles) and tiles.num_warps == 2 else 0)

    def judge_others(self, job: TuneJob, tiles: Tiles) -> Judged:
        return Judged(self._wrong_in_others)

    def times(self, job: TuneJob, both: tuple[Tiles, Tiles], rounds: int) -> tuple[Times, Times]:
        """Does the same as `Bench.times`."""
        assert both[1] in self.judged, "nothing is timed that was not judged"
        self.timed.append(both[1])
        in_use, tiles = ([[self._cost(each, job.problem)] * len(job.shapes) for _ in range(rounds)] for each in both)
        return in_use, tiles


def plain(tiles: Tiles) -> DecodeTiles:
    assert isinstance(tiles, DecodeTiles)
    return tiles


def cost(given: Tiles, layer: Problem) -> float:
    """Returns a cost that is lowest for blocks of 64 keys in four warps; each helps by itself."""
    tiles = plain(given)
    return 100.0 - 20.0 * (tiles.key_block == 64) - 10.0 * (tiles.num_warps == 4)


def options(*given: str, layer: str = "8x2x128") -> argparse.Namespace:
    return build_parser().parse_args(["tune", layer, "--provider", "triton", "--shapes", "4d1k", *given])


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "triton_version", lambda: TRITON)


def search(place: Path, bench: FakeBench, *given: str, layer: str = "8x2x128") -> TuningFile:
    command.tune(options("--output", str(place), *given, layer=layer), GFX942, "a GPU", bench)
    return TuningFile.read(place) if place.exists() else TuningFile()


def only_job() -> TuneJob:
    (job,), _ = jobs_of(command.problems_of(options(), GFX942), GFX942, [BatchSpec.parse("4d1k")])
    return job


@pytest.mark.fast
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize("config", ["8x2x128", "64x8x64", "32x1x192"])
def test_every_candidate_is_taken_by_a_kernel_and_differs_from_the_row_in_use(arch: str, config: str) -> None:
    target = known_target(arch)
    requested = build_parser().parse_args(["tune", config, "--provider", "triton"])
    problems = command.problems_of(requested, target)
    jobs, left_out = jobs_of(problems, target, shapes_named("64d4k,1x2048+6144,64x2+2k"))
    assert len(jobs) >= 2
    assert not left_out
    for job in jobs:
        found = candidates(job, target)
        assert len(found) > 20
        assert len({each.tiles for each in found}) == len(found)
        assert job.in_use not in [each.tiles for each in found]
        assert not any(refusal(job.table, each.tiles, layer_of(job.problem)) for each in found)
        changed = [len(each.changes) for each in found]
        assert changed == sorted(changed)


def test_the_best_is_found_and_written_with_where_it_comes_from(tmp_path: Path) -> None:
    (row,) = search(tmp_path / "t.json", FakeBench(cost)).rows
    assert (plain(row.tiles).key_block, plain(row.tiles).num_warps) == (64, 4)
    assert row.table is TileTable.DECODE
    of = row.measured
    assert (of.device, of.arch, of.compute_units, of.triton) == ("a GPU", "gfx942", 304, TRITON)
    assert of.gain == pytest.approx(0.3)
    assert [(times.shape, times.in_use_us, times.us) for times in of.shapes] == [("4d1k", 100.0, 70.0)]
    assert of.samples == 15
    assert of.date.endswith("+00:00")


def test_two_changes_that_leave_a_block_its_size_are_tried_though_each_alone_is_slow(tmp_path: Path) -> None:
    def cost_of_block(given: Tiles, layer: Problem) -> float:
        tiles = plain(given)
        is_as_large = tiles.key_block * tiles.heads_per_row == 32
        return 100.0 - 20.0 * (tiles.heads_per_row == 1) + 80.0 * (not is_as_large)

    (row,) = search(tmp_path / "t.json", FakeBench(cost_of_block), layer="8x2x64").rows
    assert (plain(row.tiles).heads_per_row, plain(row.tiles).key_block) == (1, 32)


def test_nothing_is_searched_where_the_row_in_use_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = FakeBench(cost, lambda tiles: "wrong: off")
    assert not search(tmp_path / "t.json", bench).rows
    assert len(bench.judged) == 1
    assert "the row in use: wrong: off" in capsys.readouterr().err


def test_what_is_wrong_in_other_kinds_of_steps_is_not_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not search(tmp_path / "t.json", FakeBench(cost, wrong_in_others="wrong: off")).rows
    assert "key_block 64: wrong: off\n" in capsys.readouterr().err


def test_noise_makes_no_row(tmp_path: Path) -> None:
    class Noisy(FakeBench):
        """A bench in which half of a candidate's rounds are fast."""

        def times(self, job: TuneJob, both: tuple[Tiles, Tiles], rounds: int) -> tuple[Times, Times]:
            in_use, tiles = super().times(job, both, rounds)
            return in_use, [
                [us * (0.8 if number % 2 == 0 else 1.2) for us in us_of] for number, us_of in enumerate(tiles)
            ]

    assert not search(tmp_path / "t.json", Noisy(lambda tiles, layer: 100.0)).rows


def test_an_interrupted_search_keeps_what_it_found_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, whole = tmp_path / "t.json", FakeBench(cost)
    search(tmp_path / "whole.json", whole)

    class Interrupted(FakeBench):
        def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
            if len(self.judged) == 9:
                raise KeyboardInterrupt
            return super().judge(job, tiles)

    first = Interrupted(cost)
    with pytest.raises(KeyboardInterrupt):
        search(place, first)
    (row,) = TuningFile.read(place).rows
    assert plain(row.tiles).key_block == 64
    second = FakeBench(cost)
    (row,) = search(place, second).rows
    assert (plain(row.tiles).key_block, plain(row.tiles).num_warps) == (64, 4)
    # The row in use is judged again, to show that the machine is right; nothing else is.
    assert set(first.judged) & set(second.judged) == {only_job().in_use}
    assert set(first.judged) | set(second.judged) == set(whole.judged)
    third = FakeBench(cost)
    search(place, third)
    assert third.judged == [only_job().in_use]
    monkeypatch.setattr(command, "commit", lambda: "another")
    search(place, fourth := FakeBench(cost))
    assert fourth.judged == whole.judged, "another commit is another search"
    for named in ("unknown", "0123456789ab+"):
        monkeypatch.setattr(command, "commit", lambda named=named: named)
        for code in ("one", "two"):
            monkeypatch.setattr(command, "code_digest", lambda code=code: code)
            search(place, other := FakeBench(cost))
            assert other.judged == whole.judged, "other code of a wheel, or of changed files, is another search"
            search(place, same := FakeBench(cost))
            assert same.judged == [only_job().in_use]


def test_a_candidate_is_not_to_blame_for_a_search_that_sigterm_ends(tmp_path: Path) -> None:
    """`timeout 1800 rocm-attn tune` sends it."""

    class Ended(FakeBench):
        def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
            if plain(tiles).key_block == 64:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().judge(job, tiles)

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "t.json", Ended(cost))
    assert signal.signal(signal.SIGTERM, before) not in (before, signal.default_int_handler), "it is as it was"
    (row,) = search(tmp_path / "t.json", FakeBench(cost)).rows
    assert plain(row.tiles).key_block == 64


def test_a_candidate_that_takes_the_process_with_it_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "t.json"

    class Faulting(FakeBench):
        def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
            if plain(tiles).num_stages == 4:
                raise SearchEnded("the GPU stopped working")
            return super().judge(job, tiles)

    with pytest.raises(SearchEnded):
        search(place, Faulting(cost))
    search(place, bench := FakeBench(cost))
    assert replace(plain(only_job().in_use), num_stages=4) not in bench.judged
    assert "num_stages 4: skipped: an earlier search did not return from it" in capsys.readouterr().err


def test_a_damaged_journal_costs_its_lines_alone(tmp_path: Path) -> None:
    place = tmp_path / "t.json"
    search(place, FakeBench(cost))
    journal = tmp_path / "t.json.trials"
    lines = journal.read_text().splitlines()
    endless = '{"key": "x", "outcome": "timed", "ratio": 1, "spilled": 1e999}'
    damaged = '{"key": 3', "[]", "[" * 100_000, endless, '{"key": "x", "outcome"'
    journal.write_text("\n".join([*lines[: len(lines) // 2], *damaged]))
    search(place, bench := FakeBench(cost))
    assert 1 < len(bench.judged) < len(lines)


def test_searches_that_run_at_once_keep_each_others_rows(tmp_path: Path) -> None:
    place = tmp_path / "t.json"

    class Meanwhile(FakeBench):
        """A bench during whose first judgement another GPU's search ends."""

        def judge(self, job: TuneJob, tiles: Tiles) -> Judged:
            if not self.judged:
                search(place, FakeBench(cost), layer="16x4x128")
            return super().judge(job, tiles)

    rows = search(place, Meanwhile(cost)).rows
    assert sorted(row.layer.num_q_heads for row in rows) == [8, 16]


def test_a_search_waits_while_another_changes_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "t.json.trials", {})
    with journal.alone(), pytest.raises(BlockingIOError), (tmp_path / "t.json.trials").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    journal.close()


def test_rows_of_a_file_that_was_removed_are_found_again(tmp_path: Path) -> None:
    """A refusal of a damaged file says to remove it."""
    place = tmp_path / "t.json"
    (found,) = search(place, FakeBench(cost)).rows
    place.unlink()
    (again,) = search(place, FakeBench(cost)).rows
    assert again.tiles == found.tiles


def test_a_candidate_whose_row_cannot_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr(TuningFile, "write", Mock(side_effect=BadSetting("the disk is full")))
        with pytest.raises(BadSetting, match="the disk is full"):
            search(tmp_path / "t.json", FakeBench(cost))
    (row,) = search(tmp_path / "t.json", FakeBench(cost)).rows
    assert (plain(row.tiles).key_block, plain(row.tiles).num_warps) == (64, 4)


def test_a_journal_that_cannot_be_written_ends_the_search_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(BadSetting, match=r"the list of trials .* cannot be written \(File too large\); make room"):
            search(tmp_path / "t.json", FakeBench(cost))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "0 rows written" in capsys.readouterr().out


def test_no_candidate_is_begun_when_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr("rocm_lab.tune.command.time.monotonic", lambda: float(next(ticks)))
    search(tmp_path / "t.json", bench := FakeBench(cost), "--seconds", "5")
    assert 1 <= len(bench.judged) <= 5
    assert "time was up before all were tried" in capsys.readouterr().out


def test_a_file_that_is_no_tuning_file_is_not_overwritten(tmp_path: Path) -> None:
    place = tmp_path / "t.json"
    place.write_text("my notes")
    with pytest.raises(BadSetting, match="is refused: Expecting value"):
        search(place, FakeBench(cost))
    assert place.read_text() == "my notes"


def test_a_dry_run_lists_the_candidates_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "32x8x128", "--dry-run", "--arch", "gfx950", "--shapes", "64d4k,1x512+2k"]) == 0
    text = f"\n{capsys.readouterr().out}"  # decode is first where Triton has no Gluon for CDNA
    assert "\ndecode of 32 over 8 heads of 128, bfloat16, pages of 16, at 64d4k\n  in use: " in text
    assert "extend of 32 over 8 heads of 128" in text
    assert main(["tune", "32x8x128", "--dry-run", "--json", "--shapes", "64d4k"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["arch"] == "gfx942"
    decode = next(job for job in said["jobs"] if job["table"] == "decode")
    assert {each["key_block"] for each in decode["candidates"]} == {16, 32, 64, 128}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--dry-run", "--shapes", "64d4k,64x"), "batch '64x': '64x', from character 1 on, does not begin with"),
        (("--arch", "gfx942"), "--arch needs --dry-run"),
        (("--dry-run", "--tp", "3"), "--tp is 3 and 32x8x128 are the heads of one rank; leave --tp out"),
        (("--device", "cpu"), "there is no GPU to measure on; --dry-run lists"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    given: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "32x8x128", *given]) == BAD_INPUT
    assert sentence in capsys.readouterr().err


def test_heads_that_cannot_be_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "0x0x0", "--dry-run"]) == BAD_INPUT
    assert "num_q_heads is 0; it must be at least 1" in capsys.readouterr().err


def test_what_would_never_be_read_is_not_searched() -> None:
    # ROCM_ATTN_TUNING is off in tests.
    with pytest.raises(BadSetting, match="ROCM_ATTN_TUNING is off, so no runtime would read the rows"):
        command.output_place(None)
