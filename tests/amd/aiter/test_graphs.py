"""Steps through AITER's kernels as graphs: recorded once, replayed at other lengths with the bits of eager steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from rocm_attn.batch.padding import PadTo
from rocm_attn.batch.step_batch import StepBatch
from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.capture.graphs import recorder_for
from rocm_attn.capture.step_runner import StepRunner
from rocm_attn.problem import Problem
from tests.amd.aiter.one_layer import STEPS, OneLayer
from tests.amd.aiter.serving import CPU, latent_problem, plain_problem, vectorised_problem
from tests.amd.aiter.stand_in import StandIn
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
