"""Copies a step's packed mask and positions to the fixed addresses that its kernels read, before its graph or launches.

    words      <- bits, byte by byte; the words after them stay unchanged, and no kernel reads them
    position t <- positions[t] for the step's tokens, 0 after them
    start[i]    = max(kv_len[i] - q_len[i] - keys_before, 0)
    window_start of (i, t) = max(its position, kv_len[i] - q_len[i]) - window_left; 0 after the step's tokens

No window reaches further back than that of the sequence's first new token: keys before it were given up.

A kernel does it, not a copy, for the reason in publish.py. It runs after publish and device_inputs, which write the
number of tokens of the step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.any_alignment import at_any_alignment
from rocm_attn.kernels.launch import RepeatedLaunch
from rocm_attn.kernels.metadata.step_tensors import StepTensors

_BLOCK = 2048
# One number for all sizes: the launch is kept by its grid.
_PROGRAMS = 512


@at_any_alignment
@triton.jit(
    do_not_specialize=[
        "num_bytes",
        "num_seqs_padded",
        "num_tokens_padded",
        "num_window_starts",
        "keys_before",
        "window_left",
    ]
)
def _place_mask_kernel(
    bits,
    positions,
    counts,
    kv_len,
    q_len,
    start,
    mask_bytes,
    position_of_token,
    window_start,
    num_bytes,
    num_seqs_padded,
    num_tokens_padded,
    num_window_starts,
    keys_before,
    window_left,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    num_tokens = tl.load(counts + 1)
    for at in range(first, num_bytes, PROGRAMS * BLOCK):
        i = at + lane
        tl.store(mask_bytes + i, tl.load(bits + i, mask=i < num_bytes, other=0), mask=i < num_bytes)
    for at in range(first, num_tokens_padded, PROGRAMS * BLOCK):
        token = at + lane
        position = tl.load(positions + token, mask=token < num_tokens, other=0)
        tl.store(position_of_token + token, position, mask=token < num_tokens_padded)
        is_pad = (token >= num_tokens) & (token < num_window_starts)
        tl.store(window_start + token, tl.zeros([BLOCK], tl.int32), mask=is_pad)
    for at in range(first, num_seqs_padded, PROGRAMS * BLOCK):
        seq = at + lane
        older = tl.load(kv_len + seq, mask=seq < num_seqs_padded, other=0)
        older -= tl.load(q_len + seq, mask=seq < num_seqs_padded, other=0)
        # It is below 0 only for a pad: no sequence of a runtime has more new tokens than KV. In two steps, because if
        # all keys before have cells, keys_before is the largest number there is.
        shown = tl.minimum(tl.maximum(older, 0), keys_before)
        tl.store(start + seq, tl.maximum(older, 0) - shown, mask=seq < num_seqs_padded)
    # Sequence by sequence, since q_indptr comes later; none if no window is read.
    windowed = tl.where(num_window_starts > 0, num_seqs_padded, 0)
    for seq in range(tl.program_id(0), windowed, PROGRAMS):
        tokens_before = tl.zeros([BLOCK], tl.int32)
        for at in range(0, seq, BLOCK):
            tokens_before += tl.load(q_len + at + lane, mask=at + lane < seq, other=0)
        first_token = tl.sum(tokens_before, 0)
        new = tl.load(q_len + seq)
        first_place = tl.load(kv_len + seq) - new
        for at in range(0, new, BLOCK):
            token = first_token + at + lane
            is_token = (at + lane < new) & (token < num_tokens)
            position = tl.load(positions + token, mask=is_token, other=0)
            # Clipped only by the window's definition, above.
            first_key = tl.maximum(position, first_place) - window_left
            tl.store(window_start + token, first_key, mask=is_token)


_place = RepeatedLaunch(_place_mask_kernel)


def launch_place_mask(bits: Tensor, positions: Tensor, keys_before: int, window_left: int, to: StepTensors) -> None:
    """Writes a mask to its place.

    bits:        uint8 [bytes], below 2 GiB; read only
    positions:   int32 [n], at least as many as the step has tokens; read only
    keys_before: keys before a sequence's new ones that have cells, at most
    window_left: keys before its position that a window holds, below 2**31
    to:          counts[1] is the number of the step's tokens, kv_len and q_len are its lengths. mask_words, of at least
                 as many bytes as bits, receives them; mask_positions receives positions, and 0 after the step's tokens;
                 mask_start receives the first key that has cells, and window_start, if it is not empty, the first key
                 of each token's window
    """
    assert to.mask_words.nbytes >= bits.nbytes
    assert bits.nbytes + _PROGRAMS * _BLOCK < 2**31
    _place(
        to.counts.device,
        (_PROGRAMS, 1, 1),
        bits,
        positions,
        to.counts,
        to.kv_len,
        to.q_len,
        to.mask_start,
        to.mask_words.view(torch.uint8),
        to.mask_positions,
        to.window_start,
        bits.shape[0],
        to.mask_start.shape[0],
        to.mask_positions.shape[0],
        to.window_start.shape[0],
        keys_before,
        window_left,
        _PROGRAMS,
        _BLOCK,
        num_warps=4,
    )
