"""Rows whose strides are multiples of 8 elements, and not of 16, are loaded as fast as others."""

from __future__ import annotations

import re

import pytest
import torch
from triton.compiler import CompiledKernel

from rocm_attn.batch.padding import PaddedShape
from rocm_attn.kernels.cache.layer_pages import LayerPages
from rocm_attn.kernels.metadata.step_tensors import StepTensors
from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.contract import StepBounds
from rocm_attn.providers.select import select
from rocm_lab.bench.prepared import PreparedLayer, ints, step_kind
from tests.amd.offline.offline_driver import compiled_by

HEADS = 3


def loads_of_kernel(name: str, head_dim: int, q_len: tuple[int, ...]) -> str:
    """The PTX of a kernel of one layer on an sm_90."""
    compiled = kernels_of_layer(head_dim, q_len)
    text: str = next(each for each in compiled if each.metadata.name == name).asm["ptx"]
    return text


def kernels_of_layer(head_dim: int, q_len: tuple[int, ...]) -> list[CompiledKernel]:
    """Schedule included."""
    problem = Problem(HEADS, HEADS, head_dim, torch.bfloat16, 16, v_head_dim=head_dim, scale=1.0)
    kernel = select(problem, known_target("sm_90"), "triton").kernel(step_kind(q_len, [64] * len(q_len))).bound
    num_seqs, num_tokens, device = len(q_len), sum(q_len), torch.device("cpu")
    step = StepTensors.of(
        ints([], device),
        counts=ints([num_seqs, num_tokens, 1, 0], device),
        kv_len=ints([64] * num_seqs, device),
        q_len=ints(q_len, device),
        q_indptr=ints([0, *torch.tensor(q_len).cumsum(0).tolist()], device),
        table=torch.ones(num_seqs, 4, dtype=torch.int32),
        row_of_seq=ints(range(num_seqs), device),
    )
    bounds = StepBounds(PaddedShape(step_kind(q_len, [64] * num_seqs), num_seqs, num_tokens), max(q_len), 64)
    k, v = (torch.zeros(8, 16, HEADS, head_dim, dtype=torch.bfloat16) for _ in range(2))
    q, out = (torch.zeros(num_tokens, HEADS, head_dim, dtype=torch.bfloat16) for _ in range(2))
    return compiled_by(
        lambda: PreparedLayer.of(kernel, step, bounds, (q, out), LayerPages.plain(k, v)).attend(), "sm_90"
    )


@pytest.mark.fast(1)
@pytest.mark.parametrize(("name", "q_len"), [("_decode_kernel", (1, 1)), ("_extend_kernel", (9, 9))])
def test_rows_of_heads_of_40_are_loaded_by_16_bytes(name: str, q_len: tuple[int, ...]) -> None:
    ptx = loads_of_kernel(name, 40, q_len)
    assert not re.findall(r"ld\.global\S*\.b16", ptx), "elements are loaded one by one"
    assert re.search(r"cp\.async\S* .*, 0x10", ptx), "key blocks are not copied by 16 bytes"
