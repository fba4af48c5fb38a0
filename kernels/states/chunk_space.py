"""The workspace between the two kernels of a recurrence in chunks: a row for each token and v head, and chunks' decays.

A row has w, read and write [dk each], u [dv] and a chunk's products [CHUNK], as chunk_rows.py calls them, of the dtype
of tokens. The float32 decays of chunks follow after all rows; a chunk has the number of its place (token_tiles.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import Recurrence, RecurrentSlots, StatePlaces
from rocm_attn.kernels.states.token_tiles import num_tiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_CHUNK = tl.constexpr(arguments.CHUNK)
# Rows and columns of a product are no fewer.
_LEAST_BLOCK = 16


class ChunkGeometry(NamedTuple):
    """The values that both kernels are compiled for.

    HEADS:              v heads
    RATIO:              of them for each k head
    DK, DV:             of a state
    DK_BLOCK, DV_BLOCK: the same or the next powers of two
    CHANNELS:           whether each channel decays by itself
    DELTA, SCALE, NORMALISES: the recurrence
    DTYPE:              Triton's name of the tokens' dtype
    """

    HEADS: int
    RATIO: int
    DK: int
    DV: int
    DK_BLOCK: int
    DV_BLOCK: int
    CHANNELS: bool
    DELTA: bool
    SCALE: float
    NORMALISES: bool
    DTYPE: Any


class SpaceOfRows(NamedTuple):
    """The parts of rows: addresses of their first elements."""

    w: Any
    read: Any
    write: Any
    u: Any
    products: Any


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def chunk_geometry(
    recurrence: Recurrence, slots: RecurrentSlots, places: StatePlaces, workspace: Tensor
) -> tuple[ChunkGeometry, Tensor, Tensor]:
    """The geometry of a launch, and the workspace's two parts: rows and chunks' decays."""
    _, num_heads, dk, dv = slots.state.shape
    words = slots.workspace_words(places.num_tokens, places.num_seqs)
    assert workspace.dtype == torch.float32
    assert workspace.is_contiguous()
    assert workspace.numel() >= words
    num_decays = num_tiles(places.num_tokens, places.num_seqs, arguments.CHUNK) * num_heads
    num_decays *= dk if slots.has_channels else 1
    geometry = ChunkGeometry(
        HEADS=num_heads,
        RATIO=num_heads // slots.k.shape[2],
        DK=dk,
        DV=dv,
        DK_BLOCK=max(_LEAST_BLOCK, next_power_of_2(dk)),
        DV_BLOCK=max(_LEAST_BLOCK, next_power_of_2(dv)),
        CHANNELS=slots.has_channels,
        DELTA=recurrence.delta,
        SCALE=recurrence.scale,
        NORMALISES=recurrence.normalises,
        DTYPE=_TRITON_DTYPES[slots.k.dtype],
    )
    return geometry, workspace[: words - num_decays].view(slots.k.dtype), workspace[words - num_decays : words]


@triton.jit
def rows_of(rows, token, head, G: tl.constexpr):
    """The rows of tokens, int64, and a v head."""
    WIDTH: tl.constexpr = 3 * G.DK + G.DV + _CHUNK
    first = rows + (token * G.HEADS + head) * WIDTH
    return SpaceOfRows(first, first + G.DK, first + 2 * G.DK, first + 3 * G.DK, first + (3 * G.DK + G.DV))


@triton.jit
def chunk_decay_at(chunk_decays, place, head, G: tl.constexpr):
    """The decay of a chunk and a v head: one, or one of each channel."""
    WIDTH: tl.constexpr = G.DK if G.CHANNELS else 1
    return chunk_decays + (tl.cast(place, tl.int64) * G.HEADS + head) * WIDTH
