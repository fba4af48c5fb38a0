"""Behaviour of a GPU's recorder, most of which only a GPU can show."""

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from rocm_attn.hip_graphs.errors import RecordingRefused
from rocm_attn.hip_graphs.torch_recorder import NoGarbageCollection, TorchRecorder

MIB = 1 << 20


def side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def test_a_device_that_is_no_gpu_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="got cpu"):
        TorchRecorder("cpu")


def test_no_garbage_is_collected_until_the_last_of_several_captures_has_ended() -> None:
    pause = NoGarbageCollection()
    for was_enabled in (True, False):
        gc.enable() if was_enabled else gc.disable()
        try:
            with pause:
                pause.__enter__()  # by another thread, whose capture ends later
            assert not gc.isenabled()
            pause.__exit__()
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()


@pytest.mark.gpu
def test_replays_run_on_the_stream_that_is_current_then() -> None:
    x = torch.zeros(1 << 20, device="cuda")
    recording, out = TorchRecorder("cuda").record(lambda: x + 1)
    for value, stream in enumerate((torch.cuda.current_stream(), side_stream()), start=5):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            x.fill_(value)
            recording.replay()
            result = out.clone()
        stream.synchronize()
        assert bool((result == value + 1).all())


def test_the_callers_stream_waits_for_the_recorders_also_after_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []

    class Stream(str):
        def wait_stream(self, other: str) -> None:
            waits.append((self, other))

    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("caller's"))
    recorder = object.__new__(TorchRecorder)  # a CPU can make none
    vars(recorder).update(device=None, _live=[None], _stream=Stream("its own"))
    with pytest.raises(RecordingRefused), recorder._on_own_stream():
        raise RecordingRefused
    assert waits == [("its own", "caller's"), ("caller's", "its own")]


def test_a_capture_whose_end_raises_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would go on with its pool and its generators in a capture."""
    calls: list[str] = []

    class Graph:
        def capture_begin(self, **how: object) -> None:
            calls.append("begin")

        def capture_end(self) -> None:
            raise RuntimeError("capturing stream has unjoined work")

        def reset(self) -> None:
            calls.append("reset")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    recorder = object.__new__(TorchRecorder)  # a CPU can make none
    vars(recorder).update(device=torch.device("cpu"), _pool=None, _mend=lambda: calls.append("mend"))
    with pytest.raises(RuntimeError, match="unjoined work"), recorder._capturing() as recording:
        pass
    assert calls == ["begin", "mend", "reset"]
    with pytest.raises(RecordingRefused, match="was refused"):
        recording.replay()


@pytest.mark.gpu
def test_page_locked_memory_is_copied_anew_by_each_replay() -> None:
    host = torch.ones(4).pin_memory()
    target = torch.zeros(4, device="cuda")
    recording, _ = TorchRecorder("cuda").record(lambda: target.copy_(host, non_blocking=True))
    host.fill_(7)
    recording.replay()
    assert target.tolist() == [7.0] * 4


@pytest.mark.gpu
@pytest.mark.parametrize(("page_locked", "non_blocking"), [(False, False), (False, True), (True, False)])
def test_other_host_copies_are_refused(page_locked: bool, non_blocking: bool) -> None:
    host = torch.ones(4).pin_memory() if page_locked else torch.ones(4)
    target = torch.zeros(4, device="cuda")
    recorder = TorchRecorder("cuda")
    with pytest.raises(RecordingRefused, match=r"pin_memory|non_blocking"):
        recorder.record(lambda: target.copy_(host, non_blocking=non_blocking))
    with pytest.raises(RecordingRefused, match="makes a copy"):
        recorder.record(lambda: host.to("cuda", non_blocking=non_blocking))


@pytest.mark.gpu
def test_host_tensors_may_be_read_and_are_frozen() -> None:
    lengths, x = torch.tensor([3, 4]), torch.ones(2, device="cuda")
    recording, out = TorchRecorder("cuda").record(lambda: x * max(lengths.tolist()))
    lengths.fill_(100)
    recording.replay()
    assert out.tolist() == [4.0, 4.0]


@pytest.mark.gpu
def test_a_fork_is_recorded_and_work_on_a_stranger_stream_is_refused() -> None:
    x, side = torch.ones(4, device="cuda"), side_stream()

    def forked() -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            half = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return half + 1

    def stray() -> Tensor:
        with torch.cuda.stream(side):
            return x * 2

    recorder = TorchRecorder("cuda")
    recording, out = recorder.record(forked)
    x.fill_(3)
    recording.replay()
    assert out.tolist() == [7.0] * 4
    with pytest.raises(RecordingRefused, match="a stream that is not recorded"):
        recorder.record(stray)


@pytest.mark.gpu
def test_a_wait_that_no_guard_sees_breaks_the_capture_and_nothing_else() -> None:
    x = torch.ones(4, device="cuda")
    recorder = TorchRecorder("cuda")
    kept, kept_out = recorder.record(lambda: x + 5)
    runs: list[int] = []

    def waits_during_capture() -> Tensor:
        runs.append(1)
        if len(runs) > TorchRecorder.WARM_UPS:
            torch._C._cuda_synchronize()
        return x + 1

    with pytest.raises(RuntimeError):
        recorder.record(waits_during_capture)
    assert not torch.cuda.is_current_stream_capturing()
    assert gc.isenabled()
    assert torch.rand(4, device="cuda").shape == (4,)
    again, out = recorder.record(lambda: x + 2)
    again.replay()
    kept.replay()
    assert (out.tolist(), kept_out.tolist()) == ([3.0] * 4, [6.0] * 4)
    del again, out
    last, out = recorder.record(lambda: x + 3)
    last.replay()
    assert out.tolist() == [4.0] * 4


@pytest.mark.gpu
def test_recordings_share_one_pool_and_keep_their_results_apart() -> None:
    x = torch.ones(16 * MIB // 4, device="cuda")

    def chain() -> Tensor:
        y = x
        for _ in range(10):
            y = y + 1
        return y

    recorder = TorchRecorder("cuda")
    first, out = recorder.record(chain)
    second, other_out = recorder.record(chain)
    assert 16 * MIB <= first.bytes <= 64 * MIB
    assert second.bytes <= 32 * MIB
    first.replay()
    x.fill_(5)
    second.replay()
    assert (out[0].item(), other_out[0].item()) == (11, 15)


@pytest.mark.gpu
def test_dropped_recordings_give_their_memory_back_and_the_recorder_goes_on() -> None:
    x = torch.ones(64 * MIB // 4, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    recorder = TorchRecorder("cuda")
    kept = [recorder.record(lambda: x + 1) for _ in range(3)]
    assert sum(recording.bytes for recording, _ in kept) >= 3 * 64 * MIB
    kept.clear()
    recorder.release_memory()
    assert torch.cuda.memory_reserved() <= before
    recording, out = recorder.record(lambda: x + 2)
    recording.replay()
    assert out[0].item() == 3


@pytest.mark.gpu
def test_a_replay_allocates_nothing() -> None:
    x = torch.ones(1000, device="cuda")
    recording, _ = TorchRecorder("cuda").record(lambda: (x + 1).softmax(0) @ x)
    recording.replay()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    recording.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_recorded_device_need_not_be_the_current_one() -> None:
    x = torch.ones(4, device="cuda:1")
    with torch.cuda.device(0):
        recording, out = TorchRecorder("cuda:1").record(lambda: x + 1)
        x.fill_(6)
        torch.cuda.synchronize(1)
        recording.replay()
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0
    assert out.tolist() == [7.0] * 4
