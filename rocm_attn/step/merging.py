"""Merges attention over disjoint parts of the keys, by their LSEs, into attention over all of them.

A side is the result of attend() over some of the keys: out [tokens, heads, dim], and lse float32 [tokens, heads], the
natural log of the softmax denominator. Sides share no key; a sink is counted in one of them only. Where a side has LSE
-inf it saw no key, and its out is not read; a token for which no side has keys gets 0 and -inf.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.machine.devices import on_device
from rocm_attn.machine.settings import require_kind
from rocm_attn.providers.torch_ref import TORCH
from rocm_attn.providers.triton import TRITON


def merge_state(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns out and lse over the keys of both sides; out has the dtype of out_a. Raises BadTensor."""
    return merge_states([(out_a, lse_a), (out_b, lse_b)])


def merge_states(sides: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges (out, lse) of one or more sides; returns out and lse over all keys. Raises BadTensor.

    out has the dtype of the first side. Sides are merged in order, in float32.
    """
    _check(sides)
    merged, merged_lse = sides[0]
    dtype, others = merged.dtype, list(sides[1:])
    if not others:
        # A second side without keys: a token that sees no key gets 0, for any content of its only side.
        others = [(merged, torch.full_like(merged_lse, float("-inf")))]
    for left, (out, lse) in zip(reversed(range(len(others))), others, strict=True):
        target = torch.empty(out.shape, dtype=torch.float32 if left else dtype, device=out.device)
        target_lse = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        merge_into(merged, merged_lse, out, lse, target, target_lse)
        merged, merged_lse = target, target_lse
    return merged, merged_lse


def merge_into(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Does the same as `merge_state`, without checks or new memory; out and lse may be those of one of the sides."""
    ops = (TRITON if out.is_cuda else TORCH).ops()
    with on_device(out.device):
        ops.merge_states(out_a, lse_a, out_b, lse_b, out, lse)


def _check(sides: Sequence[tuple[Tensor, Tensor]]) -> None:
    require_kind("sides", sides, Sequence, BadTensor)
    if not sides:
        raise BadTensor("there is no side to merge; give at least one")
    for place, side in enumerate(sides):
        if not isinstance(side, tuple | list) or [isinstance(each, Tensor) for each in side] != [True, True]:
            raise BadTensor(f"side {place} is of type {type(side).__name__}; give a pair of tensors, (out, lse)")
    shape, device = sides[0][0].shape, sides[0][0].device
    for place, (out, lse) in enumerate(sides):
        if out.dim() != 3 or out.shape != shape:
            raise BadTensor(
                f"out of side {place} has shape {list(out.shape)} and side 0 {list(shape)}; all must be [tokens, "
                "heads, dim] of equal sizes"
            )
        if not out.is_floating_point() or (out.shape[2] > 1 and out.stride(2) != 1):
            raise BadTensor(
                f"out of side {place} is {out.dtype} with stride {out.stride(2)} in its last dimension; "
                "it must be floating point and contiguous there"
            )
        if lse.shape != shape[:2] or lse.dtype != torch.float32:
            raise BadTensor(
                f"lse of side {place} is {lse.dtype} of shape {list(lse.shape)}; "
                f"it must be torch.float32 {list(shape[:2])}"
            )
        if out.device != device or lse.device != device:
            raise BadTensor(f"side {place} is on {out.device} and {lse.device}, side 0 on {device}; use one device")
