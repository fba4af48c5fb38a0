"""`rocm-attn read-report` on reports of GPUs that do not exist: what was planted comes back, and nothing else."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.cli import BAD_INPUT, DONE, main
from rocm_attn.errors import BadSetting
from rocm_attn.kernels.tuning.measured import Tiles
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.measured_choices import sorted_for
from rocm_attn.machine.releases import Release, Releases
from rocm_attn.machine.target import known_target
from rocm_attn.machine.tuning_file import TuningFile
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.first_run.findings import Discrepancy, discrepancies
from rocm_lab.first_run.report import GpuReport, problem_in
from rocm_lab.first_run.rows import ReportedRows, rows_of
from rocm_lab.tune.jobs import jobs_of
from rocm_lab.tune.journal import Journal
from tests.amd.host.test_tune import FakeBench
from tests.amd.rocm.stand_in import CANDIDATES, LAYER, TRITON, Candidate, Report, failed, kernel, layer_fields
from tests.amd.rocm.test_tiles import search_for
from tests.amd.rocm.tile_trials import RecordedBench

Content = dict[str, Any]
NOISE = 0.01


@pytest.fixture
def read(tmp_path: Path) -> Callable[[Content], GpuReport]:
    """Returns a function that writes a report and reads it as one of an MI300X."""

    def write_and_read(content: Content) -> GpuReport:
        path = tmp_path / "report.json"
        path.write_text(json.dumps(content))
        return GpuReport.read(path, "gfx942")

    return write_and_read


Read = Callable[[Content], GpuReport]


def rows(report: GpuReport) -> ReportedRows:
    return rows_of(report, TRITON)


def differences(report: GpuReport) -> list[Discrepancy]:
    return discrepancies(report, ())


def named(found: list[Discrepancy], kind: str) -> list[Discrepancy]:
    return [each for each in found if each.kind == kind]


def only_row(found: ReportedRows) -> DecodeTiles:
    (row,) = found.rows
    assert isinstance(row.tiles, DecodeTiles)
    return row.tiles


@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_the_planted_row_is_found_and_the_loader_serves_it(noise: float, read: Read, tmp_path: Path) -> None:
    """Not those that are wrong, spill, are faster by less than 3 %, or were looked at for three rounds."""
    found = rows(read(Report(noise=noise).content))
    assert (only_row(found).num_stages, only_row(found).num_warps) == (3, 1)
    assert found.left_out == ()
    place = tmp_path / "tuning.json"
    TuningFile(found.rows).write(place)
    target = replace(known_target("gfx942"), releases=Releases(triton=Release.of(TRITON)))
    serving = sorted_for(target, TuningFile.read(place).rows).serving
    problem = problem_in(layer_fields(LAYER))
    described = select(problem, replace(target, measured=serving), "triton").kernel(StepKind.DECODE).bound.describe()
    assert str(only_row(found)) in described
    of = found.rows[0].measured
    assert (of.device, of.triton, of.torch, of.rocm) == ("AMD Instinct MI300X", TRITON, "2.10.0", "7.2.4")
    assert (of.commit, of.date, of.samples, of.compute_units) == ("0123456789ab", "2026-11-26T10:15:00+00:00", 15, 304)
    assert of.gain == pytest.approx(0.1, abs=0.02)


def test_the_fastest_of_all_searches_of_a_layers_steps_is_kept(read: Read) -> None:
    ratios = {1: 0.93, 3: 0.8, 4: 0.9}
    candidates = tuple(Candidate((("num_stages", stages),), ratio) for stages, ratio in ratios.items())
    content = Report(candidates=candidates).content
    measured = content["tests"]["tiles"]["measured"]
    (slower,) = Report(candidates=candidates[:1]).content["tests"]["tiles"]["measured"]["tile trials"]
    for trials in ([*measured["tile trials"], slower], [slower, *measured["tile trials"]]):
        measured["tile trials"] = trials
        assert only_row(rows(read(content))).num_stages == 3


@pytest.mark.parametrize("left", range(1, len(CANDIDATES)))
def test_no_other_candidate_gives_a_row(left: int, read: Read) -> None:
    found = rows(read(Report((CANDIDATES[left],), NOISE).content))
    assert found.rows == ()
    assert "none of 2 candidates is right and more than 3% faster" in found.left_out[0]


def test_a_gain_of_few_rounds_is_no_gain(read: Read) -> None:
    """The median is faster by 5 %, and a quarter of the rounds is not."""
    content = Report(candidates=(Candidate((("num_stages", 3),), 0.95),)).content
    candidate = trial(content)["candidates"][1]
    assert len(rows(read(content)).rows) == 1
    candidate["us"][:4] = [[1.2 * us for us in of_round] for of_round in candidate["in_use_us"][:4]]
    assert rows(read(content)).rows == ()


def test_a_failed_test_leaves_no_row(read: Read) -> None:
    content = Report().content
    content["tests"]["tests/amd/kernels/test_decode.py::test_one"] = failed()
    found = rows(read(content))
    assert found.rows == ()
    assert found.left_out == (
        "1 tests failed, so nothing is known to be right: tests/amd/kernels/test_decode.py::test_one",
    )


def test_tiles_that_were_not_searched_to_their_end_leave_no_row(read: Read) -> None:
    content = Report().content
    content["tests"]["tiles"]["outcome"] = "skipped"
    assert rows(read(content)).left_out == ("tiles is skipped",)


def test_a_row_that_serves_no_more_is_not_compared_with(read: Read) -> None:
    content = Report().content
    trial(content)["in_use"]["tiles"]["num_stages"] = 4
    found = rows(read(content))
    assert found.rows == ()
    assert "num_stages=4" in found.left_out[0]
    assert "measure again" in found.left_out[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda devices: devices[0].update(arch="gfx950"), "give --arch gfx950 if that is the GPU that you mean"),
        (lambda devices: devices[0].update(arch="sm_90", name="NVIDIA H200"), "NVIDIA H200 (sm_90); reports of gfx942"),
        (lambda devices: devices.append({**devices[0], "name": "another"}), "the report has 2 kinds of GPUs"),
        (lambda devices: devices.clear(), "the report has 0 kinds of GPUs"),
    ],
)
def test_a_report_of_another_gpu_is_refused(change: Callable[[list[Content]], None], sentence: str, read: Read) -> None:
    content = Report().content
    change(content["environment"]["devices"])
    with pytest.raises(BadSetting) as refused:
        read(content)
    assert sentence in str(refused.value)


def trial(content: Content) -> Content:
    """Returns the first search for tiles in a report."""
    found: Content = content["tests"]["tiles"]["measured"]["tile trials"][0]
    return found


NO_REPORT = "is no report of this release"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda content: content.pop("kernels"), NO_REPORT),
        (lambda content: content["kernels"][0]["driver"].pop("registers"), NO_REPORT),
        (lambda content: content.update(tests=[]), NO_REPORT),
        (lambda content: content["environment"]["versions"].pop("rocm"), NO_REPORT),
        (lambda content: content["environment"]["devices"][0].update(compute_units="many"), NO_REPORT),
        (lambda content: content["environment"]["devices"][0].update(compute_units=-1), NO_REPORT),
        (lambda content: content["kernels"][0].update(num_waves=0), NO_REPORT),
        (lambda content: content["tests"]["tiles"]["measured"].update({"tile trials": 3}), NO_REPORT),
        (lambda content: content["tests"]["tiles"].update(outcome="pass"), "tiles is 'pass', neither passed, failed"),
        # Rows that name these would be refused by the runtimes that read them.
        (lambda content: content.update(started=None), "started is None; it must be of type str"),
        (lambda content: content.update(commit=7), "commit is 7; it must be of type str"),
        (lambda content: content["environment"]["versions"].update(rocm=7.2), "rocm is 7.2; it must be of type str"),
        (
            lambda content: content["kernels"].append({**kernel("_merge_kernel"), "arch": "gfx90a"}),
            "is of gfx942, and kernels in it were compiled for gfx90a",
        ),
    ],
)
def test_a_damaged_report_and_one_with_kernels_for_another_gpu_are_refused(
    damage: Callable[[Content], object], sentence: str, read: Read
) -> None:
    content = Report().content
    damage(content)
    with pytest.raises(BadSetting, match=sentence):
        read(content)


SHAPES: list[Content] = [{"shapes": [shape, shape]} for shape in ([1, 2], [0, 1, 1], [1, 2, 3], [1, 8, 0])]
OF_LAYERS: list[Content] = [
    *({"layer": {**layer_fields(LAYER), "dtype": dtype}} for dtype in ("nn", "none of torch's")),
    *({"layer": {**layer_fields(LAYER), "head_dim": dim, "v_head_dim": dim}} for dim in (0, 10**400)),
]
CANDIDATE_LISTS: list[Content] = [{"candidates": listed} for listed in (None, [7], [{"table": "decode"}])]


@pytest.mark.parametrize("damage", [{"layer": {}}, *SHAPES, *OF_LAYERS, *CANDIDATE_LISTS], ids=str)
def test_damaged_trials_of_tiles_are_refused(damage: Content, read: Read) -> None:
    content = Report().content
    trial(content).update(damage)
    report = read(content)
    with pytest.raises(BadSetting):
        rows(report)
    if "candidates" in damage:
        with pytest.raises(BadSetting, match="damaged"):
            differences(report)


@pytest.mark.parametrize(
    "damage",
    [
        lambda us: us.pop(),
        lambda us: us[0].pop(),
        lambda us: us[0].__setitem__(0, -1.0),
        lambda us: us[0].__setitem__(0, 10**400),
    ],
)
def test_damaged_times_of_tiles_are_refused(damage: Callable[[list[list[float]]], object], read: Read) -> None:
    content = Report().content
    damage(trial(content)["candidates"][1]["us"])
    with pytest.raises(BadSetting, match="the times of tiles in the report are damaged"):
        rows(read(content))


def test_a_gpu_that_is_as_the_compiler_says_has_no_differences(read: Read) -> None:
    content = Report(candidates=CANDIDATES[:3]).content
    content["kernels"] += [kernel("_merge_kernel", num_waves=2, waves=1), kernel("_wide", num_waves=8, waves=3)]
    content["kernels"].append(kernel("_unknown", programs_per_cu=0, registers=0))
    assert differences(read(content)) == []


@pytest.mark.parametrize(
    ("driver", "kind", "expected", "found"),
    [
        ({"scratch_bytes": 64}, "scratch", "0 bytes of a lane", "64"),
        ({"programs_per_cu": 4}, "waves", "2 of a SIMD", "1"),
        ({"registers": 256}, "registers", "180", "256"),
    ],
)
def test_what_the_driver_states_otherwise_is_listed(
    driver: dict[str, int], kind: str, expected: str, found: str, read: Read
) -> None:
    content = Report(candidates=()).content
    content["kernels"] += [kernel("_decode_kernel", **driver)] * 3
    assert differences(read(content)) == [Discrepancy(kind, "_decode_kernel, 3 variants", expected, found)]


def test_a_test_that_fails_is_listed_with_its_kernels(read: Read) -> None:
    content = Report(candidates=()).content
    content["tests"]["a"] = failed("rocm_attn.kernels.attention.extend:_extend_kernel", "aiter.ops:other")
    content["tests"]["b"] = failed("aiter.ops:other")  # the simulator's tests have not executed it
    (one,) = differences(read(content))
    assert (one.kind, one.subject) == ("test", "a")
    assert one.expected == "_extend_kernel to be right, as in the simulator"


def test_wrong_tiles_are_listed(read: Read) -> None:
    (wrong,) = named(differences(read(Report().content)), "tiles")
    assert (wrong.subject, wrong.found[:14]) == ("decode with num_warps 2", "wrong: a seque")


def test_the_command_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = tmp_path / "report.json", tmp_path / "read"
    path.write_text(json.dumps(Report(noise=NOISE).content))
    command = ["read-report", str(path), "--arch", "mi300x", "--folder", str(folder)]
    assert main([*command, "--triton-release", TRITON]) == DONE
    printed = capsys.readouterr().out
    assert "1 rows of tiles in" in printed
    assert "tiles: decode with num_warps 2: expected what the reference gives" in printed
    assert len(TuningFile.read(folder / "tuning.json").rows) == 1
    listed = json.loads((folder / "differences.json").read_text())
    assert listed["differences"]
    assert (listed["device"], listed["commit"]) == ("AMD Instinct MI300X", "0123456789ab")
    # Rows of this report for another Triton: none, and those of before are gone.
    assert main([*command, "--triton-release", "3.9.0", "--json"]) == DONE
    said = json.loads(capsys.readouterr().out)
    assert said["rows"] == []
    assert "rows are wanted for 3.9.0" in said["no_rows"][0]
    assert not (folder / "tuning.json").exists()


def test_rows_that_a_search_wrote_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So it is with --folder ~/.cache/rocm_attn, the user's cache."""
    path, kept = tmp_path / "report.json", tmp_path / "tuning.json"
    path.write_text(json.dumps(Report(noise=NOISE).content))
    TuningFile(()).write(kept)
    before = kept.read_bytes()
    command = ["read-report", str(path), "--arch", "mi300x", "--triton-release", TRITON]
    assert main([*command, "--folder", str(tmp_path)]) == BAD_INPUT
    assert f"{kept} is of no earlier report, and would be replaced; name another folder" in capsys.readouterr().err
    assert kept.read_bytes() == before


def test_the_command_refuses_another_file_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_text("[]")
    assert main(["read-report", str(path), "--folder", str(tmp_path / "read")]) == BAD_INPUT
    assert "is no report of this release" in capsys.readouterr().err
    assert not (tmp_path / "read").exists()


@pytest.mark.parametrize("triton", [TRITON, "3.9.0"])
def test_a_search_that_is_recorded_becomes_the_row_that_it_found(triton: str, tmp_path: Path, read: Read) -> None:
    """The trials are as tests/amd/rocm/test_tiles.py writes them; times are from a formula.

    With Triton 3.9.0 decode for CDNA serves: tiles of both kernels are compared with it, and its own are faster.
    """
    target = replace(known_target("gfx942"), releases=Releases(triton=Release.of(triton)))
    problem = problem_in(layer_fields(LAYER))
    jobs, _ = jobs_of([problem], target, [BatchSpec.parse("1d16k"), BatchSpec.parse("64d4k")])

    def cost(tiles: Tiles, layer: Problem) -> float:
        first = jobs[0].tiles
        assert isinstance(tiles, DecodeTiles)
        assert isinstance(first, DecodeTiles)
        is_first = type(tiles) is type(first)
        assert first.key_block != 32
        return 100.0 - 20.0 * (is_first and tiles.key_block == 32) - 5.0 * (tiles.programs_per_cu == 4)

    def verdict(tiles: Tiles) -> str:
        assert isinstance(tiles, DecodeTiles)
        return "wrong: off by 3" if tiles.programs_per_cu == 16 else ""

    bench = RecordedBench(FakeBench(cost, verdict))
    journal = Journal(tmp_path / "trials", {})
    for job in jobs:
        search_for(60, bench, target, journal, job)
    journal.close()
    content = Report().content
    content["environment"]["versions"]["triton"] = triton
    content["tests"] = {"tiles": {"outcome": "passed", "seconds": 1.0, "measured": {"tile trials": bench.trials}}}
    report = read(content)
    found = rows_of(report, triton)
    assert cost(only_row(found), problem) == 75.0
    assert found.rows[0].measured.gain == pytest.approx(0.25)
    assert (len(found.left_out), len(bench.trials)) == (0, len(jobs))
    assert [bench.verdicts[job, job.in_use] for job in jobs] == [""] * len(jobs)
    wrong = [each.subject for each in named(differences(report), "tiles")]
    assert f"{jobs[0].table.value} with programs_per_cu 16" in wrong
