"""A launch of a graph that fails, before it reaches the device or after: the next step takes its own inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from rocm_attn.hip_graphs.recorder import uncounted
from rocm_attn.kernels.metadata.slot_layout import MOST_RUNS
from rocm_attn.step.publisher import GraphRuns
from tests.amd.guards.serving import Serving
from tests.amd.runtime.stepping import Request, providers

pytestmark = pytest.mark.fast(interpreted=0)
CPU = torch.device("cpu")
each_end = pytest.mark.parametrize("launches", [False, True], ids=["not launched", "launched"])


class _LaunchFails(Exception):
    """An error that a driver may raise."""


def _failing(replay: Callable[[], object], launches: bool) -> None:
    if launches:
        replay()
    raise _LaunchFails


def _after_a_launch_that_failed(device: torch.device, *, launches: bool) -> tuple[Serving, list[Request]]:
    """Returns three requests, the first two of which were to be in a step whose graph takes its inputs."""
    serving = Serving(device, graphs=True, provider=providers()[-1])
    requests = serving.admit(3)
    serving.step(requests, [3, 5, 2])
    for _ in range(3):
        serving.step(requests[:2], [1, 1])
    (entry,) = (graph for graph in serving.runner._graph_of_plan.values() if graph.takes_inputs)
    replay = uncounted(entry.recording).replay
    with pytest.MonkeyPatch.context() as patch:
        fails = partial(_failing, replay, launches)
        patch.setattr(entry.recording, "replay", partial(serving.runtime.graph_runs.run, fails))
        with pytest.raises(_LaunchFails):
            serving.run(requests[:2], [1, 1])
    return serving, requests


@each_end
def test_the_step_after_a_launch_that_failed_takes_its_own_inputs(launches: bool, device: torch.device) -> None:
    """It has other requests, in another order, and so has the one after it."""
    serving, (first, second, third) = _after_a_launch_that_failed(device, launches=launches)
    replays = serving.runner.counters.replays
    for requests in ([third, second], [first, third], [second, first], [third, first]):
        serving.step(requests, [1, 1])
    assert serving.runner.counters.replays == replays + 4
    serving.runtime.check_device()


def test_a_count_that_is_not_lost_leaves_a_step_the_inputs_of_the_one_that_failed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has counted the run that failed, and the host has not: the host's inputs are not due."""

    def run(self: GraphRuns, replay: Callable[[], object]) -> None:
        replay()
        self.number = (self.number + 1) & MOST_RUNS

    with monkeypatch.context() as patch:
        patch.setattr(GraphRuns, "run", run)
        serving, (_, second, third) = _after_a_launch_that_failed(device, launches=True)
        patch.setattr(GraphRuns, "lose_count", lambda self: None)
        serving.run([third, second], [1, 1])
        assert not serving.is_right([third, second], [1, 1])


@each_end
def test_a_run_that_raises_is_followed_by_a_number_that_host_and_device_share(launches: bool) -> None:
    runs = GraphRuns(CPU)

    def replay() -> None:
        runs.on_device.add_(1)

    for _ in range(2):
        assert runs.next() == runs.on_device.item()
        runs.run(replay)
    assert (runs.number, runs.on_device.item()) == (2, 2)
    with pytest.raises(_LaunchFails):
        runs.run(partial(_failing, replay, launches))
    number = runs.next()
    assert number == runs.on_device.item()
    assert number not in range(4), "a slot that was written for the run that failed is not due"
    runs.run(replay)
    assert runs.next() == number + 1 == runs.on_device.item()
