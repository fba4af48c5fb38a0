"""Checks of the masks of the kernel that picks tokens from logits."""

from __future__ import annotations

from functools import partial

import torch

from rocm_attn.kernels.refs import sampling
from rocm_attn.kernels.sampling.pick_rows import launch_pick_rows
from tests.amd.mutation.memory import Memory, assert_same

NEVER_WRITTEN = -0x7F7F7F7F


def pick_rows(memory: Memory) -> None:
    """Checks rows that end in a block that is not full, one that draws among some of its tokens, and one of zeros."""
    logits = torch.randn(3, 2 * 4099, generator=torch.Generator().manual_seed(2))[:, :4099]
    logits[2] = 0.0
    logits[0, 4098] = 9.0
    terms = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.9, 0.41], [0.0, 0.0, 0.0]])
    kernel, twin = (partial(pick, num_drawing=1) for pick in (launch_pick_rows, sampling.pick_rows))
    outputs = [torch.full(shape, NEVER_WRITTEN, dtype=torch.int32) for shape in ((3,), (3, 2))]
    assert_same(memory, kernel, twin, [logits, terms], outputs)
