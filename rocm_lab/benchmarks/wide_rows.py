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
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable, RowNorm, TokenPlaces
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.torch_ref import TORCH
from rocm_attn.providers.triton import TRITON
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.ceilings import Ceilings, measured_ceilings
from rocm_lab.bench.clocks import GraphClock
from rocm_lab.bench.contestants import OwnProvider
from rocm_lab.bench.judge import ExpectedOutput
from rocm_lab.bench.prepared import ints
from rocm_lab.bench.step_data import random_pages, random_steps
from rocm_lab.bench.work import work_of
from rocm_lab.benchmarks.script import parser_of, write
from rocm_lab.benchmarks.timing import DEVICE, ROUND_US, layer, medians_in_turn

BF16 = torch.bfloat16
# Error of bfloat16 results against float32 ones of the same bfloat16 inputs, relative to the largest.
LARGEST_ERROR = 1e-2
# Query heads for each of two KV heads, and dims.
SHAPES = (
    *((8, dims) for dims in ((320, 320), (384, 384), (512, 512), (512, 256), (256, 512), (320, 512))),
    *((ratio, (512, 512)) for ratio in (1, 32, 71)),
)

# Steps of decode, of extend and mixed ones.
CHECKED = ("3d1k", "1x17+1007+1x48+976+1x33+991", "1d1k+1x7+1017+1d1k")


def problem_of(heads: tuple[int, int], dims: tuple[int, int]) -> Problem:
    """A layer in bfloat16."""
    return Problem(*heads, dims[0], BF16, 16, v_head_dim=dims[1])


GEMMA_4 = problem_of((32, 4), (512, 512))
GEMMA_4_RANK = problem_of((8, 1), (512, 512))
WINDOWED = problem_of((32, 16), (256, 256))
TIMED = (
    ("decode 64 x 4k, 32/4 heads of 512", GEMMA_4, "64d4k"),
    ("decode 16 x 4k, 8/1 heads of 512", GEMMA_4_RANK, "16d4k"),
    ("decode 1 x 128k, 32/4 heads of 512", GEMMA_4, "1d128k"),
    ("decode 64 x 4k, 32/16 heads of 256", WINDOWED, "64d4k"),
    ("extend 1 x 2048 + 6144, 32/4 heads of 512", GEMMA_4, "1x2048+6144"),
    ("extend 1 x 2048 + 6144, 32/16 heads of 256", WINDOWED, "1x2048+6144"),
)


@dataclass(frozen=True, slots=True)
class ModelLayerWork:
    """A published model's work around attention in a layer. turned: elements; normed: whether q and k are"""

    name: str
    problem: Problem
    turned: int
    normed: bool


LAYERS = (
    ModelLayerWork("llama 8b", problem_of((32, 8), (128, 128)), 128, False),
    ModelLayerWork("qwen3 8b", problem_of((32, 8), (128, 128)), 128, True),
    ModelLayerWork("qwen3.5, 64 of 256", problem_of((64, 4), (256, 256)), 64, True),
    ModelLayerWork("gemma 4, rows of 512", GEMMA_4, 512, True),
)
TOKENS = 64, 2048
REPEATS = 32  # of a launch in a graph
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
    ceilings = measured_ceilings(DEVICE, BF16, GraphClock(DEVICE, ROUND_US))
    steps = [_timed(*timed, ceilings) for timed in TIMED]
    rows = dict(itertools.starmap(_row_work, work))
    result: dict[str, Any] = {"errors": errors, "steps": steps, "row_work": rows}
    for name, part in result.items():
        print(name, json.dumps(part, indent=1))
    write(options.out, ceilings=asdict(ceilings), **result)
    wrong = [name for name, error in errors.items() if not error <= LARGEST_ERROR]
    slow = [name for name, row in rows.items() if row["coded_us"] > CODED_ALLOWED * row["fused_us"]]
    if wrong or slow:
        sys.exit(f"wrong: {wrong}; slower than they may be: {slow}")


def _error(shape: tuple[int, tuple[int, int]], batch: str) -> tuple[str, float]:
    """Returns a step's name, and its error relative to the reference; infinite if it is wrong."""
    ratio, dims = shape
    problem = problem_of((2 * ratio, 2), dims)
    (data,) = random_steps(problem, BatchSpec.parse(batch), 1, DEVICE, seed=0)
    launch = OwnProvider("triton").prepare(data)
    launch.run()
    verdict = ExpectedOutput.of(data).judge(launch.out())
    name = f"{data.kind.value} {problem.num_q_heads}/2 heads of {dims[0]}/{dims[1]}"
    return name, verdict.error if verdict.is_right else float("inf")


def _step_us(name: str, problem: Problem, batch: str) -> float:
    """Returns microseconds of a step of TIMED."""
    (us,) = medians_in_turn([layer(problem, batch)])
    return us


def _timed(name: str, problem: Problem, batch: str, ceilings: Ceilings) -> dict[str, object]:
    us, work = _step_us(name, problem, batch), work_of(problem, BatchSpec.parse(batch))
    limit_us = work.lower_bound_us(bytes_per_s=ceilings.read_per_s, flops_per_s=ceilings.flops_per_s)
    return {"name": name, "us": us, "limit_us": limit_us, "times_limit": us / limit_us}


def _row_work(layer: ModelLayerWork, num_tokens: int) -> tuple[str, dict[str, float]]:
    """Its name; microseconds of the fused store, of its parts as separate launches, and of a gate after attention."""
    problem = layer.problem
    generator = torch.Generator("cuda").manual_seed(0)

    def rows(heads: int, dim: int) -> Tensor:
        return torch.randn(num_tokens, heads, dim, device=DEVICE, generator=generator).to(BF16)

    q, out, gate = (rows(problem.num_q_heads, problem.head_dim) for _ in range(3))
    k, v = (rows(problem.num_kv_heads, problem.head_dim) for _ in range(2))
    rope = RopeTable.of_frequencies(torch.rand(layer.turned // 2).to(DEVICE), 8192)
    norm = RowNorm(torch.rand(problem.head_dim, device=DEVICE).to(BF16), 1e-6) if layer.normed else None
    work, given = QkvWork(rope, norm, norm), Projected(q, k, v, torch.empty_like(q))
    num_pages = 1 << 15
    slots = torch.randperm((num_pages - 1) * problem.page_size, device=DEVICE, generator=generator)[:num_tokens]
    positions = torch.randint(8192, (num_tokens,), device=DEVICE, generator=generator).int()
    counts = ints([num_tokens, num_tokens, 1, 0], DEVICE)
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
    times = dict(zip(names, medians_in_turn([[call] * REPEATS for call in calls]), strict=True))
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


if __name__ == "__main__":
    main()
