"""Deterministic extend for Hopper: a row's keys segment by segment, merged from left to right.

kernels/attention/segments.py has the arithmetic, and why a row's bits depend on nothing else. Registers do not hold
both accumulators. Everything left of a segment is kept in shared memory, or in the workspace if that has no room: a
program reads its own writes, from L2.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.hopper.rows import GROUP_ROWS, of_rows, parts_of, width_of


class SegmentState(NamedTuple):
    """Maximum and sum [64] of everything left of a segment; its accumulators are in shared memory or the workspace."""

    maximum: Any
    total: Any


@gluon.jit
def new_left(G: gl.constexpr):
    """Room for a consumer's accumulators [parts, 64, columns]."""
    OF_V: gl.constexpr = G.V
    PARTS: gl.constexpr = parts_of(OF_V)
    COLUMNS: gl.constexpr = G.V.TILE
    # The columns that four lanes hold together are moved as one: no two rows of a warp meet in a bank.
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [PARTS, GROUP_ROWS, COLUMNS], layout)


@gluon.jit
def nothing_left(empty):
    """The state left of the first segment. empty: the softmax state before any key"""
    return SegmentState(empty.maximum, gl.zeros_like(empty.maximum))


@gluon.jit
def left_of_group(GROUP: gl.constexpr, partials, G: gl.constexpr):
    """The group's room in the workspace."""
    return partials + (gl.program_id(0) * G.GROUPS + GROUP) * (GROUP_ROWS * G.V.DIM)


@gluon.jit
def _places(room, part: gl.constexpr, layout: gl.constexpr, G: gl.constexpr):
    """Places of a part's numbers in the workspace: in squares of eight, so that a warp moves whole squares."""
    OF_V: gl.constexpr = G.V
    WIDTH: gl.constexpr = width_of(part, OF_V)
    COLUMNS: gl.constexpr = G.V.TILE
    SQUARES: gl.constexpr = G.V.TILE // 8
    row = gl.expand_dims(gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)), 0)
    square = row // 8 * SQUARES + column // 8
    return room + part * (GROUP_ROWS * COLUMNS) + square * 64 + row % 8 * 8 + column % 8


@gluon.jit
def _shared_part(room, part: gl.constexpr, G: gl.constexpr):
    """A part's numbers in shared memory, with the columns that products are made with."""
    OF_V: gl.constexpr = G.V
    WIDTH: gl.constexpr = width_of(part, OF_V)
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    return room.index(part)._reinterpret(gl.float32, [GROUP_ROWS, WIDTH], layout)


@gluon.jit
def _part_left(room, part: gl.constexpr, is_any, layout: gl.constexpr, G: gl.constexpr):
    """A part of the accumulators; 0 for rows without any. is_any: which have some, [64, 1]"""
    if G.LEFT_IN_WORKSPACE:
        acc = gl.load(_places(room, part, layout, G), mask=is_any, other=0.0)
    else:
        acc = gl.where(is_any, _shared_part(room, part, G).load(layout), 0.0)
    return acc


@gluon.jit
def _merge_of(left, segment):
    """Maximum and sum of both; decay and weight [64] of their accumulators; whether rows have anything left."""
    maximum = gl.maximum(left.maximum, segment.maximum)
    base = gl.where(maximum == float("-inf"), 0.0, maximum)
    decay = gl.exp2(left.maximum - base)
    weight = gl.exp2(segment.maximum - base)
    total = gl.fma(left.total, decay, segment.total * weight)
    return SegmentState(maximum, total), (decay, weight, left.maximum)


@gluon.jit
def _merged_part(room, part: gl.constexpr, scale_values, acc, G: gl.constexpr):
    """A part of the accumulators of a segment, merged with everything left of it. scale_values: those of _merge_of"""
    decay, weight, left_maximum = scale_values
    is_any = of_rows(left_maximum, acc) > float("-inf")
    layout: gl.constexpr = acc.type.layout
    left = _part_left(room, part, is_any, layout, G)
    return gl.fma(left, of_rows(decay, acc), acc * of_rows(weight, acc))


@gluon.jit
def _store_part_left(room, part: gl.constexpr, acc, G: gl.constexpr):
    layout: gl.constexpr = acc.type.layout
    if G.LEFT_IN_WORKSPACE:
        gl.store(_places(room, part, layout, G), acc)
    else:
        _shared_part(room, part, G).store(acc)


@gluon.jit
def merge_segment(room, left, segment, place, G: gl.constexpr):
    """Merges a segment with everything left of it: returns the new left state, and the softmax state of all of it. See
    segments.merge_segment of kernels/attention.

    The room is not read for the first segment, which has nothing left of it, and not written for the last one, after
    which it is not needed. If rows have seen no key yet, nothing was written, so their room is not read.

    place: whether the segment is the program's first of the row, and whether it is its last
    """
    OF_V: gl.constexpr = G.V
    PARTS: gl.constexpr = parts_of(OF_V)
    is_first, is_last = place
    left, scale_values = _merge_of(left, segment)
    # The first segment stays unchanged: its weight is 1, and 0 would be added. Only a -0.0 would become 0.0 by that.
    acc = segment.acc
    if not is_first:
        acc = ()
        for i in gl.static_range(PARTS):
            acc += (_merged_part(room, i, scale_values, segment.acc[i], G),)
    if not is_last:
        for i in gl.static_range(PARTS):
            _store_part_left(room, i, acc[i], G)
    return left, Softmax(acc, left.maximum, left.total)
