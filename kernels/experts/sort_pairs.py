"""Sorts pairs of tokens and experts by expert: see groups.ExpertGroups.

A program has an expert. It counts the pairs of all experts before it, which is where its own begin, and then places
its own in their order. It reads all pairs for that; a sort would read and write them several times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.launch import only_launches, repeated_launches

# Pairs that a program reads at a time, at most: the time of many pairs is that of turns, which wait for memory.
_FEW, _MANY = 1024, 4096
# Places are below 2 GiB, so that a variant is right for every number of pairs.
MOST_PAIRS = 1 << 27


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs_kernel(
    expert,
    tokens,
    places,
    indptr,
    drawn,
    num_pairs,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    PAIRS: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    own = tl.program_id(0)
    at = tl.arange(0, PAIRS)
    before = tl.zeros([PAIRS], tl.int32)
    for first in range(0, num_pairs, PAIRS):
        owner = tl.load(expert + first + at, mask=first + at < num_pairs, other=EXPERTS)
        before += (owner < own).to(tl.int32)
    begin = tl.sum(before, 0)
    if own == 0:
        tl.store(indptr, begin.to(tl.int64))
        tl.store(drawn, 0)
    for first in range(0, num_pairs, PAIRS):
        owner = tl.load(expert + first + at, mask=first + at < num_pairs, other=EXPERTS)
        is_own = owner == own
        place = begin + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(tokens + place, ((first + at) // CHOSEN).to(tl.int64), mask=is_own)
        tl.store(places + first + at, place.to(tl.int64), mask=is_own)
        begin += tl.sum(is_own.to(tl.int32), 0)
    tl.store(indptr + own + 1, begin.to(tl.int64))


_variant = repeated_launches(_sort_pairs_kernel)


@only_launches
def launch_sort_pairs(expert: Tensor, groups: ExpertGroups) -> None:
    """Writes the groups.

    expert: int32 [tokens, chosen], each 0 to experts - 1; at most MOST_PAIRS in all
    All tensors are contiguous and begin at a multiple of 16 bytes.
    """
    tokens, places, indptr, drawn = groups
    assert [each.dtype for each in (expert, *groups)] == [torch.int32, *[torch.int64] * 3, torch.int32]
    assert all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (expert, *groups))
    num_pairs, num_experts, chosen = expert.numel(), groups.num_experts, expert.shape[1]
    assert len(tokens) == len(places) == num_pairs <= MOST_PAIRS
    early, pairs = starts_early(expert.device), _FEW if num_pairs <= _FEW else _MANY
    _variant(num_experts, chosen, pairs)(
        expert.device,
        (num_experts, 1, 1),
        expert,
        tokens,
        places,
        indptr,
        drawn,
        num_pairs,
        num_experts,
        chosen,
        pairs,
        early,
        num_warps=pairs // 256,
        **early_options(early),
    )
