"""The dashboard and the alerts use metrics that a server has."""

from __future__ import annotations

import json
import re

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


def test_the_tables_of_the_page_are_current() -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.amd.server.metrics_page"
