"""Steps through AITER's kernels as graphs: recorded once, replayed at other lengths with the bits of eager steps.

Host numbers that a function is called with are frozen in a graph, so its row must name them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import FEW_TOKENS, StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.problem import KVEncoding, PoolKind, Problem
from rocm_attn.providers.aiter.entries import ENTRIES
from rocm_attn.providers.contract import Baked, KernelEntry, PoolSize
from tests.amd.aiter.one_layer import STEPS, OneLayer
from tests.amd.aiter.serving import (
    CPU,
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
from tests.amd.graphs.small_models import same, serve

PROBLEMS = {
    "ragged and unified": plain_problem(16, dims=(64, 64)),
    "ragged and batch prefill": plain_problem(16, dims=(128, 128)),
    "unified alone": plain_problem(32, dims=(256, 256)),
    "window and sinks": replace(plain_problem(16, dims=(64, 64)), window_left=20, has_sinks=True),
    "window and soft cap": replace(plain_problem(16, dims=(128, 128)), window_left=20, logits_soft_cap=2.0),
    "slopes": replace(plain_problem(16, dims=(128, 128)), has_alibi_slopes=True),
    "vectorised": vectorised_problem(),
    "vectorised, window and sinks": replace(vectorised_problem(), window_left=20, has_sinks=True),
    "vectorised, one function": vectorised_problem(64, heads=(4, 2), dims=(64, 64)),
    "latent": latent_problem(),
    "latent, heads padded": latent_problem(8),
}


class InHalves:
    """Runs every step as two halves."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    def run(self, batch: StepBatch, pad_to: PadTo | None = None) -> Tensor:
        return self._runner.run(batch, pad_to, halves=2)


@pytest.mark.fast(1)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_step_in_two_halves_equals_a_whole_one_bitwise(problem: Problem, aiter: StandIn) -> None:
    whole, split = OneLayer.build(problem), OneLayer.build(problem)
    runner = StepRunner(split.runtime, split.forward, recorder_for(CPU))
    halves = serve(InHalves(runner), split.runtime, STEPS)
    assert same(halves, serve(StepRunner(whole.runtime, whole.forward, None), whole.runtime, STEPS))
    # Two halves with room for 70 tokens each are above the captured sizes.
    assert (runner.counters.graphs_off, runner.counters.replays) == ("", len(STEPS) - 1)


def test_a_replay_calls_nothing_on_the_host(aiter: StandIn) -> None:
    model = OneLayer.build(PROBLEMS["ragged and unified"])
    runner = StepRunner(model.runtime, model.forward, recorder_for(CPU))
    serve(runner, model.runtime, STEPS)
    aiter.calls.clear()
    serve(runner, model.runtime, STEPS)
    assert aiter.calls == []


def test_a_longer_step_takes_a_graph_with_more_partitions(aiter: StandIn) -> None:
    """The kernel ignores keys past max_num_partitions without an error, so the length bucket is part of the key."""
    model = OneLayer.build(PROBLEMS["ragged and unified"])
    runner = StepRunner(model.runtime, model.forward, recorder_for(CPU))
    serve(runner, model.runtime, [[3], [1], [100], [1], [100], [1]])
    decodes = [b.key for b in runner.capture_report().buckets if b.key.shape.kind is StepKind.DECODE]
    assert sorted(key.max_kv_len for key in decodes) == [64, 128, 256]


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
