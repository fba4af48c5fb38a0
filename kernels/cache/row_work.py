"""Rotary embedding and RMS norms of q, k and v around attention, as plain values that need no Triton."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class RopePairs(enum.Enum):
    """The pairs of elements that a rotary embedding rotates, among the n rotated elements of a row.

    HALVES:     j and j + n / 2, for j < n / 2 (GPT-NeoX, and rotate_half of Hugging Face)
    NEIGHBOURS: 2j and 2j + 1 (GPT-J; interleaved)
    """

    HALVES = "an element of the first half and one of the second"
    NEIGHBOURS = "two neighbours"


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """Cosines and sines of a rotary embedding at each position. Captured graphs read the table at its address.

    cos_sin: [positions, n], float32, float16 or bfloat16, contiguous: for each position n / 2 cosines, then n / 2
             sines. n is the rotary dim. It needs every position of a step, up to the length of the longest sequence
    pairs:   which elements make a pair
    at_end:  whether the last n elements of a row are rotated, instead of the first n
    Raises ValueError if the table has another shape, strides or dtype, or the other fields are of another type.
    """

    cos_sin: Tensor
    pairs: RopePairs = RopePairs.HALVES
    at_end: bool = False

    def __post_init__(self) -> None:
        table = self.cos_sin
        _require_tensor("cos_sin", table)
        if not isinstance(self.pairs, RopePairs) or not isinstance(self.at_end, bool):
            raise ValueError(
                f"pairs is {self.pairs!r} and at_end is {self.at_end!r}; they must be a RopePairs, and True or False"
            )
        if table.dim() != 2 or table.shape[1] < 2 or table.shape[1] % 2 or not table.is_contiguous():
            raise ValueError(
                f"cos_sin has shape {list(table.shape)} and strides {list(table.stride())}; it must be contiguous, "
                "[positions, rotated elements], with an even number of elements"
            )
        if table.dtype not in _FLOATS:
            raise ValueError(f"cos_sin is {table.dtype}; it must be one of {', '.join(map(str, _FLOATS))}")

    @property
    def dim(self) -> int:
        """The rotary dim: elements of a row that are rotated."""
        return self.cos_sin.shape[1]

    @property
    def num_positions(self) -> int:
        """The table has positions 0 to num_positions - 1."""
        return self.cos_sin.shape[0]

    @classmethod
    def of_frequencies(
        cls,
        inv_freq: Tensor,
        num_positions: int,
        *,
        factor: float = 1.0,
        pairs: RopePairs = RopePairs.HALVES,
        at_end: bool = False,
    ) -> RopeTable:
        """Makes a float32 table: pair j is rotated by position * inv_freq[j], in float32, like models in training.

        inv_freq: float32 [n / 2], radians per position; 0 for a pair that is not rotated
        factor:   factor on cosines and sines (YaRN's attention factor)
        Raises ValueError if inv_freq has another shape or dtype, if num_positions is no whole number of at least 0, or
        if factor is no finite number.
        """
        _require_tensor("inv_freq", inv_freq)
        if inv_freq.dim() != 1 or inv_freq.dtype != torch.float32:
            raise ValueError(f"inv_freq is {inv_freq.dtype} {list(inv_freq.shape)}; it must be torch.float32 [pairs]")
        if not isinstance(num_positions, Integral) or num_positions < 0:
            raise ValueError(f"num_positions is {num_positions!r}; it must be a whole number of at least 0")
        if not _is_finite(factor):
            raise ValueError(f"factor is {factor!r}; it must be a finite number")
        angle = torch.arange(num_positions, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq
        return cls(torch.cat((angle.cos(), angle.sin()), 1) * factor, pairs, at_end)


def _require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}; give a tensor on the device")


def _is_finite(number: Any) -> bool:
    return isinstance(number, Real) and math.isfinite(number)


@dataclass(frozen=True, slots=True, eq=False)
class RowNorm:
    """An RMS norm of rows: x / sqrt(mean(x^2) + eps) * (offset + weight), in float32, rounded once after the rope.

    weight: [n], float32, float16 or bfloat16, contiguous; the first n elements of a row are normalised. Ones for a norm
            without weights
    offset: 1.0 if the stored weights are differences from one (Gemma 2 and 3)
    Raises ValueError if the weight has another shape, strides or dtype, or if eps or offset is no finite number, or eps
    is negative.
    """

    weight: Tensor
    eps: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        weight = self.weight
        _require_tensor("a norm's weight", weight)
        if weight.dim() != 1 or weight.dtype not in _FLOATS or not weight.is_contiguous():
            raise ValueError(
                f"a norm's weight is {weight.dtype} {list(weight.shape)}; it must be contiguous, [elements], and "
                f"one of {', '.join(map(str, _FLOATS))}"
            )
        if not _is_finite(self.eps) or self.eps < 0:
            raise ValueError(f"a norm's eps is {self.eps!r}; it must be a finite number of at least 0")
        if not _is_finite(self.offset):
            raise ValueError(f"a norm's offset is {self.offset!r}; it must be a finite number")

    @property
    def dim(self) -> int:
        """The first elements of a row, which are normalised."""
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class QkvWork:
    """Work on q, k and v before attention: RMS norms, then the rotary embedding of q and k. None leaves one out."""

    rope: RopeTable | None = None
    q_norm: RowNorm | None = None
    k_norm: RowNorm | None = None
    v_norm: RowNorm | None = None


class Projected(NamedTuple):
    """The results of a layer's projections for T tokens; any strides but the last.

    q, q_out: [T, q_heads, head_dim]; q_out is written, and may be q. In a latent layer, whose q gets its first part
              elsewhere, [T, q_heads, rotary dim] is enough
    k, v:     [T, kv_heads, head_dim | v_head_dim]; of a latent layer v is the first part of k
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_out: Tensor


class TokenPlaces(NamedTuple):
    """The places of a step's T tokens.

    positions:     int32 [T], lines of the table
    slot_of_token: int32 [T]
    counts:        int32 [4]; [1] is num_tokens, [3] receives an error bit if a token was not finite
    """

    positions: Tensor
    slot_of_token: Tensor
    counts: Tensor
