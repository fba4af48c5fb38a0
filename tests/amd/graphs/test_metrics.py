"""Metrics: each is one field, and is counted where it occurs."""

import json
import pickle
import re
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from rocm_attn.errors import DeviceFault
from rocm_attn.step.metrics import Durations, Metrics, Reason
from tests.amd.graphs.small_models import Tiny

CPU = torch.device("cpu")


def numbered() -> Metrics:
    """Returns metrics with a distinct value each: the place of its field, and 1000."""
    metrics = Metrics()
    for number, metric in enumerate(fields(metrics), 1000):
        start = getattr(metrics, metric.name)
        if isinstance(start, Durations):
            start.note(number)
        elif isinstance(start, dict):
            start[f"reason {number}"] = number
        else:
            words = metric.metadata["labels"]
            setattr(metrics, metric.name, Reason(f"reason {number}", words[-1]) if isinstance(start, str) else number)
    return metrics


def test_every_metric_that_counted_is_in_the_text_and_all_are_in_the_json() -> None:
    assert str(Metrics()) == ""
    text = str(numbered().snapshot())
    for number, metric in enumerate(fields(Metrics), 1000):
        assert str(number) in text, metric.name
    assert set(Metrics().as_dict()) >= {metric.name for metric in fields(Metrics)}
    json.dumps(numbered().as_dict())


def test_prometheus_reads_every_metric_with_its_help_and_type() -> None:
    lines = numbered().snapshot().as_prometheus().splitlines()
    for number, metric in enumerate(fields(Metrics), 1000):
        (help,) = [line for line in lines if re.match(rf"# HELP rocm_attn_{metric.name}(_total)? \S", line)]
        (of_type,) = [line for line in lines if re.match(rf"# TYPE rocm_attn_{metric.name}(_total)? ", line)]
        assert help.endswith(metric.metadata["help"])
        value = getattr(Metrics(), metric.name)
        name = of_type.split()[2]
        samples = [line for line in lines if re.match(rf"{name}(_bucket|_sum|_count)?(\{{.*\}})? ", line)]
        if isinstance(value, Durations):
            assert of_type.split()[3] == "histogram"
            assert samples[-3:] == [f'{name}_bucket{{le="+Inf"}} 1', f"{name}_sum {float(number)}", f"{name}_count 1"]
            last = value.bounds[-1]
            assert samples[len(value.bounds) - 1] == f'{name}_bucket{{le="{last:.10g}"}} {int(number <= last)}'
        elif isinstance(value, str):
            words = metric.metadata["labels"]
            expected = [f'{name}{{reason="{word}"}} {int(word == words[-1])}' for word in words]
            assert (of_type.split()[3], samples) == ("gauge", expected)
        elif isinstance(value, dict):
            assert f'{name}{{reason="reason {number}"}} {number}' in samples
            assert len(samples) == 1 + len(metric.metadata["labels"])
        else:
            assert samples == [f"{name} {number}"]
            assert name.endswith("_total") == (of_type.split()[3] == "counter")


def test_a_reason_keeps_its_word_on_the_way_from_another_process() -> None:
    metrics = Metrics(graphs_off=Reason("memory ran out", "refused")).snapshot()
    again = pickle.loads(pickle.dumps(metrics))
    assert (again.graphs_off, again.graphs_off.word) == ("memory ran out", "refused")


def test_every_way_in_which_a_request_ends_has_a_series_before_the_first() -> None:
    text = Metrics().as_prometheus()
    for reason in ("stop", "length", "abort", "error", "cancelled"):
        assert f'rocm_attn_requests_ended_total{{reason="{reason}"}} 0\n' in text


def test_durations_count_sum_and_know_their_quantiles() -> None:
    durations = Durations()
    assert (bool(durations), durations.count, durations.quantile(0.5)) == (False, 0, 0.0)
    for milliseconds in range(1, 101):
        durations.note(milliseconds / 1000)
    assert durations.count == 100
    assert durations.total == pytest.approx(5.05)
    assert durations.longest == 0.1
    # of the bucket that holds it: above 20 and up to 50 ms; above 50 and up to 100 ms
    assert [durations.quantile(share) for share in (0.0, 0.01, 0.5, 0.51, 1.0)] == [1e-5, 0.001, 0.05, 0.1, 0.1]
    durations.note(7.0, 100)
    assert durations.total == pytest.approx(705.05)
    assert (durations.count, durations.quantile(0.99)) == (200, 7.0)
    durations.note(10_000.0)
    assert durations.quantile(1.0) == 10_000.0
    before = durations.copy()
    durations.note(1.0)
    assert (before.count, durations.count) == (201, 202)


def test_a_snapshot_stays_as_it_was_and_cannot_be_written() -> None:
    metrics = Metrics(steps=2)
    metrics.step_seconds.note(1.0)
    snapshot = metrics.snapshot(pages_in_use=5)
    metrics.steps += 1
    metrics.step_seconds.note(1.0)
    metrics.fallbacks["a reason"] = 1
    assert (snapshot.step_seconds.count, snapshot.fallbacks) == (1, {})
    assert (snapshot.steps, snapshot.pages_in_use, metrics.pages_in_use) == (2, 5, 0)
    assert snapshot == Metrics(steps=2, pages_in_use=5, step_seconds=snapshot.step_seconds).snapshot()
    with pytest.raises(FrozenInstanceError, match="steps of a snapshot"):
        snapshot.steps = 3
    with pytest.raises(AttributeError):
        metrics.snapshot(page_in_use=5)


def test_rates_of_nothing_are_zero() -> None:
    assert (Metrics().padded_share, Metrics().tokens_per_s) == (0.0, 0.0)
    counted = Metrics(real_seqs=3, padded_seqs=1, new_tokens=6, seconds=5.0, capture_seconds=2.0)
    assert (counted.padded_share, counted.tokens_per_s) == (0.25, 2.0)


def test_pages_are_in_use_while_rows_hold_them() -> None:
    tiny = Tiny.build(CPU, "torch", [2], swa_pages=100, window_left=5)
    runner = tiny.runner(graphs=False)
    requests = tiny.admitted(2)
    requests.run(runner, [9, 1])
    tables = tiny.runtime.table.spaces
    used = [table.num_usable_pages - table.num_free_pages for table in tables]
    counters = runner.counters
    assert [counters.pages_in_use, counters.swa_pages_in_use] == used
    assert min(used) > 0
    requests.free()
    assert (runner.counters.pages_in_use, runner.counters.swa_pages_in_use) == (0, 0)
    assert Tiny.build(CPU, "torch", [2]).runner(graphs=False).counters.swa_pages_in_use == 0, "there are none"


def test_a_fault_is_counted_once_wherever_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Tiny.build(CPU, "torch", [2])
    runner = tiny.runner(graphs=False)
    requests = tiny.admitted(1)

    def faulty(*_: object) -> None:
        raise DeviceFault.of_all([DeviceFault("one", 1), DeviceFault("another", 2)])

    with monkeypatch.context() as patch:
        patch.setattr(tiny.runtime.gate, "stage", faulty)
        with pytest.raises(DeviceFault):
            requests.run(runner, [3])
    assert runner.counters.faults == 2
    tiny.runtime.pool.layer(0).k[0] = 1.0
    with pytest.raises(DeviceFault):
        runner.check_device()
    assert runner.counters.faults == 3
