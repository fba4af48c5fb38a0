"""Steps whose graph takes their inputs: they leave what other steps leave, also after a launch that failed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import capture_shapes, recorder_for, takes_inputs
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.errors import DeviceFault, GraphStale, WrongState
from rocm_attn.hip_graphs.recorder import CountedRecording
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, TOKEN_WITHOUT_PAGE
from rocm_attn.kernels.metadata.slot_layout import MOST_TAKEN
from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.gate import AGAIN, StepGate
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.protocols import NO_FLIGHT_RECORDER, Flight
from rocm_attn.step.publisher import STEPS_UNTIL_COMPARED, GraphRuns
from rocm_attn.step.step import Part, Step
from tests.amd.runtime.interrupts import every_line, interrupted_at
from tests.amd.runtime.test_interrupts import Counted
from tests.amd.worlds.problems import providers, small_problem
from tests.amd.worlds.world import Request, World

# Left out under the interpreter by day: the kernels are torch's, and the host stage runs it every time.
pytestmark = pytest.mark.fast(interpreted=0)

CPU = torch.device("cpu")
NUM_SEQS, PADDED, MAX_KV_LEN = 3, 4, 2048


class Going:
    """Requests that continue by one token per step. Outputs are the inputs that the device has: id, length, row."""

    def __init__(
        self,
        flight: Flight = NO_FLIGHT_RECORDER,
        window: int = UNLIMITED_WINDOW,
        sizes: tuple[int, ...] = (PADDED,),
    ) -> None:
        self.problem, self.inputs = small_problem(window_left=window), ZeroInputs(CPU)
        # One bucket of lengths.
        options = RuntimeOptions(
            num_pages=2048,
            max_num_seqs=PADDED,
            max_kv_len=MAX_KV_LEN,
            provider="torch",
            capture_sizes=sizes,
            swa_pages=0 if window == UNLIMITED_WINDOW else 2048,
        )
        self.runtime = build_runtime([self.problem], options, device=CPU)
        self.runner = StepRunner(self.runtime, self._forward, recorder_for(CPU), check=NO_CHECK, flight=flight)
        self.rows = np.array([self.runtime.table.admit() for _ in range(NUM_SEQS)], np.int32)
        self.kv_len = np.array([1036, 1026, 1046], np.int32)
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
        step.layers.store_and_attend(0, *self.inputs.of(self.problem, step.token_ids.shape[0]))
        return torch.stack((step.token_ids[: len(step.kv_len)], step.kv_len, step.row_of_seq), 1)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list that records for each staged step whether it left its inputs to its graph."""
    found = list[bool]()
    stage: Callable[..., Step] = StepGate.stage

    def reported(self: StepGate, *args: object) -> Step:
        step = stage(self, *args)
        found.append(self._publisher.launching is not None)
        return step

    monkeypatch.setattr(StepGate, "stage", reported)
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
    counters = served.runner.counters
    assert counters.real_seqs == counters.steps * len(served.rows)
    other = Going()
    ran.clear()
    monkeypatch.setattr(other.runner, "_input_plans", {})
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


def test_a_step_does_not_run_again_over_memory_that_moved() -> None:
    served = Going()
    last = served.runtime.gate.last
    assert last is not None
    served.runner._pinned.bump()
    with pytest.raises(GraphStale, match="they have moved"):
        served.runner.run_again(last.batch)


@pytest.mark.parametrize("apart", [24, pytest.param(5, marks=pytest.mark.nightly)])
def test_an_interrupt_at_any_line_of_a_step_in_one_call_leaves_the_next_one_right(apart: int, ran: list[bool]) -> None:
    """apart: lines from one interrupt to the next"""
    served, interrupts = Going(), 0

    def step() -> None:
        served.runner.run(served.batch())

    for _ in every_line(step, apart):
        interrupts += 1
        # If it was broken off, its tokens may count as stored or not.
        served.kv_len = served.runtime.table.tokens.stored_len[served.rows]
        for _ in range(3):
            served.step()
        assert ran[-2:] == [True, True]
        served.runtime.check_device()
    assert interrupts > 20


@pytest.mark.parametrize("apart", [24, pytest.param(5, marks=pytest.mark.nightly)])
def test_an_interrupt_at_any_line_of_a_step_that_runs_again_leaves_the_next_one_right(
    apart: int, ran: list[bool]
) -> None:
    """apart: lines from one interrupt to the next"""
    served, interrupts = Going(), 0

    def again() -> None:
        batch = served.runtime.gate.last
        assert batch is not None
        served.runner.run_again(batch.batch)

    again()
    for _ in every_line(again, apart):
        interrupts += 1
        served.step()
        again()
    assert interrupts > 20
    # The lines at the end, where the step is closed.
    last = 1 + apart * interrupts
    for number in range(last - 25, last):
        if interrupted_at(number, again):
            served.step()
        again()
    served.runtime.check_device()


@pytest.mark.parametrize("apart", [20, pytest.param(3, marks=pytest.mark.nightly)])
def test_what_an_interrupt_leaves_to_run_again_sees_its_whole_window(apart: int, ran: list[bool]) -> None:
    """apart: lines from one interrupt to the next"""
    served, again = Going(window=64), 0
    for _ in every_line(lambda: served.runner.run(served.batch()), apart):
        last = served.runtime.gate.last
        if served.runner.may_run_again and last is not None:
            again += 1
            served.runner.run_again(last.batch)
        served.kv_len = served.runtime.table.tokens.stored_len[served.rows]
        served.step()
        served.runtime.check_device()
    assert again > 60 // apart


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


@pytest.mark.parametrize("ask", ["check", "report", "report_own", "forget"])
def test_the_device_is_not_asked_while_inputs_wait_for_their_graph(ask: str, ran: list[bool]) -> None:
    """The graph would run on the inputs of the step before it."""
    reported = Told()
    served = Going(reported)

    def then() -> None:
        with pytest.raises(WrongState, match="cannot be read while a staged step waits"):
            getattr(served.runtime.faults, ask)()

    reported.then = then
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


def test_a_flight_recorder_is_reported_of_a_step_and_of_what_broke_it_off(
    ran: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = Told()
    served = Going(reported)
    batch = served.batch()
    served.runner.run(batch)
    assert ran[-1]
    assert reported.noted[-1][0] is batch
    served.kv_len = batch.kv_len
    (entry,) = served.runner._graph_of_plan.values()

    with monkeypatch.context() as patch:
        patch.setattr(entry.recording, "replay", Mock(side_effect=RuntimeError("lost")))
        with pytest.raises(RuntimeError, match="lost"):
            served.runner.run(served.batch())
    assert ran[-1]
    assert [str(error) for error in reported.failures] == ["lost"]
    for _ in range(2):
        served.step()
    served.runner._pinned.bump()
    with pytest.raises(GraphStale):
        served.runner.run(served.batch())
    assert ran[-1]
    assert isinstance(reported.failures[-1], GraphStale)
    assert reported.noted[-1][1] == served.runner._pinned.epoch


def test_a_fault_is_counted_and_reported_once(ran: list[bool]) -> None:
    reported = Told()
    served = Going(reported)
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
    assert [type(error) for error in reported.failures] == [DeviceFault]


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


each_end = pytest.mark.parametrize("launches", [False, True], ids=["not launched", "launched"])


class _LaunchFails(Exception):
    """An error that a driver may raise."""


def _failing(replay: Callable[[], object], launches: bool) -> None:
    if launches:
        replay()
    raise _LaunchFails


def _after_a_launch_that_failed(device: torch.device, *, launches: bool) -> tuple[World, list[Request]]:
    """Returns three requests, the first two of which were to be in a step whose graph takes its inputs."""
    serving = World.one_layer(device, graphs=True, provider=providers()[-1])
    requests = serving.begun(3, 5, 2)
    for _ in range(3):
        serving.step(requests[:2], [1, 1])
    (entry,) = (graph for graph in serving.runner._graph_of_plan.values() if graph.takes_inputs)
    assert isinstance(entry.recording, CountedRecording)
    replay = entry.recording.recording.replay
    with pytest.MonkeyPatch.context() as patch:
        fails = partial(_failing, replay, launches)
        patch.setattr(entry.recording, "replay", partial(serving.runtime.graph_runs.run, fails))
        with pytest.raises(_LaunchFails):
            serving.run(requests[:2], [1, 1])
    return serving, requests


@each_end
def test_the_step_after_a_launch_that_failed_takes_its_own_inputs(launches: bool, device: torch.device) -> None:
    """It has other requests, in another order, and so has the one after it."""
    serving, (first, second, third) = _after_a_launch_that_failed(device, launches=launches)
    replays = serving.runner.counters.replays
    for requests in ([third, second], [first, third], [second, first], [third, first]):
        serving.step(requests, [1, 1])
    assert serving.runner.counters.replays == replays + 4
    serving.runtime.check_device()


@each_end
def test_a_run_that_raises_is_followed_by_a_number_that_host_and_device_share(launches: bool) -> None:
    runs = GraphRuns(CPU)

    def replay() -> None:
        runs.on_device.add_(1)

    for _ in range(2):
        assert runs.next() == runs.on_device.item()
        runs.run(replay)
    assert (runs.number, runs.on_device.item()) == (2, 2)
    with pytest.raises(_LaunchFails):
        runs.run(partial(_failing, replay, launches))
    number = runs.next()
    assert number == runs.on_device.item()
    assert number not in range(4), "a slot that was written for the run that failed is not due"
    runs.run(replay)
    assert runs.next() == number + 1 == runs.on_device.item()


def test_a_step_of_more_sequences_than_one_program_takes_is_published() -> None:
    """Padded sequences may be more than its tokens: prompts are padded to all of the sequences."""
    most = MOST_TAKEN + 1
    options = RuntimeOptions(
        num_pages=most + 8,
        max_num_seqs=most,
        max_kv_len=16,
        provider="torch",
        capture_sizes=(1, most),
        capture_tokens=(64,),
    )
    runtime = build_runtime([small_problem()], options, device=CPU)
    row = runtime.table.admit()
    runtime.table.reserve(row, 2)
    one = np.array([2], np.int32)
    batch = StepBatch(np.array([row], np.int32), one, one, np.zeros(2, np.int32))
    found = dict[bool, set[bool]]()
    for shape in capture_shapes(runtime.padding):
        if shape.num_halves == 1 and 2 <= shape.num_tokens <= MOST_TAKEN:
            step = runtime.stage(batch, runtime.plan(batch, shape))
            found.setdefault(shape.num_seqs > MOST_TAKEN, set()).add(takes_inputs(runtime, step))
            runtime.gate.abandon()
    assert found == {True: {False}, False: {True}}


def _one_too_many() -> Counted:
    """Returns a state in which the device has counted one run fewer than the host, as if a driver had lost a launch."""
    served = Counted(graphs=True)
    for number in range(4):
        served.run("whole", number)
    assert served.runner._input_plans
    served.runtime.graph_runs.number += 1
    return served


def test_a_run_that_the_device_has_not_counted_is_reported_some_steps_later() -> None:
    """Each step would have the inputs of the previous one, and none would report it."""
    served = _one_too_many()

    def steps() -> None:
        for number in range(STEPS_UNTIL_COMPARED + 2):
            served.runner.run(served.batch(number))

    with pytest.raises(DeviceFault, match=r"the inputs of step \d+ never reached the device"):
        steps()
    for number in range(2 * STEPS_UNTIL_COMPARED):
        served.run("whole", number)
    served.runtime.check_device()


def test_an_answer_that_comes_late_is_that_of_its_question() -> None:
    """The host continues meanwhile, and so does the device."""
    runs, is_reached = GraphRuns(CPU), False

    class Late:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            raise AssertionError("a wait was not expected")

        def query(self) -> bool:
            return is_reached

    runs._answered = Late()
    for step in range(3 * STEPS_UNTIL_COMPARED):
        is_reached = step % 7 == 0
        assert runs.next() == runs.number == runs.on_device.item() == step
        runs.run(lambda: runs.on_device.add_(1))


@pytest.mark.parametrize("launches", [False, True], ids=["not launched", "launched"])
def test_a_step_whose_graph_broke_off_does_not_run_again(launches: bool) -> None:
    """Its inputs may not be on the device, which would take those of the step before for them."""
    served = Counted(graphs=True)
    for number in range(3):
        served.run("whole", number)
    assert served.runner.may_run_again
    with _replay_raises(served, launches=launches), pytest.raises(KeyboardInterrupt):
        served.run("whole", 3)
    assert not served.runner.may_run_again
    with pytest.raises(WrongState, match="no whole step that can run again was staged last"):
        served.runtime.stage(served.batch(1), AGAIN)
    served.run("whole", 4)
    assert served.runner.may_run_again


@pytest.mark.parametrize("word", [0, TOKEN_WITHOUT_PAGE])
def test_a_fault_of_a_step_that_was_interrupted_after_its_launch_is_reported(word: int) -> None:
    """Its graph has run, unlike the work after a publication that was broken off."""
    served = Counted(graphs=True)
    for number in range(3):
        served.run("whole", number)
    step = served.runtime.faults.step_number + 1
    with _replay_raises(served, launches=True, word=word), pytest.raises(KeyboardInterrupt):
        served.run("whole", 3)
    reported = []
    for number in range(6):
        try:
            served.run("whole", 4 + number)
        except DeviceFault as fault:
            reported.append((number, fault.step))
    assert reported == ([(2, step)] if word else [])
    served.runtime.check_device()


@contextmanager
def _replay_raises(served: Counted, *, launches: bool, word: int = 0) -> Iterator[None]:
    """The graph that takes inputs is interrupted before it is launched or after; then it has left this error word."""
    (entry,) = (graph for graph in served.runner._graph_of_plan.values() if graph.takes_inputs)
    last = served.runtime.gate.last
    assert isinstance(entry.recording, CountedRecording)
    assert last is not None
    replay = entry.recording.recording.replay

    def interrupted() -> None:
        if launches:
            replay()
            last.inputs.counts[ERROR_WORD] = word
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry.recording, "replay", partial(served.runtime.graph_runs.run, interrupted))
        yield
