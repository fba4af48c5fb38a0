"""python -m rocm_lab.benchmarks.goals_page

Writes docs/performance_goals.md from the goals (goals.py) and the result files.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rocm_lab.benchmarks.goals import GOALS, OLDER, Goal, GoalPart, Profiled, ResultFiles
from rocm_lab.benchmarks.make_tables import divider, machine_line

PAGE = Path(__file__).parents[2] / "docs" / "performance_goals.md"
PROFILES = "profile_misses"
# The page lists this number of cases above a goal.
MOST_CASES = 8

INTRODUCTION = """# Goals of speed

Written by `python -m rocm_lab.benchmarks.goals_page` from the goals in `rocm_lab/benchmarks/goals.py` and the files in
`rocm_lab/benchmarks/results`; every number of the tables but the goals was measured. The goals are for one NVIDIA H200:
graph replay, the same run as the peers. [Performance](performance.md) has all times of the suites,
`rocm_lab/benchmarks/README.md` those beside every peer of a harness.

A row is met where each of its lines is. **x bound** is by a streaming read of the same bytes, **x limit** by the bytes
at copy bandwidth or the products at the rate of a large product, **x FA3** and the like by the peer's time in the same
run; a peer whose name ends in `-contig` reads K and V that lie in no pages. A mean is geometric; of all others the
worst case counts. Times are of the commit beside them, and rows of different commits are of different runs.
"""

PROFILE_WORDS = """Counters of the launches below were read by Nsight Compute: each kernel alone, with a cold L2, so
that its time is longer than in a graph. DRAM, tensor units and issue slots: percent of what they can do; occupancy: of
the warps that fit; waits: what a warp waits for, of all its cycles.
"""

# Goals that have no row.
ELSEWHERE = (
    "The error of a soft cap's tanh: [soft caps](extend.md#soft-caps).",
    "AMD's GPUs, on which nothing was measured: [static figures](amd_tuning.md), [predicted times](cost.md).",
)


def page(results: ResultFiles) -> str:
    """Returns the text."""
    missed = [goal for goal in GOALS if goal.is_missed(results)]
    parts = [INTRODUCTION, _table(results), _older(results), _not_here(results)]
    if missed:
        parts.append(f"## What is missed, and why\n\n{PROFILE_WORDS}")
        parts += [_miss(goal, results) for goal in missed]
    parts.append(_sources(results))
    return "\n".join(parts)


def _table(results: ResultFiles) -> str:
    head = "| work | | goal | reached | case | commit | |"
    lines = ["## At a glance\n", head, divider(head)]
    for goal in (each for each in GOALS if each.is_measured(results)):
        commits = "; ".join(", ".join(results.commits(name)) for name in goal.sources)
        for at, check in enumerate(goal.checks):
            reached = check.reached(results)
            met = "met" if reached <= check.most else "**missed**"
            name, by = (goal.work, commits) if at == 0 else ("", "")
            numbers = f"{check.most:g} | {reached:.2f} | {check.where(results)}"
            lines.append(f"| {name} | {check.what} | {numbers} | {by} | {met} |")
    return "\n".join(lines) + "\n"


def _older(results: ResultFiles) -> str:
    """Lists the changes since each result."""
    older = [each for each in OLDER if each.is_so(results)]
    if not older:
        return ""
    lines = ["Some results are older than the code, which may be faster or slower by now:\n"]
    for changed in dict.fromkeys(each.changed for each in older):
        files = ", ".join(f"`{each.source}_h200.json` ({each.commit})" for each in older if each.changed == changed)
        lines.append(_wrapped(f"{files}: since then {changed}.", "- "))
    return "\n".join(lines) + "\n"


def _not_here(results: ResultFiles) -> str:
    """Lists goals without a row."""
    lines = ["Not on this page:\n"]
    for goal in (each for each in GOALS if not each.is_measured(results)):
        files = " and ".join(f"`{name}_h200.json`" for name in goal.sources)
        asked = "; ".join(f"at most {check.most:g} {check.what}" for check in goal.checks)
        lines.append(
            _wrapped(f"{goal.work[0].upper()}{goal.work[1:]} ({asked}): not measured, {files} is missing.", "- ")
        )
    lines += [_wrapped(each, "- ") for each in ELSEWHERE]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, begin: str = "") -> str:
    """Wraps prose at a page's width. begin: of the first line; the others are indented as far"""
    indent = " " * len(begin)
    return textwrap.fill(
        text, 120, initial_indent=begin, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _miss(goal: Goal, results: ResultFiles) -> str:
    lines = [f"### {goal.work[0].upper()}{goal.work[1:]}\n"]
    for check in goal.checks:
        above = sorted(check.missed(results).items(), key=lambda found: -found[1])
        if above:
            cases = "; ".join(f"{case}: {value:.2f}" for case, value in above[:MOST_CASES])
            more = f"; and {len(above) - MOST_CASES} more" if len(above) > MOST_CASES else ""
            lines.append(_wrapped(f"Above {check.most:g} {check.what}: {cases}{more}.") + "\n")
            lines += peers_in_words(check, [case for case, _ in above], results)
    lines.append(_wrapped(f"Next idea: {goal.next_idea}") + "\n")
    rows = [line for each in goal.profiled for line in _profile(each, results)]
    if rows:
        head = (
            "| case | by | kernel | us | programs | waves | registers | DRAM % | GB/s | L2 hits % | tensor % | issue % "
            "| occupancy % | waits |"
        )
        lines += [head, divider(head), *rows, ""]
    return "\n".join(lines)


def peers_in_words(check: GoalPart, cases: Sequence[str], results: ResultFiles) -> list[str]:
    """Returns the results of the fastest peer of the same run, for cases above the goal."""
    peers = check.peers(results)
    said = "; ".join(f"{case}: {peers[case].name} {peers[case].value:.2f}" for case in cases if case in peers)
    return [_wrapped(f"The fastest peer of the same run, {check.what}: {said}.") + "\n"] if said else []


def _profile(each: Profiled, results: ResultFiles) -> Iterator[str]:
    """Yields a line for each kernel of a launch."""
    rows = results.of(PROFILES)["rows"]
    mine = next((row for row in rows if Profiled(row["case"], row["provider"]) == each), None)
    for at, kernel in enumerate(mine["kernels"] if mine else ()):
        name, by = (each.case, each.provider) if at == 0 else ("", "")
        yield f"| {name} | {by} | {_kernel(kernel)} |"


def _kernel(kernel: Mapping[str, Any]) -> str:
    waits = ", ".join(f"{reason.replace('_', ' ')} {part:g}" for reason, part in kernel["stalls"].items())
    numbers = ("us", "programs", "waves", "registers", "dram_percent", "dram_gb_s", "l2_hit_percent")
    rates = ("tensor_percent", "issue_percent", "occupancy_percent")
    cells = (f"{kernel[name]:g}" for name in (*numbers, *rates))
    return f"`{kernel['kernel']}` | {' | '.join(cells)} | {waits}"


def _sources(results: ResultFiles) -> str:
    names = dict.fromkeys(name for goal in GOALS if goal.is_measured(results) for name in goal.sources)
    lines = ["## Where the numbers are from\n"]
    for name in (*names, PROFILES):
        line = f"`{name}_h200.json`: {machine_line(results.of(name)['machine'])}"
        commits = results.commits(name)
        lines.append(_wrapped(f"{line}; rows are of {', '.join(commits)}" if len(commits) > 1 else line, "- "))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(ResultFiles()))


if __name__ == "__main__":
    main()
