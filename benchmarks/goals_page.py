"""Write docs/performance_goals.md from the goals (goals.py) and the result files: python -m benchmarks.goals_page"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.goals import GOALS, Goal, Profiled, Results
from benchmarks.make_tables import divider, machine_line

PAGE = Path(__file__).parent.parent / "docs" / "performance_goals.md"
PROFILES = "profile_misses"
# Of cases above a goal, so many are listed.
MOST_CASES = 8

INTRODUCTION = """# Goals of speed

Written by `python -m benchmarks.goals_page` from the goals in `benchmarks/goals.py` and the files in
`benchmarks/results`; every number but the goals was measured. The goals are for one NVIDIA H200: graph replay, the same
run as the peers. [Performance](performance.md) has all times of the suites, `benchmarks/README.md` those beside every
peer of a harness.

A row is met where each of its lines is. **x floor** is by a streaming read of the same bytes, **x limit** by the bytes
at copy bandwidth or the products at the rate of a large product, **x FA3** and the like by the peer's time in the same
run. A mean is geometric; of all others the worst case counts.
"""

PROFILE_WORDS = """Counters of the launches, read by Nsight Compute: each kernel alone, with a cold L2, so that its time
is longer than in a graph. DRAM, tensor units and issue slots: percent of what they can do; occupancy: of the warps that
fit; waits: what a warp waits for, of all its cycles.
"""


def page(results: Results) -> str:
    """The text."""
    missed = [goal for goal in GOALS if not goal.is_met(results)]
    parts = [INTRODUCTION, _table(results)]
    if missed:
        parts.append("## What is missed, and why\n")
        parts += [_miss(goal, results) for goal in missed]
    parts.append(_sources(results))
    return "\n".join(parts)


def _table(results: Results) -> str:
    head = "| work | | goal | reached | case | |"
    lines = ["## At a glance\n", head, divider(head)]
    for goal in GOALS:
        for at, check in enumerate(goal.checks):
            reached = check.reached(results)
            met = "met" if reached <= check.most else "**missed**"
            name = goal.work if at == 0 else ""
            lines.append(f"| {name} | {check.what} | {check.most:g} | {reached:.2f} | {check.where(results)} | {met} |")
    return "\n".join(lines) + "\n"


def _miss(goal: Goal, results: Results) -> str:
    lines = [f"### {goal.work[0].upper()}{goal.work[1:]}\n"]
    for check in goal.checks:
        above = sorted(check.missed(results).items(), key=lambda found: -found[1])
        if above:
            cases = "; ".join(f"{case}: {value:.2f}" for case, value in above[:MOST_CASES])
            more = f"; and {len(above) - MOST_CASES} more" if len(above) > MOST_CASES else ""
            lines.append(f"Above {check.most:g} {check.what}: {cases}{more}.\n")
    lines.append(f"Next idea: {goal.next_idea}\n")
    rows = [line for each in goal.profiled for line in _profile(each, results)]
    if rows:
        head = (
            "| case | by | kernel | us | programs | waves | registers | DRAM % | GB/s | L2 hits % | tensor % | issue % "
            "| occupancy % | waits |"
        )
        lines += [PROFILE_WORDS, head, divider(head), *rows, ""]
    return "\n".join(lines)


def _profile(each: Profiled, results: Results) -> Iterator[str]:
    """A line for each kernel of a launch."""
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


def _sources(results: Results) -> str:
    names = dict.fromkeys(name for goal in GOALS for name in goal.sources)
    lines = ["## Where the numbers are from\n"]
    lines += [
        f"- `{name}_h200.json`: {machine_line(results.of(name)['machine']).strip()}" for name in (*names, PROFILES)
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(Results()))


if __name__ == "__main__":
    main()
