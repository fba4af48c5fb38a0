"""Rows whose strides are multiples of 8 elements, and not of 16, are loaded as fast as others."""

import re

import pytest
import torch

from rocm_attn.machine.target import known_target
from rocm_attn.problem import Problem
from rocm_attn.providers.select import select
from rocm_lab.bench.batch_spec import BatchSpec
from rocm_lab.bench.step_data import empty_step
from tests.amd.offline.offline_driver import compiled_by

HEADS = 3


def loads_of_kernel(name: str, head_dim: int, batch: str) -> str:
    """Returns the PTX of a kernel of one layer on an sm_90."""
    problem = Problem(HEADS, HEADS, head_dim, torch.bfloat16, 16, v_head_dim=head_dim, scale=1.0)
    data = empty_step(problem, BatchSpec.parse(batch), 1)
    kernel = select(problem, known_target("sm_90"), "triton").kernel(data.kind).bound
    compiled = compiled_by(lambda: data.layer(kernel)(), "sm_90")
    text: str = next(each for each in compiled if each.metadata.name == name).asm["ptx"]
    return text


@pytest.mark.fast(1)
@pytest.mark.parametrize(("name", "batch"), [("_decode_kernel", "2d64"), ("_extend_kernel", "2x9+55")])
def test_rows_of_heads_of_40_are_loaded_by_16_bytes(name: str, batch: str) -> None:
    ptx = loads_of_kernel(name, 40, batch)
    assert not re.findall(r"ld\.global\S*\.b16", ptx), "elements are loaded one by one"
    assert re.search(r"cp\.async\S* .*, 0x10", ptx), "key blocks are not copied by 16 bytes"
