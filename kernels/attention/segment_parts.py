"""Merges the parts of rows that several programs of deterministic extend have shared, by whole segments.

The first program of a row has merged its segments itself, and the others have kept theirs one by one. All are merged
from left to right: kernels/attention/segments.py has the arithmetic, and a row's bits do not show who had a segment.

The schedule determines which program has a segment, as hopper/rows.steps_of and segments_of_share (segments.py)
compute it: the one in whose share the segment ends.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_FIRST_TOKEN,
    BLOCK_KEYS,
    BLOCK_KV_INDEX,
    BLOCK_SEQ,
    BLOCK_TOKENS,
    BLOCK_WORDS,
    SHARE_BLOCK,
    SHARE_DONE,
    SHARE_PARTS,
    SHARE_ROW,
    SHARE_SIZE,
    SHARE_START,
    SHARE_WORDS,
    SHARE_WORK,
)
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.attention.segments import UNFUSED, merge_segment
from rocm_attn.kernels.attention.softmax import LN_2, add_sink
from rocm_attn.kernels.early import early_options, wait_for_launch
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import ExtendTiles

# Lines of a query block, and columns of its rows, for one program; parts that are loaded before they are merged.
_LINES, _COLUMNS, _PARTS = 16, 64, 4


class PartMergeGeometry(NamedTuple):
    """The values that the merge is compiled for.

    GQA_RATIO, QUERY_ROWS, DIM, ROW_KEYS, CAUSAL, WINDOWED: extend's
    SEGMENT_LEN: keys of a segment
    SLOTS:       parts of rows that a program of extend has room for
    LINES:       lines of a query block, a token and a query head each, of one program
    COLUMNS:     columns of a line
    PARTS:       parts that are loaded before they are merged, one after the other
    EARLY:       whether it may begin while the launch before still runs
    """

    GQA_RATIO: int
    QUERY_ROWS: int
    DIM: int
    ROW_KEYS: int
    CAUSAL: bool
    WINDOWED: bool
    SEGMENT_LEN: int
    SLOTS: int
    LINES: int
    COLUMNS: int
    PARTS: int
    EARLY: bool


class SharedSegmentRow(NamedTuple):
    """A row that several programs share: the first of these programs, and how many come after it; the segments
    [first, end) that it sees; size of each share; zero: the cost at which key 0 would lie, from the start of the first
    program's share on.

    Costs of a row fit 32 bits, unlike those of a step: a 64-bit division for each segment takes long.
    """

    began: Any
    after: Any
    first: Any
    end: Any
    zero: Any
    size: Any


@triton.jit
def _shared_row(words, start, size, row_keys, kv_len, window_left, G: tl.constexpr):
    """The row of a query block that starts at a position of the axis of costs. row_keys: before its keys there"""
    kv_index = tl.load(words + BLOCK_KV_INDEX)
    num_keys = tl.load(words + BLOCK_KEYS)
    end_key = kv_index + tl.load(words + BLOCK_TOKENS) if G.CAUSAL else tl.load(kv_len + tl.load(words + BLOCK_SEQ))
    first_key = 0
    if G.WINDOWED:
        first_key = tl.maximum(kv_index - window_left, 0)
    began = start // size
    row_start = (start % size).to(tl.int32)
    after = (row_start + num_keys + row_keys - 1) // size
    zero = row_start + row_keys - (end_key - num_keys)
    end = tl.cdiv(end_key, G.SEGMENT_LEN)
    return SharedSegmentRow(began, after, first_key // G.SEGMENT_LEN, end, zero, size)


@triton.jit
def _part_of_segment(row, segment, G: tl.constexpr):
    """The place of a segment's part, and its lines: none if the row's first program has the segment, or no program."""
    ends_at = row.zero + (segment + 1) * G.SEGMENT_LEN
    number = tl.minimum(tl.maximum(tl.cdiv(ends_at, row.size) - 1, 0), row.after)
    begins_at = tl.cast(number, tl.int64) * row.size - row.zero
    first = tl.maximum(tl.maximum(begins_at, 0) // G.SEGMENT_LEN, row.first)
    num_lines = tl.where(number > 0, tl.where(segment < row.end, G.QUERY_ROWS, 0), 0)
    return (row.began + number) * G.SLOTS + 1 + segment - first, num_lines


@triton.jit
def _merged_parts(partials, sums, row, line, column, G: tl.constexpr):
    """The softmax state of a row.

    Lines without a token give numbers that are never stored, and their loads stay within the workspace too.
    """
    PARTS: tl.constexpr = G.PARTS
    # The first program's part lies left of all others.
    at = row.began * G.SLOTS * G.QUERY_ROWS + line
    # Columns beyond a head read on in the workspace, which ends with the sums; they are never stored.
    acc = tl.load(partials + (at * G.DIM)[:, None] + column[None, :])
    maximum = tl.load(sums + at * 2)
    total = tl.load(sums + at * 2 + 1)
    for first in range(row.first, row.end, PARTS):
        for i in tl.static_range(PARTS):
            part, num_lines = _part_of_segment(row, first + i, G)
            at = part * G.QUERY_ROWS + line
            # A part that is missing changes no bit.
            is_part = line < num_lines
            part_acc = tl.load(partials + (at * G.DIM)[:, None] + column[None, :], mask=is_part[:, None], other=0.0)
            part_maximum = tl.load(sums + at * 2, mask=is_part, other=float("-inf"))
            part_total = tl.load(sums + at * 2 + 1, mask=is_part, other=0.0)
            merged = merge_segment(Softmax((acc,), maximum, total), Softmax((part_acc,), part_maximum, part_total))
            acc, maximum, total = merged.acc[0], merged.maximum, merged.total
    return acc, maximum, total


@triton.jit(do_not_specialize=["num_programs", "max_blocks", "window_left"])
def _segment_parts_kernel(
    kv_len,
    schedule,
    partials,
    out,
    lse,
    sinks,
    window_left,
    num_programs,
    max_blocks,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: tl.constexpr,
):
    # The row that goes on from a program into the next one, if that is the first with a part of it.
    share = schedule + max_blocks * BLOCK_WORDS + (tl.program_id(0) + 1) * SHARE_WORDS
    start = tl.load((share + SHARE_START).to(tl.pointer_type(tl.int64)))
    size = tl.load(share + SHARE_SIZE)
    goes_on = (tl.load(share + SHARE_WORK) > 0) & (tl.load(share + SHARE_DONE) > 0)
    # See extend_merge.py.
    wait_for_launch(G.EARLY)
    line = tl.program_id(1) * G.LINES + tl.arange(0, G.LINES)
    if goes_on & (start // size == tl.program_id(0)):
        words = schedule + tl.load(share + SHARE_BLOCK) * BLOCK_WORDS
        num_lines = tl.load(words + BLOCK_TOKENS) * G.GQA_RATIO
        if tl.program_id(1) * G.LINES < num_lines:
            # The first part of a row that is cut alike has the cost of beginning in addition to as many keys as others.
            is_alike = tl.load((share + SHARE_PARTS).to(tl.pointer_type(tl.int64))) > 0
            row_keys = tl.where(is_alike, 0, G.ROW_KEYS)
            row = _shared_row(words, start, size, row_keys, kv_len, window_left, G)
            column = tl.program_id(2) * G.COLUMNS + tl.arange(0, G.COLUMNS)
            sums = partials + num_programs * (G.SLOTS * G.QUERY_ROWS * G.DIM)
            acc, maximum, total = _merged_parts(partials, sums, row, line, column, G)
            token = (tl.load(words + BLOCK_FIRST_TOKEN) + line // G.GQA_RATIO).to(tl.int64)
            head = (tl.load(share + SHARE_ROW) * G.GQA_RATIO + line % G.GQA_RATIO).to(tl.int64)
            is_row = line < num_lines
            if sinks is not None:
                maximum, total, decay = add_sink(maximum, total, tl.load(sinks + head))
                acc = acc * decay[:, None]
            total = tl.where(total == 0.0, 1.0, total)
            rows = out + (token * out_token + head * out_head)[:, None]
            is_there = is_row[:, None] & (column < G.DIM)[None, :]
            tl.store(rows + column[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=is_there)
            if lse is not None:
                # Programs of other columns store the same number.
                tl.store(lse + token * lse_token + head * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)


def launch_merge_of_segments(
    args: AttendArgs, cut: ExtendCut, *, extend: ExtendTiles, segment_len: int, slots: int
) -> None:
    """Writes out and lse of every row that several programs have parts of; args and cut are extend's.

    extend:      the tiles that cut was made from
    segment_len: keys of a segment
    slots:       parts of rows that a program of extend has room for
    """
    queries, sharing, dim, query_rows = args.queries, cut.sharing, args.out.shape[2], extend.query_rows
    ratio = extend.heads_per_block(args.heads[1])
    most_lines = min(query_rows, queries.num_tokens * ratio)
    launch(
        _segment_parts_kernel,
        (sharing.programs - 1, triton.cdiv(most_lines, _LINES), triton.cdiv(dim, _COLUMNS)),
        queries.kv_len,
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        args.sinks,
        sharing.window_left,
        sharing.programs,
        cut.max_blocks(queries.num_tokens, queries.num_seqs),
        *args.written_strides,
        G=PartMergeGeometry(
            GQA_RATIO=ratio,
            QUERY_ROWS=query_rows,
            DIM=dim,
            ROW_KEYS=sharing.row_keys,
            CAUSAL=sharing.causal,
            WINDOWED=sharing.window_left != UNLIMITED_WINDOW,
            SEGMENT_LEN=segment_len,
            SLOTS=slots,
            LINES=_LINES,
            COLUMNS=_COLUMNS,
            PARTS=_PARTS,
            EARLY=extend.early,
        ),
        num_warps=2,
        **early_options(extend.early),
        **UNFUSED,
    )
