"""The cost and gain of eight-bit K and V: one layer of attention, and its store, compared with bfloat16 pages.

    python -m rocm_lab.benchmarks.eight_bit_cost --out rocm_lab/benchmarks/results/eight_bit_cost_h200.json

Exits with 1, after writing the file, if a step or a store takes longer than allowed.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace

import torch

from rocm_attn.problem import KVEncoding, Problem, Scales
from rocm_attn.providers.triton import TRITON
from rocm_lab.bench.clocks import Run
from rocm_lab.bench.prepared import ints
from rocm_lab.bench.step_data import random_pages
from rocm_lab.benchmarks.script import parser_of, write
from rocm_lab.benchmarks.timing import DEVICE, layer, medians_in_turn

LLAMA_8B = Problem(32, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
RANK_OF_70B = replace(LLAMA_8B, num_q_heads=8, num_kv_heads=1)
GPT_OSS = Problem(64, 8, 64, torch.bfloat16, 16, v_head_dim=64, scale=64**-0.5)
SCALES = Scales.LAYER, Scales.HEAD, Scales.TOKEN
STORED_TOKENS = 64, 2048


@dataclass(frozen=True, slots=True)
class EncodingCase:
    """A step, and the time over eight-bit pages that it may take, relative to bfloat16 ones."""

    name: str
    problem: Problem
    batch: str
    times_allowed: float


CASES = (
    EncodingCase("decode 64 x 4k, 32/8 heads of 128", LLAMA_8B, "64d4k", 0.6),
    EncodingCase("decode 128 x 8k, 32/8 heads of 128", LLAMA_8B, "128d8k", 0.6),
    EncodingCase("decode 128 x 8k, 8/1 heads of 128", RANK_OF_70B, "128d8k", 0.6),
    EncodingCase("decode 64 x 4k, 64/8 heads of 64", GPT_OSS, "64d4k", 0.6),
    EncodingCase("extend 1 x 2048 + 6144, 32/8 heads of 128", LLAMA_8B, "1x2048+6144", 1.5),
)
STORE_ALLOWED = 1.1
STORES = 32  # in a graph


@dataclass(frozen=True, slots=True)
class EncodingTimes:
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


def _step_row(case: EncodingCase) -> EncodingTimes:
    layers = [layer(problem, case.batch) for problem in _problems(case.problem)]
    return _row(case.name, medians_in_turn(layers), case.times_allowed)


def _store_row(num_tokens: int) -> EncodingTimes:
    launches = [[_store(problem, num_tokens)] * STORES for problem in _problems(LLAMA_8B)]
    return _row(f"store {num_tokens} tokens", medians_in_turn(launches), STORE_ALLOWED)


def _store(problem: Problem, num_tokens: int) -> Run:
    """Returns a store of num_tokens tokens to random slots."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    num_pages, heads = 1 << 16, problem.num_kv_heads
    pages, ops = random_pages(problem, num_pages, generator), TRITON.ops()
    slots = torch.randperm((num_pages - 1) * problem.page_size, device=DEVICE, generator=generator)[:num_tokens]
    slots = (slots + problem.page_size).int()
    counts = ints([num_tokens, num_tokens, 1, 0], DEVICE)
    k, v = torch.randn(2, num_tokens, heads, problem.head_dim, device=DEVICE, generator=generator).to(problem.dtype)
    return lambda: ops.store_kv(k, v, slots, counts, pages, null_page=True)


def _row(name: str, times: list[float], times_allowed: float) -> EncodingTimes:
    plain, *coded = times
    return EncodingTimes(
        name, plain, {scales.name: time for scales, time in zip(SCALES, coded, strict=True)}, times_allowed
    )


if __name__ == "__main__":
    main()
