"""The dashboard's panels without Grafana: a page that shows what Prometheus knows now, with nothing in it that runs.

    python docker/monitoring/panels.py http://127.0.0.1:9090 --minutes 10 > panels.html

It reads the panels from the same file as Grafana does: their places, titles, units and queries.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).parent / "grafana/dashboards/rocm_attn.json"
COLOURS = ("#2f6fb5", "#d9822b", "#3b9150", "#a5439f", "#b5342f", "#5b6770", "#a08a1c", "#2a9d9d")
MOST_POINTS = 150
# Sizes of a chart, in pixels; the text of the axes is outside of the plot.
LEFT, TOP, PLOT_HEIGHT, BOTTOM = 52, 8, 150, 22


@dataclass(frozen=True, slots=True)
class Span:
    """The time that is shown, in seconds of Unix time, and the seconds over which rates are taken."""

    start: float
    end: float
    rate_over: int

    @property
    def step(self) -> int:
        """Seconds between two points."""
        return max(1, round((self.end - self.start) / MOST_POINTS))


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart: its legend, and (Unix time, value) from the first to the last."""

    legend: str
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """Its HTTP API. Raises OSError if it cannot be reached, and ValueError for a query that it refuses."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def at(self, expression: str, moment: float) -> list[Curve]:
        """Returns one point of each series."""
        found = self._ask("query", query=expression, time=moment)
        return [Curve(_all_labels(each["metric"]), (_point(each["value"]),)) for each in found]

    def over(self, expression: str, legend: str, span: Span) -> list[Curve]:
        """Returns each series over a span. legend: with {{label}} in place of a label's value"""
        found = self._ask("query_range", query=expression, start=span.start, end=span.end, step=span.step)
        return [
            Curve(_filled(legend, each["metric"]), tuple(_point(value) for value in each["values"])) for each in found
        ]

    def _ask(self, what: str, **fields: object) -> list[dict[str, Any]]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(fields)}"
        try:
            with urllib.request.urlopen(url) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except urllib.error.HTTPError as refused:
            raise ValueError(f"Prometheus refuses {fields['query']!r}: {refused.read().decode()}") from refused


def expression_of(target: dict[str, Any], span: Span) -> str:
    """A panel's query with Grafana's variables replaced, for all servers."""
    text: str = target["expr"]
    for name, value in (
        ("$instance", ".*"),
        ("$__rate_interval", f"{span.rate_over}s"),
        ("$__range", f"{math.ceil(span.end - span.start)}s"),
    ):
        text = text.replace(name, value)
    return text


def in_unit(value: float, unit: str) -> str:
    """Formats a value in a unit of Grafana's."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return next(
            (f"{value / size:.3g} {name}" for size, name in ((1, "s"), (1e-3, "ms")) if value >= size),
            f"{1e6 * value:.3g} us" if value else "0 s",
        )
    scale = 1024 if unit == "bytes" else 1000
    names = ("B", "KiB", "MiB", "GiB", "TiB") if unit == "bytes" else ("", "k", "M", "G", "T")
    place = 0
    while abs(value) >= scale and place < len(names) - 1:
        value, place = value / scale, place + 1
    return f"{value:.3g} {names[place]}{'/s' if unit == 'reqps' else ''}".strip().replace(" /s", "/s")


def page(title: str, panels: Sequence[dict[str, Any]], prometheus: Prometheus, span: Span) -> str:
    """All panels as HTML."""
    shown = time.strftime("%H:%M:%S", time.gmtime(span.start)), time.strftime("%H:%M:%S UTC", time.gmtime(span.end))
    parts = [_HEAD.format(title=html.escape(title), start=shown[0], end=shown[1])]
    for panel in panels:
        place = panel["gridPos"]
        style = f"grid-column: {place['x'] + 1} / span {place['w']}"
        name = html.escape(panel["title"])
        if panel["type"] == "row":
            parts.append(f'<h2 style="{style}">{name}</h2>')
            continue
        body = _stat(panel, prometheus, span) if panel["type"] == "stat" else _chart(panel, prometheus, span)
        parts.append(f'<section style="{style}"><h3>{name}</h3>{body}</section>')
    return "".join([*parts, "</main>\n"])


def _stat(panel: dict[str, Any], prometheus: Prometheus, span: Span) -> str:
    """The current value, in the colour of the highest threshold that it reaches."""
    defaults = panel["fieldConfig"]["defaults"]
    values = [curve.points[0][1] for curve in prometheus.at(expression_of(panel["targets"][0], span), span.end)]
    if not values or math.isnan(values[0]):
        return '<p class="value">-</p>'
    steps = defaults["thresholds"]["steps"]
    colour = [step["color"] for step in steps if step["value"] is None or values[0] >= step["value"]][-1]
    value = round(values[0]) if defaults["unit"] == "none" else values[0]
    return f'<p class="value {colour}">{in_unit(value, defaults["unit"])}</p>'


def _chart(panel: dict[str, Any], prometheus: Prometheus, span: Span) -> str:
    defaults = panel["fieldConfig"]["defaults"]
    curves = [
        curve
        for target in panel["targets"]
        for curve in prometheus.over(expression_of(target, span), target["legendFormat"], span)
        if any(not math.isnan(value) for _, value in curve.points)
    ]
    stacked = "stacking" in defaults["custom"]
    width = 56 * panel["gridPos"]["w"]
    drawn = _stacked(curves) if stacked else [(curve, None) for curve in curves]
    tallest = max((value for curve, _ in drawn for _, value in curve.points if not math.isnan(value)), default=0)
    top = defaults.get("max") or _round_up(tallest, defaults["unit"])
    lines = list(_axes(span, width, top, defaults["unit"]))
    for number, (curve, base) in reversed(list(enumerate(drawn))):
        lines += _line(_Frame(span, width, top), curve, base, COLOURS[number % len(COLOURS)])
    if not curves:
        lines.append(f'<text x="{width / 2}" y="{TOP + PLOT_HEIGHT / 2}" class="none">nothing yet</text>')
    legend = "".join(
        f'<span><i style="background:{COLOURS[number % len(COLOURS)]}"></i>{html.escape(curve.legend)} '
        f"<b>{in_unit(_last(curve), defaults['unit'])}</b></span>"
        for number, curve in enumerate(curves)
    )
    height = TOP + PLOT_HEIGHT + BOTTOM
    return f'<svg viewBox="0 0 {width} {height}">{"".join(lines)}</svg><p class="legend">{legend}</p>'


@dataclass(frozen=True, slots=True)
class _Frame:
    """The positions of values in a picture."""

    span: Span
    width: int
    top: float

    def x(self, moment: float) -> float:
        share = (moment - self.span.start) / (self.span.end - self.span.start)
        return LEFT + share * (self.width - LEFT - 6)

    def y(self, value: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - min(value, self.top) / self.top)


def _stacked(curves: Sequence[Curve]) -> list[tuple[Curve, Curve | None]]:
    """Each curve on top of those before it, and the curve below it; missing values count as 0."""
    below: dict[float, float] = {moment: 0.0 for curve in curves for moment, _ in curve.points}
    moments, result = sorted(below), list[tuple[Curve, Curve | None]]()
    for curve in curves:
        own = {moment: value for moment, value in curve.points if not math.isnan(value)}
        base = Curve("", tuple((moment, below[moment]) for moment in moments))
        below = {moment: below[moment] + own.get(moment, 0.0) for moment in moments}
        result.append((Curve(curve.legend, tuple((moment, below[moment]) for moment in moments)), base))
    return result


def _line(frame: _Frame, curve: Curve, base: Curve | None, colour: str) -> Iterator[str]:
    """A line with a gap where there is no value, and the area down to base."""
    for piece in _pieces(curve, 3 * frame.span.step):
        line = " ".join(f"{frame.x(moment):.1f},{frame.y(value):.1f}" for moment, value in piece)
        if base is not None:
            under = [point for point in reversed(base.points) if piece[0][0] <= point[0] <= piece[-1][0]]
            area = " ".join(f"{frame.x(moment):.1f},{frame.y(value):.1f}" for moment, value in under)
            yield f'<polygon points="{line} {area}" fill="{colour}" fill-opacity="0.45"/>'
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


def _pieces(curve: Curve, largest_gap: float) -> Iterator[list[tuple[float, float]]]:
    piece: list[tuple[float, float]] = []
    for moment, value in curve.points:
        if piece and (math.isnan(value) or moment - piece[-1][0] > largest_gap):
            yield piece
            piece = []
        if not math.isnan(value):
            piece.append((moment, value))
    if piece:
        yield piece


def _axes(span: Span, width: int, top: float, unit: str) -> Iterator[str]:
    frame = _Frame(span, width, top)
    for part in range(5):
        y = frame.y(top * part / 4)
        yield f'<line x1="{LEFT}" x2="{width - 6}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        yield f'<text x="{LEFT - 5}" y="{y + 3:.1f}" class="left">{in_unit(top * part / 4, unit)}</text>'
    for part in range(1, 4):
        moment = span.start + (span.end - span.start) * part / 4
        label = time.strftime("%H:%M:%S", time.gmtime(moment))
        yield f'<text x="{frame.x(moment):.1f}" y="{TOP + PLOT_HEIGHT + 15}" class="below">{label}</text>'


def _round_up(value: float, unit: str) -> float:
    """The next of 1, 2, 4 and 8 times a power of ten, or the next power of two of bytes; 1 for 0."""
    if value <= 0 or math.isinf(value):
        return 1.0
    if unit == "bytes":
        return 2.0 ** math.ceil(math.log2(value))
    power = 10.0 ** math.floor(math.log10(value))
    return next(digit * power for digit in (1, 2, 4, 8, 10) if digit * power >= value * (1 - 1e-9))


def _last(curve: Curve) -> float:
    return [value for _, value in curve.points if not math.isnan(value)][-1]


def _point(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


def _filled(legend: str, labels: dict[str, str]) -> str:
    for name, value in labels.items():
        legend = legend.replace(f"{{{{{name}}}}}", value)
    return legend


def _all_labels(labels: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items())


_HEAD = """<!doctype html><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 13px "DejaVu Sans", sans-serif; margin: 0; background: #eef1f4; color: #222b33; width: 1440px }}
header {{ padding: 12px 16px 0; display: flex; justify-content: space-between; align-items: baseline }}
h1 {{ font-size: 20px; margin: 0 }}
main {{ display: grid; grid-template-columns: repeat(24, 1fr); gap: 8px; padding: 8px 16px 16px }}
h2 {{ font-size: 14px; margin: 8px 0 0; color: #5b6770 }}
section {{ background: #fff; border: 1px solid #d5dce2; border-radius: 4px; padding: 6px 8px }}
h3 {{ font-size: 13px; margin: 0 0 4px; font-weight: 600 }}
svg {{ width: 100%; display: block }}
svg text {{ font: 11px "DejaVu Sans", sans-serif; fill: #5b6770 }}
.left {{ text-anchor: end }} .below, .none {{ text-anchor: middle }} .grid {{ stroke: #e4e9ed }}
.legend {{ margin: 2px 0 0; font-size: 11px }} .legend span {{ margin-right: 12px; white-space: nowrap }}
.legend i {{ display: inline-block; width: 10px; height: 3px; margin: 0 4px 3px 0 }}
.value {{ font-size: 24px; margin: 6px 0; text-align: center; font-weight: 600; color: #5b6770 }}
.green {{ color: #2c7d41 }} .orange {{ color: #b8650f }} .red {{ color: #b5342f }}
</style><header><h1>{title}</h1><span>{start} to {end}</span></header><main>
"""


def main(arguments: Sequence[str]) -> None:
    """Writes the page to standard output."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prometheus", help="its address, such as http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=30, help="how far back")
    parser.add_argument("--rate-over", type=int, default=30, help="seconds over which rates are taken")
    parser.add_argument("--rows", default="", help="only these rows of the dashboard: words of their titles, by commas")
    given = parser.parse_args(arguments)
    dashboard = json.loads(DASHBOARD.read_text())
    now = time.time()
    span = Span(now - 60 * given.minutes, now, given.rate_over)
    words, panels, is_wanted = [word for word in given.rows.lower().split(",") if word], [], True
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            is_wanted = not words or any(word in panel["title"].lower() for word in words)
        if is_wanted:
            panels.append(panel)
    sys.stdout.write(page(dashboard["title"], panels, Prometheus(given.prometheus), span))


if __name__ == "__main__":
    main(sys.argv[1:])
