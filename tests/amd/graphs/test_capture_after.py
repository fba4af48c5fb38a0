"""A graph that is captured when a step needs it is captured after enough steps of its plan to keep its cost small."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.capture.graphs import CPU_CAPTURE_RUNS, eager_steps_before_capture, recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.hip_graphs.fake_recorder import FakeRecording
from rocm_attn.step.step import Part
from tests.amd.graphs.small_models import Requests, Tiny, same
from tests.amd.runtime.stepping import providers

CPU = torch.device("cpu")


def runner_of(tiny: Tiny, capture_after: int) -> StepRunner:
    return StepRunner(tiny.runtime, tiny.forward, recorder_for(tiny.runtime.device), capture_after=capture_after)


def requests_of(tiny: Tiny) -> Requests:
    requests = Requests(tiny.runtime)
    requests.admit(4)
    tokens = requests.batch([2, 2, 2, 2])
    tiny.runtime.table.mark_stored(tokens.rows, tokens.kv_len)  # zeros
    return requests


@pytest.mark.parametrize("provider", providers())
def test_each_plan_pays_for_its_own_graph(provider: str, device: torch.device) -> None:
    tiny = Tiny.build(device, provider, [2, 4])
    runner, requests, captures = runner_of(tiny, 3), requests_of(tiny), []
    for count in (4, 2, 4, 2, 4, 4, 4, 2, 2):
        requests.run(runner, [1] * count)
        captures.append(runner.counters.captures)
    assert captures == [0, 0, 0, 0, 0, 1, 1, 1, 2]
    assert runner.counters.replays == 3


@pytest.mark.parametrize("provider", providers())
def test_steps_before_and_after_the_graph_are_those_of_an_eager_run(provider: str, device: torch.device) -> None:
    outs = []
    for graphs in (False, True):
        tiny = Tiny.build(device, provider, [2, 4])
        runner = runner_of(tiny, 3) if graphs else StepRunner(tiny.runtime, tiny.forward, None)
        requests = Requests(tiny.runtime)
        requests.admit(4)
        outs.append([requests.run(runner, q_len) for q_len in ([3, 5, 2, 1], *([[1] * 4] * 5), *([[1]] * 5))])
        assert runner.counters.replays == (4 if graphs else 0)
    assert same(*outs)


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
