"""The page of benchmarks agrees with its result files."""

from __future__ import annotations

from rocm_lab.benchmarks import make_tables


def test_the_page_is_what_the_result_files_say() -> None:
    assert (make_tables.HERE / "README.md").read_text() == make_tables.page()


def test_every_result_file_is_on_a_page() -> None:
    on_other_pages = {"kernels_h200", "energy_h200"}
    assert {path.stem for path in make_tables.RESULTS.iterdir()} == make_tables.templates().keys() | on_other_pages


def test_a_step_without_drafts_is_drafted_by_nothing() -> None:
    times = dict.fromkeys(
        ("launch_us_median", "launch_us_p90", "whole_us_median", "whole_us_p10", "step_us", "idle_us"), 1
    )
    row = {"model": "m", "num_seqs": 8, "idle_share": 0.5, "acceptance_length": 1.0, **times}
    rows = [
        {**row, "draft_tokens": 0, "drafter": "ngram", "topk": 1},
        {**row, "draft_tokens": 4, "drafter": "eagle:seeded", "topk": 2},
    ]
    result = {"machine": {"python_loop_us": 1}, "rows": rows}
    said = make_tables.section("round_time_h200", result).splitlines()
    assert [line.partition("| 1 |")[0] for line in said if line.startswith("| m |")] == [
        "| m |  |  | 8 | 0 ",
        "| m | eagle:seeded | 2 | 8 | 4 ",
    ]
