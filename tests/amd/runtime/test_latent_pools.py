"""Absorbed latent attention through the runtime: every kind of step, checked against the oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.problem import PoolKind, Problem
from tests.amd.runtime.stepping import World, providers, small_problem

serving = pytest.mark.parametrize("provider", providers())


def latent_problem(page_size: int = 4, *, heads: int = 6, dims: tuple[int, int] = (24, 16)) -> Problem:
    """Rows of 16 elements of V and 8 after it, unless said otherwise."""
    plain = small_problem(page_size, num_q_heads=heads, num_kv_heads=1, head_dim=dims[0], v_head_dim=dims[1])
    return replace(plain, pool=PoolKind.LATENT, wants_lse=True)


PROBLEMS = {
    "plain": latent_problem(),
    "nothing_after_v": latent_problem(1, heads=4, dims=(32, 32)),
    "window": replace(latent_problem(16, heads=12), window_left=5),
    "sinks_and_cap": replace(latent_problem(3, heads=20), has_sinks=True, logits_soft_cap=1.5),
}


@serving
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_every_kind_of_step_is_right(problem: Problem, provider: str, device: torch.device) -> None:
    """Prefill, drafts of two to eight tokens, decode, a mixed step with all of them, and chunks over a prefix."""
    world = World.build([problem, problem], device, provider, num_pages=200)
    requests = [world.admit() for _ in range(3)]
    world.step(requests, [13, 1, 7])
    world.step(requests, [1, 1, 1], pad_to=4)
    world.step(requests, [4, 8, 2])
    world.step(requests, [1, 5, 11])
    world.step(requests, [9, 0, 3], pad_to=4)
    assert world.page_zero_is_zero()
