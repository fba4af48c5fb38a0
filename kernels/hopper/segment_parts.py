"""Merge the parts of rows that several programs of deterministic extend for Hopper have shared, by whole segments.

The first program of a row has merged its segments itself, and the others have kept theirs one by one. All are merged
from left to right: kernels/attention/segments.py has the arithmetic, and a row's bits do not tell who had a segment.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_FIRST_TOKEN,
    BLOCK_KEYS,
    BLOCK_TOKENS,
    BLOCK_WORDS,
    SHARE_BLOCK,
    SHARE_DONE,
    SHARE_ROW,
    SHARE_SIZE,
    SHARE_START,
    SHARE_WORDS,
    SHARE_WORK,
)
from rocm_attn.kernels.attention.segments import UNFUSED, merge_segment
from rocm_attn.kernels.attention.softmax import LN_2, add_sink
from rocm_attn.kernels.launch import launch

# Lines of a query block, and columns of its rows, of one program.
_LINES, _COLUMNS = 16, 64


class MergeGeometry(NamedTuple):
    """What the merge is compiled for.

    GQA_RATIO, QUERY_ROWS, DIM, ROW_KEYS: extend's
    SLOTS:   parts of rows that a program of extend has room for
    LINES:   lines of a query block, a token and a query head each, of one program
    COLUMNS: columns of a line
    """

    GQA_RATIO: int
    QUERY_ROWS: int
    DIM: int
    ROW_KEYS: int
    SLOTS: int
    LINES: int
    COLUMNS: int


@triton.jit
def _with_part(softmax, acc, sums, part, line, column, G: tl.constexpr):
    """A softmax merged with a part that lies right of it."""
    at = part * G.QUERY_ROWS + line
    part_acc = tl.load(acc + (at * G.DIM)[:, None] + column[None, :])
    return merge_segment(softmax, Softmax((part_acc,), tl.load(sums + at * 2), tl.load(sums + at * 2 + 1)))


@triton.jit
def _merged_parts(partials, num_programs, began, num_parts, line, column, G: tl.constexpr):
    """The softmax of a row of which programs [began, began + num_parts) have parts.

    Lines without a token give numbers that are never stored, and what is read for them lies in the workspace too.
    """
    LINES: tl.constexpr = G.LINES
    COLUMNS: tl.constexpr = G.COLUMNS
    lines = num_programs * (G.SLOTS * G.QUERY_ROWS)
    sums = partials + lines * G.DIM
    kept = sums + lines * 2
    maximum = tl.full([LINES], float("-inf"), tl.float32)
    softmax = Softmax((tl.zeros([LINES, COLUMNS], tl.float32),), maximum, tl.zeros([LINES], tl.float32))
    softmax = _with_part(softmax, partials, sums, began * G.SLOTS, line, column, G)
    for program in range(began + 1, began + num_parts):
        for segment in range(tl.load(kept + program).to(tl.int32)):
            softmax = _with_part(softmax, partials, sums, program * G.SLOTS + 1 + segment, line, column, G)
    return softmax


@triton.jit(do_not_specialize=["num_programs", "max_blocks"])
def _segment_parts_kernel(
    schedule,
    partials,
    out,
    lse,
    sinks,
    num_programs,
    max_blocks,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: tl.constexpr,
):
    # The row that goes on from program `began` into the next one, if `began` is the first with a part of it.
    began = tl.program_id(0)
    share = schedule + max_blocks * BLOCK_WORDS + (began + 1) * SHARE_WORDS
    start = tl.load((share + SHARE_START).to(tl.pointer_type(tl.int64)))
    size = tl.load(share + SHARE_SIZE)
    goes_on = (tl.load(share + SHARE_WORK) > 0) & (tl.load(share + SHARE_DONE) > 0) & (start // size == began)
    line = tl.program_id(1) * G.LINES + tl.arange(0, G.LINES)
    if goes_on:
        words = schedule + tl.load(share + SHARE_BLOCK) * BLOCK_WORDS
        num_lines = tl.load(words + BLOCK_TOKENS) * G.GQA_RATIO
        if tl.program_id(1) * G.LINES < num_lines:
            cost = tl.load(words + BLOCK_KEYS) + G.ROW_KEYS
            num_parts = ((start + cost - 1) // size).to(tl.int32) - began + 1
            column = tl.program_id(2) * G.COLUMNS + tl.arange(0, G.COLUMNS)
            merged = _merged_parts(partials, num_programs, began, num_parts, line, column, G)
            acc, maximum, total = merged.acc[0], merged.maximum, merged.total
            token = (tl.load(words + BLOCK_FIRST_TOKEN) + line // G.GQA_RATIO).to(tl.int64)
            head = (tl.load(share + SHARE_ROW) * G.GQA_RATIO + line % G.GQA_RATIO).to(tl.int64)
            is_row = line < num_lines
            if sinks is not None:
                sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
                maximum, total, decay = add_sink(maximum, total, sink)
                acc = acc * decay[:, None]
            total = tl.where(total == 0.0, 1.0, total)
            rows = out + (token * out_token + head * out_head)[:, None]
            tl.store(rows + column[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
            if lse is not None:
                # Programs of other columns store the same number.
                tl.store(lse + token * lse_token + head * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)


def launch_merge_of_segments(args: AttendArgs, cut: ExtendCut, *, query_rows: int, slots: int) -> None:
    """out and lse of every row of which several programs hold parts; args and cut are launch_hopper_extend's.

    query_rows: rows of a query block
    slots:      parts of rows that a program of extend has room for
    """
    queries, programs, dim = args.queries, cut.sharing.programs, args.out.shape[2]
    launch(
        _segment_parts_kernel,
        (programs - 1, triton.cdiv(query_rows, _LINES), dim // _COLUMNS),
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        args.sinks,
        programs,
        cut.max_blocks(queries.num_tokens, queries.num_seqs),
        *args.written_strides,
        G=MergeGeometry(args.heads[1], query_rows, dim, cut.sharing.row_keys, slots, _LINES, _COLUMNS),
        num_warps=2,
        **UNFUSED,
    )
