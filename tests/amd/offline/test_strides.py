"""Rows whose strides are multiples of 8 elements, and not of 16, are loaded as fast as others."""

from __future__ import annotations

import re

import pytest
import torch

from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select
from rocm_lab.bench.prepared import PreparedLayer, bounds_of_step, step_kind, step_of
from tests.amd.offline.offline_driver import compiled_by

HEADS = 3


def loads_of_kernel(name: str, head_dim: int, q_len: tuple[int, ...]) -> str:
    """Returns the PTX of a kernel of one layer on an sm_90."""
    problem = Problem(HEADS, HEADS, head_dim, torch.bfloat16, 16, v_head_dim=head_dim, scale=1.0)
    kv_len = [64] * len(q_len)
    kernel = select(problem, known_target("sm_90"), "triton").kernel(step_kind(q_len, kv_len)).bound
    step = step_of(kv_len, q_len, torch.ones(len(q_len), 4, dtype=torch.int32))
    k, v = (torch.zeros(8, 16, HEADS, head_dim, dtype=torch.bfloat16) for _ in range(2))
    q, out = (torch.zeros(sum(q_len), HEADS, head_dim, dtype=torch.bfloat16) for _ in range(2))
    layer = kernel, step, bounds_of_step(kv_len, q_len), (q, out), LayerPages.plain(k, v)
    compiled = compiled_by(lambda: PreparedLayer.of(*layer).attend(), "sm_90")
    text: str = next(each for each in compiled if each.metadata.name == name).asm["ptx"]
    return text


@pytest.mark.fast(1)
@pytest.mark.parametrize(("name", "q_len"), [("_decode_kernel", (1, 1)), ("_extend_kernel", (9, 9))])
def test_rows_of_heads_of_40_are_loaded_by_16_bytes(name: str, q_len: tuple[int, ...]) -> None:
    ptx = loads_of_kernel(name, 40, q_len)
    assert not re.findall(r"ld\.global\S*\.b16", ptx), "elements are loaded one by one"
    assert re.search(r"cp\.async\S* .*, 0x10", ptx), "key blocks are not copied by 16 bytes"
