"""Logits below -87, which a running maximum of 0 removes. The binding keeps that maximum out of unified_attention."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rocm_attn.problem import Problem
from tests.amd.aiter.serving import plain_problem, vectorised_problem, world
from tests.amd.aiter.stand_in import StandIn
from tests.amd.worlds.world import World

# unified_attention is the only AITER function for head_dim 64 over these pages.
PLAIN = plain_problem(16, dims=(64, 64), heads=(2, 1))
PROBLEMS: Mapping[str, Problem] = {
    "no window": PLAIN,
    "a window": replace(PLAIN, window_left=20),
    "a window and slopes": replace(PLAIN, window_left=20, has_alibi_slopes=True),
    "a window and sinks": replace(PLAIN, window_left=20, has_sinks=True),
    "a window, vectorised": replace(vectorised_problem(heads=(2, 1), dims=(64, 64)), window_left=20),
}


class LowWorld(World):
    """A world in which every product of q and k is about -150 before anything is added."""

    def _held(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        away = (150 / (problem.scale * problem.head_dim)) ** 0.5
        return (0.1 * q + away).to(q.dtype), (0.1 * k - away).to(k.dtype), v


def serve(problem: Problem) -> None:
    built = world(problem, max_kv_len=900)
    serving = LowWorld(built.runtime, built.problems, built.generator)
    serving.served([70, 31, 600], [9, 40, 130], [1, 25, 3], [1, 1, 1])


@pytest.mark.fast(2)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_low_logits_are_those_of_the_oracle(problem: Problem, aiter: StandIn) -> None:
    serve(problem)
    assert "unified_attention" in aiter.calls


# The binding's arguments against it, taken away.
WITHOUT = {
    "sinks far below": (PROBLEMS["a window"], {"sinks": None}),
    "one piece": (PROBLEMS["no window"], {"max_seqlen_k": 900}),
}


@pytest.mark.parametrize(("problem", "change"), WITHOUT.values(), ids=WITHOUT)
def test_without_what_the_binding_does_low_logits_vanish(
    problem: Problem, change: Mapping[str, Any], aiter: StandIn
) -> None:
    world(problem, max_kv_len=900)  # after its probe, whose logits are higher
    aiter.change("unified_attention", lambda call: change)
    with pytest.raises(AssertionError, match="not close"):
        serve(problem)


def test_layers_that_have_sinks_keep_their_own(aiter: StandIn) -> None:
    built = world(PROBLEMS["a window and sinks"], max_kv_len=900)
    seen = aiter.noted("unified_attention")
    built.served([40, 50], [2, 3], [1, 1])
    own = built.runtime.head_weights.of(0).sinks
    assert own is not None
    assert seen
    assert all(torch.equal(call["sinks"], own) for call in seen)
