"""Steps through AITER's kernels as graphs: recorded once, replayed at other lengths, bitwise what eager steps give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rocm_attn.graphs import recorder_for
from rocm_attn.head_weights import HeadWeights
from rocm_attn.padding import StepKind
from rocm_attn.problem import PoolKind, Problem
from rocm_attn.runtime import AttentionRuntime, Step
from rocm_attn.step_batch import StepBatch
from rocm_attn.step_runner import StepRunner
from tests.amd.aiter.serving import CPU, GFX942, latent_problem, plain_problem
from tests.amd.aiter.stand_in import StandIn
from tests.amd.graphs.tiny import VOCABULARY, same, serve

PROBLEMS = {
    "ragged and unified": plain_problem(16, dims=(64, 64)),
    "ragged and batch prefill": plain_problem(16, dims=(128, 128)),
    "unified alone": plain_problem(32, dims=(256, 256)),
    "window and sinks": replace(plain_problem(16, dims=(64, 64)), window_left=20, has_sinks=True),
    "window and soft cap": replace(plain_problem(16, dims=(128, 128)), window_left=20, logits_soft_cap=2.0),
    "slopes": replace(plain_problem(16, dims=(128, 128)), has_alibi_slopes=True),
    "latent": latent_problem(),
    "latent, heads padded": latent_problem(8),
}

# Prompts, decode steps, chunks over a prefix, mixed steps, and lengths of several buckets.
STEPS = [[5, 2, 7], [1, 1, 1], [1, 1], [2, 9, 3], [1, 1, 1], [1, 4, 1], [70, 3, 2], [1, 1, 1], [1, 1]]


@dataclass
class Model:
    """One layer of attention over random rows; its last axis is what the layer gives."""

    runtime: AttentionRuntime
    problem: Problem
    rows: Tensor

    @classmethod
    def build(cls, problem: Problem) -> Model:
        runtime = AttentionRuntime(
            [problem],
            device=CPU,
            num_pages=600 if problem.page_size == 1 else 100,
            max_num_seqs=4,
            max_kv_len=256,
            provider="aiter",
            target=GFX942,
            capture_sizes=(1, 2, 4),
            capture_tokens=(8, 16, 96),
            split_steps=True,
        )
        for pages in (runtime.pool.layer(0).k, runtime.pool.layer(0).v):
            pages[1:] = float("nan")
        runtime.head_weights.set(0, HeadWeights.random(problem, torch.Generator().manual_seed(2)))
        width = (problem.num_q_heads + 2 * problem.num_kv_heads) * problem.head_dim
        rows = torch.randn(VOCABULARY, width, generator=torch.Generator().manual_seed(1)).to(problem.dtype)
        return cls(runtime, problem, rows)

    def forward(self, step: Step) -> Tensor:
        """[S, q_heads * v_head_dim]"""
        problem = self.problem
        rows = (self.rows[step.token_ids] * (1 + step.positions[:, None] / 100)).to(problem.dtype)
        heads = rows.view(len(rows), -1, problem.head_dim)
        q, k, v = torch.split(heads, [problem.num_q_heads, problem.num_kv_heads, problem.num_kv_heads], dim=1)
        if problem.pool is PoolKind.LATENT:
            v = k[..., : problem.v_head_dim]
        out = torch.empty(len(rows), problem.num_q_heads, problem.v_head_dim, dtype=problem.dtype)
        step.layers.store_and_attend(0, q, k, v, out)
        return out.flatten(1)[step.last_token_of_seq]


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_replayed_steps_equal_eager_ones_bitwise(problem: Problem, aiter: StandIn) -> None:
    graphed, eager = Model.build(problem), Model.build(problem)
    runner = StepRunner(graphed.runtime, graphed.forward, recorder_for(CPU))
    replayed = serve(runner, graphed.runtime, STEPS)
    assert same(replayed, serve(StepRunner(eager.runtime, eager.forward, None), eager.runtime, STEPS))
    assert runner.counters.graphs_off == ""
    assert runner.counters.replays == len(STEPS)
    assert {bucket.key.shape.kind for bucket in runner.capture_report().buckets} == {
        StepKind.DECODE,
        StepKind.EXTEND,
        StepKind.MIXED,
    }


class InHalves:
    """Runs every step as two halves."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    def run(self, batch: StepBatch, pad_to: int | None = None) -> Tensor:
        return self._runner.run_split(batch, pad_to)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_step_in_two_halves_equals_a_whole_one_bitwise(problem: Problem, aiter: StandIn) -> None:
    whole, split = Model.build(problem), Model.build(problem)
    runner = StepRunner(split.runtime, split.forward, recorder_for(CPU))
    halves = serve(InHalves(runner), split.runtime, STEPS)
    assert same(halves, serve(StepRunner(whole.runtime, whole.forward, None), whole.runtime, STEPS))
    # Two halves with room for 70 tokens each are above the captured sizes.
    assert (runner.counters.graphs_off, runner.counters.replays) == ("", len(STEPS) - 1)


def test_a_replay_calls_nothing_on_the_host(aiter: StandIn) -> None:
    model = Model.build(PROBLEMS["ragged and unified"])
    runner = StepRunner(model.runtime, model.forward, recorder_for(CPU))
    serve(runner, model.runtime, STEPS)
    aiter.calls.clear()
    serve(runner, model.runtime, STEPS)
    assert aiter.calls == []


def test_a_longer_step_takes_a_graph_with_more_partitions(aiter: StandIn) -> None:
    """Keys past max_num_partitions are ignored in silence, so the length bucket is part of the key."""
    model = Model.build(PROBLEMS["ragged and unified"])
    runner = StepRunner(model.runtime, model.forward, recorder_for(CPU))
    serve(runner, model.runtime, [[3], [1], [100], [1], [100], [1]])
    decodes = [b.key for b in runner.capture_report().buckets if b.key.shape.kind is StepKind.DECODE]
    assert sorted(key.max_kv_len for key in decodes) == [64, 128, 256]
