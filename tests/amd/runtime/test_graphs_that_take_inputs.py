"""Steps whose graph takes their inputs leave the same state as other steps, and refuse the same batches."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.mask import TreeMask
from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.prefixes import PrefixGroup, SharedPrefixes
from rocm_attn.batch.step_batch import NO_TOKEN_IDS, StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, DeviceFault, GraphStale, WrongState
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, TOKEN_WITHOUT_PAGE
from rocm_attn.machine.agreement import alone
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.gate import StepGate
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.protocols import NO_FLIGHT_RECORDER, Flight
from rocm_attn.step.step import Part, Step
from tests.amd.runtime.interrupts import every_line, interrupted_at
from tests.amd.runtime.stepping import small_problem

# Left out under the interpreter by day: the kernels are torch's, and the host stage runs it every time.
pytestmark = pytest.mark.fast(interpreted=0)

CPU = torch.device("cpu")
NUM_SEQS, PADDED, MAX_KV_LEN = 3, 4, 4096


class Going:
    """Requests that continue by one token per step. Outputs are the inputs that the device has: id, length, row."""

    def __init__(
        self,
        flight: Flight = NO_FLIGHT_RECORDER,
        window: int = UNLIMITED_WINDOW,
        sizes: tuple[int, ...] = (PADDED,),
    ) -> None:
        self.problem = small_problem(window_left=window)
        # One bucket of lengths.
        options = RuntimeOptions(
            num_pages=4096,
            max_num_seqs=PADDED,
            max_kv_len=MAX_KV_LEN,
            provider="torch",
            capture_sizes=sizes,
            swa_pages=0 if window == UNLIMITED_WINDOW else 4096,
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

    def batch(self, num_seqs: int = NUM_SEQS) -> StepBatch:
        """Returns the next step of the first requests, for which there is room."""
        rows, kv_len = self.rows[:num_seqs], self.kv_len[:num_seqs] + 1
        self.runtime.table.reserve_all(rows, kv_len)
        ids = np.arange(num_seqs, dtype=np.int32) + 10 * self.number
        return StepBatch(rows, kv_len, np.ones(num_seqs, np.int32), ids)

    def step(self, num_seqs: int = NUM_SEQS) -> None:
        """Runs a step and checks its inputs."""
        self.number += 1
        batch = self.batch(num_seqs)
        self.check(batch, self.runner.run(batch))
        self.kv_len = np.concatenate((batch.kv_len, self.kv_len[num_seqs:]))

    def check(self, batch: StepBatch, got: torch.Tensor) -> None:
        """Checks that the device has had these inputs."""
        wanted = np.stack((batch.token_ids, batch.kv_len, batch.rows), 1)
        assert torch.equal(got, torch.from_numpy(wanted))

    def _forward(self, step: Part) -> torch.Tensor:
        problem, tokens = self.problem, step.token_ids.shape[0]
        q = torch.zeros(tokens, problem.num_q_heads, problem.head_dim)
        k = torch.zeros(tokens, problem.num_kv_heads, problem.head_dim)
        v = torch.zeros(tokens, problem.num_kv_heads, problem.v_head_dim)
        step.layers.store_and_attend(0, q, k, v, torch.empty(tokens, problem.num_q_heads, problem.v_head_dim))
        return torch.stack((step.token_ids[: len(step.kv_len)], step.kv_len, step.row_of_seq), 1)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list that records for each staged step whether it left its inputs to its graph."""
    found = list[bool]()
    stage: Callable[..., Step] = StepGate.stage

    def told(self: StepGate, *args: object) -> Step:
        step = stage(self, *args)
        found.append(self._publisher.launching is not None)
        return step

    monkeypatch.setattr(StepGate, "stage", told)
    return found


def test_steps_whose_graph_takes_their_inputs_leave_what_others_leave(
    ran: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Going()
    ran.clear()
    for _ in range(4):
        served.step()
    assert ran == [True] * 4
    left = _left(served)
    other = Going()
    ran.clear()
    monkeypatch.setattr(other.runner, "_takers", {})
    for _ in range(4):
        other.step()
    assert left == _left(other)
    assert ran == [False] * 4
    served.runtime.check_device()


def _left(served: Going) -> tuple[object, ...]:
    runtime, counters = served.runtime, served.runner.counters
    assert runtime.gate.last is not None
    return (
        runtime.table.tokens.stored_len[served.rows].tolist(),
        runtime.faults.step_number,
        runtime.gate.stores.layers,
        runtime.gate.stores.refusal,
        served.runner.may_run_again,
        runtime.gate.last.batch.kv_len.tolist(),
        (counters.steps, counters.replays, counters.real_seqs, counters.padded_seqs),
    )


def test_a_step_that_stores_its_tokens_once_more_is_right(ran: list[bool]) -> None:
    served = Going()
    ran.clear()
    again = served.batch()
    served.runner.run(again)
    served.check(again, served.runner.run(again))  # its tokens are stored once more
    assert ran == [True, True]
    served.kv_len = again.kv_len
    served.step()
    served.runtime.check_device()


def test_what_is_refused_is_refused_with_its_sentence_and_nothing_is_lost(ran: list[bool]) -> None:
    served = Going()
    ran.clear()
    ones = np.ones(NUM_SEQS, np.int32)
    with pytest.raises(BadBatch, match=r"but row \d+ has room for \d+ tokens; call reserve"):
        served.runner.run(StepBatch(served.rows, served.kv_len + 2000, ones, NO_TOKEN_IDS))
    assert not ran  # it has raised
    batch = served.batch()
    served.runtime.step(batch)
    with pytest.raises(WrongState, match="a step cannot begin, because a step is running; call end_step"):
        served.runner.run(batch)
    served.runtime.gate.fill()  # the step that was begun continues
    served.runtime.end_step()
    served.step()
    served.step()
    assert ran[-1]
    served.runner._pinned.bump()
    with pytest.raises(GraphStale, match="they have moved"):
        served.runner.run(served.batch())
    assert ran[-1]


def test_an_interrupt_at_any_line_of_a_step_in_one_call_leaves_the_next_one_right(ran: list[bool]) -> None:
    served, interrupts = Going(), 0

    def step() -> None:
        served.runner.run(served.batch())

    for _ in every_line(step, 5):
        interrupts += 1
        # If it was broken off, its tokens may count as stored or not.
        served.kv_len = served.runtime.table.tokens.stored_len[served.rows]
        for _ in range(3):
            served.step()
        assert ran[-2:] == [True, True]
        served.runtime.check_device()
    assert interrupts > 20


def test_an_interrupt_at_any_line_of_a_step_that_runs_again_leaves_the_next_one_right(ran: list[bool]) -> None:
    served, interrupts = Going(), 0

    def again() -> None:
        batch = served.runtime.gate.last
        assert batch is not None
        served.runner.run_again(batch.batch)

    again()
    for _ in every_line(again, 5):
        interrupts += 1
        served.step()
        again()
    assert interrupts > 20
    # The lines at the end, where the step is closed.
    last = 1 + 5 * interrupts
    for number in range(last - 25, last):
        if interrupted_at(number, again):
            served.step()
        again()
    served.runtime.check_device()


def test_what_an_interrupt_leaves_to_run_again_sees_its_whole_window(ran: list[bool]) -> None:
    served, again = Going(window=64), 0
    for _ in every_line(lambda: served.runner.run(served.batch()), 3):
        last = served.runtime.gate.last
        if served.runner.may_run_again and last is not None:
            again += 1
            served.runner.run_again(last.batch)
        served.kv_len = served.runtime.table.tokens.stored_len[served.rows]
        served.step()
        served.runtime.check_device()
    assert again > 20


def test_an_interrupt_in_a_refused_call_leaves_the_callers_step_open() -> None:
    served, lines = Going(), 0
    batch = served.batch()
    served.runtime.step(batch)

    def refused() -> None:
        with pytest.raises(WrongState):
            served.runner.run(batch)

    for _ in every_line(refused):
        lines += 1
        served.runtime.gate.running(0)
    assert lines > 5
    served.runtime.end_step()


class Told(Flight):
    """A flight recorder: steps with their epochs, and failures. then: called when a step is reported to it"""

    def __init__(self) -> None:
        self.noted, self.failures = list[tuple[StepBatch, int]](), list[BaseException]()
        self.then: Callable[[], object] = lambda: None

    def note(self, batch: StepBatch, plan: object, replayed: bool, epoch: int) -> None:
        assert replayed or len(self.noted) == 0
        self.noted.append((batch, epoch))
        self.then()

    def failed(self, error: BaseException) -> None:
        self.failures.append(error)


@pytest.mark.parametrize("begin", ["step", "stage", "run"])
def test_no_other_step_begins_within_one(begin: str, ran: list[bool]) -> None:
    told = Told()
    served = Going(told)
    inner = served.batch()
    call: Callable[[StepBatch], object] = getattr(served.runner if begin == "run" else served.runtime, begin)

    def then() -> None:
        with pytest.raises(WrongState, match="a step cannot begin, because a step was staged"):
            call(inner)

    told.then = then
    for _ in range(3):
        served.step()
    assert ran[-3:] == [True] * 3
    served.runtime.check_device()


def test_no_other_step_begins_within_one_that_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Going()
    inner = served.batch()
    last = served.runtime.gate.last
    assert last is not None
    (entry,) = served.runner._graph_of_plan.values()
    replay, tried = entry.recording.replay, list[bool]()

    def with_another() -> None:
        with pytest.raises(WrongState, match="a step cannot begin, because a step was staged"):
            served.runner.run(inner)
        tried.append(True)
        replay()

    with monkeypatch.context() as patch:
        patch.setattr(entry.recording, "replay", with_another)
        served.runner.run_again(last.batch)
    assert tried == [True]
    served.step()
    served.runtime.check_device()


@pytest.mark.parametrize("ask", ["check", "report", "report_own", "forget"])
def test_the_device_is_not_asked_while_inputs_wait_for_their_graph(ask: str, ran: list[bool]) -> None:
    """The graph would run on the inputs of the step before it."""
    told = Told()
    served = Going(told)

    def then() -> None:
        with pytest.raises(WrongState, match="cannot be read while a staged step waits"):
            getattr(served.runtime.faults, ask)()

    told.then = then
    for _ in range(2):
        served.step()
    assert ran[-2:] == [True] * 2
    getattr(served.runtime.faults, ask)()


def test_steps_of_other_sizes_have_rows_of_their_own(ran: list[bool]) -> None:
    served = Going()
    ran.clear()
    for num_seqs in (3, 2, 2, 3, 3, 1, 1, 2):
        served.step(num_seqs)
    assert ran == [True] * 8
    served.runtime.check_device()


def test_graphs_that_were_given_up_take_no_inputs_and_hold_no_outputs(ran: list[bool]) -> None:
    sizes = (2, PADDED)
    served = Going(sizes=sizes)
    for _ in range(2):
        served.step(2)
    assert ran[-1]
    outputs = [weakref.ref(entry.outputs) for entry in served.runner._graph_of_plan.values()]
    served.runner.reopen(sizes)
    gc.collect()
    assert [each() for each in outputs] == [None, None]
    for _ in range(2):
        served.step()  # the first makes its graph
    ran.clear()
    served.step(2)
    served.step(2)
    assert not ran[0]
    assert ran[-1]
    served.runtime.check_device()


def test_a_step_from_another_device_is_right(ran: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    served = Going()
    ran.clear()
    monkeypatch.setattr("rocm_attn.step.gate.is_current", lambda device: False)
    served.step()
    assert ran == [True]


def test_a_step_that_may_not_store_does_not_run_again() -> None:
    served = Going()
    runtime = served.runtime
    runtime.table.fork(int(served.rows[1]), int(served.kv_len[1]))
    runtime.stage(StepBatch(served.rows, served.kv_len, np.ones(NUM_SEQS, np.int32), NO_TOKEN_IDS))
    assert runtime.gate.stores.refusal
    runtime.gate.abandon()
    assert not served.runner.may_run_again


def test_a_flight_recorder_is_told_of_a_step_and_of_what_broke_it_off(
    ran: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    served = Going(told)
    batch = served.batch()
    served.runner.run(batch)
    assert ran[-1]
    assert told.noted[-1][0] is batch
    served.kv_len = batch.kv_len
    (entry,) = served.runner._graph_of_plan.values()

    def broken() -> None:
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(entry.recording, "replay", broken)
        with pytest.raises(RuntimeError, match="lost"):
            served.runner.run(served.batch())
    assert ran[-1]
    assert [str(error) for error in told.failures] == ["lost"]
    for _ in range(2):
        served.step()
    served.runner._pinned.bump()
    with pytest.raises(GraphStale):
        served.runner.run(served.batch())
    assert ran[-1]
    assert isinstance(told.failures[-1], GraphStale)
    assert told.noted[-1][1] == served.runner._pinned.epoch


@pytest.mark.parametrize("apart", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_flight_recorder_hears_of_no_refusal_and_no_interrupt_before_its_step(apart: int) -> None:
    told, heard = Told(), 0
    served = Going(told)

    def step() -> None:
        batch = served.batch()
        served.runner.run(batch)
        served.kv_len = batch.kv_len

    for _ in every_line(step, apart, whole=4):
        failures, told.failures = told.failures, []
        assert len(failures) <= 1
        heard += len(failures)
        noted, told.noted = told.noted, told.noted[:1]
        if failures:
            assert len(noted) > 1
        served.kv_len = served.runtime.table.tokens.stored_len[served.rows]
        if served.kv_len.max() > MAX_KV_LEN - 10:
            told.noted.clear()
            served = Going(told)
        for _ in range(2):
            served.step()
        told.noted = told.noted[:1]
    assert heard
    with pytest.raises(BadBatch):
        served.runner.run(StepBatch(served.rows, served.kv_len + 2000, np.ones(NUM_SEQS, np.int32), NO_TOKEN_IDS))
    assert not told.failures


def test_a_fault_is_counted_and_told_once(ran: list[bool]) -> None:
    told = Told()
    served = Going(told)
    served.step()
    (line, *_) = served.runtime.gate._publisher._lines
    assert line.counts is not None
    line.counts[ERROR_WORD] = TOKEN_WITHOUT_PAGE
    ran.clear()

    def steps() -> None:
        for _ in range(6):
            served.step()

    with pytest.raises(DeviceFault):
        steps()
    assert ran
    assert all(ran)
    assert served.runner.counters.faults == 1
    assert [type(error) for error in told.failures] == [DeviceFault]


@pytest.mark.parametrize("change", ["free", "fork", "cut"])
def test_a_row_that_changed_between_steps_is_looked_at_anew(change: str, ran: list[bool]) -> None:
    served = Going()
    table, row = served.runtime.table, int(served.rows[1])
    ran.clear()
    if change == "free":
        table.free(row)
        served.rows[1] = table.admit()
        assert served.rows[1] == row
        served.kv_len = served.kv_len * np.array([1, 0, 1], np.int32)
    elif change == "fork":
        table.fork(row, int(served.kv_len[1]))
    else:
        served.kv_len = served.kv_len - np.array([0, 3, 0], np.int32)
        table.truncate(row, int(served.kv_len[1]))
    served.step()
    served.step()
    assert ran == [True, True]
    served.runtime.check_device()


def test_a_seal_that_was_renewed_has_a_graph_made_anew(ran: list[bool]) -> None:
    served = Going()
    for renew in (served.runtime.seals.reseal, served.runner.reopen):  # the first is another runner's reopen()
        renew((PADDED,))
        assert not served.runner.may_run_again
        ran.clear()
        served.step()
        assert not ran[0], "no graph is there to take them"
        served.step()
        assert ran[-1]


def test_ranks_that_agree_and_unusual_steps_are_right(ran: list[bool]) -> None:
    served = Going()
    ran.clear()
    run, ones = served.runner.run, np.ones(NUM_SEQS, np.int32)
    batch = served.batch()
    served.check(batch, run(batch, PadTo(PADDED)))
    served.kv_len = batch.kv_len
    batch = served.batch()
    inputs = DeviceInputs(token_ids=torch.from_numpy(batch.token_ids.copy()))
    served.check(batch, run(StepBatch(served.rows, batch.kv_len, ones, NO_TOKEN_IDS, inputs=inputs)))
    served.kv_len = batch.kv_len
    apart = SharedPrefixes([PrefixGroup(1, 0)] * NUM_SEQS)
    batch = served.batch()
    run(StepBatch(served.rows, batch.kv_len, ones, batch.token_ids, prefixes=apart))
    served.kv_len = batch.kv_len
    tree = TreeMask(torch.full((NUM_SEQS, 1), -1, dtype=torch.int32))
    masked = StepBatch(served.rows, served.batch().kv_len, ones, NO_TOKEN_IDS, mask=tree)
    with pytest.raises(BadBatch, match="no layer uses one"):
        run(masked)
    # No graph has that many tokens of a sequence.
    chunk = StepBatch(served.rows, served.kv_len + 2, 2 * ones, NO_TOKEN_IDS)
    served.runtime.table.reserve_all(served.rows, chunk.kv_len)
    run(chunk)
    served.kv_len = chunk.kv_len
    served.runtime.agree = lambda found: dict(found)
    served.step()
    served.runtime.agree = alone
    served.step()
    assert ran[-1]


def test_pages_that_leave_a_window_are_given_back(ran: list[bool]) -> None:
    served = Going(window=64)
    ran.clear()
    before = served.runner.counters.swa_pages_in_use
    for _ in range(80):
        served.step()
    assert ran == [True] * 80
    assert served.runner.counters.swa_pages_in_use <= before
    served.runtime.check_device()
