"""Times of launches in CUDA graphs, of one layer over pages past the L2, and of a plain read."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from rocm_attn.problem import Problem
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.clocks import GraphClock, Run, median_us
from rocm_lab.bench.contestants import OwnProvider
from rocm_lab.bench.step_data import random_steps

DEVICE = torch.device("cuda", 0)
SETS = 3  # of pages; together they exceed the L2
ROUNDS, ROUND_US = 15, 2000.0


def microseconds(run: Run) -> float:
    """Returns the median time of a graph of one run."""
    return median_us(GraphClock(DEVICE, ROUND_US), run)


def medians_in_turn(launches: Sequence[Sequence[Run]]) -> list[float]:
    """Returns microseconds of one of each of these launches, medians of rounds in which they take turns."""
    timed = [GraphClock(DEVICE, ROUND_US).timed(runs) for runs in launches]
    rounds = [[each.microseconds() for each in timed] for _ in range(ROUNDS)]
    return [median(times) for times in zip(*rounds, strict=True)]


def layer(problem: Problem, batch: str) -> list[Run]:
    """Returns the launches of a layer over each of SETS sets of random pages; the same ones for the same sizes."""
    steps = random_steps(problem, BatchSpec.parse(batch), SETS, DEVICE, seed=0)
    return [OwnProvider("triton").prepare(step).run for step in steps]


def lower_bound_us(num_bytes: int) -> float:
    """Returns the time of a plain read. Data that fit the L2 lie there, as for the kernels of such a case."""
    if num_bytes == 0:
        return 0.0
    memory, out = torch.zeros(-(-num_bytes // 4), device=DEVICE), torch.empty((), device=DEVICE)
    return microseconds(lambda: torch.sum(memory, 0, out=out))
