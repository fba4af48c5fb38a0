"""A step of attention whose tensors lie in a check's memory."""

from dataclasses import replace

import torch

from tests.amd.kernels.attention_cases import Case, Tensors, build
from tests.amd.mutation.arguments import placed
from tests.amd.mutation.memory import Memory

CPU = torch.device("cpu")


def attention(memory: Memory, case: Case) -> Tensors:
    """A step in memory. The last page is in use; table entries after a sequence's pages aim at the one after."""
    tensors = build(case, CPU)
    unused = tensors.table == len(tensors.k_pages) - 1
    num_pages = int(tensors.table[~unused].max()) + 1
    tensors.table[unused] = num_pages
    names = ("k_pages", "v_pages", "k_scale", "v_scale")
    sides = {name: side[:num_pages] for name in names if (side := getattr(tensors, name)) is not None}
    return placed(memory, replace(tensors, **sides))
