"""Exceptions of hip_graphs reach callers of the runtime as errors of the runtime."""

import pytest
import torch

from rocm_attn.capture.check import NO_CHECK
from rocm_attn.errors import GraphStale
from rocm_attn.paging.index_spaces import Space
from tests.amd.graphs.small_models import Tiny

CPU = torch.device("cpu")


def test_a_replay_over_memory_that_moved_is_a_stale_graph() -> None:
    """The recording has seen the model's own tensors too."""
    tiny = Tiny.build(CPU, "torch", [2])
    runner = tiny.runner(check=NO_CHECK)
    requests = tiny.admitted(2)
    requests.run(runner, [3, 4])
    requests.run(runner, [1, 1])
    assert runner.counters.replays == 1
    tiny.embedding.untyped_storage().resize_(0)
    with pytest.raises(GraphStale, match="resized in place"):
        requests.run(runner, [1, 1])
    assert runner.counters.replays == 1


def test_addresses_that_moved_are_a_stale_graph() -> None:
    tiny = Tiny.build(CPU, "torch", [2])
    runner = tiny.runner()
    table = tiny.runtime.table.space(Space.FULL)
    table.entries = table.entries.clone()
    with pytest.raises(GraphStale, match="table was int32"):
        runner.check_addresses()
