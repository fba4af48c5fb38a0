"""Hands out the KV of a decode batch evenly to a fixed number of programs, on the device, from the live lengths.

Work lies on one axis: sequence, then row of KV heads, then key block. A row costs row_cost + its key blocks + row_end.
With `total` the cost of all rows, program p takes the positions [p * share, (p + 1) * share), share =
ceil(total / programs). The rest is arithmetic:

  a program leaves at most two rows unfinished: the first, begun by an earlier program, and the last, which goes on;
  the key blocks of a row that starts at position x are worked on by programs (x + row_cost) // share to
  (x + row_cost + blocks - 1) // share, in this order.

So there is no list of parts and no atomic, and the cut depends on nothing but the lengths.

If all rows cost the same, the share may grow by up to a sixteenth, so that it is a multiple of a row or a row is a
multiple of it: then no program has the end of one row and the beginning of the next. If a row is shorter than a
multiple, the difference counts as padding after it. The last of several parts of a row may have no positions for the
row's end, and the padding is negative then. If the longest row has up to WHOLE_BLOCKS key blocks, no share is smaller
than that row: rows that are alike have a program each.

Programs may work side by side. Then each row of all sequences has an axis of its own, sequence by sequence, and all
axes have the same number of programs. The axes follow each other, each as long as its programs' shares. So a sequence's
rows are cut at the same keys, and programs that are launched one after the other have the same keys of all rows, and
read their pages at the same time: launch n does not have the words of program n (number_of_program). If rows do not
divide programs, the last programs have no work.

With a window a row has only the blocks that its new tokens see. The number of new tokens decides whether a sequence
takes part; each OF_ROW of them have rows of their own, and each row costs as much as the last one: see first_of_row.
With kv_len 0 a row costs row_cost + row_end, so that some program writes its zeros.

The schedule is int32, flat: PROGRAM_WORDS per program, then SEQ_WORDS per sequence, then the counters by which decode
that merges within its launch finds who ends last (merge_within.py), all 0. Positions are 64-bit, and not stored: the
words have programs, and positions counted from where they begin.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention import cuts
from rocm_attn.kernels.attention.arguments import Queries
from rocm_attn.kernels.attention.cuts import DecodeCut, NewTokenRange
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.attention.softmax import visible_blocks
from rocm_attn.kernels.launch import launch

# The words of a program.
PROGRAM_WORDS = tl.constexpr(cuts.PROGRAM_WORDS)
PROGRAM_SEQ = tl.constexpr(0)
PROGRAM_ROW = tl.constexpr(1)
PROGRAM_DONE = tl.constexpr(2)  # offset of its first work in that row
PROGRAM_WORK = tl.constexpr(3)
PROGRAM_SHARE = tl.constexpr(4)
PROGRAM_ROW_START = tl.constexpr(5)  # position where the row starts, cut to 32 bits: only slots of segments need it
PROGRAM_KV_LEN = tl.constexpr(6)
PROGRAM_PAD = tl.constexpr(7)  # positions after each row that nothing lies at; 0 unless the cut is even
# The words of a sequence.
SEQ_WORDS = tl.constexpr(cuts.SEQ_WORDS)
SEQ_PROGRAM = tl.constexpr(0)  # the program, on its axis, that has the position where the sequence's rows start
SEQ_OFFSET = tl.constexpr(1)  # that position, from the program's start
SEQ_KV_LEN = tl.constexpr(2)  # -1 if it takes no part
_COUNTER_WORDS = tl.constexpr(cuts.COUNTER_WORDS)
# Sequences that a program handles at a time; a fixed number, so that no batch size needs another compilation.
_SEQS_AT_ONCE = 512
# A share may be larger by a sixteenth if all rows are alike.
_SIXTEEN = tl.constexpr(16)
_MOST_COST = tl.constexpr(2**31 - 1)
_PAST_ALL = tl.constexpr(2**62)
# Positions of a step of this total fit 32 bits, padding included.
_FITS = tl.constexpr(2**29)
_FEW_TOKENS = tl.constexpr(8)


@triton.jit
def words_of_program(schedule, program):
    """A pointer to the first word of a program."""
    return schedule + program * PROGRAM_WORDS


@triton.jit
def work_at(words):
    """A program's first sequence and row, cost of that row that others do, cost of all its work, and kv_len."""
    seq = tl.load(words + PROGRAM_SEQ)
    row = tl.load(words + PROGRAM_ROW)
    done = tl.load(words + PROGRAM_DONE)
    work = tl.load(words + PROGRAM_WORK)
    return seq, row, done, work, tl.load(words + PROGRAM_KV_LEN)


@triton.jit
def words_of_seq(schedule, num_programs, seq):
    """A pointer to the first word of a sequence."""
    return schedule + num_programs * PROGRAM_WORDS + seq * SEQ_WORDS


@triton.jit
def heads_of_row(row, R: tl.constexpr):
    """First KV head (int64) and first query head (int64) of a row, and how many query heads it has."""
    head_block = row % R.HEAD_BLOCKS
    first_kv_head = (row // R.HEAD_BLOCKS * R.HEADS_PER_ROW).to(tl.int64)
    first_head = first_kv_head * R.GQA_RATIO + head_block * R.BLOCK_HEADS
    num_q_rows = tl.minimum(R.Q_ROWS, R.GQA_RATIO * R.HEADS_PER_ROW - head_block * R.BLOCK_HEADS)
    return first_kv_head, first_head, num_q_rows


@triton.jit
def new_tokens(q_indptr, seq, T: tl.constexpr):
    """The number of new tokens of a sequence that takes part."""
    return 1 if T.MOST == 1 else tl.load(q_indptr + seq + 1) - tl.load(q_indptr + seq)


@triton.jit
def rows_of_tokens(q_len, ROWS: tl.constexpr, T: tl.constexpr):
    """The number of rows of a sequence with q_len new tokens."""
    return ROWS * ((q_len + (T.OF_ROW - 1)) // T.OF_ROW)


@triton.jit
def first_of_row(row, q_len, T: tl.constexpr):
    """The first new token of a row, counted from the sequence's first one.

    If tokens may be many, rows are numbered from both ends in turn: the first tokens of a prompt see few keys, and a
    program that has neighbouring rows has short and long ones.
    """
    if T.MOST > _FEW_TOKENS:
        last = (q_len + (T.OF_ROW - 1)) // T.OF_ROW - 1
        row = row // 2 + row % 2 * (last - row // 2 * 2)
    return row * T.OF_ROW


@triton.jit
def number_of_program(launched, num_programs, R: tl.constexpr):
    """The number of the program with this id, if programs work side by side."""
    of_row = num_programs // R.ROWS
    beside = launched % R.ROWS * of_row + launched // R.ROWS
    return tl.where(launched < R.ROWS * of_row, beside, launched)


@triton.jit
def next_row(schedule, num_programs, work, seq, row, num_rows, kv_len):
    """Sequence, row and kv_len of the row after this one; a sequence that takes no part (-1) has no row visited.

    work:     cost that the program still has to do; if there is none, there may be no row
    num_rows: of the sequence, if it takes part
    """
    # A mask of kv_len < 0 would be kept in two scalar registers all through the loop over keys.
    row = tl.maximum(row + 1, (kv_len >> 31) & num_rows)
    seq = tl.where(row >= num_rows, seq + 1, seq)
    row = tl.where(row >= num_rows, 0, row)
    words = words_of_seq(schedule, num_programs, seq)
    return seq, row, tl.load(words + SEQ_KV_LEN, mask=work > 0, other=-1)


class ScheduleGeometry(NamedTuple):
    """The values that the schedule kernel is compiled for: a DecodeCut without its programs.

    AXES:      as many as a sequence has rows, if programs work side by side; else one
    ROWS:      rows of a sequence on an axis
    SEQS:      sequences of one iteration
    COUNTERS:  whether there are counters
    """

    AXES: int
    ROWS: int
    KEY_BLOCK: int
    ROW_COST: int
    ROW_END: int
    WINDOWED: bool
    IS_EVEN: bool
    WHOLE_BLOCKS: int
    SEQS: int
    TOKENS: NewTokenRange
    COUNTERS: bool


@triton.jit
def _costs(kv_len, q_indptr, seq, num_seqs, window_left, G: tl.constexpr):
    """Each sequence's rows on an axis, the cost of one of them, and its kv_len or -1."""
    T: tl.constexpr = G.TOKENS
    inside = seq < num_seqs
    first_token = tl.load(q_indptr + seq, mask=inside, other=0)
    q_len = tl.load(q_indptr + seq + 1, mask=inside, other=0) - first_token
    if T.MOST == 1:
        takes_part = q_len == 1
        num_rows = G.ROWS
    else:
        takes_part = (q_len >= T.FEWEST) & (q_len <= T.MOST)
        num_rows = rows_of_tokens(q_len, G.ROWS, T)
    length = tl.where(takes_part, tl.load(kv_len + seq, mask=inside, other=0), -1)
    _, _, num_blocks = visible_blocks(length, window_left, G.KEY_BLOCK, G.WINDOWED)
    row_cost = num_blocks + (G.ROW_COST + G.ROW_END)
    return tl.where(takes_part, num_rows, 0).to(tl.int64), row_cost, length


@triton.jit
def _quotient(position, size, total):
    """position // size, in 32 bits if the step's total allows: in 64 it takes ten times as many instructions."""
    return position.to(tl.int32) // size if total < _FITS else (position // size).to(tl.int32)


@triton.jit
def _even_share(share, shortest, longest, ROW_END: tl.constexpr):
    """Returns the share of a program and the padding after each row.

    shortest, longest: cost of a row; share: at least
    """
    cost = tl.maximum(longest, 1)
    # The number of rows per program, or of programs per row.
    rows = tl.cdiv(share, cost)
    parts = tl.maximum(cost // share, 1)
    # At least 1, even for a row without keys that costs only its end.
    even = tl.where(share >= cost, rows * cost, tl.maximum(tl.cdiv(cost - ROW_END, parts), 1))
    is_even = (shortest == longest) & (even <= share + share // _SIXTEEN)
    pad = tl.where(is_even & (share < cost), even * parts - cost, 0)
    return tl.where(is_even, even, share), pad


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "window_left"])
def _schedule_kernel(
    kv_len,
    q_indptr,
    schedule,
    num_seqs,
    num_programs,
    window_left,
    G: tl.constexpr,
):
    SEQS: tl.constexpr = G.SEQS
    program = tl.program_id(0)
    lane = tl.arange(0, SEQS)
    of_axis = num_programs // G.AXES

    total = tl.full([], 0, tl.int64)
    longest = 0
    shortest = _MOST_COST
    for first in range(0, num_seqs, SEQS):
        rows, cost_of_row, length = _costs(kv_len, q_indptr, first + lane, num_seqs, window_left, G)
        total += tl.sum(rows * cost_of_row, 0)
        if G.IS_EVEN:
            longest = tl.maximum(longest, tl.max(tl.where(length < 0, 0, cost_of_row), 0))
            shortest = tl.minimum(shortest, tl.min(tl.where(length < 0, _MOST_COST, cost_of_row), 0))
    share = tl.maximum(_quotient(total + of_axis - 1, of_axis, total), 1)
    pad = 0
    if G.IS_EVEN:
        share = tl.maximum(share, tl.where(longest <= G.WHOLE_BLOCKS + G.ROW_COST + G.ROW_END, longest, 0))
        share, pad = _even_share(share, shortest, longest, G.ROW_END)
    axis = program // of_axis
    # The position where the program begins on its axis; programs that are left over begin past all work.
    start = (program - axis * of_axis).to(tl.int64) * share
    if G.AXES > 1:
        start = tl.where(axis < G.AXES, start, _PAST_ALL)

    # The sequence whose positions contain `start`: the number of sequences that end at or before it.
    seq = 0
    seq_start = tl.full([], 0, tl.int64)
    row_cost = 0
    seq_len = 0
    before = tl.full([], 0, tl.int64)
    for first in range(0, num_seqs, SEQS):
        # rows, cost_of_row, length, cost: [SEQS]
        rows, cost_of_row, length = _costs(kv_len, q_indptr, first + lane, num_seqs, window_left, G)
        cost = rows * (cost_of_row + pad)
        end = before + tl.cumsum(cost, 0)
        here = (end > start) & (end - cost <= start)
        seq += tl.sum((end <= start).to(tl.int32), 0)
        seq_start += tl.sum(tl.where(here, end - cost, 0), 0)
        row_cost += tl.sum(tl.where(here, cost_of_row, 0), 0)
        seq_len += tl.sum(tl.where(here, length, 0), 0)
        if (first // SEQS) % num_programs == program:
            words = words_of_seq(schedule, num_programs, first + lane)
            inside = first + lane < num_seqs
            first_program = _quotient(end - cost, share, total)
            tl.store(words + SEQ_PROGRAM, first_program, mask=inside)
            tl.store(words + SEQ_OFFSET, end - cost - first_program.to(tl.int64) * share, mask=inside)
            tl.store(words + SEQ_KV_LEN, length, mask=inside)
        before += tl.sum(cost, 0)
    row_size = tl.maximum(row_cost + pad, 1)
    row = _quotient(start - seq_start, row_size, total)
    row_start = seq_start + row.to(tl.int64) * row_size
    work = tl.maximum(tl.minimum(share, before - start), 0)
    if G.IS_EVEN:
        # If padding follows rows, a program has only the rest of its row.
        work = tl.where(pad > 0, tl.maximum(tl.minimum(work, row_start + row_cost - start), 0), work)

    words = words_of_program(schedule, program)
    tl.store(words + PROGRAM_SEQ, tl.minimum(seq, num_seqs))
    tl.store(words + PROGRAM_ROW, row if G.AXES == 1 else axis)
    tl.store(words + PROGRAM_DONE, start - row_start)
    tl.store(words + PROGRAM_WORK, work)
    tl.store(words + PROGRAM_SHARE, share)
    tl.store(words + PROGRAM_ROW_START, row_start)
    tl.store(words + PROGRAM_KV_LEN, seq_len)
    tl.store(words + PROGRAM_PAD, pad)
    if G.COUNTERS:
        # At a multiple of 4 words (DecodeCut.first_counter).
        end = num_programs * PROGRAM_WORDS + num_seqs * SEQ_WORDS
        counter = (end + 3) // 4 * 4 + program * _COUNTER_WORDS + tl.arange(0, _COUNTER_WORDS)
        tl.store(schedule + counter, tl.zeros([_COUNTER_WORDS], tl.int32))


def launch_decode_schedule(queries: Queries, schedule: Tensor, cut: DecodeCut) -> None:
    """Fills the schedule of the queries' sequences, on the device.

    schedule: int32 [cut.words(S)] or longer, written
    """
    queries.check()
    num_seqs = queries.num_seqs
    cut.check(schedule, num_seqs)
    launch(
        _schedule_kernel,
        (cut.programs,),
        queries.kv_len,
        queries.q_indptr,
        schedule,
        num_seqs,
        cut.programs,
        cut.window_left,
        G=ScheduleGeometry(
            cut.axes,
            cut.rows // cut.axes,
            cut.key_block,
            cut.row_cost,
            cut.row_end,
            cut.window_left != UNLIMITED_WINDOW,
            cut.is_even,
            cut.whole_blocks,
            _SEQS_AT_ONCE,
            cut.tokens,
            cut.merge_group > 0,
        ),
        num_warps=4,
    )
