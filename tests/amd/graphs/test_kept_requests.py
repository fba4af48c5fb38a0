"""Graphs next to pages that outlive their rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.runtime import AttentionRuntime
from tests.amd.graphs.small_models import Requests, Tiny


def kept_values(runtime: AttentionRuntime, ids: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[torch.Tensor]:
    """Returns copies of K and V of kept pages in every layer."""
    values = []
    for layer in range(len(runtime.core.layers)):
        space = runtime.pool.space_of_layer(layer)
        pages = torch.from_numpy(runtime.table.kept.pages(ids, space)).long().to(runtime.device)
        values += [side[pages].clone() for side in (runtime.pool.layer(layer).k, runtime.pool.layer(layer).v)]
    return values


@pytest.mark.parametrize("swa_pages", [0, 60], ids=["one space", "two spaces"])
def test_the_check_of_a_graph_leaves_kept_pages_alone(swa_pages: int, device: torch.device) -> None:
    tiny = Tiny.build(
        device, "torch", [1, 2], num_pages=60, window_left=9 if swa_pages else UNLIMITED_WINDOW, swa_pages=swa_pages
    )
    runtime, table = tiny.runtime, tiny.runtime.table
    runner = StepRunner(runtime, tiny.forward, recorder_for(runtime.device))
    requests = Requests(runtime)
    requests.admit(1)
    requests.run(runner, [12])
    ids = table.kept.keep(requests.rows[0], 0, 3)
    table.free(requests.rows.pop())
    requests.kv_len.pop()
    before = kept_values(runtime, ids)
    assert runner.capture_all().buckets
    requests.admit(2)
    requests.run(runner, [30, 30])
    requests.run(runner, [1, 1])
    assert runner.counters.replays > 0
    for old, new in zip(before, kept_values(runtime, ids), strict=True):
        assert torch.equal(old, new)
    assert all(table.kept.num_holders_of(ids, space.space).tolist() == [1, 1, 1] for space in table.spaces)
