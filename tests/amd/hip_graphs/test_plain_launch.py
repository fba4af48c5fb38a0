"""Graphs that the driver itself launches, and those that torch must still replay."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from rocm_attn.hip_graphs import torch_recorder
from rocm_attn.hip_graphs.driver_graphs import DriverRefused, _loaded
from rocm_attn.hip_graphs.plain_launch import Here, PlainLaunch, is_known
from rocm_attn.hip_graphs.record_guard import guard_here
from rocm_attn.hip_graphs.torch_recorder import TorchRecorder, TorchRecording
from tests.amd.runtime.interrupts import every_line

READY = object()


class Machine:
    """A device that records its replays and launches: "torch", or the stream that the driver was given."""

    def __init__(self, beside: Callable[[], object] = lambda: None) -> None:
        self.done: list[str | int] = []
        self.device, self.stream, self.offset, self.error = 3, 0, 8, 0
        self.captures, self.requested = False, 0
        self._beside = beside
        here = Here(3, lambda: self.device, self._stream_of, self._is_capturing, lambda: self.offset)
        self.graph = PlainLaunch(self._replay, self._launch, READY, here)

    def replays(self, times: int = 1) -> list[str | int]:
        self.done.clear()
        for _ in range(times):
            self.graph.replay()
        return self.done

    def _replay(self) -> None:
        self.done.append("torch")
        self._beside()

    def _launch(self, ready: object, stream: int) -> int:
        assert ready is READY
        if not self.error:
            self.done.append(stream)
        return self.error

    def _stream_of(self, index: int) -> int:
        assert index == 3
        return self.stream

    def _is_capturing(self) -> bool:
        self.requested += 1
        return self.captures


def test_after_a_replay_of_torchs_that_only_launched_the_driver_launches() -> None:
    machine = Machine()
    assert not machine.graph.is_plain
    assert machine.replays(3) == ["torch", 0, 0]
    machine.stream = 77
    assert machine.replays() == [77]


@pytest.mark.parametrize("draws", ["an operation", "an offset"])
def test_a_graph_whose_replay_does_more_is_always_replayed_by_torch(draws: str) -> None:
    """For another generator than the device's own, only the operations show it."""
    seed = torch.zeros(1, dtype=torch.int64)

    def draw() -> None:
        if draws == "an operation":
            seed.fill_(5)
        else:
            machine.offset += 4

    machine = Machine(draw)
    assert machine.replays(3) == ["torch"] * 3
    assert not machine.graph.is_plain


def test_a_graph_whose_first_replay_raised_is_not_known_to_be_plain() -> None:
    errors = [RuntimeError("out of luck")]

    def fail_once() -> None:
        if errors:
            raise errors.pop()

    machine = Machine(fail_once)
    with pytest.raises(RuntimeError, match="out of luck"):
        machine.graph.replay()
    assert machine.replays(2) == ["torch", "torch"]


def test_an_interrupt_of_a_first_replay_leaves_nothing_that_watches() -> None:
    interrupts = 0
    for _ in every_line(lambda: Machine().graph.replay()):
        interrupts += 1
        assert torch._C._len_torch_dispatch_stack() == 0
    assert interrupts > 5


@pytest.mark.parametrize("what", ["device", "error"])
def test_where_the_driver_cannot_launch_torch_replays_once(what: str) -> None:
    machine = Machine()
    machine.graph.replay()
    setattr(machine, what, 700)
    assert machine.replays() == ["torch"]
    setattr(machine, what, 3 if what == "device" else 0)
    assert machine.replays() == [0]


def test_a_replay_within_a_capture_is_torchs_and_tells_nothing() -> None:
    machine = Machine()
    machine.stream, machine.captures = 7, True
    assert machine.replays(2) == ["torch", "torch"]
    machine.captures = False
    assert machine.replays(2) == ["torch", 7]
    machine.captures = True
    assert machine.replays() == ["torch"]
    machine.captures = False
    assert machine.replays() == [7]


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.9.0", True),
        ("2.10.0+rocm7.2.4.git40d237bf", True),
        ("2.13.1+cu130", True),
        ("2.14.0a0+gitabc", False),
        ("3.0.0", False),
        ("main", False),
    ],
)
def test_replays_of_later_releases_of_torch_are_not_known(version: str, known: bool) -> None:
    assert is_known(version) is known


class Graph:
    """The methods of a captured graph that are called before its first replay."""

    def replay(self) -> None:
        raise AssertionError("it is not replayed here")

    def raw_cuda_graph_exec(self) -> int:
        return 17


@pytest.mark.parametrize("lacks", ["a driver", "a ready graph"])
def test_what_the_driver_cannot_be_given_is_replayed_by_torch(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch() -> NoReturn:
        assert lacks == "a driver", "the driver is not asked for what it cannot launch"
        raise DriverRefused("there is none")

    monkeypatch.setattr(torch_recorder, "_GIVES_READY_GRAPHS", lacks == "a driver")
    monkeypatch.setattr(torch_recorder, "_launch", launch)
    graph: Any = Graph()
    recording = TorchRecording(graph)
    recording.finish(torch.device("cuda", 0), 5)
    assert recording.replay == graph.replay
    assert recording.bytes == 5


def test_what_the_driver_can_be_given_is_not_torchs_to_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Here(0, lambda: 0, lambda index: 0, lambda: False, lambda: 0)
    monkeypatch.setattr(torch_recorder, "_GIVES_READY_GRAPHS", True)
    monkeypatch.setattr(torch_recorder, "_launch", lambda: lambda *arguments: 0)
    monkeypatch.setattr(Here, "of", lambda index: here)
    graph: Any = Graph()
    recording = TorchRecording(graph)
    recording.finish(torch.device("cuda", 0), 5)
    assert isinstance(launch_of(recording), PlainLaunch)


def test_of_a_library_that_is_loaded_twice_neither_copy_is_taken(tmp_path: Path) -> None:
    maps, line = tmp_path / "maps", "7f00-7f01 r-xp 00000000 08:01 5 /{}/libhip.so.7\n"
    maps.write_text(line.format("a") + line.format("a"))
    assert _loaded("libhip.so", str(maps)) == "/a/libhip.so.7"
    assert _loaded("libother.so", str(maps)) == "libother.so"
    maps.write_text(line.format("a") + line.format("b"))
    with pytest.raises(OSError, match=r"2 copies of libhip\.so: /a/libhip\.so\.7, /b/libhip\.so\.7"):
        _loaded("libhip.so", str(maps))


def launch_of(recording: TorchRecording) -> PlainLaunch:
    """Returns the launch of a recording, or skips the test if this torch gives the driver nothing to launch."""
    if not torch_recorder._GIVES_READY_GRAPHS:
        pytest.skip("this torch gives no graph to launch")
    found = getattr(recording.replay, "__self__", None)
    assert isinstance(found, PlainLaunch), "torch replays what the driver could launch"
    return found


@pytest.mark.gpu
def test_a_gpu_runs_a_graph_that_draws_nothing_by_the_driver() -> None:
    x = torch.zeros(1 << 16, device="cuda")
    recording, _ = TorchRecorder("cuda").record(lambda: x.add_(1))
    launch = launch_of(recording)
    x.zero_()
    for replays in range(1, 5):
        recording.replay()
        assert launch.is_plain
        assert bool((x == replays).all())


def unseen(draw: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns a function that draws random numbers past the guard, as compiled code and extensions do."""

    def fn() -> Tensor:
        guard = guard_here()
        if guard is None:
            return draw()
        with guard.lifted():
            return draw()

    return fn


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True], ids=["the device's generator", "another generator"])
def test_a_gpu_draws_other_numbers_in_each_replay(own: bool) -> None:
    torch.cuda.init()  # type: ignore[no-untyped-call]  # torch makes its generators then
    generator = torch.Generator("cuda") if own else torch.cuda.default_generators[torch.cuda.current_device()]
    x = torch.zeros(1 << 10, device="cuda")
    recorder = TorchRecorder("cuda")
    try:
        recording, _ = recorder.record(unseen(lambda: x.uniform_(generator=generator)))
    except RuntimeError as error:
        assert own
        pytest.skip(f"this torch captures no other generator: {error}")
    launch, seen = launch_of(recording), []
    for _ in range(2):
        generator.manual_seed(5)
        for _ in range(3):
            recording.replay()
            seen.append(x.clone())
            assert not launch.is_plain
    generator.manual_seed(5)
    assert all(torch.equal(one, again) for one, again in zip(seen[:3], seen[3:], strict=True))
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.gpu
def test_a_gpu_launches_for_a_thread_that_has_used_none() -> None:
    x = torch.zeros(1 << 16, device="cuda")
    recording, _ = TorchRecorder("cuda").record(lambda: x.add_(1))
    launch = launch_of(recording)
    recording.replay()
    assert launch.is_plain
    x.zero_()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as thread:
        for _ in range(3):
            thread.submit(recording.replay).result()
    torch.cuda.synchronize()
    assert bool((x == 3).all())
