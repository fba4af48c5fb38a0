from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch

from rocm_attn.hip_graphs.errors import KeyTaken, StaleRecording
from rocm_attn.hip_graphs.fake_recorder import FakeRecorder
from rocm_attn.hip_graphs.graph_cache import GraphCache
from rocm_attn.hip_graphs.pinned import PinnedTensors


class CountingRecording:
    bytes = 64

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_a_kept_recording_is_replayed_and_gives_the_outputs_that_it_was_kept_with(fake: FakeRecorder) -> None:
    x = torch.arange(4.0)
    cache = GraphCache(PinnedTensors())
    entry = cache.put(("decode", 4), *fake.record(lambda: x + 1))
    x.copy_(torch.full((4,), 5.0))
    out = cache.replay(entry)
    assert out is entry.outputs
    assert torch.equal(out, torch.full((4,), 6.0))
    assert (entry.key, entry.epoch) == (("decode", 4), 0)


def test_a_recording_of_an_older_epoch_is_refused_and_not_replayed() -> None:
    pinned = PinnedTensors()
    cache = GraphCache(pinned)
    recording = CountingRecording()
    entry = cache.put(8, recording, "outputs")
    cache.replay(entry)
    pinned.bump()
    with pytest.raises(StaleRecording, match="under 8 is of epoch 0 and the tensors it reads are of epoch 1"):
        cache.replay(entry)
    assert recording.replays == 1


def test_a_second_recording_under_one_key_is_refused_and_the_first_one_stays() -> None:
    cache, first = GraphCache(PinnedTensors()), CountingRecording()
    entry = cache.put("key", first, None)
    with pytest.raises(KeyTaken, match="kept under 'key' already"):
        cache.put("key", CountingRecording(), None)
    cache.replay(entry)
    assert first.replays == 1


def test_a_dropped_recording_frees_its_key_alone() -> None:
    cache = GraphCache(PinnedTensors())
    for size in (1, 2):
        cache.put(size, CountingRecording(), None)
    cache.drop(1)
    cache.drop(1)
    cache.put(1, CountingRecording(), None)
    with pytest.raises(KeyTaken):
        cache.put(2, CountingRecording(), None)


def test_drop_all_forgets_every_recording_and_frees_the_keys() -> None:
    cache = GraphCache(PinnedTensors())
    for size in (1, 2, 4):
        cache.put(size, CountingRecording(), None)
    assert cache.drop_all() == 3
    assert cache.drop_all() == 0
    cache.put(1, CountingRecording(), None)


def test_a_replay_compares_two_numbers_however_much_is_pinned() -> None:
    """No function of a tensor's or of the pins' is called: the cache's replay and the recording's own are all."""
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
    cache.replay(entry)
    sys.setprofile(None)
    assert calls == ["replay", "replay", "setprofile"]
