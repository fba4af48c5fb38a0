"""Add up the partial results of a row within the launch that leaves them: who ends last with them does it.

The parts of a row (merge.py), in the order of their programs, make groups of GROUP. Of each group the program that
ends last adds up the parts, in their order, and puts the sum where the first one was. These sums make groups again,
until one is left, whose sum is the row's. So which program ends last changes no bit, and none reads all parts of a long
row: of one sequence 264 programs leave a megabyte, with 8 query heads of 128.

A part has a counter. A group's is that of its first part, or of one after it: of as many as it has levels of groups
below it.

Who counts has stored its part before, and who reads parts has counted before: "acq_rel" orders what the thread that
counts does, and barriers order it with the others of its program. The last one sets the counter back for the next
launch, which waits for the end of this one (gdc_wait, where launches are early). The schedule's kernel sets all of
them once a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.bundles import Rows, Softmax
from rocm_attn.kernels.attention.merge import Lines, add_parts, nothing_merged, write_merged


class SharedRow(NamedTuple):
    """A row that several programs have parts of.

    first: the first of these programs
    index: this one among them
    count: how many they are
    """

    first: Any
    index: Any
    count: Any


class RowOutput(NamedTuple):
    """Where a row goes. Flat, as Triton 3.6 mixes up what lies deeper where some of it is a constant.

    out, lse, sinks:                          pointers; the last two may be None
    out_token, out_head, lse_token, lse_head: strides between tokens and between heads
    token, first_head:                        of the row, int64
    heads:                                    its query heads
    """

    out: Any
    lse: Any
    sinks: Any
    out_token: Any
    out_head: Any
    lse_token: Any
    lse_head: Any
    token: Any
    first_head: Any
    heads: Any


class _Group(NamedTuple):
    """Parts, or sums of groups of them, that lie where their first parts did.

    first:  the number of its first part in the row
    apart:  parts from one to the next
    size:   how many
    is_row: whether they are all
    """

    first: Any
    apart: Any
    size: Any
    is_row: Any


@triton.jit
def merge_if_last(parts, counters, row, to, G: tl.constexpr):
    """Count a part that this program has stored, and add up every group that it ends last with.

    parts: a Parts (merge.py); row: a SharedRow; to: a RowOutput; G: a GroupShape
    """
    index = row.index
    count = row.count
    apart = 1
    level = 0
    is_last = True
    while is_last:
        number = index // G.GROUP
        size = tl.minimum(G.GROUP, count - number * G.GROUP)
        group = _Group(number * (G.GROUP * apart), apart, size, count <= G.GROUP)
        # A group of one is its sum, and has no counter: the part after it may be another row's.
        if size > 1:
            # What is stored is there before it counts: of all threads, since one counts for all.
            tl.debug_barrier()
            counter = counters + _place(row.first, group.first + level)
            is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == size - 1
            if is_last:
                tl.store(counter, 0)
                _merge_group(parts, row.first, group, to, G)
        is_last = is_last & (count > G.GROUP)
        index = number
        count = tl.cdiv(count, G.GROUP)
        apart *= G.GROUP
        level += 1


@triton.jit
def _merge_group(parts, first_program, group, to, G: tl.constexpr):
    """Add up a group: to the row's output, or to where its first part is."""
    for first_line in range(0, G.LINES, G.HEADS):
        q_row = first_line + tl.arange(0, G.HEADS)
        is_row = q_row < to.heads
        for first_column in range(0, G.V_HEAD_DIM, G.COLUMNS):
            column = first_column + tl.arange(0, G.COLUMNS)
            acc, maximum, total = _sum_of_group(parts, first_program, group, Lines(q_row, to.heads, column), G)
            if group.is_row:
                head = to.first_head + q_row
                sink = None
                if to.sinks is not None:
                    sink = tl.load(to.sinks + head, mask=is_row, other=float("-inf"))
                merged = Softmax(acc, maximum, total)
                out, lse = Rows(to.out, to.out_token, to.out_head), Rows(to.lse, to.lse_token, to.lse_head)
                write_merged(merged, sink, out, lse, (to.token, head, column), is_row, G.V_HEAD_DIM)
            else:
                # All threads have read what is written over here.
                tl.debug_barrier()
                line = _place(first_program, group.first) * G.LINES + q_row
                mask = is_row[:, None] & (column < G.V_HEAD_DIM)[None, :]
                tl.store(parts.acc + (line * G.V_HEAD_DIM)[:, None] + column[None, :], acc, mask=mask)
                if first_column + G.COLUMNS >= G.V_HEAD_DIM:
                    # All columns of the line have been weighted by those that lie there.
                    tl.store(parts.sums + line * 2, maximum, mask=is_row)
                    tl.store(parts.sums + line * 2 + 1, total, mask=is_row)


@triton.jit
def _sum_of_group(parts, first_program, group, lines, G: tl.constexpr):
    """What a group gives some lines and columns, a Softmax."""
    lane = tl.arange(0, G.PARTS)
    merged = nothing_merged(G)
    for first in range(0, group.size, G.PARTS):
        member = first + lane
        part = _place(first_program, group.first + member * group.apart)
        merged = add_parts(merged, parts, part, member < group.size, lines, G.LINES, G)
    return merged


@triton.jit
def _place(first_program, number):
    """Which one of all parts is a row's: of its first program it is the second part, of the others the first."""
    return tl.maximum(2 * (first_program + number), 2 * first_program + 1)
