"""Adds up the partial results of rows that several decode programs shared.

Part i of a row holds, for each q row, an accumulator a_i, a maximum m_i and a sum l_i in base 2. With m = max m_i:

    out = sum_i 2^(m_i - m) a_i / sum_i 2^(m_i - m) l_i        lse = ln 2 * (m + log2(sum_i 2^(m_i - m) l_i))

Which programs hold parts of a row follows from the schedule (see decode_schedule.py), in a fixed order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, HeadsOfToken, Softmax
from rocm_attn.kernels.attention.cuts import DecodeCut, MergeShape, RowCut, merge_shape
from rocm_attn.kernels.attention.decode_schedule import (
    PROGRAM_DONE,
    PROGRAM_KV_LEN,
    PROGRAM_PAD,
    PROGRAM_ROW,
    PROGRAM_SEQ,
    PROGRAM_SHARE,
    PROGRAM_WORK,
    SEQ_KV_LEN,
    SEQ_OFFSET,
    SEQ_PROGRAM,
    first_of_row,
    new_tokens,
    rows_of_tokens,
    words_of_program,
    words_of_seq,
)
from rocm_attn.kernels.attention.softmax import store_rows, visible_blocks
from rocm_attn.kernels.early import early_options
from rocm_attn.kernels.launch import launch


class MergeGeometry(NamedTuple):
    """The values that the merge is compiled for.

    rows:       how decode's rows are cut
    MOST_ROWS:  rows of a sequence, at most
    V_HEAD_DIM: elements of an output row
    EARLY:      see launch_merge
    """

    rows: RowCut
    MOST_ROWS: int
    V_HEAD_DIM: int
    shape: MergeShape
    EARLY: bool


class Parts(NamedTuple):
    """Parts of rows: acc [parts, LINES, V_HEAD_DIM]; sums [parts, LINES, 2], maximum and sum.

    If merge_within.py adds them up: acc / sum, and sums [parts, LINES, V_HEAD_DIM], each maximum + log2(sum).
    """

    acc: Any
    sums: Any


class MergedRow(NamedTuple):
    """A row that several programs have parts of.

    first_program, num_parts: the first of these programs, and how many there are
    token:  int64, the first one of the row's
    number: of the row, within its sequence
    q_len:  new tokens of the sequence
    """

    first_program: Any
    num_parts: Any
    token: Any
    number: Any
    q_len: Any


@triton.jit
def merge_parts(
    parts,
    first_program,
    num_parts,
    q_row,
    num_rows,
    column,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
):
    """The softmax state of all parts of one row: acc [lines, COLUMNS], maximum and sum [lines]. Adds PARTS at a time.

    q_row: which lines, those below num_rows; column: which elements, those below V_HEAD_DIM
    """
    HEADS: tl.constexpr = q_row.shape[0]
    lane = tl.arange(0, PARTS)
    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, COLUMNS], tl.float32)
    for first in range(0, num_parts, PARTS):
        index = first + lane
        # The row began in its first program (slot 2p + 1) and was begun earlier for all the others (slot 2p).
        part = 2 * (first_program + index) + (index == 0).to(tl.int32)
        # part_maximum, part_total: [PARTS, HEADS]; part_acc: [PARTS, HEADS, COLUMNS]
        line = part[:, None] * LINES + q_row[None, :]
        live = (index < num_parts)[:, None] & (q_row < num_rows)[None, :]
        part_maximum = tl.load(parts.sums + line * 2, mask=live, other=float("-inf"))
        part_total = tl.load(parts.sums + line * 2 + 1, mask=live, other=0.0)
        is_acc = live[:, :, None]
        if V_HEAD_DIM % COLUMNS != 0:
            is_acc = is_acc & (column < V_HEAD_DIM)[None, None, :]
        part_acc = tl.load(parts.acc + line[:, :, None] * V_HEAD_DIM + column[None, None, :], mask=is_acc, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        # Lines past num_rows have no part, and a row may have seen no key: no inf - inf for them.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - base)
        weight = tl.exp2(part_maximum - base[None, :])
        total = total * decay + tl.sum(part_total * weight, 0)
        acc = acc * decay[:, None] + tl.sum(part_acc * weight[:, :, None], 0)
        maximum = new_maximum
    return Softmax(acc, maximum, total)


@triton.jit(do_not_specialize=["num_programs", "window_left"])
def _merge_kernel(
    q_indptr,
    schedule,
    partials,
    out,
    lse,
    sinks,
    num_programs,
    window_left,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: tl.constexpr,
):
    R: tl.constexpr = G.rows
    T: tl.constexpr = R.TOKENS
    index = tl.program_id(0)
    if G.shape.by_row:
        seq = index // G.MOST_ROWS
        row = index % G.MOST_ROWS
        seq_words = words_of_seq(schedule, num_programs, seq)
        share = tl.load(schedule + PROGRAM_SHARE)
        _, _, num_blocks = visible_blocks(tl.load(seq_words + SEQ_KV_LEN), window_left, R.KEY_BLOCK, R.WINDOWED)
        row_size = num_blocks + (R.ROW_COST + R.ROW_END) + tl.load(schedule + PROGRAM_PAD)
        # Counted from the start of the program, on its axis, in which the sequence's rows start.
        first_position = tl.load(seq_words + SEQ_OFFSET) + R.ROW_COST
        first_program = tl.load(seq_words + SEQ_PROGRAM)
        if R.SIDE_BY_SIDE:
            first_program += row * (num_programs // R.ROWS)
        elif T.MOST > 1 or R.ROWS >= 4 * R.KEY_BLOCK:
            # A sequence of 2^28 tokens may have as many positions.
            first_position += row.to(tl.int64) * row_size
        else:
            first_position += row * row_size
        programs_before = first_position // share
        first_program += programs_before.to(tl.int32)
        first_position = (first_position - programs_before * share).to(tl.int32)
        mine = num_blocks > 0
        if T.MOST > 1:
            mine = mine & (row < rows_of_tokens(new_tokens(q_indptr, seq, T), R.ROWS, T))
    else:
        # The row that goes on from program `index` into the next one, if that program is the first with a part of it.
        words = words_of_program(schedule, index + 1)
        seq = tl.load(words + PROGRAM_SEQ)
        row = tl.load(words + PROGRAM_ROW)
        share = tl.load(words + PROGRAM_SHARE)
        _, _, num_blocks = visible_blocks(tl.load(words + PROGRAM_KV_LEN), window_left, R.KEY_BLOCK, R.WINDOWED)
        done = tl.load(words + PROGRAM_DONE)
        goes_on = (tl.load(words + PROGRAM_WORK) > 0) & (done > R.ROW_COST)
        # Counted from the start of program `index`.
        first_program = index
        first_position = share - done + R.ROW_COST
        mine = goes_on & (first_position >= 0)
    num_parts = (first_position + num_blocks - 1) // share + 1
    mine = mine & (num_parts > 1)
    # Memory that decode does not write is loaded while decode still runs, if launches are early.
    token = tl.load(q_indptr + seq, mask=mine, other=0)
    q_len = token
    if T.MOST > 1:
        q_len = tl.load(q_indptr + seq + 1, mask=mine, other=0) - token
    if G.EARLY:
        gdc_launch_dependents()
        # In every program: the launch after the merge may start when all have ended, and must find decode ended too.
        gdc_wait()
    if mine:
        sums = partials + num_programs * (2 * R.Q_ROWS * G.V_HEAD_DIM)
        parts = Parts(partials, sums)
        of_row = MergedRow(first_program, num_parts, token.to(tl.int64), row, q_len)
        out_rows, lse_rows = HeadRows(out, out_token, out_head), HeadRows(lse, lse_token, lse_head)
        first_line = tl.program_id(1) * G.shape.heads
        if (G.shape.few < G.shape.parts) & (num_parts <= G.shape.few):
            if first_line % G.shape.few_heads == 0:
                _merge_row(parts, of_row, sinks, out_rows, lse_rows, first_line, G.shape.few_heads, G.shape.few, G)
        else:
            _merge_row(parts, of_row, sinks, out_rows, lse_rows, first_line, G.shape.heads, G.shape.parts, G)


@triton.jit
def _merge_row(parts, row, sinks, out, lse, first_line, HEADS: tl.constexpr, PARTS: tl.constexpr, G: tl.constexpr):
    """Adds up HEADS lines of a row, COLUMNS of each, from PARTS parts at a time."""
    R: tl.constexpr = G.rows
    T: tl.constexpr = R.TOKENS
    q_row = first_line + tl.arange(0, HEADS)
    column = tl.program_id(2) * G.shape.columns + tl.arange(0, G.shape.columns)
    # The last row of a sequence, or of a KV head, may be shorter; its other lanes hold whatever decode left there.
    if T.MOST == 1:
        head_block = row.number % R.HEAD_BLOCKS
        rows = tl.minimum(R.Q_ROWS, R.GQA_RATIO * R.HEADS_PER_ROW - head_block * R.BLOCK_HEADS)
        first_head = row.number // R.HEAD_BLOCKS * (R.HEADS_PER_ROW * R.GQA_RATIO) + head_block * R.BLOCK_HEADS
        head = (first_head + q_row).to(tl.int64)
        token = row.token
    else:
        before = first_of_row(row.number, row.q_len, T)
        rows = tl.minimum(R.Q_ROWS, (row.q_len - before) * R.GQA_RATIO)
        token = row.token + before + q_row // R.GQA_RATIO
        head = (q_row % R.GQA_RATIO).to(tl.int64)
    is_row = q_row < rows
    acc, maximum, total = merge_parts(
        parts, row.first_program, row.num_parts, q_row, R.Q_ROWS, column, R.Q_ROWS, PARTS, G.shape.columns, G.V_HEAD_DIM
    )
    # Other lines hold anything. Programs of other column chunks store the same LSE.
    softmax = Softmax(acc, maximum, tl.where(is_row, total, 1.0))
    store_rows(softmax, HeadsOfToken(token, head, is_row), sinks, out, lse, column, G.V_HEAD_DIM)


def launch_merge(args: AttendArgs, cut: DecodeCut, rows: RowCut, *, early: bool = False) -> None:
    """Writes out and lse of every row that several programs have parts of; the arguments are launch_paged_decode's.

    early: whether the launch before it, decode's, lets this one start while it runs. The merge waits for its end on the
           device ("programmatic dependent launch" of NVIDIA from sm_90 on)
    """
    queries, v_head_dim = args.queries, args.out.shape[2]
    num_rows = queries.num_seqs * cut.most_rows
    shape = merge_shape(num_rows, cut.programs, rows.Q_ROWS, v_head_dim)
    launch(
        _merge_kernel,
        (
            num_rows if shape.by_row else cut.programs - 1,
            triton.cdiv(rows.Q_ROWS, shape.heads),
            triton.cdiv(v_head_dim, shape.columns),
        ),
        queries.q_indptr,
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        args.sinks,
        cut.programs,
        cut.window_left,
        *args.written_strides,
        G=MergeGeometry(rows, cut.most_rows, v_head_dim, shape, early),
        num_warps=shape.num_warps,
        **early_options(early),
    )
