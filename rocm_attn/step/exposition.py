"""Prometheus' text format, version 0.0.4: the lines of a metric, and a scrape made of several sources."""

from __future__ import annotations

from collections.abc import Iterable

from rocm_attn.step.durations import BOUNDS, Durations


def heading(name: str, help: str, of_type: str) -> list[str]:
    """The two lines that stand above a metric's samples. of_type: "counter", "gauge" or "histogram"."""
    escaped = help.replace("\\", "\\\\").replace("\n", "\\n")
    return [f"# HELP {name} {escaped}", f"# TYPE {name} {of_type}"]


def sample(name: str, value: float, **labels: str) -> str:
    """One value."""
    return f"{name}{_in_braces(labels)} {value}"


def histogram(name: str, value: Durations, **labels: str) -> list[str]:
    """Durations: how many took at most as long as each bound, their sum in seconds, and their number."""
    lines, below = [], 0
    for bound, count in zip((*BOUNDS, float("inf")), value.counts, strict=True):
        below += count
        le = "+Inf" if bound == float("inf") else format(bound, "g")
        lines.append(sample(f"{name}_bucket", below, **labels, le=le))
    return [*lines, sample(f"{name}_sum", value.total, **labels), sample(f"{name}_count", below, **labels)]


def text_of(lines: Iterable[str]) -> str:
    """What a scrape gets; texts of several sources may follow one another, if no metric is in two of them."""
    return "".join(f"{line}\n" for line in lines)


def _in_braces(labels: dict[str, str]) -> str:
    return f"{{{','.join(f'{name}={_quoted(value)}' for name, value in labels.items())}}}" if labels else ""


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
