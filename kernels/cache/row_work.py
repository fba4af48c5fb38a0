"""The work of a layer on its rows around attention, as values without Triton: a rotary embedding and norms."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class RopePairs(enum.Enum):
    """The elements that make a pair, of the n that turn.

    HALVES:     j and j + n / 2, for j < n / 2 (GPT-NeoX, and rotate_half of Hugging Face)
    NEIGHBOURS: 2j and 2j + 1 (GPT-J; interleaved)
    """

    HALVES = "an element of the first half and one of the second"
    NEIGHBOURS = "two neighbours"


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """The turn of a row's pairs at each position. Graphs read the table at its address.

    cos_sin: [positions, n], float32, float16 or bfloat16, contiguous: for each position n / 2 cosines, then n / 2
             sines. n elements of a row turn; positions are those of the step, up to the length of its longest sequence
    pairs:   which elements make a pair
    at_end:  whether the last n elements of a row turn, and not the first
    Raises ValueError if the table has another shape, strides or dtype.
    """

    cos_sin: Tensor
    pairs: RopePairs = RopePairs.HALVES
    at_end: bool = False

    def __post_init__(self) -> None:
        table = self.cos_sin
        if table.dim() != 2 or table.shape[1] < 2 or table.shape[1] % 2 or not table.is_contiguous():
            raise ValueError(
                f"cos_sin has shape {list(table.shape)} and strides {list(table.stride())}; it must be contiguous, "
                "[positions, rotated elements], with an even number of elements"
            )
        if table.dtype not in _FLOATS:
            raise ValueError(f"cos_sin is {table.dtype}; it must be one of {', '.join(map(str, _FLOATS))}")

    @property
    def dim(self) -> int:
        """Elements of a row that turn."""
        return self.cos_sin.shape[1]

    @property
    def num_positions(self) -> int:
        """Positions 0 to num_positions - 1 have a line."""
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
        """A float32 table: pair j turns by position * inv_freq[j], rounded to float32 as models are trained.

        inv_freq: float32 [n / 2], radians per position; 0 for a pair that does not turn
        factor:   on cosines and sines (YaRN's attention factor)
        """
        if inv_freq.dim() != 1 or inv_freq.dtype != torch.float32:
            raise ValueError(f"inv_freq is {inv_freq.dtype} {list(inv_freq.shape)}; it must be torch.float32 [pairs]")
        angle = torch.arange(num_positions, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq
        return cls(torch.cat((angle.cos(), angle.sin()), 1) * factor, pairs, at_end)


@dataclass(frozen=True, slots=True, eq=False)
class RowNorm:
    """An RMS norm of rows: x / sqrt(mean(x^2) + eps) * (offset + weight), in float32, rounded once with later work.

    weight: [n], float32, float16 or bfloat16, contiguous; the first n elements of a row are normalised. Ones for a norm
            without weights
    offset: 1.0 if stored weights are differences from one (Gemma 2 and 3)
    Raises ValueError if the weight has another shape, strides or dtype, or if eps is negative.
    """

    weight: Tensor
    eps: float
    offset: float = 0.0

    def __post_init__(self) -> None:
        weight = self.weight
        if weight.dim() != 1 or weight.dtype not in _FLOATS or not weight.is_contiguous():
            raise ValueError(
                f"a norm's weight is {weight.dtype} {list(weight.shape)}; it must be contiguous, [elements], and "
                f"one of {', '.join(map(str, _FLOATS))}"
            )
        if not self.eps >= 0:
            raise ValueError(f"a norm's eps is {self.eps}; it must be at least 0")

    @property
    def dim(self) -> int:
        """Elements of a row that are normalised, its first."""
        return self.weight.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class QkvWork:
    """The work of a layer on q, k and v before attention: norms, then the turn of q and k. None leaves a step out."""

    rope: RopeTable | None = None
    q_norm: RowNorm | None = None
    k_norm: RowNorm | None = None
    v_norm: RowNorm | None = None


class Projected(NamedTuple):
    """The results of a layer's projections for T tokens; any strides but the last.

    q, q_out: [T, q_heads, head_dim]; q_out is written, and may be q. In a latent layer, whose q gets its first part
              elsewhere, [T, q_heads, elements that turn] is enough
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
