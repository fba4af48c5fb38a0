"""Steps that a graph is all of run in one call: they leave what other steps leave, and refuse what those refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.made_graphs import TakingGraph
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, GraphStale, WrongState
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.at_once import StepsAtOnce
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.protocols import NO_FLIGHT_RECORDER, Flight
from rocm_attn.step.step import Step
from tests.amd.runtime.interrupts import every_line
from tests.amd.runtime.stepping import small_problem

CPU = torch.device("cpu")
NUM_SEQS, PADDED, MAX_KV_LEN = 3, 4, 4096


class Going:
    """Requests that go on by a token in each step, whose outputs are the inputs that the device has: id, length, row.

    at_once: how many steps have run in one call
    """

    def __init__(self, flight: Flight = NO_FLIGHT_RECORDER) -> None:
        self.problem = small_problem()
        # One bucket of lengths.
        options = RuntimeOptions(
            num_pages=4096, max_num_seqs=PADDED, max_kv_len=MAX_KV_LEN, provider="torch", capture_sizes=(PADDED,)
        )
        self.runtime = build_runtime([self.problem], options, device=CPU)
        self.runner = StepRunner(self.runtime, self._forward, recorder_for(CPU), check=NO_CHECK, flight=flight)
        self.rows = np.array([self.runtime.table.admit() for _ in range(NUM_SEQS)], np.int32)
        self.kv_len = np.array([2060, 2050, 2070], np.int32)
        self.runtime.table.reserve_all(self.rows, self.kv_len)
        self.runtime.table.mark_stored(self.rows, self.kv_len)
        self.number = 0
        for _ in range(2):  # the first makes the graph
            self.step()

    def batch(self) -> StepBatch:
        """The next step, for which there is room."""
        kv_len = self.kv_len + 1
        self.runtime.table.reserve_all(self.rows, kv_len)
        ids = np.arange(NUM_SEQS, dtype=np.int32) + 10 * self.number
        return StepBatch(self.rows, kv_len, np.ones(NUM_SEQS, np.int32), ids)

    def step(self) -> None:
        """A step, whose inputs are right."""
        self.number += 1
        batch = self.batch()
        self.check(batch, self.runner.run(batch))
        self.kv_len = batch.kv_len

    def check(self, batch: StepBatch, got: torch.Tensor) -> None:
        """The device has had these inputs."""
        wanted = np.stack((batch.token_ids, batch.kv_len, batch.rows), 1)
        assert torch.equal(got, torch.from_numpy(wanted))

    def _forward(self, step: Step) -> torch.Tensor:
        problem, tokens = self.problem, step.token_ids.shape[0]
        q = torch.zeros(tokens, problem.num_q_heads, problem.head_dim)
        k = torch.zeros(tokens, problem.num_kv_heads, problem.head_dim)
        v = torch.zeros(tokens, problem.num_kv_heads, problem.v_head_dim)
        step.layers.store_and_attend(0, q, k, v, torch.empty(tokens, problem.num_q_heads, problem.v_head_dim))
        return torch.stack((step.token_ids, step.kv_len, step.row_of_seq), 1)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that was tried in one call, whether it ran."""
    found = list[bool]()
    run: Callable[..., object] = StepsAtOnce.run

    def told(self: StepsAtOnce, *args: object) -> object:
        what = run(self, *args)
        found.append(what is not None)
        return what

    monkeypatch.setattr(StepsAtOnce, "run", told)
    return found


def test_steps_that_go_on_run_in_one_call_and_leave_what_others_leave(
    ran: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Going()
    ran.clear()
    for _ in range(4):
        served.step()
    assert ran == [True] * 4
    left = _left(served)
    other = Going()
    monkeypatch.setattr(StepRunner, "_run_at_once", lambda self, batch: None)
    for _ in range(4):
        other.step()
    assert left == _left(other)
    assert len(ran) == 5  # the last one is that of the second runner's start
    served.runtime.check_device()


def _left(served: Going) -> tuple[object, ...]:
    runtime, counters = served.runtime, served.runner.counters
    assert runtime.repeatable is not None
    return (
        runtime.table.tokens.of(served.rows).tolist(),
        runtime.step_number,
        runtime.graph_runs.number,
        runtime.stored_layers,
        runtime.may_store,
        served.runner.may_run_again,
        runtime.repeatable[0].kv_len.tolist(),
        (counters.steps, counters.replays, counters.real_seqs, counters.padded_seqs),
    )


def test_a_step_that_does_not_go_on_is_left_to_another_call(ran: list[bool]) -> None:
    served = Going()
    ran.clear()
    again = served.batch()
    served.runner.run(again)
    served.check(again, served.runner.run(again))  # its tokens are stored once more
    assert ran == [True, False]
    served.kv_len = again.kv_len
    served.step()
    served.runtime.check_device()


def test_what_is_refused_is_refused_with_its_sentence_and_nothing_is_lost() -> None:
    served = Going()
    beyond = StepBatch(served.rows, served.kv_len + 9, np.ones(NUM_SEQS, np.int32))
    with pytest.raises(BadBatch, match=r"but row \d+ has room for \d+ tokens; call reserve"):
        served.runner.run(beyond)
    batch = served.batch()
    served.runtime.begin_step(batch)
    with pytest.raises(WrongState, match="a step cannot begin, because a step is running; call end_step"):
        served.runner.run(batch)
    served.runtime.fill()  # the step that was begun goes on
    served.runtime.end_step()
    served.step()
    served.runner._pinned.bump()
    with pytest.raises(GraphStale, match="they have moved"):
        served.runner.run(served.batch())


def test_an_interrupt_at_any_line_of_a_step_in_one_call_leaves_the_next_one_right() -> None:
    served, interrupts = Going(), 0

    def step() -> None:
        served.runner.run(served.batch())

    for _ in every_line(step, 5):
        interrupts += 1
        # Where it was broken off, its tokens may count as stored or not.
        served.kv_len = served.runtime.table.tokens.of(served.rows)
        for _ in range(3):
            served.step()
        served.runtime.check_device()
    assert interrupts > 20


def test_a_flight_recorder_is_told_of_a_step_and_of_what_broke_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told:
        def __init__(self) -> None:
            self.noted, self.failures = list[StepBatch](), list[str]()

        def note(self, batch: StepBatch, plan: object, replayed: bool, epoch: int) -> None:
            self.noted.append(batch)

        def failed(self, error: BaseException) -> None:
            self.failures.append(str(error))

    told = Told()
    served = Going(told)
    batch = served.batch()
    served.runner.run(batch)
    assert told.noted[-1] is batch

    def broken(self: object, batch: StepBatch) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(TakingGraph, "launch", broken)
    served.kv_len = batch.kv_len
    with pytest.raises(RuntimeError, match="lost"):
        served.runner.run(served.batch())
    assert told.failures == ["lost"]
