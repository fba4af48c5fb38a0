"""Slots of tokens where ranks share contexts, on a CPU, where vLLM has none: a plug-in for each of its processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

_NAME = "_compute_slot_mapping_kernel_impl"
_RANKS = "TOTAL_CP_WORLD_SIZE"


def register() -> None:
    """Put them in the place of vLLM's function for a CPU, which still serves ranks that share nothing."""
    from vllm.utils import cpu_triton_utils

    of_one_rank = getattr(cpu_triton_utils, _NAME, None)
    if of_one_rank is None:  # in releases before
        return

    def slots(*given: Any, **named: Any) -> None:
        if named.get(_RANKS, 1) == 1:
            of_one_rank(*given, **named)
        else:
            slots_of_rank(*given, **named)

    setattr(cpu_triton_utils, _NAME, slots)


def slots_of_rank(
    num_tokens: int,
    max_num_tokens: int,
    starts: Tensor,
    positions: Tensor,
    table: Tensor,
    table_stride: int,
    slot_mapping: Tensor,
    **sizes: int,
) -> None:
    """Write the slot of each token that this rank keeps, -1 of the others. sizes: by vLLM's names"""
    block, ranks, rank = sizes["KV_CACHE_BLOCK_SIZE"], sizes[_RANKS], sizes["TOTAL_CP_RANK"]
    stretch = sizes.get("CP_KV_CACHE_INTERLEAVE_SIZE", 1)
    slot_mapping.fill_(-1)
    bounds = starts.tolist()
    for seq, (first, end) in enumerate(pairwise(bounds)):
        for token in range(first, end):
            turn, rest = divmod(int(positions[token]), stretch * ranks)
            local = turn * stretch + rest % stretch
            if rest // stretch == rank:
                slot_mapping[token] = int(table[seq, local // block]) * block + local % block
