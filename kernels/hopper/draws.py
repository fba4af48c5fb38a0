"""Whole rows of extend for Hopper, drawn as programs come to them: an even finish, however long rows take.

A counter in the schedule holds the number of drawn rows. In a program one group of warps draws, and passes the row to
the others in shared memory: a group of its own, asked two steps before the end of a row's loads, because a draw takes
about a step; if keys are gathered, the group that gathers them. The merge, which follows each launch, sets the counter
back, and so does the launcher if it fails before the merge. A row's result does not depend on the program that drew it.

Rows lie in the order of the schedule's blocks with one exception: within each DRAWN_BLOCKS consecutive blocks the rows
of one KV head come before those of the next one. If these blocks belong to one sequence, programs that run at a time
read the same keys, from the L2.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rocm_attn.kernels.attention.extend_schedule import BLOCK_TOKENS, BLOCK_WORDS, COUNTER
from rocm_attn.kernels.hopper.warp_groups import leave

_LANES = gl.constexpr(32)
# Steps of a row that are still to be loaded when the next row is requested.
_AHEAD = gl.constexpr(2)


class Draws(NamedTuple):
    """The row that was drawn, in shared memory; barriers that it is there, that all have read it, and that the next one
    is requested. If keys are gathered nothing requests it, and `parameters` is `full`.
    """

    row: Any
    full: Any
    free: Any
    parameters: Any


@gluon.jit
def new_draws(G: gl.constexpr):
    """Room for a drawn row. Its readers are the consumers, and if keys are not gathered the two that load or decode."""
    LANES: gl.constexpr = _LANES
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    row = gl.allocate_shared_memory(gl.int32, [LANES], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], bars)
    free = gl.allocate_shared_memory(gl.int64, [1], bars)
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=G.GROUPS if G.GATHERED else G.GROUPS + 2)
    parameters = full
    # An unused barrier would end here, and Triton would put the values that it passes to warp groups in its place. PTX
    # allows nothing else at a barrier's address: on an H200 that processes shared, its first value came last at times.
    if not G.GATHERED:
        parameters = gl.allocate_shared_memory(gl.int64, [1], bars)
        mbarrier.init(parameters, count=1)
    return Draws(row, full, free, parameters)


@gluon.jit
def row_at(x, place, G: gl.constexpr):
    """The row at a place among whole ones, block times KV heads and head; -1: there is none."""
    BLOCKS: gl.constexpr = G.DRAWN_BLOCKS
    ROWS: gl.constexpr = G.DRAWN_BLOCKS * G.KV_HEADS
    first = x.cut + place // ROWS * BLOCKS
    num_blocks = gl.to_tensor(0)
    for i in gl.static_range(BLOCKS):
        tokens = gl.load(x.words + (first + i) * BLOCK_WORDS + BLOCK_TOKENS, mask=first + i < x.max_blocks, other=0)
        num_blocks += (tokens > 0).to(gl.int32)
    row = place % ROWS
    is_there = row < num_blocks * G.KV_HEADS
    num_blocks = gl.maximum(num_blocks, 1)
    return gl.where(is_there, (first + row % num_blocks) * G.KV_HEADS + row // num_blocks, -1)


@gluon.jit
def first_row(x, G: gl.constexpr):
    """The first row of a program without a share. If nothing is shared, each program has a place of its own."""
    place = gl.program_id(0)
    if x.cut > 0:
        place = gl.atomic_add(x.words + COUNTER, 1, sem="relaxed")
    return row_at(x, place, G)


@gluon.jit
def draw(x, turn, WARPS: gl.constexpr, G: gl.constexpr):
    """Makes the program's turn-th draw and passes it to all others."""
    draws = x.draws
    LANES: gl.constexpr = _LANES
    place = gl.atomic_add(x.words + COUNTER, 1, sem="relaxed") + gl.where(x.cut > 0, 0, x.num_programs)
    row = row_at(x, place, G)
    mbarrier.wait(draws.free, (turn & 1) ^ 1)
    draws.row.store(gl.zeros([LANES], gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])) + row)
    gl.thread_barrier()
    mbarrier.arrive(draws.full, count=1)
    return row


@gluon.jit
def draw_rows(x, WARPS: gl.constexpr, G: gl.constexpr):
    """Draws all of the program's whole rows, each when it is requested, until there is none."""
    if G.DRAWN_BLOCKS > 0:
        turn = gl.to_tensor(0)
        row = gl.to_tensor(0)
        while row >= 0:
            mbarrier.wait(x.draws.parameters, turn & 1)
            row = draw(x, turn, WARPS, G)
            turn += 1
    leave()


@gluon.jit
def ask_before(x, is_last, steps, G: gl.constexpr):
    """Requests the next row before a short one is loaded. is_last: whether a row is drawn after it"""
    if G.DRAWN_BLOCKS > 0 and not G.GATHERED:
        mbarrier.arrive(x.draws.parameters, count=1, pred=is_last & (steps.end - steps.first <= _AHEAD))


@gluon.jit
def ask_within(x, is_last, step, steps, G: gl.constexpr):
    """Requests it at a step of a longer one."""
    if G.DRAWN_BLOCKS > 0 and not G.GATHERED:
        is_time = (step + _AHEAD == steps.end) & (step > steps.first)
        mbarrier.arrive(x.draws.parameters, count=1, pred=is_last & is_time)


@gluon.jit
def drawn(x, turn, WARPS: gl.constexpr):
    """The row of the program's turn-th draw, for warps that did not draw it."""
    draws = x.draws
    mbarrier.wait(draws.full, turn & 1)
    row = gl.max(draws.row.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    gl.thread_barrier()
    mbarrier.arrive(draws.free, count=1)
    return row
