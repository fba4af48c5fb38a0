"""What the stand-in's functions share. They refuse what the real ones refuse or misread, compute in float64, and leave
memory as the real ones leave it.

A call is checked twice: shapes, dtypes and strides when it is made, values when it runs, which may be in a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rocm_attn.kernels.launch import launch
from rocm_attn.problem import Problem
from rocm_attn.reference import attend_sequence

HALF = (torch.bfloat16, torch.float16)


class ContractBroken(AssertionError):
    """A call that the real function would refuse, misread or answer wrongly."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise ContractBroken(what)


def require_tensor(
    name: str, tensor: object, dtype: torch.dtype, shape: Sequence[int | None], *, contiguous: bool = True
) -> Tensor:
    """tensor, if it has the dtype, the shape (None: any size) and, if demanded, no gaps."""
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
    """function(*args, **options), as device work."""
    launch(_OnHost(function), (1,), *args, **options)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of one sequence: out and lse, float64; NaN where q is, as in every real kernel."""
    problem = Problem(q.shape[1], k.shape[1], q.shape[2], v.shape[2], torch.float32, 1, scale)
    out, lse = attend_sequence(q, k, v, problem)
    poisoned = q.isnan().any(-1)
    return out.masked_fill(poisoned[..., None], float("nan")), lse.masked_fill(poisoned, float("nan"))


def spans(indptr: Tensor, limit: int, name: str) -> list[tuple[int, int]]:
    """The ranges of an indptr, checked: it starts at 0, never decreases and stays within limit."""
    ends = indptr.tolist()
    require(ends[0] == 0, f"{name} starts at {ends[0]}")
    require(all(a <= b for a, b in pairwise(ends)), f"{name} decreases: {ends}")
    require(ends[-1] <= limit, f"{name} ends at {ends[-1]}, past {limit}")
    return list(pairwise(ends))


def rows_of(pages: Tensor, ids: Tensor, name: str) -> Tensor:
    """The tokens of these pages, [n * page_size, heads, dim], of pages that exist."""
    require(bool(((ids >= 0) & (ids < len(pages))).all()), f"{name} names pages {ids.tolist()} of {len(pages)}")
    return pages[ids.long()].flatten(0, 1)


def times_zero(v: Tensor) -> Tensor:
    """What keys that are masked add to each query head: 0 where V is finite, NaN where it is not."""
    return (0 * v.double()).sum()
