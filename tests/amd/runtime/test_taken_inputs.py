"""Steps whose graphs take their inputs: which steps do, and the reports of steps that were broken off or miscounted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.graphs import capture_shapes, takes_inputs
from rocm_attn.errors import DeviceFault, WrongState
from rocm_attn.hip_graphs.recorder import uncounted
from rocm_attn.kernels.metadata.error_word import ERROR_WORD, TOKEN_WITHOUT_PAGE
from rocm_attn.kernels.metadata.slot_layout import MOST_TAKEN
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.gate import AGAIN
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.publisher import STEPS_UNTIL_COMPARED, GraphRuns
from tests.amd.runtime.stepping import small_problem
from tests.amd.runtime.test_interrupts import Counted

pytestmark = pytest.mark.fast(interpreted=0)
CPU = torch.device("cpu")


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
    assert served.runner._takers
    served.runtime.graph_runs.number += 1
    return served


def test_a_run_that_the_device_has_not_counted_is_told_some_steps_later() -> None:
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


def test_a_count_that_is_not_compared_is_wrong_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphRuns, "_compare", lambda self: None)
    served = _one_too_many()
    served.runner.run(served.batch(100))
    for number in range(101, 101 + 2 * STEPS_UNTIL_COMPARED):
        (rows,) = served.runner.run(served.batch(number))
        assert bool((rows == number - 1).all())


def test_an_answer_that_comes_late_is_that_of_its_question() -> None:
    """The host continues meanwhile, and so does the device."""
    runs, is_reached = GraphRuns(CPU), False

    class Late:
        def record(self) -> None:
            pass

        def synchronize(self) -> None:
            raise AssertionError("nobody waits")

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
def test_a_fault_of_a_step_that_was_interrupted_after_its_launch_is_told(word: int) -> None:
    """Its graph has run, unlike the work after a publication that was broken off."""
    served = Counted(graphs=True)
    for number in range(3):
        served.run("whole", number)
    step = served.runtime.faults.step_number + 1
    with _replay_raises(served, launches=True, word=word), pytest.raises(KeyboardInterrupt):
        served.run("whole", 3)
    told = []
    for number in range(6):
        try:
            served.run("whole", 4 + number)
        except DeviceFault as fault:
            told.append((number, fault.step))
    assert told == ([(2, step)] if word else [])
    served.runtime.check_device()


@contextmanager
def _replay_raises(served: Counted, *, launches: bool, word: int = 0) -> Iterator[None]:
    """The graph that takes inputs is interrupted before it is launched or after; then it has left this error word."""
    (entry,) = (graph for graph in served.runner._graph_of_plan.values() if graph.takes_inputs)
    replay, last = uncounted(entry.recording).replay, served.runtime.gate.last
    assert last is not None

    def interrupted() -> None:
        if launches:
            replay()
            last.inputs.counts[ERROR_WORD] = word
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry.recording, "replay", partial(served.runtime.graph_runs.run, interrupted))
        yield
