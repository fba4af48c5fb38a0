"""The pages of performance and of benchmarks agree with their result files, and are current."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_lab.bench.choices import SUITES
from rocm_lab.bench.result_file import read_result
from rocm_lab.benchmarks import make_tables
from rocm_lab.benchmarks.performance_page import PAGE, PREFIX, RESULT, TITLES, page, whole_page
from tests.amd.bench.test_compare import result_file, row, samples


def test_the_page_is_what_its_result_file_says() -> None:
    assert PAGE.read_text() == whole_page(RESULT)


def test_every_picture_of_the_page_is_there_and_every_suite_has_one() -> None:
    pictures = re.findall(r"\]\((\w+\.png)\)", PAGE.read_text())
    assert pictures == [f"{PREFIX}_{suite.replace('-', '_')}.png" for suite in SUITES]
    assert all((PAGE.parent / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert TITLES.keys() == set(SUITES)


def test_no_time_is_on_the_page_for_what_was_wrong(tmp_path: Path) -> None:
    own, other = samples(100, 0.0, 1), samples(50, 0.0, 1)
    rows = [row("one", own), row("one", other, "fa3"), row("two", own), row("two", [], "fa3")]
    kept = read_result(result_file(tmp_path / "a.json", rows))
    machine = {**kept.machine, "runtime": "CUDA 13", "date": "today"}
    rest = {**kept.rest, "ceilings": {"bytes_per_s": 4e12, "flops_per_s": 8e14}}
    text = page(replace(kept, machine=machine, rest=rest), "a.json")
    assert "| one | 50.0 | 100.0 (50) | 50.0 (50) |  |" in text
    assert "| two | 50.0 | 100.0 (50) | wrong |  |" in text
    assert "| decode | 50 to 50 | fa3 (1) | 2.00 | 2.00 (one) |" in text


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_was_measured_with_our_kernels(suite: str) -> None:
    rows = [each for each in read_result(RESULT).rows if each["suite"] == suite and each["provider"] == "triton"]
    assert rows
    assert all(each["status"] == "ok" for each in rows)


def test_the_page_is_what_the_result_files_say() -> None:
    assert (make_tables.HERE / "README.md").read_text() == make_tables.page()


def test_every_result_file_is_on_a_page() -> None:
    shown, on_other_pages = make_tables.TEMPLATE.read_text(), {"kernels_h200", "energy_h200"}
    assert {path.stem for path in make_tables.RESULTS.iterdir() if path.stem not in shown} == on_other_pages


def test_a_number_that_was_not_measured_is_an_empty_cell() -> None:
    assert make_tables.number(make_tables.by(3.0, None), ".2f") == make_tables.number(None, ".1e") == ""
    assert make_tables.number(make_tables.by(3.0, 2.0), ".2f") == "1.50"
