"""Checks and arithmetic shared by the stand-in's functions. They refuse calls that the real functions refuse or
misread, compute in float64, and leave memory as the real functions leave it.

A call is checked twice: shapes, dtypes and strides when it is made, values when it runs, which may be in a replay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rocm_attn.kernels.launch import launch
from tests.amd.vectorised import linear_keys, linear_values

HALF = (torch.bfloat16, torch.float16)

# The dtype that `dtypes.fp8` names on each arch.
EIGHT_BITS = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


class ContractBroken(BaseException):
    """A call that the real function would refuse, misread or answer wrongly; the probe lets it through."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise ContractBroken(what)


def require_tensor(
    name: str, tensor: object, dtype: torch.dtype, shape: Sequence[int | None], *, contiguous: bool = True
) -> Tensor:
    """Returns `tensor` after checking its dtype, its shape (None: any size) and, if demanded, that it has no gaps."""
    require(isinstance(tensor, Tensor), f"{name} is {type(tensor).__name__}, not a tensor")
    assert isinstance(tensor, Tensor)
    require(tensor.dtype == dtype, f"{name} is {tensor.dtype} and would be read as {dtype}")
    same = tensor.dim() == len(shape) and all(w is None or w == s for w, s in zip(shape, tensor.shape, strict=True))
    require(same, f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
    require(tensor.is_contiguous() if contiguous else tensor.stride(-1) == 1, f"{name} has strides {tensor.stride()}")
    return tensor


class _OnHost:
    """Lets `launch` run a host function as it runs a kernel, so that a recorder sees one launch."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run

    def _run(self, *args: Any, enable_fp_fusion: bool, **options: Any) -> None:
        self._function(*args, **options)


def run(function: Callable[..., None], *args: Any, **options: Any) -> None:
    """Runs `function(*args, **options)` as device work."""
    launch(_OnHost(function), (1,), *args, **options)


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores that a function computes from the products q.k of one sequence. Fields are named like its arguments.

    visible:  bool [q_len, kv_len]
    soft_cap: 0 for none; applied to scaled products
    bias:     [q_heads, q_len, kv_len], added after the cap, or None
    sinks:    [q_heads], one more logit of each softmax, or None
    caps_bias: true if the cap is applied to the sum of product and bias instead
    floored:  bool [q_len], queries whose running maximum is at least 0, or None
    """

    scale: float
    visible: Tensor
    soft_cap: float = 0.0
    bias: Tensor | None = None
    sinks: Tensor | None = None
    caps_bias: bool = False
    floored: Tensor | None = None


def distances(q_len: int, kv_len: int) -> Tensor:
    """Returns the distance [q_len, kv_len] from each key to each query; negative for keys after the query."""
    return torch.arange(kv_len - q_len, kv_len)[:, None] - torch.arange(kv_len)[None, :]


def require_heads(name: str, tensor: object, num_heads: int) -> None:
    """Checks that `tensor` is None, or float32 with one number per query head."""
    if tensor is not None:
        require_tensor(name, tensor, torch.float32, (num_heads,))


# Number of queries computed at a time: all pairs of a prompt of 4,096 tokens would take 2 GB.
_QUERIES = 512


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """Returns out and lse of the attention of one sequence, float64. They are NaN where q is, as in real kernels."""
    parts = [_attend_some(q, k, v, scores, slice(at, at + _QUERIES)) for at in range(0, len(q), _QUERIES)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _attend_some(q: Tensor, k: Tensor, v: Tensor, scores: Scores, some: slice) -> tuple[Tensor, Tensor]:
    q, visible = q[some], scores.visible[some]
    bias = None if scores.bias is None else scores.bias.expand(-1, len(scores.visible), -1)[:, some]
    kv_heads, ratio = k.shape[1], q.shape[1] // k.shape[1]
    rows = q.double().reshape(len(q), kv_heads, ratio, q.shape[2])
    logits = torch.einsum("qhrd,khd->hrqk", rows, k.double()).flatten(0, 1) * scores.scale
    if bias is not None and scores.caps_bias:
        logits = logits + bias
    if scores.soft_cap:
        logits = scores.soft_cap * torch.tanh(logits / scores.soft_cap)
    if bias is not None and not scores.caps_bias:
        logits = logits + bias
    logits = logits.masked_fill(~visible, float("-inf"))
    terms = logits
    if scores.sinks is not None:
        terms = torch.cat([logits, scores.sinks.double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    lse = terms.logsumexp(-1)
    shares = (logits - lse[..., None]).exp()
    if scores.floored is not None:
        shares = torch.where(scores.floored[some, None], _beside_zero(logits, terms), shares)
    out = torch.einsum("hrqk,khd->qhrd", shares.view(kv_heads, ratio, *shares.shape[1:]), v.double())
    return out.flatten(1, 2), lse.t()


def _beside_zero(logits: Tensor, terms: Tensor) -> Tensor:
    """Returns float32 shares for a maximum that is at least 0. Shares of logits below -87 vanish, and 0 / 0 is NaN."""
    top = terms.amax(-1, keepdim=True).clamp(min=0.0)
    smallest = torch.finfo(torch.float32).tiny
    weights, all_weights = ((each - top).float().exp() for each in (logits, terms))
    weights, all_weights = (each.where(each >= smallest, 0.0) for each in (weights, all_weights))
    return (weights / all_weights.sum(-1, keepdim=True)).double()


def spans(indptr: Tensor, limit: int, name: str) -> list[tuple[int, int]]:
    """Returns the ranges of an indptr after checking that it starts at 0, never decreases and stays within `limit`."""
    ends = indptr.tolist()
    require(ends[0] == 0, f"{name} starts at {ends[0]}")
    require(all(a <= b for a, b in pairwise(ends)), f"{name} decreases: {ends}")
    require(ends[-1] <= limit, f"{name} ends at {ends[-1]}, past {limit}")
    return list(pairwise(ends))


def rows_of(pages: Tensor, ids: Tensor, name: str) -> Tensor:
    """Returns the tokens of these pages, [n * page_size, heads, dim], after checking that the pages exist."""
    require(bool(((ids >= 0) & (ids < len(pages))).all()), f"{name} names pages {ids.tolist()} of {len(pages)}")
    return pages[ids.long()].flatten(0, 1)


def require_scales(cache: Tensor, like: torch.dtype, eight_bits: torch.dtype, **scale_values: object) -> None:
    """Checks that a cache in `like` has no scales, and that one in the arch's 8-bit dtype has float32 [1] for each."""
    if cache.dtype == like:
        require(all(each is None for each in scale_values.values()), "nothing is quantised")
        return
    require(cache.dtype == eight_bits, f"codes of {cache.dtype} would be read as {eight_bits}")
    for name, each in scale_values.items():
        require_tensor(name, each, torch.float32, (1,))


def worth(rows: Tensor, scale_value: Tensor | None) -> Tensor:
    """Returns the float64 values that the elements of a cache represent."""
    return rows.double() if scale_value is None else rows.double() * scale_value.double()


def require_vectorised(k_cache: object, v_cache: object, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Checks and returns K [blocks, kv_heads, dim / x, block, x], V [blocks, kv_heads, block / x, dim, x]: no gaps."""
    x = 16 // dtype.itemsize
    k = require_tensor("K", k_cache, dtype, (None, None, None, None, x))
    blocks, heads, _, block, _ = k.shape
    require(block % x == 0, f"blocks of {block} tokens are not cut into vectors of {x}")
    return k, require_tensor("V", v_cache, dtype, (blocks, heads, block // x, None, x))


def linear(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a vectorised cache as [blocks, block, kv_heads, dim], and a linear one unchanged."""
    return (linear_keys(k_cache), linear_values(v_cache)) if k_cache.dim() == 5 else (k_cache, v_cache)


def times_zero(v: Tensor) -> Tensor:
    """Returns the value that masked keys add to each query head: 0 if V is finite, NaN otherwise."""
    return (0 * v.double()).sum()
