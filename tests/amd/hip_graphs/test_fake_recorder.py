"""The fake recorder freezes what a device freezes."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from torch import Tensor

from rocm_attn.hip_graphs.errors import RecordingRefused, StaleRecording
from rocm_attn.hip_graphs.fake_recorder import FakeRecorder
from rocm_attn.kernels.launch import launch, run_as_launch


class Kernel:
    """Computes out = 2 x + added with calls that no recording may make, like an interpreter of kernels."""

    def __init__(self) -> None:
        self.runs = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
        return self

    def __call__(self, x: Tensor, out: Tensor, added: float, **options: object) -> None:
        self.runs += 1
        for place, value in enumerate(x.tolist()):
            out[place] = torch.tensor(value).item() * 2 + added


def test_what_fn_returned_is_garbage_until_the_first_replay(fake: FakeRecorder) -> None:
    x = torch.ones(4)
    recording, out = fake.record(lambda: x + 1)
    assert bool(out.isnan().all())
    recording.replay()
    assert out.tolist() == [2.0] * 4


def test_a_launch_is_recorded_as_one_whatever_its_body_does(fake: FakeRecorder) -> None:
    kernel, x, out = Kernel(), torch.arange(3.0), torch.zeros(3)
    recording, _ = fake.record(lambda: launch(kernel, (1,), x, out, 5.0))
    assert len(recording._operations) == 1
    runs = kernel.runs
    x.fill_(10)
    recording.replay()
    assert out.tolist() == [25.0] * 3
    assert kernel.runs == runs + 1


def test_what_is_updated_in_place_has_advanced_by_two_runs_as_with_a_device(fake: FakeRecorder) -> None:
    """It is a cache of K and V, say, and goes on from there."""
    x, by_launch, by_operations = torch.ones(3), torch.zeros(3), torch.zeros(3)

    def run() -> None:
        launch(Kernel(), (1,), by_launch, by_launch, 1.0)
        by_operations.add_(x * 2)

    fake.record(run)
    assert by_launch.tolist() == [3.0] * 3
    assert by_operations.tolist() == [4.0] * 3


def test_work_keeps_the_address_of_a_tensor_object_that_was_pointed_elsewhere(fake: FakeRecorder) -> None:
    kernel, x, out = Kernel(), torch.ones(3), torch.zeros(3)

    def fn() -> Tensor:
        launch(kernel, (1,), x, out, 0.0)
        return x + 1

    recording, total = fake.record(fn)
    x.data = torch.full((3,), 50.0)
    recording.replay()
    assert (out.tolist(), total.tolist()) == ([2.0] * 3, [2.0] * 3)


def test_memory_that_was_resized_in_place_stops_the_replay(fake: FakeRecorder) -> None:
    x = torch.ones(3)
    recording, _ = fake.record(lambda: x + 1)
    x.resize_(1 << 20)
    with pytest.raises(StaleRecording, match="resized in place"):
        recording.replay()


def test_views_cost_nothing_on_replay(fake: FakeRecorder) -> None:
    x = torch.ones(4, 6)
    recording, view = fake.record(lambda: x.view(2, 12).t().unsqueeze_(0)[:, 3:].expand(5, -1, -1))
    assert len(recording._operations) == 0
    x.fill_(3)
    assert bool((view == 3).all())


def test_intermediates_share_memory_and_results_keep_theirs(fake: FakeRecorder) -> None:
    x = torch.ones(1000)

    def chain() -> Tensor:
        y = x
        for _ in range(50):
            y = y + 1
        return y

    first, out = fake.record(chain)
    assert first.bytes < 4 * 4096
    second, other_out = fake.record(chain)
    assert second.bytes <= 4096
    first.replay()
    x.fill_(10)
    second.replay()
    assert bool((out == 51).all())
    assert bool((other_out == 60).all())


def test_a_dropped_recording_gives_its_memory_to_the_next(fake: FakeRecorder) -> None:
    x = torch.ones(1 << 16)
    recording, out = fake.record(lambda: x + 1)
    assert recording.bytes == 1 << 18
    address = out.data_ptr()
    del recording, out
    again, out = fake.record(lambda: x + 2)
    assert again.bytes == 0
    assert out.data_ptr() == address
    del again, out
    fake.release_memory()
    assert fake.record(lambda: x + 1)[0].bytes == 1 << 18, "the pool is a new one"


def test_release_memory_lets_live_recordings_share_their_pool(fake: FakeRecorder) -> None:
    x = torch.ones(1 << 16)
    recording, out = fake.record(lambda: ((x + 1) * 2).sum())
    assert recording.bytes >= 1 << 19
    fake.release_memory()
    second, second_out = fake.record(lambda: (x + 2).sum())
    assert second.bytes == 0
    recording.replay()
    second.replay()
    assert (out.item(), second_out.item()) == (4 << 16, 3 << 16)


def test_recording_works_under_inference_mode_too(fake: FakeRecorder) -> None:
    with torch.inference_mode():
        x, weight = torch.randn(3, 4), torch.randn(5, 4)
        recording, out = fake.record(lambda: torch.nn.functional.rms_norm(x @ weight.t(), (5,)).softmax(-1))
        x.normal_()
        wanted = torch.nn.functional.rms_norm(x @ weight.t(), (5,)).softmax(-1)
    recording.replay()
    assert torch.equal(out, wanted)
    fake.record(lambda: x + 1)  # in the same memory, outside of the mode


def test_launches_of_another_thread_are_not_recorded(fake: FakeRecorder) -> None:
    """A replay repeated another runtime's stores, in pages that belonged to other requests by then."""
    x, made = torch.ones(2), list[int]()

    def body() -> Tensor:
        thread = Thread(target=run_as_launch, args=(made.append, 1))
        thread.start()
        thread.join()
        return x + 1

    recording, _ = fake.record(body)
    assert made == [1, 1]  # fn runs twice
    recording.replay()
    assert made == [1, 1]


def test_weights_that_want_gradients_are_recorded_without_any(fake: FakeRecorder) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 4)
    recording, out = fake.record(lambda: torch.nn.functional.linear(x, weight))
    recording.replay()
    assert not out.requires_grad
    assert torch.equal(out, x @ weight.detach().t())


def test_tensors_of_another_device_are_refused(fake: FakeRecorder) -> None:
    with pytest.raises(RecordingRefused, match="replays only CPU tensors"):
        fake.record(lambda: torch.ones(3, device="meta") + 1)


def test_a_lazily_conjugated_tensor_is_refused(fake: FakeRecorder) -> None:
    z = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(RecordingRefused, match="resolve_conj"):
        fake.record(lambda: z.conj() * 2)


def test_unwritten_memory_costs_nothing_on_replay_where_nothing_fills_it(
    fake: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    x = torch.ones(2)
    recording, out = fake.record(lambda: torch.empty(2).copy_(x))
    assert len(recording._operations) == 1
    recording.replay()
    assert out.tolist() == [1.0, 1.0]


def test_unwritten_memory_is_poisoned_again_where_tests_ask_for_it(fake: FakeRecorder) -> None:
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    x = torch.ones(2)

    def half_written() -> Tensor:
        out = torch.empty(4)
        out[:2] = x
        return out

    recording, out = fake.record(half_written)
    out.zero_()
    recording.replay()
    assert out[:2].tolist() == [1.0, 1.0]
    assert bool(out[2:].isnan().all())
