"""Recordings of blocks of code."""

import pytest
import torch

from rocm_attn.hip_graphs.errors import RecordingRefused
from tests.amd.hip_graphs.recorders import Lab, same_bits


def test_what_a_block_does_is_replayed_with_what_its_tensors_hold_then(lab: Lab) -> None:
    x, total = (torch.arange(6.0, device=lab.device) for _ in range(2))

    def step() -> torch.Tensor:
        total.add_(x)
        return (total * 2).relu()

    step()
    with lab.recorder.capture() as graph:
        out = step()
    assert torch.equal(total, x * (3 if lab.device.type == "cpu" else 2)), "a CPU runs it while it records it"
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


def test_a_recording_within_another_one_is_refused_and_the_other_one_goes_on(lab: Lab) -> None:
    x = torch.ones(4, device=lab.device)
    x + 1
    with lab.recorder.capture() as graph:
        with pytest.raises(RecordingRefused, match="while this thread makes another one"), lab.recorder.capture():
            x.add_(1)
        with pytest.raises(RecordingRefused, match="while this thread makes another one"):
            lab.recorder.record(lambda: x.add_(1))
        out = x + 1
    x.fill_(5)
    graph.replay()
    assert (x.tolist(), out.tolist()) == ([5.0] * 4, [6.0] * 4)
