"""Host numbers that an AITER function is called with are frozen in a graph, so its row must name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_attn.batch.step_kinds import FEW_TOKENS, StepKind
from rocm_attn.problem import KVEncoding, PoolKind, Problem
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import Baked, KernelEntry, PoolSize
from tests.amd.aiter.serving import (
    GFX942,
    functions_of,
    in_eight_bits,
    latent_problem,
    plain_problem,
    vectorised_problem,
    world,
)
from tests.amd.aiter.stand_in import StandIn
from tests.amd.aiter_source.serving import selection_of

BOUND = [row for row in ENTRIES if not row.not_bound and row.kind is not StepKind.PREFILL]


def problem_of(row: KernelEntry) -> Problem:
    """Returns a problem over the row's first kind of pool."""
    problems = {
        PoolKind.SPLIT: plain_problem(16, dims=(128, 128)),
        PoolKind.LATENT: latent_problem(),
        PoolKind.VECTORIZED: vectorised_problem(),
    }
    problem = problems[row.limits.pools[0]]
    if row.limits.page_sizes and problem.page_size not in row.limits.page_sizes:
        problem = replace(problem, page_size=row.limits.page_sizes[0])
    if KVEncoding.LIKE_Q in row.limits.encodings:
        return problem
    return in_eight_bits(replace(problem, dtype=torch.bfloat16))


def numbers(row: KernelEntry, aiter: StandIn, kv_len: int, q_len: int) -> Mapping[str, Any]:
    """Returns the host's numbers for the row's function in a step of two sequences, the longer one of kv_len tokens."""
    problem = problem_of(row)
    selection = selection_of([row], problem, GFX942, PoolSize(100, 640, 8))
    serving = world(problem, selections=[selection])
    requests = serving.begun(kv_len - q_len, 5)
    name = functions_of(row)[0]
    right = aiter.bodies[name]
    seen = aiter.noted(name)
    try:
        serving.step(requests, [q_len, {StepKind.EXTEND: 2}.get(row.kind, 1)])
    finally:
        aiter.bodies[name] = right
    (only,) = seen
    return {key: value for key, value in only.items() if isinstance(value, int | float | tuple)}


def differs(row: KernelEntry, aiter: StandIn, *lengths: tuple[int, int]) -> bool:
    first, second = (numbers(row, aiter, kv_len, q_len) for kv_len, q_len in lengths)
    return first != second


@pytest.mark.fast(2)
@pytest.mark.parametrize("row", BOUND, ids=lambda row: f"{row.name}-{row.kind.value}")
def test_a_row_names_the_lengths_that_its_function_is_given_and_no_others(row: KernelEntry, aiter: StandIn) -> None:
    new = 1 if row.kind is StepKind.DECODE else 3
    assert differs(row, aiter, (50, new), (400, new)) == (Baked.MAX_KV_LEN in row.bakes)
    if row.kind is not StepKind.DECODE:
        # Above two: unified_attention takes one new token for a decode step, and is given at least two.
        most = FEW_TOKENS if row.kind is StepKind.VERIFY else 60
        assert differs(row, aiter, (200, 3), (200, most)) == (Baked.MAX_Q_LEN in row.bakes)
