from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch
from torch import Tensor

from rocm_attn.hip_graphs.errors import KeyTaken, NotRecorded, StaleRecording
from rocm_attn.hip_graphs.fake_recorder import FakeRecorder
from rocm_attn.hip_graphs.graph_cache import GraphCache
from rocm_attn.hip_graphs.pinned import PinnedTensors


class CountingRecording:
    bytes = 64

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_a_recorded_function_replays_under_its_key_with_counters(fake: FakeRecorder) -> None:
    x = torch.arange(4.0)
    cache = GraphCache(PinnedTensors())
    entry = cache.record(("decode", 4), fake, lambda: x + 1)
    x.copy_(torch.full((4,), 5.0))
    out = cache.replay(("decode", 4))
    assert out is entry.outputs
    assert torch.equal(out, torch.full((4,), 6.0))
    assert entry.replays == 1
    assert entry.capture_seconds > 0
    assert cache.bytes == entry.recording.bytes > 0
    assert (cache.counters.captures, cache.counters.replays) == (1, 1)
    assert cache.keys == (("decode", 4),)


def test_a_recording_of_an_older_epoch_is_refused_and_not_replayed() -> None:
    pinned = PinnedTensors()
    cache = GraphCache(pinned)
    recording = CountingRecording()
    cache.put(8, recording, "outputs")
    cache.replay(8)
    pinned.bump()
    with pytest.raises(StaleRecording, match="under 8 is of epoch 0 and the tensors it reads are of epoch 1"):
        cache.replay(8)
    assert recording.replays == 1
    assert cache.counters.stale == 1


def test_a_second_recording_under_one_key_is_refused_before_anything_runs(fake: FakeRecorder) -> None:
    cache = GraphCache(PinnedTensors())
    first = cache.record("key", fake, lambda: torch.zeros(1))
    runs: list[int] = []
    with pytest.raises(KeyTaken, match="kept under 'key' already"):
        cache.record("key", fake, lambda: runs.append(1))
    with pytest.raises(KeyTaken):
        cache.put("key", CountingRecording(), None)
    assert runs == []
    assert cache.get("key") is first


def test_tensors_that_move_while_recording_make_the_recording_worthless(fake: FakeRecorder) -> None:
    pinned = PinnedTensors()
    cache = GraphCache(pinned)

    def grows() -> Tensor:
        pinned.bump()
        return torch.zeros(1)

    with pytest.raises(StaleRecording, match="moved while 'key' was recorded"):
        cache.record("key", fake, grows)
    assert "key" not in cache


def test_an_unknown_key_is_a_miss() -> None:
    cache = GraphCache(PinnedTensors())
    assert cache.get(1) is None
    with pytest.raises(NotRecorded, match="nothing is recorded under 1"):
        cache.replay(1)
    assert cache.counters.misses == 2


def test_drop_all_forgets_every_recording_and_frees_the_keys() -> None:
    cache = GraphCache(PinnedTensors())
    for size in (1, 2, 4):
        cache.put(size, CountingRecording(), None)
    assert cache.drop_all() == 3
    assert len(cache) == 0
    assert cache.bytes == 0
    cache.put(1, CountingRecording(), None)


def test_a_replay_compares_two_numbers_however_much_is_pinned() -> None:
    """No function of a tensor's or of the pins' is called: replay_entry and the recording's own replay are all."""
    pinned = PinnedTensors()
    for name in range(1000):
        pinned.pin(str(name), torch.zeros(1))
    cache, calls = GraphCache(pinned), []
    entry = cache.put(1, CountingRecording(), None)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(getattr(argument, "__name__", repr(argument)))

    sys.setprofile(note)
    cache.replay_entry(entry)
    sys.setprofile(None)
    assert calls == ["replay_entry", "replay", "setprofile"]
