"""One layer's launches in a CUDA graph over several sets of pages, for kernels that are timed in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from rocm_attn.problem import Problem
from rocm_attn.providers.contract import BoundKernel
from rocm_attn.step.head_weights import HeadWeights
from rocm_lab.bench.clocks import microseconds_of
from rocm_lab.bench.prepared import Prepared, bounds_of_step, step_of
from rocm_lab.bench.step_data import random_pages

SETS = 3  # of pages; together they exceed the L2
ROUNDS = 15
REPLAYS = 10


@dataclass(frozen=True, slots=True)
class Batch:
    """A step: kv_len and q_len of its sequences."""

    kv_len: tuple[int, ...]
    q_len: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """A captured layer. out: its output for the last set."""

    graph: torch.cuda.CUDAGraph
    out: Tensor
    kept: tuple[Prepared, ...]

    @classmethod
    def capture(cls, problem: Problem, kernel: BoundKernel, batch: Batch) -> LayerGraph:
        """Captures the kernel over SETS sets of random pages; the same ones for every kernel of a problem's sizes."""
        generator = torch.Generator("cuda").manual_seed(0)
        kept = tuple(_prepared(problem, kernel, batch, generator) for _ in range(SETS))
        for each in kept:
            each.attend()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for each in kept:
                each.attend()
        graph.replay()
        return cls(graph, kept[-1].args.out, kept)

    def microseconds(self) -> float:
        """Returns the time of the layer, over REPLAYS of the graph."""
        return microseconds_of(self.graph.replay, REPLAYS) / SETS


def medians_in_turn(graphs: Sequence[LayerGraph]) -> list[float]:
    """Returns microseconds of each, medians of ROUNDS in which they take turns."""
    rounds = [[graph.microseconds() for graph in graphs] for _ in range(ROUNDS)]
    return [median(times) for times in zip(*rounds, strict=True)]


def _prepared(problem: Problem, kernel: BoundKernel, batch: Batch, generator: torch.Generator) -> Prepared:
    device = torch.device("cuda", 0)
    num_seqs, num_pages = len(batch.kv_len), sum(batch.kv_len) // problem.page_size
    table = (torch.randperm(num_pages, device=device, generator=generator).int() + 1).view(num_seqs, -1)
    step = step_of(batch.kv_len, batch.q_len, table)

    def rows(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device, generator=generator).to(problem.dtype)

    q = rows(sum(batch.q_len), problem.num_q_heads, problem.head_dim)
    weights = HeadWeights.random(problem, torch.Generator().manual_seed(0)).to(device)
    out = q.new_empty(*q.shape[:2], problem.v_head_dim)
    bounds = bounds_of_step(batch.kv_len, batch.q_len)
    return Prepared.of(kernel, step, bounds, (q, out), random_pages(problem, num_pages + 1, generator), weights)
