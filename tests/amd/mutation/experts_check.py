"""Checks of the masks of the product of experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.experts.product import launch_expert_product
from rocm_attn.kernels.tuning.expert_tiles import ExpertTiles
from tests.amd.kernels.expert_cases import random_problem
from tests.amd.mutation.memory import Memory


def experts(memory: Memory) -> None:
    """Checks experts with more pairs than a tile has rows and with none; sizes that leave parts of tiles empty."""
    tiles = ExpertTiles(rows=16, columns=16, step=16, num_warps=1, num_stages=1)
    problem = random_problem(25, 5, 2, (19, 21), has_bias=True)
    # the first expert has no token, and the last one, whose matrix ends the memory, has some
    problem = replace(
        problem, x=rows_with_gaps(problem.x), weight=rows_with_gaps(problem.weight), expert=4 - problem.expert
    )
    assert problem.bias is not None
    placed = [memory.put(each) for each in (problem.x, problem.weight, problem.bias)]
    out, groups = memory.put(rows_with_gaps(problem.empty_out())), ExpertGroups(*map(memory.put, problem.groups))
    launch_expert_product(placed[0], placed[1], placed[2], groups, out, tiles=tiles)
    problem.assert_served(out)
    memory.assert_surroundings_untouched()


def rows_with_gaps(rows: Tensor) -> Tensor:
    """The same values, with room after each row."""
    return torch.cat((rows, torch.zeros_like(rows)), -1)[..., : rows.shape[-1]]
