"""A step of attention whose tensors lie in a check's memory."""

from dataclasses import fields, replace
from typing import Any

import torch

from tests.amd.kernels.attention_cases import Case, Tensors, build
from tests.amd.mutation.memory import Memory

CPU = torch.device("cpu")


def attention(memory: Memory, case: Case) -> Tensors:
    """A step in memory. The last page is in use; table entries after a sequence's pages aim at the one after."""
    tensors = build(case, CPU)
    unused = tensors.table == len(tensors.k_pages) - 1
    num_pages = int(tensors.table[~unused].max()) + 1
    tensors.table[unused] = num_pages
    tensors = replace(tensors, k_pages=tensors.k_pages[:num_pages], v_pages=tensors.v_pages[:num_pages])
    if tensors.k_scale is not None:
        tensors = replace(tensors, k_scale=tensors.k_scale[:num_pages])
    if tensors.v_scale is not None:
        tensors = replace(tensors, v_scale=tensors.v_scale[:num_pages])
    names = (
        "q",
        "k_pages",
        "v_pages",
        "table",
        "row_of_seq",
        "kv_len",
        "q_len",
        "q_indptr",
        "out",
        "lse",
        "sinks",
        "slopes",
        "first_page",
        "k_scale",
        "v_scale",
    )
    given = {name: tensor for name in names if (tensor := getattr(tensors, name)) is not None}
    placed: dict[str, Any] = {name: memory.put(tensor) for name, tensor in given.items()}
    if tensors.mask is not None:
        mask = tensors.mask
        placed["mask"] = type(mask)(**{each.name: memory.put(getattr(mask, each.name)) for each in fields(mask)})
    return replace(tensors, **placed)
