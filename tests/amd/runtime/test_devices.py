"""A runtime on a GPU that is not the current one, and steps that come on changing streams."""

import pytest
import torch

from tests.amd.graphs.small_models import Tiny, come_and_go, same
from tests.amd.worlds.problems import small_problem
from tests.amd.worlds.world import World

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_runtime_works_on_a_gpu_that_is_not_the_current_one(provider: str) -> None:
    device = torch.device("cuda", 1)
    with torch.cuda.device(0):
        world = World.build([small_problem()], device, provider)
        requests = world.begun(5, 1, 9)
        world.step(requests, [1, 1, 1])
        outs = []
        for graphs in (False, True):
            tiny = Tiny.build(device, provider)
            runner = tiny.runner(graphs=graphs)
            outs.append(come_and_go(runner, tiny.runtime, [3, 5, 1]))
        assert torch.cuda.current_device() == 0
    assert all(out.device == device for out in outs[0])
    assert same(*outs)


@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_step_on_another_stream_starts_after_the_last_one(provider: str, device: torch.device) -> None:
    world = World.build([small_problem()], device, provider)
    requests = world.begun(3, 8)
    for _ in range(4):
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # The next work on other streams must wait for this step.
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            world.step(requests, [1, 1])
        torch.cuda.current_stream(device).wait_stream(stream)
    world.step(requests, [1, 2])
