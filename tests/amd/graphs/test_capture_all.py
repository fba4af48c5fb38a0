"""Capturing ahead of the first request, or after enough steps of a plan: the graphs, their order, their costs."""

import io
from itertools import product
from typing import Any

import pytest
import torch

from rocm_attn.batch.padding import PaddingPolicy
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import (
    CPU_CAPTURE_RUNS,
    capture_shapes,
    eager_steps_before_capture,
    recorder_for,
    shape_name,
)
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.cli.progress_bar import ProgressBar
from rocm_attn.errors import BadSetting
from rocm_attn.hip_graphs.fake_recorder import FakeRecording
from rocm_attn.hip_graphs.size_ladder import SizeLadder
from rocm_attn.step.step import Part
from tests.amd.graphs.small_models import Requests, Tiny, counts_on_the_host


@pytest.mark.parametrize("seqs", [(1, 3, 4), (2, 3, 4)])
def test_what_is_captured_are_the_shapes_of_all_steps_but_for_mixed_ones_whose_halves_are_not(
    seqs: tuple[int, ...],
) -> None:
    padding = PaddingPolicy(SizeLadder(seqs), SizeLadder((2, 3, 4, 6)), max_children=2)
    steps = (each for num_seqs in range(1, 5) for each in product(range(1, 7), repeat=num_seqs))
    batches = [StepBatch(list(range(1, len(q_len) + 1)), q_len, q_len) for q_len in steps]
    shapes = {shape for batch in batches for shape in (padding.shape(batch), padding.split_shape(batch))}
    captured, of_steps = set(capture_shapes(padding)), set(filter(padding.captures, shapes))
    assert captured <= of_steps
    assert all(shape.kind.mixes and shape.num_halves == 2 for shape in of_steps - captured)


def test_token_counts_are_captured_where_a_step_can_have_them() -> None:
    shapes = capture_shapes(PaddingPolicy(SizeLadder((2, 4)), SizeLadder((4, 8))))
    assert [*map(shape_name, shapes)] == [
        "extend of 4 sequences with 8 tokens",
        "mixed of 4 sequences with 8 tokens",
        "extend of 2 sequences with 8 tokens",
        "mixed of 2 sequences with 8 tokens",
        "decode of 4 sequences",
        # Three sequences with two tokens each have more than 4; with at least one each, they may have 4.
        "mixed of 4 sequences with 4 tokens",
        "extend of 2 sequences with 4 tokens",
        "mixed of 2 sequences with 4 tokens",
        "decode of 2 sequences",
    ]


def test_every_bucket_is_reported_with_seconds_bytes_and_its_check(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [1, 4], tokens=(4, 8))
    runner = tiny.runner()
    seen: list[tuple[int, int, str]] = []
    report = runner.capture_all(lambda *progress: seen.append(progress))
    shapes = capture_shapes(tiny.runtime.padding)
    assert [bucket.key.shape for bucket in report.buckets] == list(shapes)
    assert {shape.kind for shape in shapes} == {StepKind.DECODE, StepKind.EXTEND, StepKind.MIXED}
    assert all(bucket.seconds > 0 and bucket.check_seconds > 0 for bucket in report.buckets)
    assert all("equal to the eager run bitwise in 3 random batches" in bucket.check for bucket in report.buckets)
    assert report.seconds == sum(bucket.seconds + bucket.check_seconds for bucket in report.buckets)
    kept = [entry.recording.bytes for entry in runner._graph_of_plan.values()]
    assert report.num_bytes == sum(bucket.num_bytes for bucket in report.buckets) == sum(kept) > 0
    assert (report.skipped, report.graphs_off) == ({}, "")
    assert [done for done, _, _ in seen] == list(range(len(shapes) + 1))
    assert {total for _, total, _ in seen} == {len(shapes)}
    assert [name for _, _, name in seen] == [*map(shape_name, shapes), ""]
    assert len(report.lines()) == len(shapes) + 1
    assert runner.counters.steps == 0
    assert runner.counters.capture_seconds >= report.seconds * 0.9


def test_a_graph_that_exists_is_not_made_again(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [1, 4])
    runner = tiny.runner()
    requests = tiny.admitted(3)
    requests.run(runner, [1, 1, 1])
    assert [bucket.key.shape.num_seqs for bucket in runner.capture_report().buckets] == [4]
    assert [bucket.key.shape.num_seqs for bucket in runner.capture_all().buckets] == [4, 1]
    assert runner.capture_all() == runner.capture_report()
    assert runner.counters.captures == 2


def test_a_bucket_that_cannot_be_checked_now_is_left_for_later(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [4], max_num_seqs=2)
    runner = tiny.runner()
    requests = tiny.admitted(2)
    report = runner.capture_all()
    assert list(report.skipped.values()) == ["no request row is free"]
    assert report.buckets == ()
    assert report.lines()[0] == "decode of 4 sequences: not captured: no request row is free"
    requests.run(runner, [1, 1])
    assert runner.counters.replays == 1
    assert runner.capture_report().buckets[0].check.endswith("up to 2 sequences and 1 tokens of the step itself")


def test_too_few_free_pages_are_a_reason_to_wait(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [4], num_pages=6, max_kv_len=20)
    runner = tiny.runner()
    requests = tiny.admitted(1)
    requests.run(runner, [20])
    (reason,) = runner.capture_all().skipped.values()
    assert reason == "too few free pages to check it"
    requests.free()
    assert len(runner.capture_all().buckets) == 1


def test_a_refused_graph_ends_the_capture(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [2, 4, 8])
    runner = StepRunner(tiny.runtime, counts_on_the_host(tiny), recorder_for(tiny.runtime.device))
    report = runner.capture_all()
    assert report.buckets == ()
    assert "decode of 8 sequences" in report.graphs_off
    assert report.lines()[-1] == f"graphs are off: {report.graphs_off}"
    assert runner.capture_all().graphs_off == report.graphs_off


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_progress_bar_draws_on_terminals_only() -> None:
    terminal, file = _Terminal(), io.StringIO()
    for stream in (terminal, file):
        bar = ProgressBar(stream)
        bar(1, 2, "decode of 4 sequences")
        bar(2, 2, "")
    assert "[############------------] 1/2 decode of 4 sequences" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert file.getvalue() == ""


def test_captures_after_another_runners_reopen_are_of_the_memory_that_there_is() -> None:
    device = torch.device("cpu")
    tiny = Tiny.build(device, "torch", [2, 4])
    first, other = (tiny.runner() for _ in range(2))
    first.capture_all()
    other.reopen((3,))
    report = first.capture_all()
    assert ([bucket.key.shape.num_seqs for bucket in report.buckets], report.graphs_off) == ([3], "")
    first.check_addresses()
    tiny.runtime.seals.unseal((2,))
    first.check_addresses()
    assert "to make graphs possible again" in first.capture_all().graphs_off


CPU = torch.device("cpu")


@pytest.mark.parametrize("capture_after", [-1, None, "80"])
def test_a_number_of_eager_steps_that_is_none_is_refused(capture_after: Any, device: torch.device) -> None:
    """With None each step that may be captured ended in a TypeError."""
    with pytest.raises(BadSetting, match=f"capture_after is {capture_after!r}; it must be"):
        Tiny.build(device, "torch", [4]).runner(capture_after=capture_after)


@pytest.mark.parametrize(
    ("forward", "recorder", "says"),
    [
        (None, None, "forward is None; give the model's function of a Part"),
        (len, "cpu", r"recorder is 'cpu'; give recorder_for\(device\), or None to run every step eagerly"),
        (len, True, "recorder is True; give"),
    ],
)
def test_a_forward_or_a_recorder_that_is_none_is_refused(
    forward: Any, recorder: Any, says: str, device: torch.device
) -> None:
    """Captures failed later, and every step ran eagerly."""
    with pytest.raises(BadSetting, match=says):
        StepRunner(Tiny.build(device, "torch", [4]).runtime, forward, recorder)
    assert type(recorder_for(str(device))) is type(recorder_for(device))


def runner_of(tiny: Tiny, capture_after: int) -> StepRunner:
    return tiny.runner(capture_after=capture_after)


def requests_of(tiny: Tiny) -> Requests:
    requests = tiny.admitted(4)
    tokens = requests.batch([2, 2, 2, 2])
    tiny.runtime.table.mark_stored(tokens.rows, tokens.kv_len)  # zeros
    return requests


def test_each_plan_pays_for_its_own_graph(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [2, 4])
    runner, requests, captures = runner_of(tiny, 3), requests_of(tiny), []
    for count in (4, 2, 4, 2, 4, 4, 4, 2, 2):
        requests.run(runner, [1] * count)
        captures.append(runner.counters.captures)
    assert captures == [0, 0, 0, 0, 0, 1, 1, 1, 2]
    assert runner.counters.replays == 3


def test_graphs_made_ahead_wait_for_nothing(device: torch.device) -> None:
    tiny = Tiny.build(device, "torch", [2, 4])
    runner = runner_of(tiny, 3)
    assert len(runner.capture_all().buckets) == 2
    requests_of(tiny).run(runner, [1] * 4)
    assert runner.counters.replays == 1


def test_after_reopening_graphs_are_paid_anew(device: torch.device) -> None:
    tiny = Tiny.build(device, "torch", [4])
    runner, requests = runner_of(tiny, 2), requests_of(tiny)
    for _ in range(3):
        requests.run(runner, [1] * 4)
    runner.reopen([4])
    for captures in (1, 1, 2):
        requests.run(runner, [1] * 4)
        assert runner.counters.captures == captures


def test_an_attempt_without_room_is_not_repeated_at_every_step(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = Tiny.build(device, "torch", [4])
    attempts: list[int] = []

    def refuse(runner: StepRunner[torch.Tensor], *_: object) -> str:
        attempts.append(runner.counters.steps)
        return "too few free pages to check it"

    monkeypatch.setattr(StepRunner, "_capture", refuse)
    runner, requests = runner_of(tiny, 2), requests_of(tiny)
    for _ in range(7):
        requests.run(runner, [1] * 4)
    assert attempts == [2, 5]


def test_a_capture_on_a_cpu_costs_what_is_said_in_runs_of_forward() -> None:
    tiny, runs = Tiny.build(CPU, "torch", [4]), []

    def forward(step: Part) -> torch.Tensor:
        runs.append("forward")
        return tiny.forward(step)

    runner = StepRunner(tiny.runtime, forward, recorder_for(CPU))
    with pytest.MonkeyPatch.context() as patch:
        count_replays(patch, runs)
        runner.capture_all()
    assert len(runs) == CPU_CAPTURE_RUNS


def test_a_gpu_makes_its_graphs_at_the_first_step() -> None:
    assert eager_steps_before_capture(torch.device("cuda", 1)) == 0


def count_replays(patch: pytest.MonkeyPatch, runs: list[str]) -> None:
    """Records each replay of a recording on the CPU."""
    replay = FakeRecording.replay

    def noted(recording: FakeRecording) -> None:
        runs.append("replay")
        replay(recording)

    patch.setattr(FakeRecording, "replay", noted)
