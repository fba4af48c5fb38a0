"""Write docs/performance.md and its pictures from a result file of `rocm-attn bench kernels --suite all`:

python -m rocm_lab.benchmarks.performance_page [rocm_lab/benchmarks/results/kernels_h200.json]
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rocm_lab.bench.choices import SUITES
from rocm_lab.bench.plots import draw
from rocm_lab.bench.result_file import ResultFile, read_result

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "results", HERE.parents[1] / "docs"
RESULT, PAGE, PREFIX = RESULTS / "kernels_h200.json", DOCS / "performance.md", "performance"
ENERGY = RESULTS / "energy_h200.json"
OWN = "triton"

INTRODUCTION = """# Performance

`python -m rocm_lab.benchmarks.performance_page` writes this page from `rocm_lab/benchmarks/results/{file}`, a result of
`rocm-attn bench kernels --suite all`. All times were measured on an {device}. No AMD GPU was at hand: [the first run on
an MI300](rocm.md) measures them there. [Bench](bench.md) shows how to make such a page of your own machine.

{machine}

- **us**: median time of one layer's launches. They are replayed as a graph, over pages that do not fit into the L2
  cache. All providers of a row take turns.
- **lower bound**: the time of the step's memory traffic or of its matrix products, whichever is longer, without
  launches. The rates, {bytes_per_s:.0f} GB/s and {flops_per_s:.0f} TFLOP/s, were measured in the same process.
- **%**: the lower bound divided by the time.
- **MHz**: the lowest clock of the compute units over the samples of a row. The GPU lowers it under load, so compare
  rows with equal clocks. The file has all samples.
- A provider without a time in a row does not serve it, or gave a wrong result: results are checked first.
- `sdpa` is torch's attention over contiguous K and V, without pages, so it has less work.
"""

TITLES = {
    "few-tiles": "Few query tiles: 777 new tokens over 5,001, and 12 ragged chunks",
    "odd-dims": "Head dims of 80, 96 and 192",
    "verify": "Verification of drafts: 64 sequences, 5 new tokens each",
    "mixed": "Mixed steps: 31 decodes and 2 chunks",
    "chunks": "Large chunks",
    "soft-cap": "Soft caps",
    "ranges": "Chunks of 8,192 keys, windows of 1,024, and images whose tokens see each other",
    "short": "Short contexts: few keys, or few new tokens",
    "eight-bits": "K and V in eight bits",
    "decode": "Decode",
    "decode-192": "Decode with head dim 192",
    "page-sizes": "Page sizes",
}


def page(kept: ResultFile, file: str) -> str:
    """Returns the text. file: the name of the result file"""
    machine, ceilings = kept.machine, kept.rest["ceilings"]
    words = f"Commit {machine['commit']}, torch {machine['torch']}, Triton {machine['triton']}, {machine['runtime']}"
    parts = [
        INTRODUCTION.format(
            file=file,
            device=machine["device"],
            machine=f"{words}, {machine['date']}.",
            bytes_per_s=ceilings["bytes_per_s"] / 1e9,
            flops_per_s=ceilings["flops_per_s"] / 1e12,
        ),
        _summary(kept.rows),
    ]
    for suite in SUITES:
        rows = [row for row in kept.rows if row["suite"] == suite]
        if any("us" in row for row in rows):
            picture = f"![{TITLES[suite]}]({PREFIX}_{suite.replace('-', '_')}.png)"
            parts.append(f"## {TITLES[suite]}\n\n{picture}\n\n{_table(rows)}")
    return "\n".join(parts)


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Compares our kernels with each other provider, suite by suite."""
    lines = ["## At a glance\n", "Times of ours by those of others: below 1 ours is faster.\n"]
    lines += [
        "| suite | ours, % of the lower bound's speed | compared with | geometric mean | worst |",
        f"|{' --- |' * 5}",
    ]
    for suite in SUITES:
        mine = {row["case"]: row for row in rows if row["suite"] == suite and row["provider"] == OWN and "us" in row}
        if not mine:
            continue
        shares = [100 * row["share"] for row in mine.values()]
        first = f"{min(shares):.0f} to {max(shares):.0f}"
        for other, ratios in _ratios(suite, mine, rows):
            worst = max(ratios, key=lambda case: ratios[case])
            mean = geometric_mean(ratios.values())
            lines.append(
                f"| {suite} | {first} | {other} ({len(ratios)}) | {mean:.2f} | {ratios[worst]:.2f} ({worst}) |"
            )
            first = ""
    return "\n".join(lines) + "\n"


def _ratios(
    suite: str, mine: Mapping[str, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields for each other provider: case -> our time relative to its time."""
    others = dict.fromkeys(row["provider"] for row in rows if row["provider"] != OWN)
    for other in others:
        found = {
            row["case"]: mine[row["case"]]["us"] / row["us"]
            for row in rows
            if row["suite"] == suite and row["provider"] == other and "us" in row and row["case"] in mine
        }
        if found:
            yield other, found


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each case, a column for each provider that has a time."""
    providers = list(dict.fromkeys(row["provider"] for row in rows if "us" in row))
    lines = [
        f"| layer: step | bound us | {' | '.join(f'{name} us (%)' for name in providers)} | MHz |",
        f"|{' --- |' * (len(providers) + 3)}",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = {row["provider"]: row for row in rows if row["case"] == case}
        cells = [_cell(of_case.get(name)) for name in providers]
        clocks = [row["lowest_mhz"] for row in of_case.values() if "lowest_mhz" in row]
        lower_bound = next(iter(of_case.values()))["lower_bound_us"]
        lines.append(f"| {case} | {lower_bound:.1f} | {' | '.join(cells)} | {f'{min(clocks):.0f}' if clocks else ''} |")
    return "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or "us" not in row:
        return "" if row is None or row["status"] == "not served" else row["status"]
    return f"{row['us']:.1f} ({100 * row['share']:.0f})"


def energy(kept: ResultFile) -> str:
    """Returns the section on the energy of a launch, for rows that counted it."""
    rows: Iterable[Mapping[str, Any]] = (row for row in kept.rows if "joules_a_token" in row)
    lines = [
        "## Energy\n",
        f"Joules of one layer for each new token, by {kept.rest['energy']}, over a second of launches and more:\n",
        "| layer: step | provider | us | mJ a token |",
        f"|{' --- |' * 4}",
        *(
            f"| {row['case']} | {row['provider']} | {row['us']:.1f} | {1e3 * row['joules_a_token']:.3f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def whole_page(path: Path) -> str:
    """Returns the page of a result file, with energy if it was measured."""
    whole = page(read_result(path), path.name)
    return f"{whole}\n{energy(read_result(ENERGY))}" if ENERGY.exists() else whole


def main() -> None:
    """Writes the page and the pictures."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULT
    PAGE.write_text(whole_page(path))
    draw(read_result(path), DOCS, PREFIX)


if __name__ == "__main__":
    main()
