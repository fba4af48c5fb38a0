"""Graphs next to pages that outlive their rows; a runtime with more rows than sequences has the same graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.paging.index_spaces import Space
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from tests.amd.graphs.small_models import Requests, Tiny
from tests.amd.worlds.problems import small_problem

CPU = torch.device("cpu")


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


def runtime_of(max_num_seqs: int, max_num_rows: int) -> AttentionRuntime:
    options = RuntimeOptions(
        num_pages=60, max_num_seqs=max_num_seqs, max_num_rows=max_num_rows, max_kv_len=32, provider="torch"
    )
    return build_runtime([small_problem()] * 2, options, device=CPU)


def test_graphs_follow_the_sequences_of_a_step_and_not_the_rows() -> None:
    few, many = runtime_of(3, 0), runtime_of(3, 20)
    assert (few.table.num_free_rows, many.table.num_free_rows) == (3, 20)
    assert few.padding == many.padding
    for runtime in (few, many):
        runtime.seals.seal()
    sizes = [
        {name: t.numel() for name, t in each.seals.tensors().items() if "table" not in name} for each in (few, many)
    ]
    assert sizes[0] == sizes[1]
    widths = [each.table.space(Space.FULL).entries.shape[0] for each in (few, many)]
    assert widths == [4, 21]
