"""Writes rocm_lab/benchmarks/README.md from the result files: python -m rocm_lab.benchmarks.make_tables

README.jinja is the page. Each result file is a variable of its name.
"""

import json
from pathlib import Path

import jinja2

HERE = Path(__file__).parent
RESULTS, TEMPLATE = HERE / "results", HERE / "README.jinja"


def main() -> None:
    """Writes the page."""
    (HERE / "README.md").write_text(page())


def page() -> str:
    """Returns the page's text."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters.update(number=number, by=by)
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.iterdir()}
    return environment.from_string(TEMPLATE.read_text()).render(results)


def number(value: float | None, form: str) -> str:
    """Returns a number in a form of Python's format(); empty if there is none."""
    return "" if value is None else format(value, form)


def by(value: float, other: float | None) -> float | None:
    """Returns a ratio; None if there is no second number."""
    return value / other if other else None


if __name__ == "__main__":
    main()
