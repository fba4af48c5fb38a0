"""The text of /metrics: Prometheus' own parser reads it, and it has the counted values."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from rocm_attn.step.metrics import BOUNDS, Durations, Metrics, heading, histogram, sample, text_of
from rocm_serve.server.http_metrics import HttpMetrics
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
