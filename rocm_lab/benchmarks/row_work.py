"""A layer's work on its rows around attention, fused and as launches of torch: norms, rotations, the store, a gate.

    python -m rocm_lab.benchmarks.row_work --out rocm_lab/benchmarks/results/row_work_h200.json

Exits with 1, after writing the file, if rotated queries are wrong, or if the fused store takes longer into eight-bit
pages than allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_attn.kernels.cache.row_work import Projected, QkvWork, RopeTable, RowNorm, TokenPlaces
from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.torch_ref import TORCH
from rocm_attn.providers.triton import TRITON
from rocm_lab.bench.clocks import GraphClock, medians_in_turn
from rocm_lab.bench.step_data import ints, random_pages
from rocm_lab.benchmarks.script import Row, parser_of, printed, write

DEVICE = torch.device("cuda", 0)
BF16 = torch.bfloat16
# Error of bfloat16 results against the twin's, relative to the largest.
LARGEST_ERROR = 1e-2


def problem_of(heads: tuple[int, int], dim: int) -> Problem:
    """A layer in bfloat16."""
    return Problem(*heads, dim, BF16, 16, v_head_dim=dim)


@dataclass(frozen=True, slots=True)
class ModelLayerWork:
    """A published model's work around attention in a layer. turned: elements; normed: whether q and k are"""

    name: str
    problem: Problem
    turned: int
    normed: bool


LAYERS = (
    ModelLayerWork("llama 8b", problem_of((32, 8), 128), 128, False),
    ModelLayerWork("qwen3 8b", problem_of((32, 8), 128), 128, True),
    ModelLayerWork("qwen3.5, 64 of 256", problem_of((64, 4), 256), 64, True),
    ModelLayerWork("gemma 4, rows of 512", problem_of((32, 4), 512), 512, True),
)
TOKENS = 64, 2048
REPEATS = 32  # of a launch in a graph
# The fused store may take this much longer into eight-bit pages than into bfloat16 ones.
CODED_ALLOWED = 1.1


def main() -> None:
    """Measures, prints, and writes the result."""
    options = parser_of(__doc__).parse_args()
    rows = printed(_row_work(layer, num_tokens) for layer in LAYERS for num_tokens in TOKENS)
    write(options.out, rows=rows)
    wrong = [row["name"] for row in rows if not row["error"] <= LARGEST_ERROR]
    slow = [row["name"] for row in rows if row["coded_us"] > CODED_ALLOWED * row["fused_us"]]
    if wrong or slow:
        sys.exit(f"wrong: {wrong}; slower than they may be: {slow}")


def _row_work(layer: ModelLayerWork, num_tokens: int) -> Row:
    """Microseconds of the fused store, of its parts as separate launches, and of a gate after attention."""
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
    times = dict(
        zip(names, medians_in_turn(GraphClock(DEVICE, 2000.0), [[call] * REPEATS for call in calls]), strict=True)
    )
    name = f"{layer.name}, {num_tokens} tokens"
    return {"name": name, "error": _row_error(given, tokens, work), **times}


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
