"""Aborts, preemptions, prefix hits, priorities, tenants and faults in one trace: every output is the reference's."""

from __future__ import annotations

import pytest

from tests.amd.runner.random_trace import run_trace


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(0, id="eager", marks=pytest.mark.nightly),
        pytest.param(1, id="graphs", marks=pytest.mark.nightly),
        pytest.param(2, id="windows", marks=pytest.mark.nightly),
        pytest.param(3, id="windows, graphs"),
    ],
)
def test_every_output_of_a_random_trace_is_the_oracles(seed: int) -> None:
    served = run_trace(seed, 60)
    metrics = served.metrics
    for count in (metrics.prefix_hits, metrics.preemptions, metrics.aborts, metrics.faults):
        assert count > 0, f"the trace does not show what it is for: {metrics}"
    has_graphs = seed % 2 == 1
    assert (metrics.replays > 0, not served.hit_in_passing) == (has_graphs, has_graphs)


@pytest.mark.parametrize(
    "seed", [pytest.param(2, id="windows"), pytest.param(1, id="graphs", marks=pytest.mark.nightly)]
)
def test_every_output_of_a_trace_with_steps_ahead_is_the_oracles(seed: int) -> None:
    metrics = run_trace(seed, 60, steps_ahead=1).metrics
    assert min(metrics.prefix_hits, metrics.preemptions, metrics.aborts, metrics.faults) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("steps_ahead", [0, 1], ids=["", "ahead"])
@pytest.mark.parametrize("seed", range(4, 64))
def test_every_output_of_a_longer_trace_is_the_oracles(seed: int, steps_ahead: int) -> None:
    """One in five in deterministic mode."""
    metrics = run_trace(seed, 150, steps_ahead).metrics
    assert min(metrics.prefix_hits, metrics.preemptions, metrics.aborts, metrics.faults) > 0
