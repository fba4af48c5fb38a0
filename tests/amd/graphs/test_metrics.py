"""Metrics: each is one field, and is counted where it happens."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import DeviceFault
from rocm_attn.step.metrics import Metrics
from tests.amd.graphs.small_models import Requests, Tiny

CPU = torch.device("cpu")


def test_every_metric_that_counted_is_in_the_text_and_all_are_in_the_json() -> None:
    metrics = Metrics()
    assert str(metrics) == ""
    for place, metric in enumerate(fields(metrics)):
        setattr(metrics, metric.name, f"reason {1000 + place}" if isinstance(metric.default, str) else 1000 + place)
    text = str(metrics.snapshot())
    for place, metric in enumerate(fields(metrics)):
        assert str(1000 + place) in text, metric.name
    assert set(metrics.as_dict()) >= {metric.name for metric in fields(metrics)}


def test_a_snapshot_stays_as_it_was_and_cannot_be_written() -> None:
    metrics = Metrics(steps=2)
    snapshot = metrics.snapshot(pages_in_use=5)
    metrics.steps += 1
    assert (snapshot.steps, snapshot.pages_in_use, metrics.pages_in_use) == (2, 5, 0)
    assert snapshot == Metrics(steps=2, pages_in_use=5).snapshot()
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
    runner = StepRunner(tiny.runtime, tiny.forward, None)
    requests = Requests(tiny.runtime)
    requests.admit(2)
    requests.run(runner, [9, 1])
    tables = tiny.runtime.table.spaces
    used = [table.num_usable_pages - table.num_free_pages for table in tables]
    counters = runner.counters
    assert [counters.pages_in_use, counters.swa_pages_in_use] == used
    assert min(used) > 0
    requests.free()
    assert (runner.counters.pages_in_use, runner.counters.swa_pages_in_use) == (0, 0)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_that_goes_without_its_graph_is_a_fallback(graphs: bool) -> None:
    tiny = Tiny.build(CPU, "torch", [2])
    runner = StepRunner(tiny.runtime, tiny.forward, recorder_for(CPU) if graphs else None, capture_after=2)
    requests = Requests(tiny.runtime)
    requests.admit(2)
    requests.run(runner, [3, 4])
    assert runner.counters.fallbacks == 0, "steps of this kind get no graph"
    for _ in range(4):
        requests.run(runner, [1, 1])
    counters = runner.counters
    assert (counters.fallbacks, counters.replays, counters.captures) == ((2, 2, 1) if graphs else (0, 0, 0))
    assert (counters.steps, counters.real_seqs, counters.padded_seqs) == (5, 10, 0)


def test_a_fault_is_counted_once_wherever_it_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Tiny.build(CPU, "torch", [2])
    runner = StepRunner(tiny.runtime, tiny.forward, None)
    requests = Requests(tiny.runtime)
    requests.admit(1)

    def faulty(*_: object) -> None:
        raise DeviceFault.of_all([DeviceFault("one", 1), DeviceFault("another", 2)])

    with monkeypatch.context() as patch:
        patch.setattr(tiny.runtime, "stage", faulty)
        with pytest.raises(DeviceFault):
            requests.run(runner, [3])
    assert runner.counters.faults == 2
    tiny.runtime.pool.layer(0).k[0] = 1.0
    with pytest.raises(DeviceFault):
        runner.check_device()
    assert runner.counters.faults == 3
