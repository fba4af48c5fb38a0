"""Rotary embeddings of q and k outside of attention. Names and arguments are FlashInfer's.

All functions turn the first rotary_dim elements of each head, by the launch that a step uses. A position that a table
does not have gives NaN.

q, k:       [tokens, heads, head_dim], float32, float16 or bfloat16
pos_ids:    int [tokens], positions; indptr: int [S + 1], the first token of each sequence; offsets: int [S], the
            position of that token. Tokens after indptr[S] stay as they are
interleave: pairs are neighbours, else an element of the first half and one of the second
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rocm_attn.errors import BadTensor
from rocm_attn.integrations.flashinfer.page import get_batch_indices_positions, step_ops
from rocm_attn.integrations.flashinfer.signatures import Given, as_in_flashinfer
from rocm_attn.kernels.cache.row_work import QkvWork, RopePairs, RopeTable
from rocm_attn.machine.devices import on_device, with_index
from rocm_attn.problem import DTYPES


@dataclass(frozen=True, slots=True)
class _Frequencies:
    """The angle of pair i at position p is p * f, with f = theta^(-2 i / rotary_dim), and f / scale for long waves.

    slope, start: f is kept to the part slope * f + start, clamped to 0 and 1, and divided for the rest
    """

    scale: float
    theta: float
    slope: float = 0.0
    start: float = 0.0

    @classmethod
    def llama31(cls, scale: float, theta: float, low: float, high: float, old_context_len: int) -> _Frequencies:
        """Returns those of Llama 3.1: waves longer than old_context_len / low are divided, shorter than / high kept."""
        return cls(scale, theta, old_context_len / (2 * math.pi * (high - low)), -low / (high - low))

    def table(self, positions: Tensor, rotary_dim: int) -> Tensor:
        """Returns a line for each token, float32 [tokens, rotary_dim]: cosines, then sines. Angles are in float64."""
        pair = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions.device)
        f = self.theta ** (-pair / rotary_dim)
        kept = (f * self.slope + self.start).clamp(0, 1)
        angle = positions.double()[:, None] * ((1 - kept) * f / self.scale + kept * f)
        return torch.cat((angle.cos(), angle.sin()), 1).float()


def _check(positions: Tensor, rotary_dim: int) -> None:
    if positions.dim() != 1 or positions.is_floating_point():
        raise BadTensor(
            f"positions are {positions.dtype} {list(positions.shape)}; they must be integers of one dimension"
        )
    if rotary_dim < 2 or rotary_dim % 2:
        raise BadTensor(f"rotary_dim is {rotary_dim}; it must be even, and at least 2")


def _turn(q: Tensor, k: Tensor, lines: Tensor, cos_sin: Tensor, *, interleave: bool) -> None:
    """Turns q and k in place. lines: int [tokens], of cos_sin, float32 [lines, rotary_dim]. Raises BadTensor."""
    for name, x in {"q": q, "k": k}.items():
        if x.dim() != 3 or len(x) != len(lines) or x.dtype not in DTYPES or x.stride(-1) != 1:
            raise BadTensor(
                f"{name} is {x.dtype} {list(x.shape)} with strides {list(x.stride())}; it must be [tokens, heads, "
                f"head_dim] in {', '.join(map(str, DTYPES))}, with the {len(lines)} tokens of the positions and a last "
                "stride of 1"
            )
        if cos_sin.shape[1] > x.shape[2]:
            raise BadTensor(f"rotary_dim is {cos_sin.shape[1]}, and {name} has heads of {x.shape[2]} elements")
    device = with_index(q.device)
    pairs = RopePairs.NEIGHBOURS if interleave else RopePairs.HALVES
    work = QkvWork(RopeTable(cos_sin.contiguous(), pairs))
    at = lines.clamp(-1, len(cos_sin)).to(torch.int32)  # wide positions that no line has must not wrap to one that has
    with on_device(device):
        for x in (q, k):
            if x.numel():
                step_ops(device).rope_queries(x, x, at, work)


def _turn_by(q: Tensor, given: Given, by: _Frequencies) -> None:
    rotary_dim = q.shape[-1] if given.rotary_dim is None else given.rotary_dim
    _check(given.pos_ids, rotary_dim)
    lines = torch.arange(len(given.pos_ids), device=given.pos_ids.device)
    _turn(q, given.k, lines, by.table(given.pos_ids, rotary_dim), interleave=given.interleave)


def _at_positions(q: Tensor, given: Given) -> dict[str, Any]:
    """Returns the arguments with the position of each token in place of indptr and offsets. Raises BadTensor.

    Tokens of no sequence are at 0, which turns by nothing.
    """
    values = vars(given)
    indptr, offsets = values.pop("indptr"), values.pop("offsets")
    if indptr.dim() != 1 or offsets.shape != (len(indptr) - 1,):
        raise BadTensor(f"indptr is {list(indptr.shape)} and offsets {list(offsets.shape)}; give [S + 1] and [S]")
    return values | {"pos_ids": get_batch_indices_positions(indptr, offsets + indptr.diff(), len(q))[1]}


def _copying(in_place: Callable[..., None]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns a function with the same arguments that turns copies of q and k, and returns them."""

    @functools.wraps(in_place)
    def copying(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        q, k = q.clone(), k.clone()
        in_place(q, k, *args, **kwargs)
        return q, k

    return copying


@as_in_flashinfer
def apply_rope_pos_ids_inplace(q: Tensor, given: Given) -> None:
    """Turns q and k in place by their positions divided by rope_scale. Raises BadTensor."""
    _turn_by(q, given, _Frequencies(given.rope_scale, given.rope_theta))


@as_in_flashinfer
def apply_rope_inplace(q: Tensor, given: Given) -> None:
    """Turns q and k of sequences in place, each from its offset on. Raises BadTensor."""
    apply_rope_pos_ids_inplace(q, **_at_positions(q, given))


@as_in_flashinfer
def apply_llama31_rope_pos_ids_inplace(q: Tensor, given: Given) -> None:
    """Turns q and k in place by their positions, with the frequencies of Llama 3.1. Raises BadTensor."""
    factors = given.low_freq_factor, given.high_freq_factor, given.old_context_len
    _turn_by(q, given, _Frequencies.llama31(given.rope_scale, given.rope_theta, *factors))


@as_in_flashinfer
def apply_llama31_rope_inplace(q: Tensor, given: Given) -> None:
    """Turns q and k of sequences in place, with the frequencies of Llama 3.1. Raises BadTensor."""
    apply_llama31_rope_pos_ids_inplace(q, **_at_positions(q, given))


def apply_rope_with_cos_sin_cache_inplace(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """Turns query and key in place by a table, as vLLM and SGLang keep it. Raises BadTensor.

    query, key:    [tokens, heads * head_size], or [tokens, heads, head_size]
    cos_sin_cache: float32 [positions, rotary_dim], cosines, then sines; is_neox: not interleave
    """
    if cos_sin_cache.dtype != torch.float32 or cos_sin_cache.dim() != 2:
        raise BadTensor(
            f"cos_sin_cache is {cos_sin_cache.dtype} {list(cos_sin_cache.shape)}; it must be torch.float32 [positions, "
            "rotary_dim]"
        )
    for name, x in {"query": query, "key": key}.items():
        if x.dim() not in (2, 3) or head_size < 1 or x.shape[-1] % head_size:
            raise BadTensor(f"{name} is {list(x.shape)}; it must be [tokens, heads * head_size], head_size {head_size}")
    q, k = (torch.unflatten(x, 1, (-1, head_size)) if x.dim() == 2 else x for x in (query, key))
    _check(positions, cos_sin_cache.shape[1])
    _turn(q, k, positions, cos_sin_cache, interleave=not is_neox)


# Those that return turned copies of q and k and leave the arguments alone.
apply_rope = _copying(apply_rope_inplace)
apply_rope_pos_ids = _copying(apply_rope_pos_ids_inplace)
apply_llama31_rope = _copying(apply_llama31_rope_inplace)
apply_llama31_rope_pos_ids = _copying(apply_llama31_rope_pos_ids_inplace)


def apply_rope_with_cos_sin_cache(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns query and key turned as by apply_rope_with_cos_sin_cache_inplace. Raises BadTensor."""
    query, key = query.clone(), key.clone()
    apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox)
    return query, key
