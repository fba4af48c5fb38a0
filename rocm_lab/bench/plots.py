"""Pictures of result files: of kernels, times with the lower bound and shares of it; of servers, rates and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_attn.errors import BadSetting
from rocm_attn.machine.whole_files import whole_file
from rocm_lab.bench.choices import HOST
from rocm_lab.bench.kernels import OK
from rocm_lab.bench.result_file import KERNELS, ResultFile

_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf")
_INCHES_A_CASE, _WIDTH, _DPI = 0.42, 9.0, 110


@dataclass(frozen=True, slots=True)
class Picture:
    """A suite's rows. cases: in the order in which they were measured"""

    suite: str
    cases: tuple[str, ...]
    providers: tuple[str, ...]
    lower_bound_us: Mapping[str, float]
    us: Mapping[tuple[str, str], float]

    @classmethod
    def of(cls, suite: str, rows: Sequence[Mapping[str, Any]]) -> Picture:
        """Makes a picture of rows with a result. The others have no bar. Cases of one name are numbered, in order."""
        rows = _numbered(rows)
        timed = [row for row in rows if row["status"] == OK]
        return cls(
            suite,
            tuple(dict.fromkeys(row["case"] for row in rows)),
            tuple(dict.fromkeys(row["provider"] for row in timed)),
            {row["case"]: row["lower_bound_us"] for row in rows},
            {(row["case"], row["provider"]): row["us"] for row in timed},
        )


def _numbered(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows, of which the second of a provider with a case's name has the case "name (2)", and so on."""
    seen, numbered = Counter[tuple[str, str]](), list[Mapping[str, Any]]()
    for row in rows:
        of_one_name = row["case"], row["provider"]
        seen[of_one_name] += 1
        nth = seen[of_one_name]
        numbered.append({**row, "case": f"{row['case']} ({nth})"} if nth > 1 else row)
    return numbered


def pictures_of(kept: ResultFile) -> list[Picture]:
    """Returns one picture per suite. Raises BadSetting for another kind of file, or one without a result."""
    if kept.kind != KERNELS:
        raise BadSetting(f"a file of {kept.kind} was given; give one of `rocm-attn bench kernels`")
    rows = [row for row in kept.rows if row["suite"] != HOST]  # times of the host have no lower bound
    suites = dict.fromkeys(row["suite"] for row in rows)
    found = [Picture.of(suite, [row for row in rows if row["suite"] == suite]) for suite in suites]
    found = [picture for picture in found if picture.us]
    if not found:
        raise BadSetting("no row of the file has a result; there is nothing to draw")
    return found


def draw(kept: ResultFile, folder: Path, prefix: str) -> list[Path]:
    """Writes PREFIX_SUITE.png for each suite into folder, and returns the paths. Equal files give equal pictures.

    Raises BadSetting; ModuleNotFoundError without matplotlib, which the extra bench of rocm-lab brings.
    """
    return [
        _written(
            folder / f"{prefix}_{(picture.suite or 'cases').replace('-', '_')}.png", _figure, picture, kept.machine
        )
        for picture in pictures_of(kept)
    ]


def draw_serving(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], path: Path) -> Path:
    """Writes one picture of servers under a load: new tokens a second, first tokens, and times between tokens.

    rows: of the servers. Raises like draw()
    """
    if not any(row["output_tokens"] for row in rows):
        raise BadSetting("no server has made a token; there is nothing to draw")
    return _written(path, _figure_of_servers, rows, machine)


def _written(path: Path, figure_of: Callable[[Any, Any, str], Any], drawn: Any, machine: Mapping[str, Any]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    caption = f"{machine['device']}, {machine['commit']}, torch {machine['torch']}, Triton {machine['triton']}"
    with matplotlib.rc_context({"font.size": 8}):
        figure = figure_of(pyplot, drawn, caption)
        try:
            with whole_file(path) as part:
                figure.savefig(part, format="png", dpi=_DPI, metadata={"Software": None}, facecolor="white")
        except OSError as error:
            raise BadSetting(f"{path} cannot be written ({error.strerror}); choose another place") from error
        finally:
            pyplot.close(figure)
    return path


def _figure_of_servers(pyplot: Any, rows: Sequence[Mapping[str, Any]], caption: str) -> Any:
    """Draws a panel per measure, with a bar per server; of times p50, and p99 as a line to the right of it."""
    height = 1.2 + 2 * _INCHES_A_CASE * len(rows)
    figure, (rates, *panels) = pyplot.subplots(1, 3, sharey=True, figsize=(_WIDTH, height), layout="constrained")
    at, colours = list(range(len(rows))), [_COLOURS[place % len(_COLOURS)] for place in range(len(rows))]
    rates.barh(at, [row["output_tokens_per_s"] for row in rows], 0.6, color=colours)
    rates.set_xlabel("new tokens a second")
    rates.set_yticks(at, [row["target"] for row in rows])
    rates.invert_yaxis()
    times = ("first_token", "time to the first token"), ("token_gap", "time between tokens")
    for panel, (name, label) in zip(panels, times, strict=True):
        p50, p99 = ([row[name][which] or 0.0 for row in rows] for which in ("p50_ms", "p99_ms"))
        panel.barh(at, p50, 0.6, color=colours)
        panel.hlines(at, p50, p99, "k", linewidth=0.8)
        panel.set_xlabel(f"{label}: p50, line to p99 (ms)")
    figure.supxlabel(caption, fontsize=7, color="#555555")
    return figure


def _figure(pyplot: Any, picture: Picture, caption: str) -> Any:
    """Draws times on the left, on a logarithmic axis, with the lower bound as a line at each case; on the right, shares
    of the lower bound's speed.
    """
    height = 1.2 + _INCHES_A_CASE * len(picture.cases) * max(1.0, len(picture.providers) / 3)
    figure, (times, shares) = pyplot.subplots(1, 2, sharey=True, figsize=(_WIDTH, height), layout="constrained")
    bar = 0.8 / len(picture.providers)
    for number, provider in enumerate(picture.providers):
        here = [
            (place, picture.us[case, provider], picture.lower_bound_us[case])
            for place, case in enumerate(picture.cases)
            if (case, provider) in picture.us
        ]
        places = [place - 0.4 + bar * (number + 0.5) for place, _, _ in here]
        colour = _COLOURS[number % len(_COLOURS)]
        times.barh(places, [us for _, us, _ in here], bar, color=colour, label=provider)
        shares.barh(places, [100 * lower_bound / us for _, us, lower_bound in here], bar, color=colour)
    lower_bounds = [picture.lower_bound_us[case] for case in picture.cases]
    at = range(len(lower_bounds))
    times.vlines(lower_bounds, [place - 0.45 for place in at], [place + 0.45 for place in at], "k", label="lower bound")
    times.set_xscale("log", subs=())
    ticks = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]
    low, high = 0.7 * min(lower_bounds), 1.15 * max((*lower_bounds, *picture.us.values()))
    times.set_xlim(low, high)
    times.set_xticks([tick for tick in ticks if low <= tick <= high])
    times.xaxis.set_major_formatter("{x:g}")
    times.set_xlabel("microseconds of one layer")
    times.set_yticks(list(at), picture.cases)
    times.invert_yaxis()
    shares.axvline(100, color="k", linewidth=0.8)
    shares.set_xlabel("% of the lower bound's speed")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(caption, fontsize=7, color="#555555")
    return figure
