"""Processes that share a GPU take turns on it amid their kernels: replays keep their bits, and nothing fails.

Hopper's extend over gathered keys once had an unused barrier, whose memory Triton reused. One process alone was always
right. With three at a time each failed within seconds.
"""

import multiprocessing
import time
from multiprocessing.connection import wait
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier

import pytest
import torch

from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.clocks import GraphClock
from rocm_lab.bench.contestants import OwnProvider
from rocm_lab.bench.layers import LayerSizes
from rocm_lab.bench.step_data import random_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, which its processes share"),
]

PROCESSES = 3
SECONDS = 2.0


# Query heads, KV heads, head dim, page size and batch: keys gathered and by TMA, rows drawn and assigned, prompts only,
# drafts to verify, decode.
SHAPES = {
    "gathered, drawn": ((70, 10, 72, 1), "3x20+10"),
    "gathered, drawn, long": ((12, 4, 80, 4), "8x600+1600"),
    "gathered": ((16, 4, 64, 2), "3x500+200"),
    "drawn": ((32, 2, 80, 128), "2x1445+1800"),
    "heads of 128": ((32, 8, 128, 16), "4x300+1200"),
    "heads of 256": ((16, 4, 256, 16), "2x400+500"),
    "prompts": ((32, 8, 96, 16), "16x60"),
    "drafts": ((32, 8, 128, 16), "16x5+1995"),
    "decode": ((32, 8, 128, 16), "16d3000"),
}


def replay(barrier: Barrier, failures: SimpleQueue[str]) -> None:
    """Replays a graph of each shape at the same time as other processes."""
    device = torch.device("cuda", 0)
    clock = GraphClock(device, 3000.0)
    try:
        for name, ((*heads, page_size), batch) in SHAPES.items():
            problem = LayerSizes.plain(*heads).problem(torch.bfloat16, page_size)
            (data,) = random_steps(problem, BatchSpec.parse(batch), 1, device, seed=1)
            launch, out = OwnProvider("triton").prepare(data), data.out
            launch.run()
            wanted = out.clone()
            timed = clock.timed((launch.run,))
            out.fill_(float("nan"))
            barrier.wait()
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                timed.microseconds()
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
