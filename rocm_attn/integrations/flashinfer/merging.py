"""Merging attention over parts of the keys. Names and arguments are FlashInfer's.

A state is an output [tokens, heads, dim] and its log-sum-exp [tokens, heads], to base 2.
"""

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.integrations.flashinfer.page import step_ops
from rocm_attn.integrations.flashinfer.planned import LOG2_E
from rocm_attn.machine.devices import on_device, with_index

_LN_2 = 1.0 / LOG2_E


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the attention over the keys of both sides; the output has the dtype of v_a.

    v_a, v_b: [tokens, heads, dim]; s_a, s_b: [tokens, heads], to base 2
    Raises BadTensor.
    """
    out, lse = torch.empty_like(v_a, memory_format=torch.contiguous_format), s_a.to(torch.float32, copy=True)
    _check(v_a, lse)
    _merge((v_a, lse.mul_(_LN_2)), (v_b, s_b.to(torch.float32) * _LN_2), (out, lse))
    return out, lse.mul_(LOG2_E)


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merges v_other and s_other into v and s, like merge_state.

    s:    float32 [tokens, heads]
    mask: [tokens], not 0 where a token takes the other side; None: all do
    Raises BadTensor.
    """
    _check(v, s)
    if s.dtype != torch.float32:
        raise BadTensor(f"s is {s.dtype}; it is written, so it must be torch.float32")
    if v.stride(-1) != 1:
        raise BadTensor(f"v has strides {list(v.stride())}; it is written, so its last stride must be 1")
    if mask is not None and mask.shape != s.shape[:1]:
        raise BadTensor(f"mask is {list(mask.shape)}; it must have one entry for each of {s.shape[0]} tokens")
    merged, lse = v if mask is None else torch.empty_like(v, memory_format=torch.contiguous_format), s * _LN_2
    _merge((v, lse), (v_other, s_other.to(torch.float32) * _LN_2), (merged, lse))
    lse.mul_(LOG2_E)
    if mask is None:
        s.copy_(lse)
    else:
        takes = (mask != 0)[:, None]
        s.copy_(torch.where(takes, lse, s))
        v.copy_(torch.where(takes[:, None], merged, v))


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the attention over the keys of all sides.

    v: [tokens, sides, heads, dim]; s: [tokens, sides, heads], to base 2
    Raises BadTensor.
    """
    if v.dim() != 4 or s.shape != v.shape[:3] or v.shape[1] == 0:
        raise BadTensor(
            f"v is {list(v.shape)} and s {list(s.shape)}; they must be [tokens, sides, heads, dim] and [tokens, "
            "sides, heads]"
        )
    natural = s.to(torch.float32) * _LN_2
    lse = natural[:, 0].clone()
    # Partial results are float32, so that a merge of many sides is rounded once.
    out = v[:, 0].to(torch.float32, copy=True).contiguous()
    sides = [(v[:, side], natural[:, side]) for side in range(1, v.shape[1])]
    for side in sides or [(v[:, 0], torch.full_like(lse, float("-inf")))]:
        _merge((out, lse), side, (out, lse))
    return out.to(v.dtype), lse.mul_(LOG2_E)


def _merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor]) -> None:
    if a[0].shape != b[0].shape or a[1].shape != b[1].shape:
        raise BadTensor(
            f"the sides are {list(a[0].shape)} and {list(b[0].shape)}; they must have the same tokens and heads"
        )
    device = with_index(a[0].device)
    a, b = ((out if out.stride(-1) == 1 else out.contiguous(), lse) for out, lse in (a, b))
    with on_device(device):
        step_ops(device).merge_states(*a, *b, *into)


def _check(v: Tensor, s: Tensor) -> None:
    if v.dim() != 3 or s.shape != v.shape[:2]:
        raise BadTensor(
            f"v is {list(v.shape)} and s {list(s.shape)}; they must be [tokens, heads, dim] and [tokens, heads]"
        )
