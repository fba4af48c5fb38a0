"""Several recordings as one, recordings of functions that have run before, and blocks of code."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from rocm_attn.hip_graphs.driver_graphs import DriverGraph, DriverRefused, GraphCalls
from rocm_attn.hip_graphs.errors import RecordingRefused, StaleRecording
from rocm_attn.hip_graphs.fake_recorder import FakeRecorder
from rocm_attn.hip_graphs.recorder import Joiner, Recording
from rocm_attn.hip_graphs.torch_recorder import JoinedRecording, TorchRecorder
from rocm_attn.kernels.launch import run_as_launch
from tests.amd.hip_graphs.recorders import Lab, same_bits


def joiner(lab: Lab) -> Joiner:
    assert isinstance(lab.recorder, FakeRecorder | TorchRecorder)
    return lab.recorder


def three(lab: Lab, x: torch.Tensor) -> list[Recording]:
    """Returns recordings of x * 2, then x + 3, then x * 5. It sets x to 1."""
    steps = lambda: x.mul_(2), lambda: x.add_(3), lambda: x.mul_(5)
    recordings: list[Recording] = [lab.recorder.record(step)[0] for step in steps]
    x.fill_(1)
    return recordings


def test_joined_recordings_run_in_their_order_each_time(lab: Lab) -> None:
    x = torch.ones(1 << 16, device=lab.device)
    recordings = three(lab, x)
    joined = joiner(lab).join(recordings)
    joined.replay()
    assert bool((x == 25).all())
    joined.replay()
    assert bool((x == 265).all())
    recordings[1].replay()
    assert bool((x == 268).all())
    joiner(lab).join([recordings[2], recordings[0]]).replay()
    assert bool((x == 2680).all())


def test_joined_recordings_hold_what_they_work_on(lab: Lab) -> None:
    """The memory of a result that only the recording holds is not given to others."""
    x, total = torch.ones(1 << 16, device=lab.device), torch.zeros(1 << 16, device=lab.device)
    first, doubled = lab.recorder.record(lambda: x * 2)
    last, _ = lab.recorder.record(partial(total.copy_, doubled))
    joined = joiner(lab).join([first, last])
    del first, last, doubled
    others = [lab.recorder.record(lambda: x * 7) for _ in range(3)]
    joined.replay()
    for other, _ in others:
        other.replay()
    joined.replay()
    assert bool((total == 2).all())


def test_what_is_recorded_without_a_run_writes_nothing_before_its_replay(lab: Lab) -> None:
    x = torch.ones(64, device=lab.device)
    recording = joiner(lab).record_launches(lambda: run_as_launch(x.add_, 4))
    assert x.tolist() == [1.0] * 64
    recording.replay()
    recording.replay()
    assert x.tolist() == [9.0] * 64


def test_a_joined_recording_of_memory_that_moved_does_not_run(fake: FakeRecorder) -> None:
    x = torch.ones(4)
    recordings = [fake.record(lambda: x.add_(1))[0], fake.record_launches(lambda: run_as_launch(x.add_, 1))]
    joined = fake.join(recordings)
    x.untyped_storage().resize_(1 << 20)
    with pytest.raises(StaleRecording):
        joined.replay()


class Driver:
    """A driver whose functions record their calls. One may fail, or lack a context until one is current."""

    def __init__(self, fails: str = "", *, has_context: bool = True) -> None:
        self.called, self._has_context = list[str](), has_context
        self.calls = GraphCalls(*(self._call(name, fails) for name in GraphCalls._fields))

    def make_current(self) -> None:
        self.called.append("make_current")
        self._has_context = True

    def _call(self, name: str, fails: str):  # type: ignore[no-untyped-def]
        def call(*arguments: object) -> int:
            self.called.append(name)
            if name == "launch" and not self._has_context:
                return 201
            return 801 if name == fails else 0

        return call


@pytest.mark.parametrize("fails", ["create", "add_child", "instantiate"])
def test_graphs_that_a_driver_cannot_join_are_refused_and_nothing_is_left(fails: str) -> None:
    driver = Driver(fails)
    with pytest.raises(DriverRefused, match="gave error 801"):
        DriverGraph(driver.calls, [1, 2], driver.make_current)
    assert driver.called[-1] == ("create" if fails == "create" else "destroy")
    assert "destroy_exec" not in driver.called


def test_a_graph_of_the_driver_is_launched_and_given_back_once() -> None:
    driver = Driver()
    graph = DriverGraph(driver.calls, [1, 2, 3], driver.make_current)
    assert driver.called == ["create", *["add_child"] * 3, "instantiate", "destroy"]
    graph.launch(0)
    del graph
    assert driver.called[-2:] == ["launch", "destroy_exec"]


def test_a_launch_that_the_driver_refuses_is_an_error() -> None:
    driver = Driver("launch")
    graph = DriverGraph(driver.calls, [1], driver.make_current)
    with pytest.raises(RuntimeError, match="could not launch a graph of several recordings: error 801"):
        graph.launch(0)
    assert driver.called.count("launch") == 1


@pytest.mark.parametrize("fails", ["", "launch"])
def test_a_thread_without_a_context_gets_one_and_launches_again(fails: str) -> None:
    driver = Driver(fails, has_context=False)
    graph = DriverGraph(driver.calls, [1], driver.make_current)
    with pytest.raises(RuntimeError, match="error 801") if fails else nullcontext():
        graph.launch(0)
    assert driver.called[-3:] == ["launch", "make_current", "launch"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_runs_joined_recordings_as_one_graph_on_the_stream_that_is_current() -> None:
    recorder = TorchRecorder("cuda")
    x = torch.ones(1 << 20, device="cuda")
    lab = Lab(recorder, recorder.device)
    recordings = three(lab, x)
    joined = recorder.join(recordings)
    assert isinstance(joined, JoinedRecording)
    del recordings
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        x.fill_(2)
        joined.replay()
        found = x.clone()
    stream.synchronize()
    assert bool((found == 35).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_runs_joined_recordings_for_a_thread_that_has_used_no_gpu() -> None:
    recorder = TorchRecorder("cuda")
    x = torch.ones(1 << 16, device="cuda")
    joined = recorder.join(three(Lab(recorder, recorder.device), x))
    assert isinstance(joined, JoinedRecording)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(joined.replay).result()
    torch.cuda.synchronize()
    assert bool((x == 25).all())


def test_what_a_block_does_is_replayed_with_what_its_tensors_hold_then(lab: Lab) -> None:
    x, total = (torch.arange(6.0, device=lab.device) for _ in range(2))

    def step() -> torch.Tensor:
        total.add_(x)
        return (total * 2).relu()

    step()
    with lab.recorder.capture() as graph:
        out = step()
    total.zero_()
    for value in (1.0, -3.0, 5.0):
        x.fill_(value)
        wanted = ((total + x) * 2).relu()
        graph.replay()
        assert same_bits(out, wanted)


def test_captures_and_recordings_of_one_recorder_leave_each_other_alone(lab: Lab) -> None:
    x = torch.ones(1000, device=lab.device)
    first, kept = lab.recorder.record(lambda: x + 1)
    with lab.recorder.capture() as second:
        between = x * 3
        out = between + 1
        del between
    third, last = lab.recorder.record(lambda: (x * 5).sum(0, keepdim=True))
    for graph in (third, second, first):
        graph.replay()
    assert torch.equal(kept, torch.full_like(x, 2.0))
    assert torch.equal(out, torch.full_like(x, 4.0))
    assert last.tolist() == [5000.0]


def test_a_block_that_asks_for_a_value_is_refused_and_its_recording_too(lab: Lab) -> None:
    x = torch.ones(4, device=lab.device)
    with pytest.raises(RecordingRefused, match=r"item\(\)|_local_scalar_dense|tolist"), lab.recorder.capture() as graph:
        x.sum().item()
    with pytest.raises(RecordingRefused, match="has not ended, or was refused"):
        graph.replay()
    with lab.recorder.capture() as graph:
        out = x + 1
        with pytest.raises(RecordingRefused, match="has not ended, or was refused"):
            graph.replay()
    graph.replay()
    assert out.tolist() == [2.0] * 4
    assert torch.is_grad_enabled()
