"""A runtime belongs to one thread at a time, and cannot be copied."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocm_attn.errors import NotCopied, WrongState
from tests.amd.runtime.test_interrupts import Counted

# Left out under the interpreter by day: no Triton kernel runs here, and the host stage runs it every time.
pytestmark = pytest.mark.fast(interpreted=0)


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
