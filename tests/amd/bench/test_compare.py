"""A comparison reports slower or faster only if the samples show it."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_attn.cli import BAD_INPUT, DONE, FAILED, main
from rocm_attn.errors import BadSetting
from rocm_lab.bench.compare import Allowed, Change, ComparedCase, compare, ratio_of_medians
from rocm_lab.bench.plots import draw, pictures_of
from rocm_lab.bench.result_file import SCHEMA, head, read_result, write_json


def samples(median: float, spread: float, seed: int, count: int = 15) -> list[float]:
    """Returns times about a median."""
    chooser = random.Random(seed)
    return [median * (1 + spread * chooser.uniform(-1, 1)) for _ in range(count)]


def row(case: str, us: Sequence[float], provider: str = "triton", suite: str = "decode") -> dict[str, Any]:
    """Returns a row of a result file. A row without samples was wrong."""
    found: dict[str, Any] = {
        "suite": suite,
        "case": case,
        "batch": "1d8k",
        "provider": provider,
        "lower_bound_us": 50.0,
    }
    if not us:
        return {**found, "status": "wrong", "reason": "it left NaN"}
    return {**found, "status": "ok", "us": sorted(us)[len(us) // 2], "share": 0.5, "samples_us": list(us)}


def result_file(path: Path, rows: Sequence[dict[str, Any]], device: str = "NVIDIA H200", **changes: Any) -> Path:
    """Writes a result file as `bench kernels --out` does."""
    machine = {"device": device, "commit": "abc", "torch": "2.11", "triton": "3.6"}
    path.write_text(json.dumps({"schema": SCHEMA, "kind": "kernels", "machine": machine, "rows": rows, **changes}))
    return path


def compared(tmp_path: Path, before: Sequence[float], after: Sequence[float]) -> ComparedCase:
    """Returns the comparison of one row, for which 2% count."""
    old, new = (result_file(tmp_path / f"{number}.json", [row("a", us)]) for number, us in enumerate((before, after)))
    (found,) = compare(read_result(old), read_result(new), 0.02, Allowed())
    return found


@pytest.mark.parametrize("seed", range(5))
def test_two_runs_of_the_same_are_not_called_different(seed: int, tmp_path: Path) -> None:
    found = compared(tmp_path, samples(100, 0.01, seed), samples(100, 0.01, seed + 1000))
    assert found.change is Change.SAME
    assert found.low <= found.ratio <= found.high


@pytest.mark.parametrize(
    ("median", "spread", "change"),
    [
        (110, 0.01, Change.SLOWER),
        (90, 0.01, Change.FASTER),
        (101, 0.005, Change.SAME),
        (110, 0.6, Change.UNCLEAR),
        (102, 0.02, Change.UNCLEAR),
    ],
)
def test_a_change_is_called_by_its_interval(median: float, spread: float, change: Change, tmp_path: Path) -> None:
    assert compared(tmp_path, samples(100, spread, 1), samples(median, spread, 2)).change is change


def test_rows_of_another_dtype_are_other_rows(tmp_path: Path) -> None:
    old, new = (
        read_result(result_file(tmp_path / dtype, [{**row("a", samples(100, 0.01, 1)), "layer": {"dtype": dtype}}]))
        for dtype in ("float32", "bfloat16")
    )
    with pytest.raises(
        BadSetting, match=r"1 rows are only in the run before, such as triton on a \(1d8k in float32\);"
    ):
        compare(old, new, 0.02, Allowed())


def test_each_of_several_rows_of_one_name_is_compared(tmp_path: Path) -> None:
    """A model's layers may differ in what a name does not tell."""
    times = [[samples(median, 0.01, 1) for median in medians] for medians in ((100, 100), (200, 100))]
    old, new = (
        read_result(result_file(tmp_path / str(number), [row("a", us) for us in each]))
        for number, each in enumerate(times)
    )
    changes = [each.change for each in compare(old, new, 0.02, Allowed())]
    assert changes == [Change.SLOWER, Change.SAME]


def test_an_outlier_does_not_make_a_row_slower(tmp_path: Path) -> None:
    assert compared(tmp_path, samples(100, 0.005, 1), [*samples(100, 0.005, 2), 900.0]).change is Change.SAME


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [(samples(1, 0, 1), [], Change.BROKEN), ([], samples(1, 0, 1), Change.MENDED)],
)
def test_what_is_wrong_in_one_run_is_said(
    before: Sequence[float], after: Sequence[float], change: Change, tmp_path: Path
) -> None:
    assert compared(tmp_path, before, after).change is change


def test_few_samples_are_refused() -> None:
    with pytest.raises(BadSetting, match="a row has 3 samples"):
        ratio_of_medians([1.0, 2.0, 3.0], samples(1, 0.1, 1))


def test_other_devices_and_cases_are_refused_unless_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = result_file(tmp_path / "a.json", [row("one", samples(100, 0.01, 1)), row("two", samples(9, 0.01, 2))])
    after = result_file(tmp_path / "b.json", [row("one", samples(100, 0.01, 3))], device="AMD Instinct MI300X")
    assert main(["bench", "compare", str(before), str(after)]) == BAD_INPUT
    assert "of 'NVIDIA H200' and of 'AMD Instinct MI300X'" in capsys.readouterr().err
    assert main(["bench", "compare", str(before), str(after), "--other-device"]) == BAD_INPUT
    assert "1 rows are only in the run before, such as triton on two" in capsys.readouterr().err
    assert main(["bench", "compare", str(before), str(after), "--other-device", "--common-cases"]) == DONE
    assert "1 rows: 1 same" in capsys.readouterr().out


def test_something_slower_ends_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = result_file(tmp_path / "a.json", [row("one", samples(100, 0.01, 1)), row("two", samples(9, 0.01, 2))])
    after = result_file(tmp_path / "b.json", [row("one", samples(120, 0.01, 3)), row("two", [])])
    assert main(["bench", "compare", str(before), str(after)]) == FAILED
    streams = capsys.readouterr()
    assert streams.out.splitlines()[0].startswith("slower     1.2")
    assert "2 of 2 rows are slower than before, or wrong now" in streams.err
    assert main(["bench", "compare", str(after), str(before), "--json"]) == DONE
    changes = {found["case"]: found["change"] for found in json.loads(capsys.readouterr().out)["rows"]}
    assert changes == {"one": "faster", "two": "right now"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has the schema None"),
        ('{"schema": "rocm_attn.bench/0"}', "has the schema 'rocm_attn.bench/0'"),
    ],
)
def test_another_file_is_refused(text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(text)
    for command in (["compare", str(tmp_path / "a.json")], ["plot"]):
        assert main(["bench", *command, str(tmp_path / "a.json")]) == BAD_INPUT
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        {"machine": {}},
        {"machine": None},
        {"rows": None},
        {"rows": [1]},
        {"rows": [{"suite": "decode"}]},
        {"rows": [row("one", samples(100, 0.01, 1)) | {"samples_us": [1.0, None]}]},
        {"rows": [row("one", samples(100, 0.01, 1)) | {"samples_us": 5}]},
        {"rows": [row("one", samples(100, 0.01, 1)) | {"samples_us": [9.0] * 5 + [10**400]}]},
        {"rows": [row("one", samples(100, 0.01, 1)) | {"samples_us": [9.0] * 5 + [float("nan")]}]},
        {"machine": {"device": "NVIDIA H200", "torch": "2.11", "triton": "3.6"}},
        {"rows": [row("one", samples(100, 0.01, 1)) | {"lower_bound_us": None}]},
        {"rows": [row("one", samples(100, 0.01, 1)) | {"us": 0}]},
        {"rows": [row("one", []) | {"lower_bound_us": 10**400}]},
    ],
    ids=str,
)
def test_a_damaged_file_is_refused(damage: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("one", samples(100, 0.01, 1))]
    good = result_file(tmp_path / "a.json", rows)
    kept = json.loads(good.read_text())
    (tmp_path / "b.json").write_text(json.dumps(kept | damage))
    for command in (["compare", str(good)], ["plot"]):
        assert main(["bench", *command, str(tmp_path / "b.json")]) == BAD_INPUT
        assert "b.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", None),
        ("output_tokens", "5"),
        ("output_tokens_per_s", [1.0]),
        ("token_gap", []),
        ("first_token", {"p50_ms": 1.0}),
        ("first_token", {"p50_ms": 1.0, "p99_ms": 10**30}),
    ],
)
def test_a_damaged_file_of_a_server_is_refused(
    name: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"p50_ms": 1.0, "p99_ms": None}  # a null was not measured
    good = {"target": "a", "output_tokens": 5, "output_tokens_per_s": 5.0, "first_token": times, "token_gap": times}
    assert read_result(result_file(tmp_path / "a.json", [good], kind="serving")).rows == [good]
    bad = result_file(tmp_path / "b.json", [{**good, name: value}], kind="serving")
    assert main(["bench", "plot", str(bad), "--folder", str(tmp_path)]) == BAD_INPUT
    assert "b.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "complaint"), [("compare", "a file of serving"), ("plot", "no server has made")])
def test_a_file_of_a_server_without_tokens_is_refused(
    command: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = result_file(tmp_path / "a.json", [], kind="serving")
    assert main(["bench", command, *[str(path)] * (1 + (command == "compare"))]) == BAD_INPUT
    assert complaint in capsys.readouterr().err


@pytest.mark.nightly  # two seconds of importing matplotlib
def test_a_picture_is_drawn_for_each_suite_the_same_one_each_time(tmp_path: Path) -> None:
    rows = [row("one", samples(100, 0.01, 1)), row("one", samples(200, 0.01, 1), "torch"), row("one", [], "fa3")]
    rows += [row("two", samples(100, 0.01, 1), suite="odd-dims"), row("three", [], suite="mixed")]
    kept = read_result(result_file(tmp_path / "a.json", rows))
    paths = []
    for time in range(2):
        (tmp_path / str(time)).mkdir()
        paths.append(draw(kept, tmp_path / str(time), "run"))
    assert [path.name for path in paths[0]] == ["run_decode.png", "run_odd_dims.png"]
    assert [path.read_bytes() for path in paths[0]] == [path.read_bytes() for path in paths[-1]]
    assert paths[0][0].read_bytes().startswith(b"\x89PNG")


def test_rows_of_one_name_have_a_bar_each(tmp_path: Path) -> None:
    """Layers that differ in their scale alone have one: the last row's bar was the only one."""
    rows = [row("one", samples(us, 0.01, 1), provider) for us in (100, 200) for provider in ("triton", "torch")]
    (picture,) = pictures_of(read_result(result_file(tmp_path / "a.json", [*rows, row("one", [], "torch")])))
    assert picture.cases == ("one", "one (2)", "one (3)")
    assert [picture.us[case, "torch"] for case in picture.cases[:2]] == [rows[1]["us"], rows[3]["us"]]


def test_times_of_the_host_have_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row("a", samples(9, 0.01, 1), suite="host"), "lower_bound_us": None}]
    file = result_file(tmp_path / "run.json", rows)
    assert main(["bench", "plot", str(file), "--folder", str(tmp_path)]) == BAD_INPUT
    assert "there is nothing to draw" in capsys.readouterr().err
    assert compare(read_result(file), read_result(file), 0.02, Allowed())[0].change is Change.SAME


def test_what_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"rows": [{"ratio": float("nan"), "us": [1.5, float("inf")], "case": "a"}], "n": 3})
    assert json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word)) == {
        "rows": [{"ratio": None, "us": [1.5, None], "case": "a"}],
        "n": 3,
    }


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("--suite", "--suite"),
        ("64d4k", "64d4k"),
        ("32/8", "32/8"),
        ("as-q,e4m3fnuz/token", "as-q,e4m3fnuz/token"),
        ("1x2048+6144", "1x2048+6144"),
        ("/home/somebody/run.json", "run.json"),
        ("--out=/home/somebody/run.json", "--out=run.json"),
        ("@lengths/of.txt", "@of.txt"),
        ("http://me:secret@10.0.0.1:8000/v1", "http://10.0.0.1:8000/v1"),
    ],
)
def test_a_result_file_has_no_paths_of_whom_made_it(word: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/rocm-attn", word])
    assert head("kernels", torch.device("cpu"))["command"] == ["rocm-attn", shown]


def test_a_run_without_a_result_has_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = result_file(tmp_path / "a.json", [row("one", [])])
    assert main(["bench", "plot", str(path), "--folder", str(tmp_path)]) == BAD_INPUT
    assert "there is nothing to draw" in capsys.readouterr().err
