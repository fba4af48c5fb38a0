"""An interrupt or another thread in the middle of a step leaves a runtime that serves the next step correctly."""

import copy
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rocm_attn.batch.inputs import DeviceInputs
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.capture.check import NO_CHECK
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.capture.zero_inputs import ZeroInputs
from rocm_attn.errors import NotCopied, WrongState
from rocm_attn.hip_graphs.pinned import PinnedTensors
from rocm_attn.selection.build import build_runtime
from rocm_attn.step.options import RuntimeOptions
from rocm_attn.step.step import Part
from tests.amd.runtime.interrupts import every_line, interrupted_at
from tests.amd.worlds.problems import small_problem

# Left out under the interpreter by day: the kernels are torch's, and the host stage runs it every time.
pytestmark = pytest.mark.fast(interpreted=0)

CPU = torch.device("cpu")
KINDS = ["whole", "split", "lengths on the device", "after a split step"]


class Counted:
    """A runner over one request whose step number n has V of n; attention over one token is that token's V."""

    def __init__(self, *, graphs: bool) -> None:
        self.problem = small_problem()
        self.runtime = build_runtime(
            [self.problem],
            RuntimeOptions(
                num_pages=16, max_num_seqs=2, max_kv_len=16, provider="torch", capture_sizes=(2,), split_steps=True
            ),
            device=CPU,
        )
        self.runner = StepRunner(self.runtime, self._forward, recorder_for(CPU) if graphs else None, check=NO_CHECK)
        self.row = self.runtime.table.admit()
        self.runtime.table.reserve(self.row, 1)

    def batch(self, number: int, *, on_device: bool = False) -> StepBatch:
        one = np.array([1], np.int32)
        rows, ids = np.array([self.row], np.int32), np.array([number], np.int32)
        if on_device:
            return StepBatch(rows, one, one, ids, inputs=DeviceInputs(kv_len=torch.ones(1, dtype=torch.int32)))
        return StepBatch(rows, one, one, ids)

    def run(self, kind: str, number: int) -> None:
        """Runs a step and checks its result."""
        split = kind == "split"
        batch = self.batch(number, on_device=kind == "lengths on the device")
        (rows,) = (partial(self.runner.run, halves=2) if split else self.runner.run)(batch)
        assert bool((rows == number).all())

    def _forward(self, step: Part) -> torch.Tensor:
        q, k, v, out = ZeroInputs(CPU).of(self.problem, step.token_ids.shape[0])
        step.layers.store_and_attend(0, q, k, v.copy_(step.token_ids[:, None, None]), out)
        return out.flatten(1).index_select(0, step.last_token_of_seq)


@pytest.mark.fast(2)
@pytest.mark.parametrize("apart", [20, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind == "split")) for kind in KINDS]
)
def test_an_interrupt_at_any_line_of_a_step_leaves_the_next_one_right(graphs: bool, kind: str, apart: int) -> None:
    """It reports no fault that did not happen. apart: lines from one interrupt to the next."""
    served = Counted(graphs=graphs)
    for _ in range(2):
        served.run(kind, 1)
    interrupts = 0

    def step() -> None:
        if kind == "after a split step":
            served.run("split", 2)
        served.run(kind, 3)

    # Whole eager steps at more lines; the others differ from them in a few.
    for line in every_line(step, apart if kind == "whole" and not graphs else 3 * apart):
        interrupts += 1
        for number in range(4):
            served.run("split" if number == 2 else kind, 10 + line + number)
        served.runtime.check_device()
    # Python 3.12 has fewer lines: comprehensions are part of the function around them.
    assert interrupts > 10
    assert (served.runner.counters.replays > 0) == graphs


@pytest.mark.parametrize("stride", [9001, pytest.param(397, marks=pytest.mark.nightly)])
def test_an_interrupt_while_a_graph_is_made_leaves_the_next_step_right(stride: int) -> None:
    """No row or page is lost either."""
    line = 1
    while True:
        served = Counted(graphs=True)
        free = served.runtime.table.num_free_rows, served.runtime.table.full.num_free_pages
        if not interrupted_at(line, lambda served=served: served.run("whole", 1)):  # type: ignore[misc]
            break
        for number in range(3):
            served.run("whole", 2 + number)
        served.runtime.check_device()
        assert served.runner.counters.graphs_off == ""
        assert served.runner.counters.replays >= 3  # the interrupted step may have been replayed by then
        assert (served.runtime.table.num_free_rows, served.runtime.table.full.num_free_pages) == free
        line += stride
    assert line > 1000


def test_an_interrupt_right_after_a_graph_was_put_away_leaves_the_next_step_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Counted(graphs=True)
    keep = StepRunner._keep

    def keep_and_interrupt(*arguments: Any) -> None:
        keep(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepRunner, "_keep", keep_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            served.run("whole", 1)
    for number in range(3):
        served.run("whole", 2 + number)
    assert served.runner.counters.replays == 3
    assert served.runner.counters.graphs_off == ""


def test_an_interrupt_while_addresses_are_pinned_again_lets_the_next_reopen_pin_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This also holds after a step has found that they were given up, and has kept no number of a seal."""
    served = Counted(graphs=True)
    served.run("whole", 1)
    served.runtime.seals.unseal([4], [1])
    served.run("whole", 2)
    pin_all = PinnedTensors.pin_all

    def pin_and_interrupt(*arguments: Any) -> None:
        pin_all(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PinnedTensors, "pin_all", pin_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            served.runner.reopen([4], [1])
    served.runner.reopen([8], [1])
    for number in range(3):
        served.run("whole", 3 + number)
    assert served.runner.counters.replays >= 3


def test_an_interrupt_at_any_line_of_a_beginning_step_leaves_none_begun() -> None:
    served = Counted(graphs=False)
    for number in every_line(lambda: served.runtime.step(served.batch(1))):
        served.run("whole", 1 + number)
    served.runtime.end_step()
    served.runtime.check_device()


def test_a_step_within_a_step_is_refused_and_the_outer_one_goes_on() -> None:
    served = Counted(graphs=False)
    step = served.runtime.step(served.batch(1)).parts[0]
    for begin in (
        served.runner.run,
        partial(served.runner.run, halves=2),
        served.runtime.step,
        served.runtime.stage,
    ):
        with pytest.raises(WrongState, match="a step cannot begin, because a step is running; call end_step"):
            begin(served.batch(2))
    problem = served.problem
    one = torch.ones(step.token_ids.shape[0], problem.num_q_heads, problem.head_dim)
    step.layers.store_and_attend(0, one, one[:, : problem.num_kv_heads], one[:, : problem.num_kv_heads], one.clone())
    served.runtime.end_step()
    served.run("whole", 4)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads switch as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_runtime_and_a_runner_are_not_copied(make: Callable[[object], object]) -> None:
    served = Counted(graphs=True)
    served.run("whole", 1)
    with pytest.raises(NotCopied, match="a runtime cannot be copied or pickled"):
        make(served.runtime)
    with pytest.raises(NotCopied, match="a StepRunner cannot be copied or pickled"):
        make(served.runner)
    served.run("whole", 2)


def test_two_threads_get_right_results_or_are_refused(hasty_threads: None) -> None:
    served = Counted(graphs=False)
    counts: Counter[str] = Counter()
    refusals = set()
    begin = threading.Barrier(2)

    def work(first: int) -> None:
        begin.wait()
        for number in range(first, first + 300):
            try:
                served.run("whole", number)
                counts["right"] += 1
            except WrongState as refused:
                refusals.add(str(refused))
                counts["refused"] += 1

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(work, first) for first in (1, 1000)]:
            done.result()
    assert counts["right"] + counts["refused"] == 600
    assert counts["right"] > 0
    assert all("because another thread has begun a step and not ended it" in refusal for refusal in refusals)
    served.runtime.check_device()


def in_another_thread(call: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def test_a_step_of_one_thread_is_neither_ended_nor_doubled_by_another() -> None:
    served = Counted(graphs=False)
    step = served.runtime.step(served.batch(5)).parts[0]
    for call in (
        lambda: served.runtime.step(served.batch(1)),
        lambda: served.runner.run(served.batch(1)),
        lambda: served.runtime.seals.unseal((1,)),
        served.runtime.seals.seal,
        served.runtime.check_device,
    ):
        with pytest.raises(WrongState, match="another thread has begun a step and not ended it; a runtime is used by"):
            in_another_thread(call)
    in_another_thread(served.runtime.end_step)
    assert bool((served._forward(step)[0] == 5).all())
    served.runtime.end_step()
    in_another_thread(lambda: served.run("whole", 6))


def test_a_step_of_a_thread_that_has_ended_is_in_nobodys_way() -> None:
    served = Counted(graphs=False)
    thread = threading.Thread(target=lambda: served.runtime.stage(served.batch(1)))
    thread.start()
    thread.join()
    with pytest.raises(WrongState, match="a step was staged and its metadata is not filled yet; call end_step"):
        served.runtime.step(served.batch(2))
    served.runtime.end_step()
    served.run("whole", 3)
