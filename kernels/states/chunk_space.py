"""The workspace between the two kernels of a recurrence in chunks: a row for each token and v head, and chunks' words.

A row has a chunk's products [CHUNK], as chunk_rows.py calls them, and, of the dtype of tokens, [dk] each: write, unless
all channels of sums decay as one; with decays of channels read, and for delta rules predict too. The float32 words of
chunks follow after all rows: a decay of each channel or, if all channels decay as one, the factors of rows of q and of
k [CHUNK each], and a decay. A chunk has the number of its place (token_tiles.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.backend import on_nvidia
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import RecurArgs, RecurrenceRule, RecurrentSlots
from rocm_attn.kernels.states.token_tiles import num_tiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_CHUNK = tl.constexpr(arguments.CHUNK)
_BYTES_OF_A_PART = 128
# The strongest decay that counts, a natural logarithm: exp(-104) is 0 in float32 already.
STRONGEST = tl.constexpr(-128.0)
# The first decay of a chunk that a kernel has left to chunk_rows.py. Decays are positive.
LEFT = tl.constexpr(-1.0)


class ChunkGeometry(NamedTuple):
    """The values that both kernels are compiled for.

    HEADS:              v heads
    RATIO:              of them for each k head
    DK, DV:             of a state
    DK_BLOCK, DV_BLOCK: the same or the next powers of two
    DK_PART:            columns of rows that are in registers at the same time, before the walk
    ROW, WORDS:         RecurrentSlots.row_elements and chunk_words
    CHANNELS:           whether each channel decays by itself
    """

    HEADS: int
    RATIO: int
    DK: int
    DV: int
    DK_BLOCK: int
    DV_BLOCK: int
    DK_PART: int
    ROW: int
    WORDS: int
    CHANNELS: bool
    RULE: RecurrenceRule


@constexpr_function
def exact() -> str:
    """The precision of products of float32 rows: NVIDIA's matrix units make three products of one, AMD's have it."""
    return "tf32x3" if on_nvidia() else "ieee"


@constexpr_function
def close(dtype: tl.dtype) -> str:
    """The precision of products of float32 values that are rounded to the dtype of tokens later.

    MI300 has products of as many digits as NVIDIA's tf32. MI355 takes three of bfloat16, which have more.
    """
    precision: str = exact()
    if dtype.primitive_bitwidth == 16 and not knobs.runtime.interpret:
        if on_nvidia() or current_target().arch == "gfx942":
            precision = "tf32"
        elif current_target().arch == "gfx950":
            precision = "bf16x3"
    return precision


class WordsOfChunk(NamedTuple):
    """The parts of a chunk's words: addresses of their first ones.

    decay: one of each channel, or one
    of_q:  factors of rows of q, which make them rows of read, if all channels decay as one; else the first word
    of_k:  factors of rows of k then, which make them rows of predict, or for sums of write
    """

    decay: Any
    of_q: Any
    of_k: Any


class SpaceOfRows(NamedTuple):
    """The parts of rows: addresses of their first elements."""

    products: Any
    write: Any
    read: Any
    predict: Any


def least_block(slots: RecurrentSlots) -> int:
    """The least columns of a product's operand.

    On NVIDIA their rows have 128 bytes or more: for narrower ones Triton 3.6 makes matrix instructions that read beyond
    shared memory (compute-sanitizer on an H100, rows of 32 float16).
    """
    return _BYTES_OF_A_PART // slots.k.itemsize if on_nvidia() else 16


def chunk_geometry(args: RecurArgs) -> tuple[ChunkGeometry, Tensor, Tensor]:
    """The geometry of a launch, and the workspace's two parts: rows and chunks' words."""
    _, rule, slots, places, workspace = args
    _, num_heads, dk, dv = slots.state.shape
    words = slots.workspace_words(rule, places.num_tokens, places.num_seqs)
    assert workspace.dtype == torch.float32
    assert workspace.is_contiguous()
    assert workspace.numel() >= words
    num_words = num_tiles(places.num_tokens, places.num_seqs, arguments.CHUNK) * num_heads * slots.chunk_words
    least = least_block(slots)
    part = _BYTES_OF_A_PART // slots.k.itemsize
    dk_block, dv_block = (max(least, next_power_of_2(dim)) for dim in (dk, dv))
    geometry = ChunkGeometry(
        HEADS=num_heads,
        RATIO=num_heads // slots.k.shape[2],
        DK=dk,
        DV=dv,
        DK_BLOCK=dk_block,
        DV_BLOCK=dv_block,
        DK_PART=min(dk_block, part),
        ROW=slots.row_elements(rule),
        WORDS=slots.chunk_words,
        CHANNELS=slots.has_channels,
        RULE=rule,
    )
    return geometry, workspace[: words - num_words].view(slots.k.dtype), workspace[words - num_words : words]


@triton.jit
def rows_of(rows, token, head, G: tl.constexpr):
    """The rows of tokens, int64, and a v head."""
    first = rows + (token * G.HEADS + head) * G.ROW
    write = first + _CHUNK
    return SpaceOfRows(first, write, write + G.DK, write + 2 * G.DK)


@triton.jit
def words_of(chunk_words, place, head, G: tl.constexpr):
    """The words of a chunk and a v head."""
    first = chunk_words + (tl.cast(place, tl.int64) * G.HEADS + head) * G.WORDS
    return WordsOfChunk(first if G.CHANNELS else first + 2 * _CHUNK, first, first + _CHUNK)
