"""Windows of drafts in a round: kernels read ranges of keys, which follow from the parents of each draft step."""

import pytest
import torch

from rocm_attn.batch.drafts import Drafts
from rocm_attn.kernels.launch import Thunk, observe_launches
from tests.amd.runtime.test_drafts import world_of


@pytest.mark.fast(interpreted=1)
@pytest.mark.parametrize(
    ("branches", "window_left", "rounds"),
    [(3, 2, 1), (3, 2, 2), (1, 5, 2), *(pytest.param(3, left, 2, marks=pytest.mark.nightly) for left in (0, 5))],
)
@pytest.mark.parametrize("swa", [False, True])
def test_windows_count_back_from_the_depth_of_a_draft(
    swa: bool, rounds: int, window_left: int, branches: int, provider: str, device: torch.device
) -> None:
    """Some hold fewer drafts than a branch has; each key is looked at by itself, in prefix and branch.

    One round is a case of its own for Triton's interpreter, in which a round takes seconds.
    """
    world = world_of(provider, device, branches, window_left=window_left, swa=swa)
    requests = world.begun(9, 3)
    for _ in range(rounds):
        world.step_round(requests, Drafts(branches, 4))
        world.step(requests, [2, 1])
    world.runtime.check_device()


@pytest.mark.fast(interpreted=1)
def test_parents_build_the_ranges_of_windows_and_no_other_part_of_a_schedule(
    provider: str, device: torch.device
) -> None:
    """One layer of two has a window. How work is cut follows from lengths, which parents do not change."""
    world, drafts = world_of(provider, device, 3, window_left=2), Drafts(3, 2)
    requests = world.begun(9, 3)
    batch, launches = world.round_batch(requests, drafts), list[object]()

    def note(launch: Thunk) -> None:
        launches.append(launch)
        launch()

    with world.runtime.step(batch, world.runtime.plan(batch)) as round_, observe_launches(note):
        filled = len(launches)
        round_.parts[1].set_parents(torch.zeros(2, 3, dtype=torch.int32, device=world.runtime.device))
    trees_and_ranges = {"torch": 0, "triton": 2}
    assert len(launches) - filled == trees_and_ranges[provider]
