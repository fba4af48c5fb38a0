"""Checks of the masks of a graph that takes its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.slot_layout import TAKEN_BY_GRAPH
from rocm_attn.kernels.metadata.step_tensors import Pads
from rocm_attn.kernels.metadata.take_inputs import launch_take_inputs
from rocm_attn.kernels.refs import metadata as twins
from tests.amd.kernels.launches_of_tensors import of_take_inputs
from tests.amd.mutation.memory import Memory, assert_same

NEVER_WRITTEN = -0x7F7F7F7F


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def take_inputs(memory: Memory) -> None:
    """Takes the inputs of `checks.publish` from the second slot, which is due; then neither slot is due."""
    for run in (5, 7):
        inputs = 4, 5, 30, 40, 1, 2, 11, 12, 13, 16, 32, 1, 2
        slots = [[2, 3, 9, 1, 8, TAKEN_BY_GRAPH, -1, runs_before, *inputs] for runs_before in (6, 5)]
        outputs = [torch.stack([_ints(slot) for slot in slots]), _ints([run]), _ints([6, 6, 8, 2])]
        outputs += [torch.full((size,), NEVER_WRITTEN, dtype=torch.int32) for size in (5, 5, 5, 5, 5, 7)]
        of = of_take_inputs(launch_take_inputs, Pads(5, 0)), of_take_inputs(twins.take_inputs, Pads(5, 0))
        assert_same(memory, *of, [], outputs)
