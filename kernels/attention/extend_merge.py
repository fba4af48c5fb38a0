"""Adds up the partial results of extend's rows that several programs shared; merge.py has the formula.

Which programs hold parts of a row follows from the schedule (see extend_schedule.py), in a fixed order.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, HeadsOfToken, Softmax
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_BEFORE,
    BLOCK_FIRST_TOKEN,
    BLOCK_KEYS,
    BLOCK_TOKENS,
    BLOCK_WORDS,
    SHARE_BLOCK,
    SHARE_CUT,
    SHARE_DONE,
    SHARE_PARTS,
    SHARE_ROW,
    SHARE_SIZE,
    SHARE_START,
    SHARE_WORDS,
    SHARE_WORK,
)
from rocm_attn.kernels.attention.merge import Parts, merge_parts
from rocm_attn.kernels.attention.query_block import BlockGeometry
from rocm_attn.kernels.attention.softmax import store_rows
from rocm_attn.kernels.early import early_options, wait_for_launch
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# The most parts of a row that take longer with their loads in flight than one after the other. On an H200 heads of 128,
# 64 new of 2064 in eight parts: 19.6 us with them in flight, and 17.9; heads of 64, 8 x 5 of 2005 in seven: 14.4 and
# 15.3.
_FEW_PARTS = tl.constexpr(8)


class ExtendMergeGeometry(NamedTuple):
    """The values that the merge is compiled for.

    GQA_RATIO, BLOCK_HEADS, HEAD_BLOCKS, QUERY_ROWS, ROW_KEYS: extend's
    V_HEAD_DIM: elements of an output row
    LINES:      lines of a query block, a token and a query head each, of one program
    COLUMNS:    columns of a line, padding included
    STAGES:     parts whose loads are in flight if a row has many
    PARTS:      parts that programs of rows add up in one step; 0: programs take the boundaries between shares
    ROWS:       rows of a query block
    ALIKE:      whether rows may be cut alike (extend_schedule.py)
    EARLY:      whether it may begin while the launch before still runs
    """

    GQA_RATIO: int
    BLOCK_HEADS: int
    HEAD_BLOCKS: int
    QUERY_ROWS: int
    ROW_KEYS: int
    V_HEAD_DIM: int
    LINES: int
    COLUMNS: int
    STAGES: int
    PARTS: int
    ROWS: int
    ALIKE: bool
    EARLY: bool


@triton.jit
def _sum_of_parts(parts, began, num_parts, line, column, STAGES: tl.constexpr, G: tl.constexpr):
    """Returns the softmax state of all parts of a row, added one after the other. line: which lines of a part

    There are no masks: lines without a token and padded columns give numbers that are never stored, and their loads
    stay within the workspace, which ends with the sums.
    """
    LINES: tl.constexpr = G.LINES
    COLUMNS: tl.constexpr = G.COLUMNS
    maximum = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    acc = tl.zeros([LINES, COLUMNS], tl.float32)
    for index in tl.range(0, num_parts, num_stages=STAGES):
        # The row began in its first program (part 2p + 1) and was begun earlier for all the others (part 2p).
        at = tl.maximum(2 * (began + index), 2 * began + 1) * G.QUERY_ROWS + line
        part_maximum = tl.load(parts.sums + at * 2)
        part_total = tl.load(parts.sums + at * 2 + 1)
        part_acc = tl.load(parts.acc + (at * G.V_HEAD_DIM)[:, None] + column[None, :])
        new_maximum = tl.maximum(maximum, part_maximum)
        # A row may have seen no key yet: no inf - inf.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - base)
        weight = tl.exp2(part_maximum - base)
        total = total * decay + part_total * weight
        acc = acc * decay[:, None] + part_acc * weight[:, None]
        maximum = new_maximum
    return Softmax(acc, maximum, total)


@triton.jit(do_not_specialize=["num_programs", "max_blocks"])
def _extend_merge_kernel(
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
    ROWS: tl.constexpr = G.ROWS
    line = tl.program_id(1) * G.LINES + tl.arange(0, G.LINES)
    shares = schedule + max_blocks * BLOCK_WORDS
    parts_of_alike = 0
    if G.ALIKE:
        parts_of_alike = tl.load((shares + SHARE_PARTS).to(tl.pointer_type(tl.int64)))
    if G.PARTS > 0:
        block = tl.program_id(0) // ROWS
        row = tl.program_id(0) % ROWS
        words = schedule + block * BLOCK_WORDS
        is_shared = block < tl.load(shares + SHARE_CUT)
        size = tl.load(shares + SHARE_SIZE)
        cost = tl.load(words + BLOCK_KEYS) + G.ROW_KEYS
        start = tl.load((words + BLOCK_BEFORE).to(tl.pointer_type(tl.int64))) * ROWS + row * cost
        if G.ALIKE:
            start = tl.where(parts_of_alike > 0, tl.program_id(0) * parts_of_alike * size, start)
        began = (start // size).to(tl.int32)
    else:
        # The row that goes on from program `began` into the next one, if `began` is the first with a part of it.
        began = tl.program_id(0)
        share = shares + (began + 1) * SHARE_WORDS
        goes_on = (tl.load(share + SHARE_WORK) > 0) & (tl.load(share + SHARE_DONE) > 0)
        start = tl.load((share + SHARE_START).to(tl.pointer_type(tl.int64)))
        size = tl.load(share + SHARE_SIZE)
        words = schedule + tl.load(share + SHARE_BLOCK) * BLOCK_WORDS
        is_shared = goes_on & (start // size == began)
        row = tl.load(share + SHARE_ROW)
        cost = tl.load(words + BLOCK_KEYS) + G.ROW_KEYS
    num_lines = tl.load(words + BLOCK_TOKENS) * G.BLOCK_HEADS
    num_parts = ((start + cost - 1) // size).to(tl.int32) - began + 1
    if G.ALIKE:
        # The first part has the cost of beginning the row in addition to as many keys as others.
        num_parts = tl.where(parts_of_alike > 0, tl.cdiv(cost - G.ROW_KEYS, size).to(tl.int32), num_parts)
    # The schedule was complete before extend's programs passed their wait; their results are read after this one.
    wait_for_launch(G.EARLY)
    if is_shared & (num_parts > 1) & (tl.program_id(1) * G.LINES < num_lines):
        column = tl.program_id(2) * G.COLUMNS + tl.arange(0, G.COLUMNS)
        sums = partials + num_programs * (2 * G.QUERY_ROWS * G.V_HEAD_DIM)
        parts = Parts(partials, sums)
        if G.PARTS > 0:
            acc, maximum, total = merge_parts(
                parts, began, num_parts, line, num_lines, column, G.QUERY_ROWS, G.PARTS, G.COLUMNS, G.V_HEAD_DIM
            )
        elif (G.STAGES > 1) and (num_parts > _FEW_PARTS):
            acc, maximum, total = _sum_of_parts(parts, began, num_parts, line, column, G.STAGES, G)
        else:
            acc, maximum, total = _sum_of_parts(parts, began, num_parts, line, column, 1, G)
        ratio_head = row % G.HEAD_BLOCKS * G.BLOCK_HEADS + line % G.BLOCK_HEADS
        token = (tl.load(words + BLOCK_FIRST_TOKEN) + line // G.BLOCK_HEADS).to(tl.int64)
        head = (row // G.HEAD_BLOCKS * G.GQA_RATIO + ratio_head).to(tl.int64)
        is_row = (line < num_lines) & (ratio_head < G.GQA_RATIO)
        out_rows, lse_rows = HeadRows(out, out_token, out_head), HeadRows(lse, lse_token, lse_head)
        # Programs of other columns store the same LSE.
        store_rows(
            Softmax(acc, maximum, total),
            HeadsOfToken(token, head, is_row),
            sinks,
            out_rows,
            lse_rows,
            column,
            G.V_HEAD_DIM,
        )


# Columns of a program of rows, and numbers that it loads in one step. On an H200, 5 new of 8197: 32 x 8 heads of 128
# take 25.7 us with 8192 numbers in programs of four warps, 19.3 so, 19.6 with 4096; 8 x 1 heads, 200 new of 1200: 19.4,
# 14.0, 14.3; 64 x 8 heads of 64, 8 x 16 of 1016: 15.3, 15.4, 15.9.
_ROW_COLUMNS, _ROW_NUMBERS, _ROW_WARPS = 32, 2048, 2


def parts_of_step(num_rows: int, num_programs: int) -> int:
    """The parts that are added up in one step if programs take rows; 0: they take the boundaries between shares.

    By row there are fewer programs, of fewer lines: launching 1,000 takes about as long as a step.

    num_rows: the most rows of a step
    """
    if num_rows >= num_programs:
        return 0
    return min(max(next_power_of_2(num_programs // num_rows), 2), 128)


def launch_extend_merge(args: AttendArgs, cut: ExtendCut, block: BlockGeometry, stages: int) -> None:
    """Writes out and lse of every row that several programs have parts of; args and cut are launch_paged_extend's.

    stages: parts whose loads are in flight
    """
    queries, v_head_dim, programs = args.queries, args.out.shape[2], cut.sharing.programs
    max_blocks = cut.max_blocks(queries.num_tokens, queries.num_seqs)
    # The last block is the tail's.
    num_rows = max(max_blocks - 1, 1) * cut.sharing.rows
    lines, columns, warps = min(16, block.QUERY_ROWS), min(128, max(16, next_power_of_2(v_head_dim))), 4
    parts = parts_of_step(num_rows, programs)
    if parts:
        columns, warps = min(columns, _ROW_COLUMNS), _ROW_WARPS
        lines = min(max(_ROW_NUMBERS // (columns * parts), 1), block.QUERY_ROWS)
    most_lines = min(block.QUERY_ROWS, queries.num_tokens * block.BLOCK_HEADS)
    launch(
        _extend_merge_kernel,
        (num_rows if parts else programs - 1, triton.cdiv(most_lines, lines), triton.cdiv(v_head_dim, columns)),
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        args.sinks,
        programs,
        max_blocks,
        *args.written_strides,
        G=ExtendMergeGeometry(
            block.GQA_RATIO,
            block.BLOCK_HEADS,
            block.HEAD_BLOCKS,
            block.QUERY_ROWS,
            block.ROW_KEYS,
            v_head_dim,
            lines,
            columns,
            stages,
            parts,
            cut.sharing.rows,
            cut.sharing.alike_keys > 0,
            block.EARLY,
        ),
        num_warps=warps,
        **early_options(block.EARLY),
    )
