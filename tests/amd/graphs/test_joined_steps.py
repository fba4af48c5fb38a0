"""Graphs that take their inputs as parts of other graphs: host and device count the same runs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.hip_graphs.recorder import CountedRecording, InTurn, Recording, counted_as, uncounted
from rocm_attn.hip_graphs.torch_recorder import JoinedRecording
from rocm_attn.step.publisher import GraphRuns
from tests.amd.graphs.small_models import Tiny
from tests.amd.worlds.problems import providers


def joined(device: torch.device, parts: Sequence[Recording]) -> Recording:
    """Returns the parts as one: on a GPU its own graph, elsewhere a stand-in that counts their runs like a graph."""
    if device.type == "cpu":
        return counted_as(parts, InTurn([uncounted(part) for part in parts]))
    whole = recorder_for(device).join(parts)
    assert isinstance(uncounted(whole), JoinedRecording)
    return whole


class Counter:
    """A recording that adds 1 to the device's counter."""

    bytes = 0

    def __init__(self, runs: GraphRuns) -> None:
        self._runs = runs

    def replay(self) -> None:
        """Does the same as `Recording.replay`."""
        self._runs.on_device.add_(1)


@pytest.mark.parametrize("num_counted", [0, 1, 2])
def test_each_counted_part_of_a_joined_recording_is_a_run(num_counted: int) -> None:
    runs = GraphRuns(torch.device("cpu"))
    x = torch.zeros(1)
    other, counter = InTurn([]), Counter(runs)
    parts: list[Recording] = [other, *[CountedRecording(counter, runs.run)] * num_counted, other]
    whole = joined(x.device, parts)
    for turn in range(1, 4):
        whole.replay()
        assert runs.on_device.item() == runs.number == turn * num_counted
        assert runs.next() == turn * num_counted


def test_a_joined_recording_that_raises_loses_the_count_of_its_parts() -> None:
    runs = GraphRuns(torch.device("cpu"))

    class Broken(InTurn):
        def replay(self) -> None:
            raise KeyboardInterrupt

    whole = joined(torch.device("cpu"), [CountedRecording(Broken([]), runs.run)] * 2)
    with pytest.raises(KeyboardInterrupt):
        whole.replay()
    assert runs.next() > 2
    assert runs.on_device.item() == runs.number


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_counts_what_it_runs_of_a_joined_graph() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    runs, recorder = GraphRuns(device), recorder_for(device)
    recording, _ = recorder.record(lambda: runs.on_device.add_(1))
    other, _ = recorder.record(lambda: runs.on_device.add_(0))
    runs.on_device.zero_()
    counted = CountedRecording(recording, runs.run)
    for whole, num in (joined(device, [counted, other]), 1), (joined(device, [counted, other, counted]), 2):
        before = runs.number
        whole.replay()
        whole.replay()
        assert runs.on_device.item() == runs.number == before + 2 * num


@pytest.mark.parametrize("provider", providers())
@pytest.mark.parametrize("is_counted", [True, False], ids=["counted", "not counted"])
def test_a_plain_step_after_a_joined_one_takes_its_own_inputs(
    is_counted: bool, provider: str, device: torch.device
) -> None:
    """A step whose graph ran once more than the host knows takes no inputs, and repeats the step before."""
    found = []
    for is_joined in (False, True):
        tiny = Tiny.build(device, provider)
        runner = tiny.runner()
        requests = tiny.admitted(2)
        for q_len in ([5, 3], [1, 1], [1, 1], [1, 1]):
            last = requests.run(runner, q_len)
        if not runner._input_plans:
            pytest.skip("twins on a GPU take no inputs in a graph")
        if is_joined:
            assert_repeats(runner, tiny.runtime.device, last, is_counted=is_counted)
        found.append(requests.run(runner, [1, 1]))
    assert torch.equal(*found) is is_counted


def assert_repeats(runner: StepRunner[Tensor], device: torch.device, last: Tensor, *, is_counted: bool) -> None:
    """Checks that the graph of the last step gives the same result as a part of another graph."""
    graph = runner.graph_again
    assert graph is not None
    assert isinstance(graph.recording, CountedRecording)
    whole = joined(device, [graph.recording, InTurn([])] if device.type == "cpu" else [graph.recording])
    batch = runner._runtime.gate.last.batch  # type: ignore[union-attr]
    runner.run_again(batch, whole if is_counted else uncounted(whole))
    assert torch.equal(graph.outputs[: len(last)], last)
