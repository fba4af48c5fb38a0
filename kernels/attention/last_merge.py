"""Add up the parts of a row in decode's own launch: the program that stores the last one does it.

A program counts, after it has stored its part, and who counts last knows that all the others have stored theirs. No
program waits for another one. Which program that is may differ from launch to launch; what it adds, and in which order,
does not: parts are added in groups of MEMBERS neighbours, what these come to again in groups, and so on. So a row of
hundreds of parts takes three such steps, most of which run side by side.

Counts lie in the schedule, a word for each program, zero outside of a launch: the schedule kernel writes zeros, and who
counts last puts the zero back, so that the next layer and the next replay find it. The group at level n that begins
with the part of program p counts in word p + n. No other one does: a group of two members or more has over MEMBERS^n
programs, and the last program of a row, with which another row may begin, is not among the first MEMBERS^n of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.cuts import RowCut
from rocm_attn.kernels.attention.decode_schedule import count_of_program
from rocm_attn.kernels.attention.merge import Members, MergeGeometry, merge_parts, merge_row, part_of
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Parts that a program adds up at each level.
MEMBERS = tl.constexpr(8)


class Stored(NamedTuple):
    """A part that a program has stored: the program, and of its row the first program with a part, and the parts."""

    program: Any
    first_program: Any
    num_parts: Any


def geometry_of_last(rows: RowCut, most_rows: int, v_head_dim: int, elements: int) -> MergeGeometry:
    """How one program adds up parts: so many elements of a part at once."""
    columns = max(16, next_power_of_2(v_head_dim))
    heads = min(next_power_of_2(rows.Q_ROWS), max(1, elements // columns))
    return MergeGeometry(rows, most_rows, v_head_dim, True, heads, columns, 4, False)


@triton.jit
def merge_if_last(stored, parts, schedule, num_programs, of, sinks, written, G: tl.constexpr):
    """Add up what can be added up now that a part is stored; with the last one of all, write out and lse."""
    R: tl.constexpr = G.rows
    Q_ROWS: tl.constexpr = R.Q_ROWS
    column = tl.arange(0, G.COLUMNS)
    first_program = stored.first_program
    index = stored.program - first_program
    left = stored.num_parts
    step = 1
    level = 0
    while left > 1:
        group = index // MEMBERS
        count = tl.minimum(left - group * MEMBERS, MEMBERS)
        start = first_program + group * MEMBERS * step
        is_last = count <= 1
        if count > 1:
            word = count_of_program(schedule, num_programs, start + level)
            # All threads have stored; counting makes it known, and what others stored before they counted.
            tl.debug_barrier()
            is_last = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == count - 1
            if is_last:
                tl.store(word, 0)
        members = Members(first_program, start, step, count)
        if is_last & (left <= MEMBERS):
            for first in range(0, Q_ROWS, G.HEADS):
                merge_row(parts, members, of, first + tl.arange(0, G.HEADS), column, sinks, written, G)
        elif is_last & (count > 1):
            for first in range(0, Q_ROWS, G.HEADS):
                line = first + tl.arange(0, G.HEADS)
                acc, maximum, total = merge_parts(parts, members, line, Q_ROWS, column, Q_ROWS, G)
                # In the place of the first one, which all threads have read.
                tl.debug_barrier()
                place = part_of(start, first_program) * Q_ROWS + line
                inside = line < Q_ROWS
                mask = inside[:, None] & (column < G.V_HEAD_DIM)[None, :]
                tl.store(parts.acc + place[:, None] * G.V_HEAD_DIM + column[None, :], acc, mask=mask)
                tl.store(parts.sums + place * 2, maximum, mask=inside)
                tl.store(parts.sums + place * 2 + 1, total, mask=inside)
        index = group
        left = tl.where(is_last, tl.cdiv(left, MEMBERS), 0)
        step *= MEMBERS
        level += 1
