"""Rows of up to 512 elements, and a layer's work on its rows around attention: correctness on this GPU, and speed.

    python -m rocm_lab.benchmarks.wide_rows --out rocm_lab/benchmarks/results/wide_rows_h200.json

Processes in parallel compile the kernels and compare; then one measures. Errors are against torch's kernels in float32
over the same pages. "limit" is the time to copy half of the bytes that must be read, or that of the products at the
speed of a large one, whichever is longer. Exits with
1, after writing the file, if something is wrong or slower than allowed.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable, RowNorm, TokenPlaces
from rocm_attn.machine.target import detect_target
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.contract import BoundKernel, PoolSize
from rocm_attn.providers.select import select
from rocm_attn.providers.torch_ref import TORCH
from rocm_attn.providers.triton import TRITON
from rocm_lab.bench.clocks import microseconds_of
from rocm_lab.bench.prepared import ints, step_kind
from rocm_lab.bench.step_data import random_pages
from rocm_lab.benchmarks.one_layer import REPLAYS, ROUNDS, Batch, LayerGraph, medians_in_turn
from rocm_lab.benchmarks.script import parser_of, write

BF16 = torch.bfloat16
CUDA = torch.device("cuda", 0)
# Error of bfloat16 results against float32 ones of the same bfloat16 inputs, relative to the largest.
LARGEST_ERROR = 1e-2
# Query heads for each of two KV heads, and dims.
SHAPES = (
    *((8, dims) for dims in ((320, 320), (384, 384), (512, 512), (512, 256), (256, 512), (320, 512))),
    *((ratio, (512, 512)) for ratio in (1, 32, 71)),
)

# Steps of decode, of extend and mixed ones.
CHECKED = tuple(Batch((1024,) * 3, q_len) for q_len in ((1, 1, 1), (17, 48, 33), (1, 7, 1)))


def problem_of(heads: tuple[int, int], dims: tuple[int, int]) -> Problem:
    """A layer in bfloat16."""
    return Problem(*heads, dims[0], BF16, 16, v_head_dim=dims[1])


GEMMA_4 = problem_of((32, 4), (512, 512))
GEMMA_4_RANK = problem_of((8, 1), (512, 512))
WINDOWED = problem_of((32, 16), (256, 256))
TIMED = (
    ("decode 64 x 4k, 32/4 heads of 512", GEMMA_4, Batch((4096,) * 64, (1,) * 64)),
    ("decode 16 x 4k, 8/1 heads of 512", GEMMA_4_RANK, Batch((4096,) * 16, (1,) * 16)),
    ("decode 1 x 128k, 32/4 heads of 512", GEMMA_4, Batch((131072,), (1,))),
    ("decode 64 x 4k, 32/16 heads of 256", WINDOWED, Batch((4096,) * 64, (1,) * 64)),
    ("extend 1 x 2048 + 6144, 32/4 heads of 512", GEMMA_4, Batch((8192,), (2048,))),
    ("extend 1 x 2048 + 6144, 32/16 heads of 256", WINDOWED, Batch((8192,), (2048,))),
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A published model's work around attention in a layer. turned: elements; normed: whether q and k are"""

    name: str
    problem: Problem
    turned: int
    normed: bool


LAYERS = (
    Layer("llama 8b", problem_of((32, 8), (128, 128)), 128, False),
    Layer("qwen3 8b", problem_of((32, 8), (128, 128)), 128, True),
    Layer("qwen3.5, 64 of 256", problem_of((64, 4), (256, 256)), 64, True),
    Layer("gemma 4, rows of 512", GEMMA_4, 512, True),
)
TOKENS = 64, 2048
# The fused store may take this much longer into eight-bit pages than into bfloat16 ones.
CODED_ALLOWED = 1.1


def main() -> None:
    """Measures, prints, and writes the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--processes", type=int, default=15)
    options = parser.parse_args()
    work = list(itertools.product(LAYERS, TOKENS))
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        # The results of the first two are measured again below, by one process alone.
        steps_made, rows_made = pool.starmap_async(_step_us, TIMED, 1), pool.starmap_async(_row_work, work, 1)
        errors = dict(pool.starmap(_error, itertools.product(SHAPES, CHECKED), 1))
        steps_made.get()
        rows_made.get()
    ceilings = _ceilings()
    steps = [_timed(*timed, ceilings) for timed in TIMED]
    rows = dict(itertools.starmap(_row_work, work))
    result: dict[str, Any] = {"errors": errors, "steps": steps, "row_work": rows}
    for name, part in result.items():
        print(name, json.dumps(part, indent=1))
    write(options.out, ceilings=ceilings, **result)
    wrong = [name for name, error in errors.items() if not error <= LARGEST_ERROR]
    slow = [name for name, row in rows.items() if row["coded_us"] > CODED_ALLOWED * row["fused_us"]]
    if wrong or slow:
        sys.exit(f"wrong: {wrong}; slower than they may be: {slow}")


def _kernel(problem: Problem, batch: Batch, provider: str) -> BoundKernel:
    pool = PoolSize(1 << 20, max(batch.kv_len), len(batch.kv_len))
    chosen = select(problem, detect_target(CUDA), provider, pool=pool)
    return chosen.kernel(step_kind(batch.q_len, batch.kv_len)).bound


def _error(shape: tuple[int, tuple[int, int]], batch: Batch) -> tuple[str, float]:
    """Returns a step's name, and its error relative to the largest number."""
    ratio, dims = shape
    problem = problem_of((2 * ratio, 2), dims)
    found = LayerGraph.capture(problem, _kernel(problem, batch, "triton"), batch)
    last = found.kept[-1]
    exact = torch.empty_like(last.args.out, dtype=torch.float32)
    pages = LayerPages.plain(last.args.pages.k.float(), last.args.pages.v.float())
    trusted = _kernel(replace(problem, dtype=torch.float32), batch, "torch")
    trusted.attend(last.args._replace(q=last.args.q.float(), out=exact, pages=pages), last.step, last.bounds)
    error = float((found.out.float() - exact).abs().max() / exact.abs().max())
    return f"{step_kind(batch.q_len, batch.kv_len).value} {problem.num_q_heads}/2 heads of {dims[0]}/{dims[1]}", error


def _ceilings() -> dict[str, float]:
    """Bytes and operations per second: of a sum over 4 GiB, and of a product of 8192^3 in bfloat16."""
    source, total = torch.zeros(1 << 30, device=CUDA), torch.empty((), device=CUDA)
    left = torch.randn(8192, 8192, device=CUDA, dtype=BF16)
    read_us, product_us = _times([lambda: torch.sum(source, 0, out=total), lambda: left @ left], repeats=2)
    return {"read_bytes_per_s": source.nbytes / read_us * 1e6, "products_per_s": 2 * 8192**3 / product_us * 1e6}


def _step_us(name: str, problem: Problem, batch: Batch) -> float:
    """Returns microseconds of a step of TIMED."""
    (us,) = medians_in_turn([LayerGraph.capture(problem, _kernel(problem, batch, "triton"), batch)])
    return us


def _timed(name: str, problem: Problem, batch: Batch, ceilings: dict[str, float]) -> dict[str, object]:
    us = _step_us(name, problem, batch)
    limit_us = _limit(problem, batch, ceilings)
    return {"name": name, "us": us, "limit_us": limit_us, "times_limit": us / limit_us}


def _limit(problem: Problem, batch: Batch, ceilings: dict[str, float]) -> float:
    dims = problem.head_dim + problem.v_head_dim
    num_bytes = sum(batch.kv_len) * problem.num_kv_heads * dims * problem.dtype.itemsize
    pairs = sum(new * (kv - new) + new * (new + 1) / 2 for kv, new in zip(batch.kv_len, batch.q_len, strict=True))
    products = 2 * pairs * problem.num_q_heads * dims
    return 1e6 * max(num_bytes / ceilings["read_bytes_per_s"], products / ceilings["products_per_s"])


def _row_work(layer: Layer, num_tokens: int) -> tuple[str, dict[str, float]]:
    """Its name; microseconds of the fused store, of its parts as separate launches, and of a gate after attention."""
    problem = layer.problem
    generator = torch.Generator("cuda").manual_seed(0)

    def rows(heads: int, dim: int) -> Tensor:
        return torch.randn(num_tokens, heads, dim, device=CUDA, generator=generator).to(BF16)

    q, out, gate = (rows(problem.num_q_heads, problem.head_dim) for _ in range(3))
    k, v = (rows(problem.num_kv_heads, problem.head_dim) for _ in range(2))
    rope = RopeTable.of_frequencies(torch.rand(layer.turned // 2).to(CUDA), 8192)
    norm = RowNorm(torch.rand(problem.head_dim, device=CUDA).to(BF16), 1e-6) if layer.normed else None
    work, given = QkvWork(rope, norm, norm), Projected(q, k, v, torch.empty_like(q))
    num_pages = 1 << 15
    slots = torch.randperm((num_pages - 1) * problem.page_size, device=CUDA, generator=generator)[:num_tokens]
    positions = torch.randint(8192, (num_tokens,), device=CUDA, generator=generator).int()
    counts = ints([num_tokens, num_tokens, 1, 0], CUDA)
    tokens = TokenPlaces(positions, (slots + problem.page_size).int(), counts)
    coded = replace(problem, kv_encoding=KVEncoding.E4M3FN, kv_scales=Scales.TOKEN)
    pages, coded_pages = (random_pages(each, num_pages, generator) for each in (problem, coded))
    ops, store = TRITON.ops(), (tokens.slot_of_token, counts, pages)

    def separate() -> None:
        turned = [_turned(_normed(x, norm), positions, rope) for x in (q, k)]
        ops.store_kv(turned[1], v, *store, null_page=True)

    def gated() -> None:
        out.mul_(torch.sigmoid(gate))

    names = ("store_us", "fused_us", "coded_us", "separate_us", "finish_us", "torch_gate_us")
    calls: list[Callable[[], object]] = [
        lambda: ops.store_kv(k, v, *store, null_page=True),
        lambda: ops.rope_store(given, tokens, work, pages, null_page=True),
        lambda: ops.rope_store(given, tokens, work, coded_pages, null_page=True),
        separate,
        lambda: ops.finish(out, gate, None, positions, counts),
        gated,
    ]
    times = dict(zip(names, _times(calls), strict=True))
    return f"{layer.name}, {num_tokens} tokens", {"error": _row_error(given, tokens, work), **times}


def _row_error(given: Projected, tokens: TokenPlaces, work: QkvWork) -> float:
    """Returns the error of q_out against the twin's, relative to the largest number."""
    want = torch.empty_like(given.q)
    TORCH.ops().rope_queries(given.q, want, tokens.positions, work)
    TRITON.ops().rope_queries(given.q, given.q_out, tokens.positions, work)
    return float((given.q_out.float() - want.float()).abs().max() / want.float().abs().max())


def _normed(x: Tensor, norm: RowNorm | None) -> Tensor:
    return x if norm is None else F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def _turned(x: Tensor, positions: Tensor, rope: RopeTable) -> Tensor:
    """Rotates as a model in torch does."""
    cos, sin = rope.cos_sin.index_select(0, positions).to(x.dtype)[:, None].chunk(2, 2)
    near, far = x[..., : rope.dim].chunk(2, 2)
    return torch.cat((near * cos - far * sin, far * cos + near * sin, x[..., rope.dim :]), 2)


def _times(calls: list[Callable[[], object]], repeats: int = 32) -> list[float]:
    """Returns microseconds of each call in a graph of many, medians of rounds in which they take turns."""
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        graphs.append(graph)
    rounds = [[microseconds_of(graph.replay, REPLAYS) / repeats for graph in graphs] for _ in range(ROUNDS)]
    return [median(times) for times in zip(*rounds, strict=True)]


if __name__ == "__main__":
    main()
