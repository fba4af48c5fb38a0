"""Exceptions of hip_graphs reach callers of the runtime as errors of the runtime."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.errors import GraphStale
from rocm_attn.paging.index_spaces import Space
from tests.amd.graphs.small_models import Tiny

CPU = torch.device("cpu")


def test_addresses_that_moved_are_a_stale_graph() -> None:
    tiny = Tiny.build(CPU, "torch", [2])
    runner = tiny.runner()
    table = tiny.runtime.table.space(Space.FULL)
    table.entries = table.entries.clone()
    with pytest.raises(GraphStale, match="table was int32"):
        runner.check_addresses()
