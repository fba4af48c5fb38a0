"""Reopening for smaller sizes frees the memory that graphs of the larger ones held."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.runtime import AttentionRuntime
from rocm_attn.step.step import Part
from tests.amd.graphs.small_models import Tiny, serve

LARGE, SMALL = 256, 2
WIDTH = 1 << 18
NEEDED_BYTES = LARGE * WIDTH * 4


def step_memory(runtime: AttentionRuntime) -> list[Tensor]:
    """Returns the tensors sealed for steps. The table and the pages belong to requests and stay."""
    return [t for name, t in runtime.seals.tensors().items() if name != "table" and "pages" not in name]


def num_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_nothing_of_the_larger_sizes_is_held(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [LARGE], tokens=(LARGE,))
    runner = tiny.runner()
    served = [[3, 5], [1, 1], [1]]
    serve(runner, tiny.runtime, served)
    assert runner.counters.replays == 3
    outputs = [entry.outputs for entry in runner._graph_of_plan.values()]
    large = num_bytes(step_memory(tiny.runtime))
    held = [weakref.ref(tensor) for tensor in (*step_memory(tiny.runtime), *outputs)]
    del outputs
    runner.reopen([SMALL])
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []

    fresh = Tiny.build(device, provider, [SMALL])
    fresh.runner()
    assert num_bytes(step_memory(tiny.runtime)) == num_bytes(step_memory(fresh.runtime)) < large
    serve(runner, tiny.runtime, served)
    assert runner.counters.replays == 5, "the prompt is longer than any graph by now"


@pytest.mark.gpu
def test_the_device_gets_the_memory_of_graphs_back(provider: str, device: torch.device) -> None:
    """The forward needs NEEDED_BYTES at the large size, all of them in the graphs' pool."""
    tiny = Tiny.build(device, provider, [LARGE])

    def forward(step: Part) -> Tensor:
        rows = tiny.forward(step)
        return rows + rows[:, :1].repeat(1, WIDTH).mean(1, keepdim=True)

    def in_use() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)

    runner = StepRunner(tiny.runtime, forward, recorder_for(tiny.runtime.device))
    before = in_use()
    assert runner.capture_all().num_bytes >= NEEDED_BYTES
    captured = in_use()
    runner.reopen([SMALL])
    given_back = in_use()
    assert given_back[0] < captured[0]
    assert captured[1] - given_back[1] >= NEEDED_BYTES
    # Libraries keep workspaces for the captured stream.
    assert given_back[1] - before[1] < NEEDED_BYTES // 4
    assert runner.capture_all().num_bytes < NEEDED_BYTES // 4
    serve(runner, tiny.runtime, [[3, 5], [1, 1], [1]])
    assert runner.counters.replays == 2
