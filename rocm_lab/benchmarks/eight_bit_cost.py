"""The cost and gain of eight-bit K and V: one layer of attention, and its store, compared with bfloat16 pages.

    python -m rocm_lab.benchmarks.eight_bit_cost --out rocm_lab/benchmarks/results/eight_bit_cost_h200.json

Exits with 1, after writing the file, if a step or a store takes longer than allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch

from rocm_attn.machine.target import detect_target
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import select
from rocm_attn.providers.triton import TRITON
from rocm_lab.bench.clocks import microseconds_of
from rocm_lab.bench.prepared import ints, step_kind
from rocm_lab.bench.step_data import random_pages
from rocm_lab.benchmarks.one_layer import REPLAYS, ROUNDS, Batch, LayerGraph, medians_in_turn
from rocm_lab.benchmarks.script import parser_of, write

LLAMA_8B = Problem(32, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
RANK_OF_70B = replace(LLAMA_8B, num_q_heads=8, num_kv_heads=1)
GPT_OSS = Problem(64, 8, 64, torch.bfloat16, 16, v_head_dim=64, scale=64**-0.5)
SCALES = Scales.LAYER, Scales.HEAD, Scales.TOKEN
STORED_TOKENS = 64, 2048


@dataclass(frozen=True, slots=True)
class Case:
    """A step, and the time over eight-bit pages that it may take, relative to bfloat16 ones."""

    name: str
    problem: Problem
    batch: Batch
    times_allowed: float


def _decode(num_seqs: int, kv_len: int) -> Batch:
    return Batch((kv_len,) * num_seqs, (1,) * num_seqs)


CASES = (
    Case("decode 64 x 4k, 32/8 heads of 128", LLAMA_8B, _decode(64, 4096), 0.6),
    Case("decode 128 x 8k, 32/8 heads of 128", LLAMA_8B, _decode(128, 8192), 0.6),
    Case("decode 128 x 8k, 8/1 heads of 128", RANK_OF_70B, _decode(128, 8192), 0.6),
    Case("decode 64 x 4k, 64/8 heads of 64", GPT_OSS, _decode(64, 4096), 0.6),
    Case("extend 1 x 2048 + 6144, 32/8 heads of 128", LLAMA_8B, Batch((8192,), (2048,)), 1.5),
)
STORE_ALLOWED = 1.1


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds over bfloat16 pages, and over eight-bit ones with each kind of scale.

    times_allowed: the largest allowed ratio of the slowest of those to the first
    """

    name: str
    bfloat16: float
    eight_bit: dict[str, float]
    times_allowed: float

    @property
    def times(self) -> float:
        """The time of the slowest kind, relative to bfloat16."""
        return max(self.eight_bit.values()) / self.bfloat16


def main() -> None:
    """Measures, prints, and writes the result."""
    options = parser_of(__doc__).parse_args()
    steps = [_step_row(case) for case in CASES]
    stores = [_store_row(num_tokens) for num_tokens in STORED_TOKENS]
    for row in (*steps, *stores):
        print(row, f"{row.times:.3f}")
    write(options.out, steps=[asdict(row) for row in steps], stores=[asdict(row) for row in stores])
    missed = [row.name for row in (*steps, *stores) if row.times > row.times_allowed]
    if missed:
        sys.exit(f"slower than they may be: {', '.join(missed)}")


def _problems(problem: Problem) -> list[Problem]:
    """The layer over bfloat16 pages, then over eight-bit ones with each kind of scale."""
    return [problem, *(replace(problem, kv_encoding=KVEncoding.E4M3FN, kv_scales=scales) for scales in SCALES)]


def _step_row(case: Case) -> Row:
    target, kind = detect_target(torch.device("cuda", 0)), step_kind(case.batch.q_len, case.batch.kv_len)
    pool = PoolSize(1 << 20, max(case.batch.kv_len), len(case.batch.kv_len))
    graphs = []
    for problem in _problems(case.problem):
        kernel = select(problem, target, "triton", pool=pool).kernel(kind)
        graphs.append(LayerGraph.capture(problem, kernel.bound, case.batch))
    return _row(case.name, medians_in_turn(graphs), case.times_allowed)


def _store_row(num_tokens: int) -> Row:
    runs = [_store(problem, num_tokens) for problem in _problems(LLAMA_8B)]
    rounds = [[run() for run in runs] for _ in range(ROUNDS)]
    return _row(f"store {num_tokens} tokens", [median(times) for times in zip(*rounds, strict=True)], STORE_ALLOWED)


def _store(problem: Problem, num_tokens: int) -> Callable[[], float]:
    """Returns a function: microseconds of a store of num_tokens tokens to random slots."""
    generator = torch.Generator("cuda").manual_seed(0)
    num_pages, heads = 1 << 16, problem.num_kv_heads
    pages, ops = random_pages(problem, num_pages, generator), TRITON.ops()
    slots = torch.randperm((num_pages - 1) * problem.page_size, device="cuda", generator=generator)[:num_tokens]
    slots = (slots + problem.page_size).int()
    counts = ints([num_tokens, num_tokens, 1, 0], torch.device("cuda", 0))
    k, v = torch.randn(2, num_tokens, heads, problem.head_dim, device="cuda", generator=generator).to(problem.dtype)
    ops.store_kv(k, v, slots, counts, pages, null_page=True)
    torch.cuda.synchronize()
    graph, repeats = torch.cuda.CUDAGraph(), 32
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            ops.store_kv(k, v, slots, counts, pages, null_page=True)

    def microseconds(kept: object = (pages, slots, counts, k, v)) -> float:
        """kept: the tensors that the graph reads"""
        return microseconds_of(graph.replay, REPLAYS) / repeats

    return microseconds


def _row(name: str, times: list[float], times_allowed: float) -> Row:
    plain, *coded = times
    return Row(name, plain, {scales.name: time for scales, time in zip(SCALES, coded, strict=True)}, times_allowed)


if __name__ == "__main__":
    main()
