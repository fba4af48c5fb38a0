"""What the compiler and llvm-mca say of the hot loop of an attention kernel; cost.py predicts times from it."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_attn.kernels.tuning.tiles import DecodeTiles, ExtendTiles


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Of decode over heads of one dim, in these tiles.

    programs:  that a CU has room for
    own:       cycles of 4 clocks that an iteration takes a wave, were loads immediate
    latencies: of loads, one after another, that come on top
    clocks:    of a CU that its busiest unit takes for a token of a KV head
    """

    arch: str
    head_dim: int
    tiles: DecodeTiles
    programs: int
    own: float
    latencies: float
    clocks: float


@dataclass(frozen=True, slots=True)
class ExtendFigures:
    """Of extend over heads of one dim, in these tiles: cycles of the matrix and of the vector unit in an iteration."""

    arch: str
    head_dim: int
    tiles: ExtendTiles
    matrix: float
    vector: float
