"""Packs an engine's mask of one byte per cell into the bits that kernels read, and places its positions.

    bit i of the words = cells[i] != 0              for the cells that the step has, mask_indptr[S] of them
    position t        <- positions[t] for the step's tokens, 0 after them
    window_start t     = max(position t, kv_len - q_len of its sequence) - window_left, 0 after the step's tokens

Bits are in order from the lowest of each byte. The rest of the last word is 0; the words after it stay unchanged, and
no kernel reads them. If fewer cells or positions are given than the step has, the bits of the others are 0, so that
their keys are hidden, and so are those positions; TOO_FEW_GIVEN in the step's error word reports it. The launch runs
after fill, which computes how many cells the step has, and may be captured with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import repeated_launches
from rocm_attn.kernels.metadata import error_word
from rocm_attn.kernels.metadata.step_tensors import StepTensors

_WORDS = 128  # of 32 cells
_TOKENS = 1024
# One number for all sizes: the launch is kept by its grid.
_PROGRAMS = 512
_ERROR_WORD = tl.constexpr(error_word.ERROR_WORD)
_TOO_FEW = tl.constexpr(error_word.TOO_FEW_GIVEN)


@at_any_alignment
@triton.jit(
    do_not_specialize=[
        "num_seqs",
        "num_cells",
        "num_words",
        "num_positions",
        "num_tokens_padded",
        "num_window_starts",
        "positions_stride",
        "window_left",
    ]
)
def _pack_mask_kernel(
    cells,
    positions,
    counts,
    kv_len,
    q_len,
    seq_of_token,
    mask_indptr,
    words,
    position_of_token,
    window_start,
    num_seqs,
    num_cells,
    num_words,
    num_positions,
    num_tokens_padded,
    num_window_starts,
    positions_stride,
    window_left,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    program = tl.program_id(0)
    bit = tl.arange(0, 32)
    num_tokens = tl.load(counts + 1)
    needed = tl.load(mask_indptr + num_seqs)
    if (program == 0) & ((needed > num_cells) | (num_tokens > num_positions)):
        tl.atomic_or(counts + _ERROR_WORD, _TOO_FEW, sem="relaxed")
    given = tl.minimum(needed, num_cells).to(tl.int32)
    # There are words for all cells of the largest step, so none is left out that a kernel reads.
    last = tl.minimum(tl.cdiv(needed, 32), num_words).to(tl.int32)
    for first in range(program * WORDS, last, PROGRAMS * WORDS):
        word = first + tl.arange(0, WORDS)
        # No cell is given from this word on, however many there are: more could be beyond 32 bits.
        begin = tl.minimum(word, tl.cdiv(num_cells, 32)) * 32
        cell = begin[:, None] + bit[None, :]
        value = tl.load(cells + cell, mask=cell < given, other=0)
        packed = tl.sum((value != 0).to(tl.int32) << bit[None, :], 1)
        tl.store(words + word, packed, mask=word < last)
    for first in range(program * TOKENS, num_tokens_padded, PROGRAMS * TOKENS):
        token = first + tl.arange(0, TOKENS)
        has_position = (token < num_tokens) & (token < num_positions)
        position = tl.load(positions + token.to(tl.int64) * positions_stride, mask=has_position, other=0)
        tl.store(position_of_token + token, position.to(tl.int32), mask=token < num_tokens_padded)
        live = (token < num_tokens) & (token < num_window_starts)
        seq = tl.load(seq_of_token + token, mask=live, other=0)
        first_place = tl.load(kv_len + seq) - tl.load(q_len + seq)
        # Clipped only by the window's definition, above.
        first_key = tl.where(live, tl.maximum(position.to(tl.int32), first_place) - window_left, 0)
        tl.store(window_start + token, first_key, mask=token < num_window_starts)


_variant = repeated_launches(_pack_mask_kernel)


def launch_pack_mask(cells: Tensor, positions: Tensor, window_left: int, to: StepTensors) -> None:
    """Packs a mask of bytes and writes it to its place.

    cells:             bool or uint8 [n], contiguous, at most MOST_MASK_CELLS; read only: the [q_len, kv_len] cells of a
                       sequence, one sequence after the other
    positions:         int32 or int64 [m], any stride; read only
    window_left:       keys before its position that a window holds, below 2**31
    to:                counts and mask_indptr hold the number of tokens and cells of the step, and counts[3] receives an
                       error bit if that is more than was given; mask_words receive the cells, mask_positions the
                       positions, and 0 after the step's tokens. If window_start is not empty it receives the first key
                       of each token's window, by kv_len, q_len and seq_of_token
    """
    num_cells = cells.shape[0]
    assert num_cells + 32 * _PROGRAMS * _WORDS < 2**31
    _variant(positions.dtype)(
        to.counts.device,
        (_PROGRAMS, 1, 1),
        cells.view(torch.uint8),
        positions,
        to.counts,
        to.kv_len,
        to.q_len,
        to.seq_of_token,
        to.mask_indptr,
        to.mask_words,
        to.mask_positions,
        to.window_start,
        to.mask_indptr.shape[0] - 1,
        num_cells,
        to.mask_words.shape[0],
        positions.shape[0],
        to.mask_positions.shape[0],
        to.window_start.shape[0],
        positions.stride(0),
        window_left,
        _PROGRAMS,
        _WORDS,
        _TOKENS,
        num_warps=4,
    )
