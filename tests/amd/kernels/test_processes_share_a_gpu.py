"""Processes that share a GPU take turns on it amid their kernels: replays keep their bits, and nothing fails.

Hopper's extend over gathered keys once had an unused barrier, whose memory Triton reused. One process alone was always
right. With three at a time each failed within seconds.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import wait
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier

import pytest
import torch

from rocm_attn.problem import UNLIMITED_WINDOW
from rocm_lab.bench.clocks import GraphClock
from rocm_lab.benchmarks.random_shapes import ROUND_US, cases_of
from rocm_lab.benchmarks.shape_sweep import SweepShape, SweepStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which its processes share"),
]

PROCESSES = 3
SECONDS = 2.0


def shape(heads: tuple[int, int], dim: int, page_size: int, work: SweepStep, kv_len: list[int], new: int) -> SweepShape:
    return SweepShape(*heads, dim, page_size, UNLIMITED_WINDOW, work, tuple(kv_len), (new,) * len(kv_len))


# Keys gathered and by TMA, rows drawn and assigned, prompts only, drafts to verify, decode.
SHAPES = {
    "gathered, drawn": shape((70, 10), 72, 1, SweepStep.EXTEND, [30] * 3, 20),
    "gathered, drawn, long": shape((12, 4), 80, 4, SweepStep.EXTEND, [2200] * 8, 600),
    "gathered": shape((16, 4), 64, 2, SweepStep.EXTEND, [700] * 3, 500),
    "drawn": shape((32, 2), 80, 128, SweepStep.EXTEND, [3245] * 2, 1445),
    "heads of 128": shape((32, 8), 128, 16, SweepStep.EXTEND, [1500] * 4, 300),
    "heads of 256": shape((16, 4), 256, 16, SweepStep.EXTEND, [900] * 2, 400),
    "prompts": shape((32, 8), 96, 16, SweepStep.EXTEND, [60] * 16, 60),
    "drafts": shape((32, 8), 128, 16, SweepStep.VERIFY, [2000] * 16, 5),
    "decode": shape((32, 8), 128, 16, SweepStep.DECODE, [3000] * 16, 1),
}


def replay(barrier: Barrier, failures: SimpleQueue[str]) -> None:
    """Replays a graph of each shape at the same time as other processes."""
    clock = GraphClock(torch.device("cuda", 0), ROUND_US)
    try:
        for name, each in SHAPES.items():
            (case,) = cases_of(each, 1)
            case.launch.run()
            out = case.data.out
            wanted = out.clone()
            timed = clock.timed((case.launch.run,))
            out.fill_(float("nan"))
            barrier.wait()
            timed.run(SECONDS)
            if wanted.isnan().any() or not torch.equal(out, wanted):
                failures.put(f"{name}: the result changed")
    except Exception as failure:
        failures.put(f"{name}: {type(failure).__name__}: {failure}")
        raise


def test_replays_amid_those_of_others_keep_their_bits() -> None:
    context = multiprocessing.get_context("spawn")
    barrier, failures = context.Barrier(PROCESSES), context.SimpleQueue()
    processes = [context.Process(target=replay, args=(barrier, failures)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            assert isinstance(sentinel, int)
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                # The others would wait for it.
                barrier.abort()
    found = []
    while not failures.empty():
        found.append(failures.get())
    assert not found
    assert [process.exitcode for process in processes] == [0] * PROCESSES
