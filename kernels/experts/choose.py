"""Chooses the experts of each token, and its shares of them, as rocm_attn.models.routing.Routing says.

A program has a token. An expert's rank, as an integer of the same order, and its number make one key; the largest key
is chosen, and then that of the others. The first expert has the larger key among equal ranks. NaN counts as the largest
rank, so that a token of NaN has experts too; its shares are NaN.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import only_launches, repeated_launches
from rocm_attn.kernels.tuning.tiles import next_power_of_2

NO_SHARED, SHARED, SHARED_BY_LOGIT = range(3)
_NO_SHARED, _SHARED_BY_LOGIT = tl.constexpr(NO_SHARED), tl.constexpr(SHARED_BY_LOGIT)
_NO_KEY = tl.constexpr(-(2**63))
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
# Experts of a warp of 32 threads; more of them have several warps.
_EXPERTS_OF_WARP = 512


class ChoiceRule(NamedTuple):
    """The rule of a choice, as plain numbers for the kernel: see Routing.

    softmax: whether scores are the softmax of a token's logits, and not the sigmoid of each
    shared:  NO_SHARED; SHARED and SHARED_BY_LOGIT: each token takes expert 0 too, with a share of 1, or of the sigmoid
             of the logit after the others; the experts that it chooses from begin at 1
    """

    num_groups: int
    num_groups_chosen: int
    best_of_group: int
    softmax: bool
    normalised: bool
    scale: float
    shared: int = NO_SHARED


class ChoiceGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    OF_GROUP:     experts of a group
    *_BLOCK:      the next power of 2
    LOGITS:       elements from a token's logits to those of the next one
    CHOSEN:       experts that a token chooses
    EARLY:        whether it starts early (early.py)
    the others:   see ChoiceRule
    """

    GROUPS: int
    GROUPS_CHOSEN: int
    BEST: int
    SOFTMAX: bool
    NORMALISED: bool
    SCALE: float
    SHARED: int
    GROUPS_BLOCK: int
    OF_GROUP: int
    OF_GROUP_BLOCK: int
    LOGITS: int
    CHOSEN: int
    CHOSEN_BLOCK: int
    EARLY: bool


@triton.jit
def _key(rank, number, COUNT: tl.constexpr):
    """int64, in the order of float32 ranks, and for equal ones of falling numbers, which are below COUNT."""
    bits = tl.where(rank == rank, rank, float("inf")).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (COUNT - 1 - number).to(tl.int64)


@triton.jit
def _number_of(key, COUNT: tl.constexpr):
    return COUNT - 1 - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _choose_experts_kernel(logits, correction, expert, share, G: tl.constexpr):
    EXPERTS: tl.constexpr = G.GROUPS * G.OF_GROUP
    GROUPS_BLOCK: tl.constexpr = G.GROUPS_BLOCK
    BLOCK: tl.constexpr = G.GROUPS_BLOCK * G.OF_GROUP_BLOCK
    BEST: tl.constexpr = G.BEST
    GROUPS_CHOSEN: tl.constexpr = G.GROUPS_CHOSEN
    CHOSEN: tl.constexpr = G.CHOSEN
    CHOSEN_BLOCK: tl.constexpr = G.CHOSEN_BLOCK
    wait_for_launch(G.EARLY)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_BLOCK)
    within = tl.arange(0, G.OF_GROUP_BLOCK)
    each = group[:, None] * G.OF_GROUP + within[None, :]
    is_expert = (group < G.GROUPS)[:, None] & (within < G.OF_GROUP)[None, :]
    logits += token * G.LOGITS
    scores = tl.load(logits + each, mask=is_expert, other=float("-inf")).to(tl.float32)
    if G.SOFTMAX:
        largest = tl.max(tl.max(tl.where(scores == scores, scores, float("-inf")), 1), 0)
        # Without a finite largest logit all shares are NaN.
        powers = tl.exp(scores - tl.where(tl.abs(largest) < float("inf"), largest, float("nan")))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    else:
        scores = tl.sigmoid(scores)
    rank = scores
    if correction is not None:
        rank += tl.load(correction + each, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, _key(rank, each, EXPERTS), _NO_KEY)
    if GROUPS_CHOSEN < G.GROUPS:
        left = keys
        best = tl.zeros([GROUPS_BLOCK], tl.float32)
        for _ in tl.static_range(BEST):
            first = tl.max(left, 1)
            best += tl.sum(tl.where(left == first[:, None], rank, 0.0), 1)
            left = tl.where(left == first[:, None], _NO_KEY, left)
        group_keys = tl.where(group < G.GROUPS, _key(best, group, G.GROUPS), _NO_KEY)
        is_chosen = group < 0
        for _ in tl.static_range(GROUPS_CHOSEN):
            first_group = tl.max(group_keys, 0)
            is_chosen = is_chosen | (group_keys == first_group)
            group_keys = tl.where(group_keys == first_group, _NO_KEY, group_keys)
        keys = tl.where(is_chosen[:, None], keys, _NO_KEY)
    keys = tl.reshape(keys, [BLOCK])
    scores = tl.reshape(scores, [BLOCK])
    place = tl.arange(0, CHOSEN_BLOCK)
    experts = tl.zeros([CHOSEN_BLOCK], tl.int32)
    shares = tl.zeros([CHOSEN_BLOCK], tl.float32)
    for chosen in tl.static_range(CHOSEN):
        first = tl.max(keys, 0)
        score = tl.sum(tl.where(keys == first, scores, 0.0), 0)
        experts = tl.where(place == chosen, _number_of(first, EXPERTS), experts)
        shares = tl.where(place == chosen, score, shares)
        keys = tl.where(keys == first, _NO_KEY, keys)
    if G.NORMALISED:
        total = tl.sum(shares, 0)
        shares /= tl.where(total < _TINY, _TINY, total)
    shares *= G.SCALE
    TAKEN: tl.constexpr = CHOSEN + (G.SHARED != _NO_SHARED)
    if G.SHARED != _NO_SHARED:
        of_shared = 1.0
        if G.SHARED == _SHARED_BY_LOGIT:
            of_shared = tl.sigmoid(tl.load(logits + EXPERTS).to(tl.float32))
        experts = tl.where(place == CHOSEN, 0, experts + 1)
        shares = tl.where(place == CHOSEN, of_shared, shares)
    is_place = place < TAKEN
    to = token * TAKEN + place
    tl.store(expert + to, experts, mask=is_place)
    tl.store(share + to, shares, mask=is_place)


_variant = repeated_launches(_choose_experts_kernel)


@only_launches
def launch_choose(logits: Tensor, correction: Tensor | None, expert: Tensor, share: Tensor, rule: ChoiceRule) -> None:
    """Writes the experts of each token, and its shares.

    logits:     float32, float16 or bfloat16 [tokens, experts], and a column more if the shared expert has a logit
    correction: float32 [experts], added to the scores for the choice, or None
    expert:     int32 [tokens, taken], written: by falling rank, and the shared one
    share:      float32 [tokens, taken], written
    All begin at a multiple of 16 bytes, and are contiguous; rows of logits may lie apart.
    """
    num_tokens, num_experts = len(logits), logits.shape[1] - (rule.shared == SHARED_BY_LOGIT)
    taken = expert.shape[1]
    chosen = taken - (rule.shared != NO_SHARED)
    assert expert.shape == share.shape == (num_tokens, taken)
    assert logits.stride(1) == 1
    assert expert.dtype == torch.int32
    assert share.dtype == torch.float32
    assert correction is None or (correction.dtype == torch.float32 and correction.shape == (num_experts,))
    written = [each for each in (correction, expert, share) if each is not None]
    assert all(each.is_contiguous() for each in written)
    assert all(each.data_ptr() % 16 == 0 for each in (logits, *written))
    if not num_tokens:
        return
    early, of_group = starts_early(logits.device), num_experts // rule.num_groups
    geometry = ChoiceGeometry(
        *rule,
        GROUPS_BLOCK=next_power_of_2(rule.num_groups),
        OF_GROUP=of_group,
        OF_GROUP_BLOCK=next_power_of_2(of_group),
        LOGITS=logits.stride(0),
        CHOSEN=chosen,
        CHOSEN_BLOCK=next_power_of_2(taken),
        EARLY=early,
    )
    block = geometry.GROUPS_BLOCK * geometry.OF_GROUP_BLOCK
    _variant(logits.dtype, correction is None, geometry)(
        logits.device,
        (num_tokens, 1, 1),
        logits,
        correction,
        expert,
        share,
        geometry,
        num_warps=min(8, max(1, block // _EXPERTS_OF_WARP)),
        **early_options(early),
    )
