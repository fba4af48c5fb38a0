"""Hand out the KV of a decode batch evenly to a fixed number of programs, on the device, from the live lengths.

Work lies on one axis: sequence, then row of KV heads, then tile. A row costs row_cost + its tiles. With `total` the
cost of all rows, program p takes the positions [p * share, (p + 1) * share), share = ceil(total / num_programs).
All the rest is arithmetic:

  a program leaves at most two rows unfinished: the first, begun by an earlier program, and the last, which goes on;
  the tiles of a row that starts at position x are worked on by programs (x + row_cost) // share to
  (x + row_cost + tiles - 1) // share, in this order.

So there is no list of parts and no atomic, and the cut depends on nothing but the lengths.
With a window a row has only the tiles that its new token sees. A sequence takes part if it has one new token. With
kv_len 0 it costs row_cost, so that some program writes its zeros.

The schedule is int32, flat: 8 words a program, then 2 words a sequence.
  program   seq, row, offset of its first work in that row, work, share, position where the row starts, kv_len, 0
  sequence  position where its rows start, kv_len or -1 if it takes no part
Positions must fit int32: rows x KV tokens / block_n below 2**31.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.attention.softmax import visible_tiles
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import DecodeTiles

PROGRAM_WORDS = tl.constexpr(8)
SEQ_WORDS = tl.constexpr(2)
# Sequences that a program looks at in one step; a fixed number, so that no batch size needs another compilation.
_SEQS_AT_ONCE = 512


@triton.jit
def _costs(
    kv_len,
    q_len,
    seq,
    num_seqs,
    window_left,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_COST: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Cost of all rows of each sequence, and its kv_len or -1."""
    inside = seq < num_seqs
    takes_part = tl.load(q_len + seq, mask=inside, other=0) == 1
    length = tl.where(takes_part, tl.load(kv_len + seq, mask=inside, other=0), -1)
    _, _, num_tiles = visible_tiles(length, window_left, BLOCK_N, WINDOWED)
    return tl.where(takes_part, (num_tiles + ROW_COST) * ROWS, 0), length


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "window_left"])
def _schedule_kernel(
    kv_len,
    q_len,
    schedule,
    num_seqs,
    num_programs,
    window_left,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_COST: tl.constexpr,
    WINDOWED: tl.constexpr,
    SEQS: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, SEQS)

    total = 0
    for first in range(0, num_seqs, SEQS):
        cost, _ = _costs(kv_len, q_len, first + lane, num_seqs, window_left, ROWS, BLOCK_N, ROW_COST, WINDOWED)
        total += tl.sum(cost, 0)
    share = tl.maximum(tl.cdiv(total, num_programs), 1)
    start = program * share
    work = tl.maximum(tl.minimum(share, total - start), 0)

    # The sequence whose positions contain `start`: the number of sequences that end at or before it.
    seq = 0
    seq_start = 0
    seq_cost = 0
    seq_len = 0
    before = 0
    for first in range(0, num_seqs, SEQS):
        cost, length = _costs(kv_len, q_len, first + lane, num_seqs, window_left, ROWS, BLOCK_N, ROW_COST, WINDOWED)
        end = before + tl.cumsum(cost, 0)
        here = (end > start) & (end - cost <= start)
        seq += tl.sum((end <= start).to(tl.int32), 0)
        seq_start += tl.sum(tl.where(here, end - cost, 0), 0)
        seq_cost += tl.sum(tl.where(here, cost, 0), 0)
        seq_len += tl.sum(tl.where(here, length, 0), 0)
        if (first // SEQS) % num_programs == program:
            words = schedule + num_programs * PROGRAM_WORDS + (first + lane) * SEQ_WORDS
            tl.store(words, end - cost, mask=first + lane < num_seqs)
            tl.store(words + 1, length, mask=first + lane < num_seqs)
        before += tl.sum(cost, 0)
    row_cost = tl.maximum(seq_cost // ROWS, 1)
    row = (start - seq_start) // row_cost
    row_start = seq_start + row * row_cost

    words = schedule + program * PROGRAM_WORDS
    tl.store(words, tl.minimum(seq, num_seqs))
    tl.store(words + 1, row)
    tl.store(words + 2, start - row_start)
    tl.store(words + 3, work)
    tl.store(words + 4, share)
    tl.store(words + 5, row_start)
    tl.store(words + 6, seq_len)
    tl.store(words + 7, 0)


def decode_schedule_words(num_programs: int, num_seqs: int) -> int:
    """int32 words of the schedule buffer."""
    return num_programs * int(PROGRAM_WORDS.value) + num_seqs * int(SEQ_WORDS.value)


def launch_decode_schedule(
    kv_len: Tensor,
    q_len: Tensor,
    schedule: Tensor,
    *,
    window_left: int,
    num_kv_heads: int,
    num_programs: int,
    tiles: DecodeTiles,
) -> None:
    """Fill the schedule that launch_paged_decode reads, for the same window, num_programs and tiles.

    kv_len:    int32 [S]  tokens, the new one included
    q_len:     int32 [S]  new tokens; sequences with another number than 1 take no part
    schedule:  int32 [decode_schedule_words(num_programs, S)] or longer, written
    """
    num_seqs = kv_len.shape[0]
    assert kv_len.dtype == q_len.dtype == schedule.dtype == torch.int32
    assert kv_len.stride(0) == q_len.stride(0) == schedule.stride(0) == 1
    assert q_len.shape[0] == num_seqs
    assert schedule.numel() >= decode_schedule_words(num_programs, num_seqs)
    assert tiles.row_cost >= 1
    launch(
        _schedule_kernel,
        (num_programs,),
        kv_len,
        q_len,
        schedule,
        num_seqs,
        num_programs,
        window_left,
        ROWS=tiles.rows_per_seq(num_kv_heads),
        BLOCK_N=tiles.block_n,
        ROW_COST=tiles.row_cost,
        WINDOWED=window_left != UNLIMITED_WINDOW,
        SEQS=_SEQS_AT_ONCE,
        num_warps=4,
    )
