"""Layers that a release of Triton compiles wrongly are refused with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rocm_attn.errors import Unsupported
from rocm_attn.machine.releases import Release
from rocm_attn.machine.target import Target, known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select


def _sm_90(triton: str) -> Target:
    target = known_target("sm_90")
    return replace(target, releases=replace(target.releases, triton=Release.of(triton)))


@pytest.mark.parametrize("dims", [(24, 8), (40, 24), (64, 32), (128, 16), (128, 32), (256, 32)], ids=str)
def test_deterministic_kernels_that_ptxas_breaks(dims: tuple[int, int]) -> None:
    layer = Problem(3, 1, dims[0], torch.bfloat16, 4, v_head_dim=dims[1])
    with pytest.raises(Unsupported, match="no deterministic kernel"):
        select(layer, _sm_90("3.6.0"), "triton", deterministic=True)
    assert select(layer, _sm_90("3.9.0"), "triton", deterministic=True).kernels
    assert select(layer, _sm_90("3.6.0"), "triton").kernels
    for served in (dims[0], 64):
        assert select(replace(layer, v_head_dim=served), _sm_90("3.6.0"), "triton", deterministic=True).kernels
