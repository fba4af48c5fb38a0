"""Deterministic extend for Hopper: a row's keys segment by segment, merged from left to right.

kernels/attention/segments.py has the arithmetic, and why a row's bits depend on nothing else. What lies left of a
segment is kept in shared memory: both accumulators have no room in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.hopper.rows import GROUP_ROWS


class Left(NamedTuple):
    """Maximum and sum [64] of what lies left of a segment; its accumulators are in shared memory."""

    maximum: Any
    total: Any


@gluon.jit
def new_left(G: gl.constexpr):
    """Room for a consumer's accumulators [parts, 64, columns]."""
    PARTS: gl.constexpr = G.DIM // G.COLUMNS
    COLUMNS: gl.constexpr = G.COLUMNS
    # The columns that four lanes hold together are moved as one: no two rows of a warp meet in a bank.
    layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    return gl.allocate_shared_memory(gl.float32, [PARTS, GROUP_ROWS, COLUMNS], layout)


@gluon.jit
def nothing_left(room, empty, G: gl.constexpr):
    """Left of the first segment. empty: the softmax of no key"""
    PARTS: gl.constexpr = G.DIM // G.COLUMNS
    if G.SEGMENT_STEPS > 0:
        for i in gl.static_range(PARTS):
            room.index(i).store(empty.acc[i])
    return Left(empty.maximum, gl.zeros_like(empty.maximum))


@gluon.jit
def merge_segment(room, left, segment, G: gl.constexpr):
    """What lies left of a segment, merged with it: segments.merge_segment of kernels/attention."""
    PARTS: gl.constexpr = G.DIM // G.COLUMNS
    o_layout: gl.constexpr = segment.acc[0].type.layout
    O_ROW: gl.constexpr = gl.SliceLayout(1, o_layout)
    maximum = gl.maximum(left.maximum, segment.maximum)
    base = gl.where(maximum == float("-inf"), 0.0, maximum)
    decay = gl.exp2(left.maximum - base)
    weight = gl.exp2(segment.maximum - base)
    total = gl.fma(left.total, decay, segment.total * weight)
    decay = gl.expand_dims(gl.convert_layout(decay, O_ROW), 1)
    weight = gl.expand_dims(gl.convert_layout(weight, O_ROW), 1)
    for i in gl.static_range(PARTS):
        acc = room.index(i)
        acc.store(gl.fma(acc.load(o_layout), decay, segment.acc[i] * weight))
    return Left(maximum, total)


@gluon.jit
def merged(room, left, segment, G: gl.constexpr):
    """The softmax of a row. segment: the last one"""
    PARTS: gl.constexpr = G.DIM // G.COLUMNS
    o_layout: gl.constexpr = segment.acc[0].type.layout
    left = merge_segment(room, left, segment, G)
    acc = ()
    for i in gl.static_range(PARTS):
        acc += (room.index(i).load(o_layout),)  # type: ignore[assignment]
    return Softmax(acc, left.maximum, left.total)
