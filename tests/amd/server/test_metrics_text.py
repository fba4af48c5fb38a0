"""The text of /metrics is read by Prometheus' own parser, and the dashboard and the alerts use what is in it."""

import json
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from rocm_attn.step.metrics import BOUNDS, Durations, Metrics, heading, histogram, sample, text_of
from rocm_serve.server.http_metrics import HttpMetrics
from tests.amd.server.metrics_page import MONITORING, PAGE, served_names, with_tables
from tests.amd.server.scraped import families_of, value_of

HOSTILE = 'a "quoted"\nreason \\ with {braces}, and = signs'


def counted() -> tuple[Metrics, HttpMetrics]:
    metrics, http = Metrics(), HttpMetrics(open=3)
    for metric in fields(metrics):
        if isinstance(getattr(metrics, metric.name), dict):
            getattr(metrics, metric.name)[HOSTILE] = 7
    metrics.note_end("stop", 0.25, 3)
    http.note("/v1/models/{model}", 200, 0.003)
    http.note("/v1/completions", 500, 2.0)
    http.note("/v1/completions", 200, 4.0)
    http.refused["queue"] += 2
    return metrics, http


def test_prometheus_reads_the_whole_text_and_no_metric_is_there_twice() -> None:
    metrics, http = counted()
    text = metrics.as_prometheus() + http.as_prometheus()
    found = list(text_string_to_metric_families(text))
    names = [family.name for family in found]
    assert len(names) == len(set(names)) == text.count("# TYPE ") == text.count("# HELP ")
    assert all(family.documentation for family in found)
    assert {family.type for family in found} == {"counter", "gauge", "histogram"}
    keys = [(each.name, *sorted(each.labels.items())) for family in found for each in family.samples]
    assert len(keys) == len(set(keys))
    by_name = families_of(text)
    assert value_of(by_name, "rocm_attn_fallbacks_total", reason=HOSTILE) == 7
    assert value_of(by_name, "rocm_attn_requests_ended_total", reason="stop") == 1
    assert value_of(by_name, "rocm_attn_http_requests_total", route="/v1/completions", status="200") == 1
    assert value_of(by_name, "rocm_attn_http_open_requests") == 3
    assert value_of(by_name, "rocm_attn_http_refused_total", reason="queue") == 2


def test_a_first_error_is_seen_because_its_series_was_there_before() -> None:
    http = HttpMetrics()
    http.note("/v1/completions", 200, 0.1)
    found = families_of(http.as_prometheus())
    for status in ("429", "500", "503"):
        assert value_of(found, "rocm_attn_http_requests_total", route="/v1/completions", status=status) == 0


def test_histograms_of_two_servers_can_be_added() -> None:
    one, other, both = HttpMetrics(), HttpMetrics(), HttpMetrics()
    for place, seconds in enumerate((1e-6, 0.01, 0.3, 7.0, 9e9)):
        (one, other)[place % 2].note("/x", 200, seconds)
        both.note("/x", 200, seconds)
    added = buckets(families_of(one.as_prometheus())["rocm_attn_http_request_seconds"])
    for name, value in buckets(families_of(other.as_prometheus())["rocm_attn_http_request_seconds"]).items():
        added[name] += value
    expected = buckets(families_of(both.as_prometheus())["rocm_attn_http_request_seconds"])
    assert added == pytest.approx(expected)
    assert len(expected) == len(BOUNDS) + 3
    counts = [value for (name, _), value in expected.items() if name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert (counts[-1], counts[-2]) == (5, 4), "what took longer than the last bound is in the last bucket alone"


def buckets(family: Metric) -> dict[tuple[str, str], float]:
    """(name, le) -> value of all samples of a histogram with one route."""
    return {(each.name, each.labels.get("le", "")): each.value for each in family.samples}


def test_a_help_of_two_lines_and_a_hostile_label_come_back_as_they_were() -> None:
    durations = Durations()
    durations.note(0.02)
    lines = [*heading("a_total", "first \\ line\nsecond", "counter"), sample("a_total", 1, reason=HOSTILE)]
    lines += [*heading("b_seconds", "b", "histogram"), *histogram("b_seconds", durations, route=HOSTILE)]
    found = families_of(text_of(lines))
    assert found["a"].documentation == "first \\ line\nsecond"
    assert value_of(found, "a_total", reason=HOSTILE) == 1
    assert value_of(found, "b_seconds_bucket", route=HOSTILE, le="0.02") == 1
    assert value_of(found, "b_seconds_bucket", route=HOSTILE, le="0.01") == 0


# In a process of its own, the tests that ran before cannot give memory back between the two texts.
GROWING = """
import os
from rocm_serve.server.http_metrics import HttpMetrics
before = HttpMetrics().as_prometheus()
held = bytearray(os.urandom(1) * (64 << 20))  # written to, so that it is in RAM
with open(os.devnull), open(os.devnull):
    after = HttpMetrics().as_prometheus()
print(before, after, open("/proc/self/status").read(), sep="\\0")
"""


def test_the_process_is_described_as_the_kernel_describes_it() -> None:
    done = subprocess.run([sys.executable, "-c", GROWING], stdout=subprocess.PIPE, text=True, check=True)
    *texts, status = done.stdout.split("\0")
    before, after = map(families_of, texts)
    grown = "process_resident_memory_bytes"
    assert value_of(after, grown) - value_of(before, grown) > 32 << 20
    assert value_of(after, "process_open_fds") == value_of(before, "process_open_fds") + 2
    (virtual_kib,) = re.findall(r"VmSize:\s+(\d+) kB", status)
    assert abs(value_of(after, "process_virtual_memory_bytes") - 1024 * int(virtual_kib)) < 64 << 20
    assert value_of(before, "process_cpu_seconds_total") > 0
    (boot,) = re.findall(r"btime (\d+)", Path("/proc/stat").read_text())
    assert int(boot) < value_of(before, "process_start_time_seconds") < time.time()


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
