"""The dashboard and the alerts use metrics that a server has, and the page of panels draws Prometheus' values."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.amd.server.metrics_page import MONITORING, PAGE, served_names, with_tables

DASHBOARD = json.loads((MONITORING / "grafana/dashboards/rocm_attn.json").read_text())
CHARTS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def names_in(expression: str) -> set[str]:
    """The metrics that a query names."""
    return set(re.findall(r"\b(?:rocm_attn|process)_\w+|\bup\b", re.sub(r'"[^"]*"', "", expression)))


def labels_in(expression: str) -> set[str]:
    """The labels that a query selects by, or sums by."""
    found = {name for inside in re.findall(r"{([^}]*)}", expression) for name in re.findall(r"(\w+)\s*[=!]~?", inside)}
    return found | {name for inside in re.findall(r"by \(([^)]*)\)", expression) for name in re.split(r",\s*", inside)}


QUERIES = [
    *((panel["title"], target["expr"]) for panel in CHARTS for target in panel["targets"]),
    *((rule["alert"], rule["expr"]) for rule in RULES),
]


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_every_query_asks_for_what_a_server_has(title: str, expression: str) -> None:
    served = {**served_names(), "up": set[str]()}
    names = names_in(expression)
    assert names
    assert names <= served.keys(), f"{title}: {names - served.keys()}"
    allowed = {"job", "instance"}.union(*(served[name] for name in names))
    assert labels_in(expression) <= allowed, f"{title}: {labels_in(expression) - allowed}"


def test_a_name_that_no_server_has_is_noticed() -> None:
    expression = 'sum by (why) (rate(rocm_attn_step_total{instance=~"$instance"}[5m]))'
    assert names_in(expression) - served_names().keys() == {"rocm_attn_step_total"}
    assert labels_in(expression) == {"instance", "why"}


def test_panels_fill_their_rows_and_have_numbers_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered = set[tuple[int, int]]()
    for place in (panel["gridPos"] for panel in panels):
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & covered
        covered |= cells
    assert covered == {(x, y) for x in range(24) for y in range(max(y for _, y in covered) + 1)}
    assert all(panel["description"] for panel in CHARTS)


def test_alerts_say_which_server_they_are_about_and_how_bad_it_is() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 10
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
    tested = {
        test["alertname"]
        for case in yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
        for test in case["alert_rule_test"]
        if test.get("exp_alerts")
    }
    assert tested == {rule["alert"] for rule in RULES}


def panels_script() -> ModuleType:
    """docker/monitoring/panels.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("panels", MONITORING / "panels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["panels"] = module
    spec.loader.exec_module(module)
    return module


class Recorded:
    """A stand-in for the part of Prometheus that the page uses."""

    def __init__(self, script: ModuleType, values: dict[str, list[float]]) -> None:
        self._curve, self._values = script.Curve, values
        self.requested: list[str] = []

    def at(self, expression: str, moment: float) -> list[Any]:
        self.requested.append(expression)
        return [self._curve("", ((moment, values[-1]),)) for values in self._values.values()]

    def over(self, expression: str, legend: str, span: Any) -> list[Any]:
        self.requested.append(expression)
        return [
            self._curve(name, tuple((span.start + span.step * place, value) for place, value in enumerate(values)))
            for name, values in self._values.items()
        ]


def test_the_page_has_every_panel_and_no_variable_of_grafanas_is_left() -> None:
    script = panels_script()
    prometheus = Recorded(script, {"a <b>": [1.0, float("nan"), 3.0], "c": [2.0, 2.0, 2.0]})
    text = script.page("a title", DASHBOARD["panels"], prometheus, script.Span(0.0, 600.0, 30))
    assert len(prometheus.requested) == sum(len(panel["targets"]) for panel in CHARTS)
    assert not [expression for expression in prometheus.requested if "$" in expression]
    assert any("[30s]" in expression for expression in prometheus.requested)
    assert any("[600s]" in expression for expression in prometheus.requested)
    for panel in DASHBOARD["panels"]:
        assert f">{panel['title']}<" in text
    assert text.count("<svg") == sum(panel["type"] == "timeseries" for panel in CHARTS)
    assert "a &lt;b&gt;" in text
    assert "a <b>" not in text
    assert "nan" not in text
    assert "<script" not in text


def test_values_are_read_in_their_units() -> None:
    in_unit = panels_script().in_unit
    units = [("s", 0.0123), ("s", 2.5), ("s", 4e-5), ("s", 0.0), ("bytes", 3 << 30), ("percentunit", 0.125)]
    assert [in_unit(value, unit) for unit, value in units] == ["12.3 ms", "2.5 s", "40 us", "0 s", "3 GiB", "12.5 %"]
    assert [in_unit(value, "reqps") for value in (0.5, 12_300)] == ["0.5/s", "12.3 k/s"]
    assert in_unit(1_500_000, "none") == "1.5 M"


def test_stacked_curves_stand_on_one_another_and_a_gap_is_a_gap() -> None:
    script = panels_script()
    nan = float("nan")
    one, two = script.Curve("one", ((0, 1.0), (1, 1.0), (2, nan))), script.Curve("two", ((1, 2.0), (2, 5.0)))
    (first, _), (second, base) = script._stacked([one, two])
    assert [value for _, value in first.points] == [1.0, 1.0, 0.0]
    assert [value for _, value in second.points] == [1.0, 3.0, 5.0]
    assert base.points == first.points
    pieces = list(script._pieces(script.Curve("", ((0, 1.0), (1, nan), (2, 3.0), (3, 3.0), (9, 1.0))), 3))
    assert pieces == [[(0, 1.0)], [(2, 3.0), (3, 3.0)], [(9, 1.0)]]
    assert [script._round_up(value, "s") for value in (0.0, 0.9, 1.0, 3.0, 1700.0)] == [1.0, 1.0, 1.0, 4.0, 2000.0]
    assert script._round_up(250 << 20, "bytes") == 256 << 20


def test_the_tables_of_the_page_are_current() -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.amd.server.metrics_page"
