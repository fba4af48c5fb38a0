"""The inputs of a plan, the choice of a graph, and the values that every step derives again."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.errors import GraphStale
from rocm_attn.guards.registry import Guards
from tests.amd.guards.ways import both_ways, in_each_way
from tests.amd.worlds.bounds import run_within_bounds
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import ALL_ON, Request, World, is_right


def across_a_bucket(device: torch.device, guards: Guards, graphs: bool) -> tuple[World, list[Request]]:
    """Grows a request from 63 to 65 tokens. Graphs of the torch provider are captured for lengths up to 64, 128, ..."""
    serving = World.one_layer(device, guards, graphs=graphs, problem=small_problem(16), max_kv_len=128)
    requests = serving.begun(63, 5)
    serving.step(requests, [1, 1])
    serving.run(requests, [1, 1])
    return serving, requests


@both_ways
def test_a_plan_reads_nothing_that_a_captured_kernel_writes(graphs: bool, device: torch.device) -> None:
    """Seed 000: a step planned from a buffer that the last step's forward has written gets that step's plan."""
    serving, requests = across_a_bucket(device, ALL_ON, graphs)
    serving.check_step(requests, [1, 1])
    serving, requests = across_a_bucket(device, Guards().without("planner_inputs"), graphs)
    assert not is_right(serving, requests, [1, 1])


@both_ways
def test_a_longer_step_takes_another_graph(graphs: bool, device: torch.device) -> None:
    serving, requests = across_a_bucket(device, ALL_ON, graphs)
    serving.check_step(requests, [1, 1])
    serving, requests = across_a_bucket(device, Guards().without("graph_key"), graphs)
    assert not is_right(serving, requests, [1, 1])


def sharing_memory(tensor: Tensor, others: Mapping[str, Tensor]) -> list[str]:
    """Returns names of contiguous tensors that share bytes with another one."""

    def span(one: Tensor) -> range:
        assert one.is_contiguous()
        return range(one.data_ptr(), one.data_ptr() + one.nbytes)

    bytes_ = span(tensor)
    return [
        name
        for name, other in others.items()
        if other.device == tensor.device and max(bytes_.start, span(other).start) < min(bytes_.stop, span(other).stop)
    ]


@in_each_way
def test_derived_tensors_are_filled_by_every_step(provider: str, graphs: bool, device: torch.device) -> None:
    def two_decodes(guards: Guards) -> tuple[World, list[Request]]:
        serving = World.one_layer(device, guards, graphs=graphs, provider=provider)
        requests = serving.admit_all(3)
        for request, length in zip(requests, [4, 3, 7], strict=True):
            serving.run([request], [length])
        serving.step(requests, [1, 1, 1])
        serving.run(requests, [1, 1, 1])
        return serving, requests

    serving, requests = two_decodes(ALL_ON)
    serving.check_step(requests, [1, 1, 1])
    assert serving.runtime.seals.tensors()["position_of_token"][:3].tolist() == [5, 4, 8]
    serving, requests = two_decodes(Guards().without("full_refresh"))
    assert not is_right(serving, requests, [1, 1, 1])
    # The first step's positions, and so its slots: the second step's tokens were stored over the first one's.
    assert serving.runtime.seals.tensors()["position_of_token"][:3].tolist() == [4, 3, 7]
    page = serving.runtime.table.pages_of(requests[0].row)[1]
    assert torch.equal(serving.runtime.pool.layer(0).k[page, 0], requests[0].k[0][5])


def test_a_graph_of_memory_that_moved_is_refused(device: torch.device) -> None:
    def moved(guards: Guards) -> tuple[World, list[Request]]:
        """A decode step is captured, then its buffers move because another guard is off, and their owner reports it."""
        serving = World.one_layer(device, guards.without("sealed_growth"), graphs=True)
        requests = serving.admit_all(2)
        serving.run(requests, [4, 3])
        serving.step(requests, [1, 1])
        serving.runtime.core.memory._sealed.ensure(PaddedShape(StepKind.DECODE, 64, 64))
        serving.runner._pinned.bump()
        return serving, requests

    serving, requests = moved(ALL_ON)
    with pytest.raises(GraphStale, match="they have moved; call reopen"):
        serving.run(requests, [1, 1])
    if device.type == "cuda":
        return  # with the guard off, the graph reads freed memory, which ends the process
    serving, requests = moved(Guards().without("graph_epoch"))
    run_within_bounds(serving, requests, [1, 1])
    # A repetition of the previous step: the new token was stored to its slot.
    assert not is_right(serving, requests, [1, 1])
    page = serving.runtime.table.pages_of(requests[0].row)[1]
    assert torch.equal(serving.runtime.pool.layer(0).k[page, 0], requests[0].k[0][5])
