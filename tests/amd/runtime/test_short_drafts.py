"""A round of drafts in short, for the interpreter of every run; test_drafts.py has all of it."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from tests.amd.runtime.drafting import Round, run_round
from tests.amd.runtime.stepping import World, providers, small_problem


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("provider", providers())
def test_a_round_of_two_sequences(provider: str, branches: int, device: torch.device) -> None:
    world = World.build([small_problem(2, custom_mask=branches > 1)], device, provider)
    requests = [world.admit() for _ in range(2)]
    world.step(requests, [3, 1])
    run_round(world, requests, Round.drawn(Drafts(branches, 2), 2, 0))
    world.runtime.check_device()
