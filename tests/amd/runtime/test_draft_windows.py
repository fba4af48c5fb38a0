"""Windows of drafts in a round: kernels read ranges of keys, which follow from the parents of each draft step."""

from __future__ import annotations

import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from tests.amd.runtime.test_drafts import world_of


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize(
    ("branches", "window_left"),
    [(3, 2), (1, 5), *(pytest.param(3, left, marks=pytest.mark.nightly) for left in (0, 5))],
)
@pytest.mark.parametrize("swa", [False, True])
def test_windows_count_back_from_the_depth_of_a_draft(
    swa: bool, window_left: int, branches: int, provider: str, device: torch.device
) -> None:
    """Some hold fewer drafts than a branch has; each key is looked at by itself, in prefix and branch."""
    world = world_of(provider, device, branches, window_left=window_left, swa=swa)
    requests = world.begun(9, 3)
    for _ in range(2):
        world.step_round(requests, Drafts(branches, 4))
        world.step(requests, [2, 1])
    world.runtime.check_device()
