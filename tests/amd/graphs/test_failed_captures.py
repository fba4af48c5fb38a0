"""Exceptions during a capture or a replay: serving continues, other ranks learn of it, nothing is reported twice."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.errors import BadBatch, DeviceFault, GraphStale
from rocm_attn.hip_graphs.recorder import Recording
from rocm_attn.machine.agreement import found_by_any
from rocm_attn.paging.index_spaces import Space
from rocm_attn.step.protocols import LayerCalls, WrappedLayers
from rocm_attn.step.step import Part
from tests.amd.graphs.small_models import SERVED, Requests, Tiny, WrappedRecorder, same, serve
from tests.amd.ranks import among_all, on_every_rank
from tests.amd.worlds.hybrid import Hybrid

CPU = torch.device("cpu")


class Fails(WrappedRecorder):
    """A recorder that raises instead of its first recordings, after running the function once."""

    def __init__(self, error: BaseException, times: int = 1_000_000) -> None:
        super().__init__(recorder_for(CPU))
        self._error = error
        self._left = times

    def record(self, fn: Callable[[], Any]) -> tuple[Recording, Any]:
        if self._left:
            self._left -= 1
            fn()
            raise self._error
        return self._inner.record(fn)


def long_model() -> Tiny:
    return Tiny.build(CPU, "torch", [4], max_kv_len=256, num_pages=400)


def eager() -> list[Tensor]:
    return eager_of(Tiny.build(CPU, "torch", [4]), SERVED)


def eager_of(tiny: Tiny, served: Sequence[Sequence[int]]) -> list[Tensor]:
    return serve(tiny.runner(graphs=False), tiny.runtime, served)


# Prompts, and decode steps of one length bucket, until a graph whose forward has raised was tried again.
UNTIL_TRIED_AGAIN = [[130, 129, 131], *[[1, 1, 1]] * 70]


@pytest.mark.fast(1)
@pytest.mark.parametrize("error", [RuntimeError("not while capturing"), KeyError("a library")])
def test_a_forward_that_raises_in_two_captures_switches_graphs_off_and_serving_goes_on(error: Exception) -> None:
    tiny = long_model()
    runner = StepRunner(tiny.runtime, tiny.forward, Fails(error))
    assert same(serve(runner, tiny.runtime, UNTIL_TRIED_AGAIN), eager_of(long_model(), UNTIL_TRIED_AGAIN))
    assert runner.counters.graphs_off == f"{type(error).__name__}: {error}"
    assert runner.counters.graphs_off.word == "forward"
    assert runner.counters.replays == 0


def test_a_forward_that_raises_once_in_a_capture_leaves_graphs_on() -> None:
    tiny = long_model()
    runner = StepRunner(tiny.runtime, tiny.forward, Fails(RuntimeError("a library was busy"), times=1))
    assert same(serve(runner, tiny.runtime, UNTIL_TRIED_AGAIN), eager_of(long_model(), UNTIL_TRIED_AGAIN))
    counters = runner.counters
    assert (counters.graphs_off, counters.captures) == ("", 1)
    assert counters.replays == 70 - 1 - 64
    assert counters.fallbacks == {
        "its forward raised, or stored NaN, while it was tried": 1,
        "eager steps come first": 64,
    }


def test_a_forward_that_raises_in_capture_all_is_named_and_its_graph_is_made_later() -> None:
    tiny = Tiny.build(CPU, "torch", [2, 4])
    runner = StepRunner(tiny.runtime, tiny.forward, Fails(RuntimeError("a library was busy"), times=1))
    report = runner.capture_all()
    assert [shape.num_seqs for shape in report.skipped] == [4]
    assert list(report.skipped.values()) == ["RuntimeError: a library was busy"]
    assert len(report.buckets) == 1
    assert same(serve(runner, tiny.runtime), eager_of(Tiny.build(CPU, "torch", [2, 4]), SERVED))
    assert (runner.counters.graphs_off, runner.counters.replays) == ("", len(SERVED) - 1)


class InAThread(WrappedLayers):
    """Layer calls that are made in a thread of their own."""

    def __init__(self, inner: LayerCalls) -> None:
        self._inner = inner

    def _call(self, name: str, layer: int, *given: Any, **named: Any) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(getattr(self._inner, name), layer, *given, **named).result()


def test_layers_of_a_forwards_own_threads_are_refused_in_a_recording_on_a_cpu_and_run_in_eager_steps() -> None:
    """A CPU's recording lacks the work of other threads, so an unchecked graph replayed old results."""
    tiny = Tiny.build(CPU, "torch", [4])
    tiny.around = InAThread
    runner = tiny.runner(check=NO_CHECK)
    assert same(serve(runner, tiny.runtime), eager())
    assert "from another thread than the one that records the step" in runner.counters.graphs_off


def test_an_interrupt_while_recording_reaches_the_caller_and_the_step_can_be_run_again() -> None:
    tiny = Tiny.build(CPU, "torch", [4])
    runner = StepRunner(tiny.runtime, tiny.forward, Fails(KeyboardInterrupt(), times=1))
    requests = tiny.admitted(3)
    outs = [requests.run(runner, SERVED[0])]
    batch = requests.batch(SERVED[1])
    with pytest.raises(KeyboardInterrupt):
        runner.run(batch)
    outs.append(runner.run(batch).clone())
    outs += [requests.run(runner, q_len) for q_len in SERVED[2:]]
    assert same(outs, eager())
    assert (runner.counters.graphs_off, runner.counters.replays) == ("", len(SERVED) - 1)


class OfTwo:
    """This rank's agreement with another one that finds nothing wrong; its messages are kept."""

    def __init__(self) -> None:
        self.sent: list[dict[str, str]] = []

    def __call__(self, findings: Mapping[str, str]) -> Mapping[str, str]:
        self.sent.append(dict(findings))
        return found_by_any([findings, {}])


def raising_in_run(number: int, tiny: Tiny, error: BaseException) -> Callable[[Part], Tensor]:
    """Returns the model's forward, which raises in this run."""
    runs = itertools.count(1)

    def forward(step: Part) -> Tensor:
        if next(runs) == number:
            raise error
        return tiny.forward(step)

    return forward


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError("of the check")])
def test_an_exception_that_leaves_a_capture_is_sent_to_the_other_ranks_first(error: BaseException) -> None:
    tiny, agree = Tiny.build(CPU, "torch", [4]), OfTwo()
    tiny.runtime.agree = agree
    runner = StepRunner(tiny.runtime, raising_in_run(5, tiny, error), recorder_for(CPU))
    with pytest.raises(type(error)):
        runner.capture_all()
    before, *_, sent = agree.sent
    assert before == {}
    assert sent["failure"] == f"the check stopped with {type(error).__name__}: {error}"
    assert sent["failure"] in runner.counters.graphs_off
    assert same(serve(runner, tiny.runtime), eager())


def test_a_graph_that_another_rank_could_not_record_is_not_checked() -> None:
    """The check runs the model, whose sums over ranks would wait for that rank."""

    def runs_with(findings_of_other: dict[str, str]) -> int:
        tiny, runs = Tiny.build(CPU, "torch", [4]), list[Part]()
        tiny.runtime.agree = lambda findings: found_by_any([findings, findings_of_other])

        def forward(step: Part) -> Tensor:
            runs.append(step)
            return tiny.forward(step)

        StepRunner(tiny.runtime, forward, recorder_for(CPU)).capture_all()
        return len(runs)

    assert runs_with({"failure": "not while capturing"}) < runs_with({})


def broken_off_on(rank: int, broken: int, how: str) -> list[str]:
    """Serves with a capture failing on one rank. Returns why graphs are off, replays, and whether rows are right."""
    tiny = Tiny.build(CPU, "torch", [4])
    tiny.runtime.agree = among_all()
    raises = rank == broken and how == "check"
    forward = raising_in_run(5, tiny, ZeroDivisionError()) if raises else tiny.forward
    records = rank == broken and how == "recording"
    recorder = Fails(RuntimeError("not while capturing")) if records else recorder_for(CPU)
    runner = StepRunner(tiny.runtime, forward, recorder)
    raised = ""
    try:
        runner.capture_all()
    except ZeroDivisionError as error:
        raised = type(error).__name__
    outs = serve(runner, tiny.runtime)
    return [raised, runner.counters.graphs_off, str(runner.counters.replays), str(same(outs, eager()))]


@pytest.mark.parametrize(
    ("how", "reason"),
    [("recording", "RuntimeError: not while capturing"), ("check", "the check stopped with ZeroDivisionError: ")],
)
def test_no_rank_waits_for_one_whose_capture_fails(how: str, reason: str, tmp_path: Path) -> None:
    first, second = on_every_rank(broken_off_on, tmp_path, 1, how)
    assert first == ["", f"on rank 1: {reason}", "0", "True"]
    assert second[0] == ("ZeroDivisionError" if how == "check" else "")
    assert reason in second[1]
    assert second[2:] == first[2:]


# Reports, and their times, while a step's graph is captured during serving.


def one_row(tiny: Tiny, wrong: bool) -> StepBatch:
    """Returns a decode step of row 1 at length 4. wrong: the device has another length, beyond its bound"""
    lengths = torch.tensor([99 if wrong else 4], dtype=torch.int32)
    arrays = [np.array([value], np.int32) for value in (1, 4, 1, 7)]
    return StepBatch(*arrays, inputs=DeviceInputs(kv_len=lengths))


def admitted(max_num_seqs: int = 8) -> tuple[Tiny, StepRunner]:
    tiny = Tiny.build(CPU, "torch", [1, 2], max_num_seqs=max_num_seqs)
    assert tiny.runtime.table.admit() == 1
    tiny.runtime.table.reserve(1, 8)
    eagerly = tiny.runner(graphs=False)
    eagerly.run(StepBatch(*(np.array(values, np.int32) for values in ([1], [4], [4], [7, 7, 7, 7]))))
    return tiny, tiny.runner()


@pytest.mark.parametrize("num_rows", [4, 8], ids=["no free row", "free rows"])
def test_steps_without_new_tokens_leave_graphs_on(num_rows: int) -> None:
    """A graph of such a step had no output to be compared by, and switched all graphs off. Its shape has tokens."""
    world = Hybrid(CPU, "torch", graphs=True, num_rows=num_rows)
    requests = world.begun(4, 3, 2, 1)
    for _ in range(2):
        assert len(world.run(requests, [[]] * 4)) == 0
    for _ in range(2):
        world.step(requests, [world.ids(2) for _ in requests])
    assert world.runner.counters.graphs_off == ""
    counters = world.runner.counters
    assert counters.replays == counters.steps - (2 if num_rows == 4 else 0)


@pytest.mark.parametrize("max_num_seqs", [1, 8], ids=["no free row", "free rows"])
def test_a_bad_first_batch_of_its_shape_is_reported_once_and_graphs_stay_on(max_num_seqs: int) -> None:
    """It is published before and after its capture. If no row is free, a graph is tried on a batch."""
    tiny, runner = admitted(max_num_seqs)
    reported = []
    for at in range(8):
        try:
            runner.run(one_row(tiny, wrong=at == 0))
        except DeviceFault as fault:
            reported.append(fault.rows)
    assert reported == [(1,)]
    tiny.runtime.check_device()
    assert runner.counters.graphs_off == ""
    assert runner.counters.captures == 1
    assert runner.counters.replays >= 6


def test_graphs_that_were_switched_off_come_back_by_reopen(caplog: pytest.LogCaptureFixture) -> None:
    tiny = Tiny.build(CPU, "torch", [4])
    runner = StepRunner(tiny.runtime, tiny.forward, Fails(torch.OutOfMemoryError("the pool is full"), times=1))
    assert same(serve(runner, tiny.runtime), eager())
    assert "graphs are switched off until reopen(): OutOfMemoryError: the pool is full" in caplog.text
    assert runner.counters.graphs_off.word == "refused"
    assert runner.counters.replays == 0
    runner.reopen([4])
    assert runner.counters.graphs_off == ""
    assert runner.capture_all().graphs_off == ""
    runner.check_addresses()


@pytest.mark.parametrize("rows", [1, 8], ids=["no free row", "free rows"])
def test_a_fault_of_an_earlier_step_is_reported_before_a_capture_touches_anything(rows: int) -> None:
    tiny = Tiny.build(CPU, "torch", [1, 2], max_num_seqs=rows)
    requests, runner = Requests(tiny.runtime), tiny.runner()
    requests.admit(1)
    requests.run(runner, [5])
    requests.run(tiny.runner(graphs=False), [1])
    number, counts = tiny.runtime.faults.step_number, tiny.runtime.gate._publisher._lines[0].counts
    assert counts is not None
    counts[3] = 1
    stored = requests.stored()
    # The last token again: its K and V are already stored.
    again = StepBatch(*(np.array([value], np.int32) for value in (requests.rows[0], requests.kv_len[0], 1, 9)))
    with pytest.raises(DeviceFault, match=f"step {number}: "):
        runner.run(again)
    assert same(requests.stored(), stored)
    right = tiny.runner(graphs=False).run(again).clone()
    assert same([runner.run(again)], [right])
    assert runner.counters.replays == 1


def test_faults_of_steps_that_a_graph_was_tried_on_are_reported_as_its_refusal_alone() -> None:
    """The trial's rows are free by then, and may belong to an unrelated request."""
    tiny = Tiny.build(CPU, "torch", [4])

    def forward(step: Part) -> Tensor:
        counts = tiny.runtime.gate._publisher._lines[0].counts
        assert counts is not None
        counts[3:4].fill_(1)  # as if a kernel had found a fault
        return tiny.forward(step)

    runner = StepRunner(tiny.runtime, forward, recorder_for(CPU))
    assert "DeviceFault: step" in runner.capture_all().graphs_off
    tiny.runtime.check_device()
    serving = tiny.runner(graphs=False)
    assert same(serve(serving, tiny.runtime), eager())


def test_a_check_on_the_live_step_that_is_broken_off_leaves_its_kv_as_it_was() -> None:
    tiny = Tiny.build(CPU, "torch", [1], max_num_seqs=1)
    requests = tiny.admitted(1)
    for q_len in ([5], [1]):
        requests.run(tiny.runner(graphs=False), q_len)
    stored = requests.stored()
    again = StepBatch(*(np.array([value], np.int32) for value in (requests.rows[0], requests.kv_len[0], 1, 9)))
    with pytest.raises(ZeroDivisionError):
        StepRunner(tiny.runtime, raising_in_run(3, tiny, ZeroDivisionError()), recorder_for(CPU)).run(again)
    assert same(requests.stored(), stored)


def test_a_step_without_new_tokens_has_a_graph_of_its_own_kernels(device: torch.device) -> None:
    """Its plan allows one new token, so the probe that its graph is made of may not have more."""
    tiny = Tiny.build(device, "torch", (2, 4), (4, 16))
    runner, requests = StepRunner(tiny.runtime, tiny.forward, recorder_for(device)), tiny.admitted(1)
    runner.run(requests.batch([5]))
    for _ in range(2):
        assert len(runner.run(requests.batch([0]))) == 1
    assert runner.counters.replays >= 2
    assert not runner.counters.graphs_off


def test_a_captured_forward_that_leaves_out_a_layer_is_named_by_its_first_replay() -> None:
    tiny = Tiny.build(CPU, "torch", layers=3)
    tiny.projections.pop()
    requests = tiny.admitted(1)
    runner = tiny.runner()
    runner.capture_all()
    with pytest.raises(BadBatch, match=r"mark_stored.*; the captured forward does not store in layer 2$"):
        requests.run(runner, [1])


def test_a_replay_over_memory_that_moved_is_a_stale_graph() -> None:
    """The recording has seen the model's own tensors too."""
    tiny = Tiny.build(CPU, "torch", [2])
    runner = tiny.runner(check=NO_CHECK)
    requests = tiny.admitted(2)
    requests.run(runner, [3, 4])
    requests.run(runner, [1, 1])
    assert runner.counters.replays == 1
    tiny.embedding.untyped_storage().resize_(0)
    with pytest.raises(GraphStale, match="resized in place"):
        requests.run(runner, [1, 1])
    assert runner.counters.replays == 1


def test_addresses_that_moved_are_a_stale_graph() -> None:
    tiny = Tiny.build(CPU, "torch", [2])
    runner = tiny.runner()
    table = tiny.runtime.table.space(Space.FULL)
    table.entries = table.entries.clone()
    with pytest.raises(GraphStale, match="table was int32"):
        runner.check_addresses()
