"""Turns and normalises rows in kernels.

The elements at one end of a row turn in pairs (a, b) by the angle that the table has for the token:

    a' = a cos - b sin        b' = b cos + a sin

A norm takes the first n elements x of a row to x / sqrt(mean(x^2) + eps) * (offset + weight), before any turn.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.cache.row_work import RopePairs, RopeTable, RowNorm
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Lanes of AMD's waves; NVIDIA's warps have half as many.
_WAVE = 64


class RowGeometry(NamedTuple):
    """The values that a kernel which carries rows is compiled for.

    DIM:            elements of a row
    PAIRS:          pairs that turn; PAIR_COLUMNS: with padding, or 0; PAIR_FIRST: the first element that turns
    NEIGHBOURS:     whether a pair's elements are adjacent
    REST:           elements that do not turn; REST_COLUMNS: with padding, or 0; REST_FIRST: the first of them
    NORM_DIM:       elements that are normalised, the first of the row; 0: none
    EPS, OFFSET:    of the norm
    """

    DIM: int
    PAIRS: int
    PAIR_COLUMNS: int
    PAIR_FIRST: int
    NEIGHBOURS: bool
    REST: int
    REST_COLUMNS: int
    REST_FIRST: int
    NORM_DIM: int
    EPS: float
    OFFSET: float

    @classmethod
    def of(cls, dim: int, rope: RopeTable | None, norm: RowNorm | None) -> RowGeometry:
        """The geometry of rows that turn, or not, and that are normalised, or not."""
        turned = 0 if rope is None else rope.dim
        at_end = rope is not None and rope.at_end
        rest = dim - turned
        return cls(
            DIM=dim,
            PAIRS=turned // 2,
            PAIR_COLUMNS=_columns(turned // 2),
            PAIR_FIRST=rest if at_end else 0,
            NEIGHBOURS=rope is not None and rope.pairs is RopePairs.NEIGHBOURS,
            REST=rest,
            REST_COLUMNS=_columns(rest),
            REST_FIRST=0 if at_end else turned,
            NORM_DIM=0 if norm is None else norm.dim,
            EPS=0.0 if norm is None else norm.eps,
            OFFSET=0.0 if norm is None else norm.offset,
        )

    @property
    def columns(self) -> int:
        """Elements that a program holds of a row, padding included."""
        return 2 * self.PAIR_COLUMNS + self.REST_COLUMNS


def _columns(elements: int) -> int:
    return next_power_of_2(elements) if elements else 0


def warps_in_place(heads_block: int, *parts: int) -> int:
    """Warps of a program that writes rows where it has read them; parts: columns of the blocks that it holds, or 0.

    There are several only if each element has a lane of its own: if two warps held the same element, one would read
    the other's results.
    """
    return 4 if heads_block * min(part for part in parts if part) >= 4 * _WAVE else 1


@triton.jit
def places_of_pairs(R: tl.constexpr):
    """Number of each pair, and the places of its two elements in a row; all [1, PAIR_COLUMNS]."""
    pair = tl.arange(0, R.PAIR_COLUMNS)[None, :]
    if R.NEIGHBOURS:
        near = R.PAIR_FIRST + 2 * pair
        far = near + 1
    else:
        near = R.PAIR_FIRST + pair
        far = near + R.PAIRS
    return pair, near, far


@triton.jit
def angles_at(cos_sin, position, num_positions, R: tl.constexpr):
    """Cosines and sines of a position, float32 [1, PAIR_COLUMNS]; NaN if the table has no such position."""
    pair = tl.arange(0, R.PAIR_COLUMNS)[None, :]
    in_table = (position >= 0) & (position < num_positions)
    line = cos_sin + position.to(tl.int64) * (2 * R.PAIRS) + pair
    is_angle = pair < tl.where(in_table, R.PAIRS, 0)
    cos = tl.load(line, mask=is_angle, other=0.0).to(tl.float32)
    sin = tl.load(line + R.PAIRS, mask=is_angle, other=0.0).to(tl.float32)
    return tl.where(in_table, cos, float("nan")), tl.where(in_table, sin, float("nan"))


@triton.jit
def turned(near, far, cos, sin):
    """Turns pairs (near, far)."""
    return near * cos - far * sin, far * cos + near * sin
