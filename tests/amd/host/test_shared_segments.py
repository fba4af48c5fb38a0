"""Deterministic extend of the plain kernel: sharing of rows by whole segments."""

from __future__ import annotations

from dataclasses import replace

import torch

from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.triton_segments import SegmentExtend, bind_extend, bind_masked

LAYER = Problem(32, 8, 128, torch.bfloat16, v_head_dim=128, page_size=16, scale=128**-0.5)
POOL = PoolSize(1000, 1 << 17, 64)


def bound(arch: str, problem: Problem) -> SegmentExtend:
    """Returns the kernel that serves the steps of a layer."""
    extend = bind_extend(problem, known_target(arch), POOL)
    assert isinstance(extend, SegmentExtend)
    return extend


def test_blocks_of_query_heads_that_are_not_equal_are_one_programs_each() -> None:
    """The merge finds the heads of a block by its place. A block has 128 rows, so 129 heads leave one over."""
    of_equal, of_unequal = (bound("gfx942", replace(LAYER, num_q_heads=heads, num_kv_heads=1)) for heads in (128, 129))
    assert of_equal.cut.sharing.programs == 304
    assert of_unequal.cut.sharing.programs == 0


def test_masked_steps_and_gpus_on_which_nothing_was_looked_at_share_nothing() -> None:
    """A window counted from a draft's depth begins before the keys that a row's cost covers."""
    masked = bind_masked(replace(LAYER, custom_mask=True), known_target("gfx942"), POOL)
    assert "programs=304" in bound("gfx942", LAYER).describe()
    assert "programs=304" not in masked.describe()
    assert bound("sm_80", LAYER).cut.sharing.programs == 0
