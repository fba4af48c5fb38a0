"""Adds up the partial results of a row within the launch that leaves them: the program that ends last with them does.

The parts of a row (merge.py), in the order of their programs, make groups of GROUP. The program that ends last with a
group adds up its parts, in their order, and puts the sum where the first one was. These sums make groups again,
until one is left, whose sum is the row's. So the program that ends last changes no bit, and none reads all parts of a
long row: for one sequence 264 programs leave 2.2 MB, with 8 query heads of 128.

A part has a counter. A group uses the counter of its first part, or of a later one: as many parts later as it has
levels of groups below it.

Here a part is divided by its sum, and has the logarithm of the sum next to each element. So an element needs nothing
that another thread has, and no barrier.

A program that counts has stored its part before, and one that reads parts has counted before: "acq_rel" orders what the
counting thread does, and barriers order it with the others of its program. The last one sets the counter back for the
next launch, which waits for the end of this one (gdc_wait, if launches are early). The schedule's kernel sets all of
them once per step.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.merge import Parts
from rocm_attn.kernels.attention.softmax import LN_2, add_sink


class SharedRow(NamedTuple):
    """A row that several programs have parts of.

    first: the first of these programs
    index: this one among them
    count: how many programs there are
    """

    first: Any
    index: Any
    count: Any


class RowOutput(NamedTuple):
    """The destination of a row. Flat, because Triton 3.6 mixes up deeper fields if some of them are constants.

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
    size:   how many there are
    is_row: whether they are all of the row
    """

    first: Any
    apart: Any
    size: Any
    is_row: Any


@triton.jit
def merge_if_last(parts, counters, row, to, G: tl.constexpr):
    """Counts a part that this program has stored, and adds up every group that it ends last with.

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
            # A part is stored before it counts: by all threads, since one counts for all.
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
    """Adds up a group: to the row's output, or to the place of its first part."""
    HEADS: tl.constexpr = G.HEADS
    COLUMNS: tl.constexpr = G.COLUMNS
    for first_line in range(0, G.LINES, HEADS):
        q_row = first_line + tl.arange(0, HEADS)
        for first_column in range(0, G.V_HEAD_DIM, COLUMNS):
            column = first_column + tl.arange(0, COLUMNS)
            mask = (q_row < to.heads)[:, None] & (column < G.V_HEAD_DIM)[None, :]
            element = (q_row * G.V_HEAD_DIM)[:, None] + column[None, :]
            at = Parts(parts.acc + element, parts.sums + element)
            acc, maximum, total = _sum_of_group(at, first_program, group, mask, G)
            if group.is_row:
                head = (to.first_head + q_row)[:, None]
                if to.sinks is not None:
                    sink = tl.load(to.sinks + head + tl.zeros_like(element), mask=mask, other=float("-inf"))
                    maximum, total, decay = add_sink(maximum, total, sink)
                    acc = acc * decay
                total = tl.where(mask, total, 1.0)
                value = (acc / total).to(to.out.dtype.element_ty)
                out_row = to.out + to.token * to.out_token + head * to.out_head
                tl.store(out_row + column[None, :], value, mask=mask)
                if to.lse is not None:
                    lse_row = to.lse + to.token * to.lse_token + head * to.lse_head + tl.zeros_like(element)
                    is_first = mask & (column == 0)[None, :]
                    tl.store(lse_row, (maximum + tl.log2(total)) * LN_2, mask=is_first)
            else:
                # All threads must have read what is overwritten here.
                tl.debug_barrier()
                first = _place(first_program, group.first) * (G.LINES * G.V_HEAD_DIM)
                total = tl.where(mask, total, 1.0)
                tl.store(at.acc + first, acc / total, mask=mask)
                tl.store(at.sums + first, maximum + tl.log2(total), mask=mask)


@triton.jit
def _sum_of_group(at, first_program, group, mask, G: tl.constexpr):
    """A group's softmax state of some elements, each with its own maximum and total. at: those of part 0"""
    PARTS: tl.constexpr = G.PARTS
    acc = tl.zeros(mask.shape, tl.float32)
    total = tl.zeros(mask.shape, tl.float32)
    maximum = tl.full(mask.shape, float("-inf"), tl.float32)
    for first in range(0, group.size, PARTS):
        sums = ()
        accs = ()
        new_maximum = maximum
        for i in tl.static_range(PARTS):
            place = _place(first_program, group.first + (first + i) * group.apart) * (G.LINES * G.V_HEAD_DIM)
            live = mask & (first + i + tl.zeros(mask.shape, tl.int32) < group.size)
            part_sum = tl.load(at.sums + place, mask=live, other=float("-inf"))
            accs += (tl.load(at.acc + place, mask=live, other=0.0),)  # type: ignore[assignment]
            sums += (part_sum,)  # type: ignore[assignment]
            new_maximum = tl.maximum(new_maximum, part_sum)
        # Lines without a head have -inf: no inf - inf.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - base)
        total *= decay
        acc *= decay
        for i in tl.static_range(PARTS):
            weight = tl.exp2(sums[i] - base)
            total += weight
            acc += accs[i] * weight
        maximum = new_maximum
    return Softmax(acc, maximum, total)


@triton.jit
def _place(first_program, number):
    """The number of a row's part among all parts: the second part of its first program, the first one of the others."""
    return tl.maximum(2 * (first_program + number), 2 * first_program + 1)
