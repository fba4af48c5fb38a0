"""The page of goals is current, each row counts what it claims, and counters are parsed as ncu writes them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rocm_lab.bench.choices import ALL_SUITES
from rocm_lab.bench.suites import suite
from rocm_lab.benchmarks.goals import (
    GOALS,
    OLDER,
    FastestPeer,
    Goal,
    GoalPart,
    Older,
    ResultFiles,
    beside,
    by_peer,
    decode_by_bound,
    eager_layer,
    of_no_peer,
    peers_by_bound,
)
from rocm_lab.benchmarks.goals_page import PAGE, page, peers_in_words
from rocm_lab.benchmarks.make_tables import section
from rocm_lab.benchmarks.profile_misses import kernels_of, stalls_of
from rocm_lab.benchmarks.summarize_attention import Pass, peers_of, row, summary


class Given(ResultFiles):
    """Result files that a test has written."""

    def __init__(self, **files: Any) -> None:
        super().__init__()
        self._kept = files


def timed(case: str, provider: str, us: float) -> dict[str, Any]:
    return {"suite": "verify", "case": case, "provider": provider, "us": us}


TWO = Given(kernels={"rows": [timed("a", "triton", 2), timed("a", "fa3", 1), timed("b", "triton", 1)]})


def test_the_page_is_what_the_result_files_say() -> None:
    assert PAGE.read_text() == page(ResultFiles())


def test_every_missed_goal_says_what_would_be_tried_next() -> None:
    results = ResultFiles()
    assert not [goal.work for goal in GOALS if goal.is_missed(results) and not goal.next_idea]


def test_every_profiled_launch_is_a_case_of_the_suites() -> None:
    names = {case.name for case in suite(ALL_SUITES)}
    assert {each.case for goal in GOALS for each in goal.profiled} <= names


def test_a_case_counts_only_beside_a_time_of_the_peer() -> None:
    assert beside("verify", "fa3")(TWO) == {"a": 2.0}
    assert beside("verify", "fa3", but="a")(TWO) == {}
    assert beside("mixed", "fa3")(TWO) == {}


@pytest.mark.parametrize(("most", "missed"), [(2.0, False), (1.9, True)])
def test_a_row_is_met_where_each_check_is(most: float, missed: bool) -> None:
    values = beside("verify", "fa3")
    goal = Goal("work", ("kernels",), (GoalPart("x", 5.0, 1, values), GoalPart("x", most, 1, values)))
    assert goal.is_missed(TWO) is missed


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("rows", [TWO.of("kernels")["rows"], []])
def test_a_case_without_a_time_is_an_error_and_no_met_goal(rows: list[dict[str, Any]], mean: bool) -> None:
    check = GoalPart("x FA3", 2.5, 2, beside("verify", "fa3"), mean=mean)
    goal = Goal("work", ("kernels",), (check,))
    given = Given(kernels={"rows": rows})
    names = "1 (a)" if rows else "0 (none)"
    for refused in (check.reached, check.where, check.missed, goal.is_missed):
        with pytest.raises(
            ValueError, match=r'^"x FA3", at most 2.5, is of 2 cases, and .* run its script again'
        ) as said:
            refused(given)
        assert names in str(said.value)


def test_a_peer_that_was_wrong_in_the_harness_is_an_error_too() -> None:
    rows = [
        {"case": f"dec/{case}/p16", "us": 2.0, "peers": peers} for case, peers in (("a", {"cudnn": 1.0}), ("b", {}))
    ]
    given = Given(attention={"rows": rows})
    assert GoalPart("x", 3.0, 1, by_peer("cudnn", "dec/a")).reached(given) == 2.0
    with pytest.raises(ValueError, match="of 2 cases"):
        GoalPart("x", 3.0, 2, by_peer("cudnn", "dec/a", "dec/b")).reached(given)


def test_a_goal_whose_file_is_missing_is_neither_met_nor_missed() -> None:
    goal = Goal("work", ("never_run",), (GoalPart("x", 1.0, 1, lambda results: results.of("never_run")),))
    assert not goal.is_measured(ResultFiles())
    assert not goal.is_missed(ResultFiles())


def test_a_file_is_older_until_it_is_of_another_commit() -> None:
    older = Older("kernels", "0123abcd", "tiles")
    of = {commit: Given(kernels={"rows": [], "machine": {"commit": commit}}) for commit in ("0123abcdef01", "fedcba98")}
    assert [older.is_so(given) for given in of.values()] == [True, False]


def test_every_older_file_is_still_the_one_of_its_commit() -> None:
    """If this fails, a file was measured again: remove its line from OLDER, and write the page."""
    results = ResultFiles()
    assert not [each.source for each in OLDER if not each.is_so(results)]


def test_what_is_older_names_a_file_that_goals_or_counters_are_of() -> None:
    known = {name for goal in GOALS for name in goal.sources} | {"profile_misses"}
    assert {each.source for each in OLDER} <= known


def test_rows_of_several_commits_name_each_the_most_frequent_first() -> None:
    rows = {str(at): {"commit": commit} for at, commit in enumerate(("bbbbbbbbbbbb", "aaaaaaaaaaaa", "aaaaaaaaaaaa"))}
    given = Given(random_shapes={"rows": rows, "machine": {"commit": "cccccccccccc"}})
    assert given.commits("random_shapes") == ("aaaaaaaa", "bbbbbbbb")


def test_one_sequence_is_said_as_one() -> None:
    rows = [{"num_seqs": count, "step_us_median": 32.0, "layers": 32} for count in (1, 64)]
    assert eager_layer(Given(eager_step={"rows": rows})) == {"1 sequence": 1.0, "64 sequences": 1.0}


def test_of_a_mean_the_geometric_one_counts_and_else_the_worst_case() -> None:
    check = GoalPart("x", 2.0, 2, lambda results: {"a": 1.0, "b": 4.0})
    assert (check.reached(TWO), check.where(TWO), check.missed(TWO)) == (4.0, "b, of 2", {"b": 4.0})
    mean = replace(check, mean=True)
    assert math.isclose(mean.reached(TWO), 2.0)
    assert mean.where(TWO) == "mean, of 2"
    assert not mean.missed(TWO)


def test_decode_counts_by_the_bytes_that_it_reads() -> None:
    rows = [{"case": f"dec/{at}", "bytes": at * 1e8, "times_bound": at} for at in range(4)]
    found = decode_by_bound(1e8, 2e8)(Given(attention={"rows": [*rows, {"case": "ext/1", "bytes": 1e8}]}))
    assert found == {"dec/1": 1, "dec/2": 2}


def test_a_missed_case_says_what_the_fastest_peer_of_the_same_run_reached() -> None:
    rows = [
        {
            "case": case,
            "bytes": 1.0,
            "times_bound": times,
            "lower_bound_us": 10.0,
            "peers": {"slow": 30.0, "fast": 12.0},
        }
        for case, times in (("dec/a", 1.5), ("dec/b", 1.1), ("ext/c", 9.0))
    ]
    check = GoalPart("x bound", 1.2, 2, decode_by_bound(0, 1), peers=peers_by_bound(0, 1))
    given = Given(attention={"rows": rows})
    assert set(check.peers(given).values()) == {FastestPeer("fast", 1.2)}
    (said,) = peers_in_words(check, list(check.missed(given)), given)
    assert said == "The fastest peer of the same run, x bound: dec/a: fast 1.20.\n"
    assert not peers_in_words(replace(check, peers=of_no_peer), ["dec/a"], given)


def record(name: str, us: float, error: float = 1e-3) -> str:
    return f'{{"t": "res", "case": "one", "ad": "{name}", "us": {us}, "err": 1e-3, "err_graph_path": {error}}}'


def raw(*lines: str) -> str:
    ceilings = '"copy_GBs": 1.0, "read_GBs": 1.0, "mma_TFs": 1.0, "graph_launch_us": 1.0, "read_curve": [[1, 1.0]]'
    versions = '"gpu": "g", "torch": "t", "triton": "t"'
    missing = '{"t": "missing", "missing": {"fa4": "not staged"}}'
    return "\n".join((missing, f'{{"t": "ceil", {ceilings}, {versions}}}', *lines))


ONE = SimpleNamespace(name="one", min_bytes=lambda: 2000, flops=lambda: 0)


def test_rows_are_means_of_passes_and_peers_count_where_every_pass_has_them() -> None:
    passes = [
        Pass.of(raw(record("own", 2.0), record("a", 3.0), record("b", 1.0), record("c-contig", 1.0))),
        Pass.of(raw(record("own", 4.0), record("a", 5.0), record("b", 1.0, error=0.5), record("c-contig", 1.0))),
    ]
    assert peers_of("one", passes) == {"a": 4.0, "c-contig": 1.0}
    found = row(ONE, passes)
    assert (found["us"], found["passes_us"], found["peer"], found["peer_us"]) == (3.0, [2.0, 4.0], "a", 4.0)
    assert (found["limit_us"], found["times_limit"]) == (2.0, 1.5)
    assert summary(passes, {"one": ONE})["missing"] == ["fa4"]


def test_a_table_of_passes_says_their_mean_and_every_peer() -> None:
    passes = [Pass.of(raw(record("own", us), record("a", 5.0), record("b", 9.0))) for us in (2.0, 4.0)]
    said = section("attention_h200", summary(passes, {"one": ONE}))
    assert "us: mean of 2 passes; spread:" in said
    assert "| one | 3.0 | 66.7% |" in said
    assert "Every peer of the same run" in said
    assert "could not be loaded: fa4." in said


def test_a_table_of_one_pass_has_no_spread_and_says_where_peers_were_not_recorded() -> None:
    lines = raw(record("own", 2.0), record("a", 5.0)).splitlines()
    result = summary([Pass.of("\n".join(lines[1:]))], {"one": ONE})
    said = section("attention_h200", result)
    assert result["missing"] is None
    assert "us: of one pass." in said
    assert "| one | 2.0 |  |" in said
    assert "Every peer" not in said
    assert "an empty cell says nothing" in said


def test_a_step_without_drafts_is_drafted_by_nothing() -> None:
    times = dict.fromkeys(
        ("launch_us_median", "launch_us_p90", "whole_us_median", "whole_us_p10", "step_us", "idle_us"), 1
    )
    row = {"model": "m", "num_seqs": 8, "idle_share": 0.5, "acceptance_length": 1.0, **times}
    rows = [
        {**row, "draft_tokens": 0, "drafter": "ngram", "topk": 1},
        {**row, "draft_tokens": 4, "drafter": "eagle:seeded", "topk": 2},
    ]
    said = section("round_time_h200", {"machine": {"python_loop_us": 1}, "rows": rows}).splitlines()
    assert [line.partition("| 1 |")[0] for line in said if line.startswith("| m |")] == [
        "| m |  |  | 8 | 0 ",
        "| m | eagle:seeded | 2 | 8 | 4 ",
    ]


@pytest.mark.parametrize("error", ["0.5", "NaN"])
def test_a_wrong_result_of_ours_is_no_row(error: str) -> None:
    with pytest.raises(SystemExit, match="own was wrong on one"):
        Pass.of(raw(record("own", 2.0).replace('"err": 1e-3', f'"err": {error}')))


COUNTERS = {
    "gpu__time_duration.sum": ("nsecond", "1,500"),
    "launch__grid_size": ("", "264"),
    "launch__block_size": ("", "128"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "launch__waves_per_multiprocessor": ("", "1"),
    "dram__bytes.sum.per_second": ("byte/second", "4,400,000,000,000"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "91.04"),
    "lts__t_sector_hit_rate.pct": ("%", "1.2"),
    "sm__inst_executed_pipe_tensor_op_hmma.avg.pct_of_peak_sustained_elapsed": ("%", "12.5"),
    "sm__inst_executed_pipe_tensor_op_hmma.max.pct_of_peak_sustained_elapsed": ("%", "99"),
    "smsp__issue_active.avg.per_cycle_active": ("inst/cycle", "0.25"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "12.0"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", "1"),
    "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio": ("inst", "9"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "3"),
}


def ncu_table(*kernels: str) -> str:
    def line(*cells: str) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    units, values = zip(*COUNTERS.values(), strict=True)
    head = line("ID", "Kernel Name", *COUNTERS)
    rows = (line(str(at), kernel, *values) for at, kernel in enumerate(kernels))
    return "\n".join(("==PROF== Connected", head, line("", "", *units), *rows))


def test_kernels_are_parted_by_the_mark_after_each_case() -> None:
    table = ncu_table("_decode_kernel", "_merge_kernel", "void erfinv_kernel", "fmha", "void erfinv_kernel")
    first, second = kernels_of(table)
    assert [each["kernel"] for each in first] == ["_decode_kernel", "_merge_kernel"]
    assert [each["kernel"] for each in second] == ["fmha"]
    assert (first[0]["us"], first[0]["dram_gb_s"], first[0]["issue_percent"]) == (1.5, 4400, 25.0)
    assert (first[0]["tensor_percent"], first[0]["waves"]) == (12.5, 1.0)


def test_waits_are_parts_of_all_and_what_was_issued_is_none() -> None:
    of = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
    number = {of.format(name): value for name, value in (("selected", 1.0), ("wait", 1.0), ("barrier", 2.0))}
    assert stalls_of(number) == {"barrier": 50.0, "wait": 25.0}
