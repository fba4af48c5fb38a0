"""Aborts, preemptions, prefix hits, priorities, tenants and faults in one trace: every output is the oracle's."""

from __future__ import annotations

import pytest

from tests.amd.runner.random_trace import run_trace


@pytest.mark.parametrize("seed", range(4), ids=["eager", "graphs", "windows", "windows, graphs"])
def test_every_output_of_a_random_trace_is_the_oracles(seed: int) -> None:
    metrics = run_trace(seed, 60).metrics
    for count in (metrics.prefix_hits, metrics.preemptions, metrics.aborts, metrics.faults):
        assert count > 0, f"the trace does not show what it is for: {metrics}"
    assert (metrics.replays > 0) == (seed % 2 == 1)
