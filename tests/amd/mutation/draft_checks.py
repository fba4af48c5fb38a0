"""Checks of the masks of the launches that take lengths from the device, and of those of a round of drafts."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rocm_attn.kernels.metadata.device_inputs import launch_device_inputs
from rocm_attn.kernels.metadata.draft_steps import launch_draft_steps
from rocm_attn.kernels.metadata.place_trees import launch_place_trees
from rocm_attn.kernels.metadata.step_tensors import Pads
from rocm_attn.kernels.refs import metadata as twins
from tests.amd.kernels.launches_of_tensors import of_device_inputs, of_draft_steps, of_place_trees
from tests.amd.mutation.memory import Memory, assert_same


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def device_inputs(memory: Memory) -> None:
    """Checks two sequences of up to five tokens, at five and seven, within their bounds and not.

    Lengths also lie below the shared length and above the stored one.
    """
    slot = _ints(*[2, 5, 9, 0, 8, 0, 8, 0, 4, 5, 30, 40, 3, 2])
    for kv_len, q_len, floor, stored in (
        ([29, 40], [1, 2], [28, 0], [28, 38]),
        ([31, 1], [4, 2], [0, 0], [40, 40]),
        ([29, 1], [3, 1], [28, 9], [40, 40]),
        ([20, 30], [3, 2], [0, 0], [9, 27]),
    ):
        inputs = [slot, *(_ints(*values) for values in (kv_len, q_len, [11, 12, 13, 14, 15], floor, stored))]
        outputs = [_ints(*[2, 5, 9, 0]), *(_ints(*[-77] * size) for size in (5, 5, 7))]
        assert_same(
            memory, of_device_inputs(launch_device_inputs), of_device_inputs(twins.device_inputs), inputs, outputs
        )


def draft_steps(memory: Memory) -> None:
    """Checks three steps of two branches; two sequences and two pads, and a gap after each step's part."""
    kv_len, token_ids, mask_start, parents = (_ints(*[-77] * size) for size in (15, 27, 15, 24))
    kv_len[:2] = _ints(9, 30)
    launch, twin = (
        partial(of_draft_steps(derive, Pads(5, 0)), num_seqs=4, branches=2, steps=3)
        for derive in (launch_draft_steps, twins.draft_steps)
    )
    assert_same(memory, launch, twin, [_ints(2, 4, 1, 0)], [kv_len, token_ids, mask_start, parents])


def place_trees(memory: Memory) -> None:
    """Checks trees of three sequences and a pad, of new nodes alone and of nodes before them, and shared words.

    There is room for all of their tokens or for fewer; one case has no window; some parents are invalid for new nodes.
    """
    right, wrong = [0, 0, 1, 2, 9, 9, 0, 0, 1, 9, 9, 9, 0, 0, 1, 2, 9, 9], [-1, 0, 0, 1, 2, -1, -1, 0, 1, 9, 3, 7]
    lines = [[-1, *right[1:6], -1, *right[7:12], -1, *right[13:]], [*wrong, -1, -1, 1, 2, 3, 0]]
    for nodes_before, branches, num_tokens, num_starts in ((0, 0, 9, 9), (2, 0, 5, 5), (2, 2, 9, 9), (3, 0, 9, 0)):
        launch, twin = (
            partial(of_place_trees(place), nodes_before=nodes_before, branches=branches, window_left=1)
            for place in (launch_place_trees, twins.place_trees)
        )
        for parents in lines:
            outputs = [_ints(*[3, 7, 1, 0]), _ints(*[9, 5, 7, 0]), _ints(*[3, 2, 2, 0])]
            outputs += [_ints(*[-77] * size) for size in (4, 3, num_tokens, num_starts)]
            assert_same(memory, launch, twin, [_ints(*parents).view(3, 6)], outputs)
