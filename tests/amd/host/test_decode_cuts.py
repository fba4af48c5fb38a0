"""The tiles of a decode step. Memory made for a step has room for every smaller one."""

from dataclasses import replace

import pytest
import torch

from rocm_attn.batch.step_kinds import StepKind
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.tuning.tiles import DecodeTiles
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import PoolSize
from rocm_attn.providers.select import select
from rocm_attn.providers.triton import TritonDecode

LLAMA = Problem(64, 8, 128, torch.bfloat16, 16, v_head_dim=128, scale=128**-0.5)
GEMMA = Problem(16, 8, 256, torch.bfloat16, 16, v_head_dim=256, scale=256**-0.5)
NARROW = replace(LLAMA, v_head_dim=1)


# Pools of long sequences and of short ones. Only with long ones does a separate launch merge steps of few rows.
LONG, SHORT = PoolSize(1000, 1 << 17, 64), PoolSize(1000, 512, 64)


def decode_of(problem: Problem, arch: str = "sm_90", pool: PoolSize = LONG) -> TritonDecode:
    kernel = select(problem, known_target(arch), "triton", pool=pool).kernels[StepKind.DECODE].bound
    assert isinstance(kernel, TritonDecode)
    return kernel


@pytest.mark.parametrize("pool", [LONG, SHORT], ids=["long", "short"])
@pytest.mark.parametrize("problem", [LLAMA, GEMMA, NARROW], ids=["llama", "gemma", "narrow"])
def test_memory_of_a_step_has_room_for_smaller_ones(problem: Problem, pool: PoolSize) -> None:
    kernel = decode_of(problem, pool=pool)
    has_other_tiles = any(kernel.tiles_of(kernel.cut.of_step(n)) != kernel.tiles for n in range(1, 40))
    assert has_other_tiles == (pool == LONG or problem == GEMMA)

    def partials(cut: DecodeCut, tiles: DecodeTiles) -> int:
        return cut.partials_words(gqa_ratio=problem.gqa_ratio, v_head_dim=problem.v_head_dim, tiles=tiles)

    for most in range(1, 40):
        room = kernel.cut.roomiest_of_step(most)
        for n in range(1, most + 1):
            cut = kernel.cut.of_step(n)
            assert cut.words(n) <= room.words(most)
            assert partials(cut, kernel.tiles_of(cut)) <= partials(room, kernel.tiles)
