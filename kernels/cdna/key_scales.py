"""Scales of tokens in decode for CDNA: few registers hold those of a block, and products read them from other lanes.

A lane's scores are those of four keys of each chunk (key_blocks.py), and the other fifteen lanes of its row have scores
of the same keys. So each of them loads other scales, and a row has all that it needs. A product takes its factor from
the lane of the row that has it (DPP), which is a part of the instruction.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.language import core
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.softmax import in_range
from rocm_attn.kernels.cache.codes import TOKEN_SCALES
from rocm_attn.kernels.cdna.key_layouts import CHUNK, CdnaGeometry, product_layout

# Lanes of a row; a wave has four. And keys of a chunk whose scores a lane has.
_LANES = gl.constexpr(16)
_OWN_KEYS = gl.constexpr(4)
# DPP: lanes read from one lane of their row (row_newbcast), or from one that is some places before (row_ror, circular).
# All rows, and all banks, are written.
_FROM_ONE, _ROTATED = gl.constexpr(0x150), gl.constexpr(0x120)
_EVERY = 0xF
_INT = tl.int32
_MOVE = {(_INT, _INT, _INT, _INT, tl.int1): ("llvm.amdgcn.mov.dpp.i32", _INT)}
_READ_LANE = {(_INT, _INT): ("llvm.amdgcn.readlane.i32", _INT)}
_LANES_BELOW = {(_INT, _INT): ("llvm.amdgcn.mbcnt.lo", _INT)}
_LANES_BELOW_FROM_32 = {(_INT, _INT): ("llvm.amdgcn.mbcnt.hi", _INT)}
# 2^-60, as the bits of a float32 with one more in its exponent: a row with smaller scales of V alone counts as this,
# so that sums of weights stay finite.
_SMALLEST = gl.constexpr((127 + 1 - 60) << 23)

# The bias of float32's exponents, and one more as largest_scales adds.
BIAS = gl.constexpr(127 + 1)


class ScaleSides(NamedTuple):
    """Scales of K and of V of a row of work: pointers to those in page 0; the place of a lane's keys from there on.

    keys: int64 [4, _LANES, _neighbours]
    """

    k: Any
    v: Any
    keys: Any


class KeyScales(NamedTuple):
    """Scales of a block's keys, float32 [4, _LANES, _neighbours], and pages_of_lanes of the next block."""

    k: Any
    v: Any
    pages: Any


@constexpr_function
def has_scales(G: CdnaGeometry) -> bool:
    """True if tokens have scales."""
    return bool(G.CODING.SCALES == TOKEN_SCALES)


@constexpr_function
def _neighbours(G: CdnaGeometry) -> int:
    """Neighbouring scales that a lane loads."""
    return 1 if G.CHUNKS * _OWN_KEYS.value <= _LANES.value else 2


@constexpr_function
def _layout(G: CdnaGeometry) -> gl.constexpr:
    """The layout of loaded scales, [4, _LANES, _neighbours]: rows of lanes, the lanes of a row, a lane's own."""
    own = [[0, 0, 1]] if _neighbours(G) == 2 else []
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [1, 0, 0], [2, 0, 0]]
    return gl.DistributedLinearLayout(own, lanes, [], [], [4, _LANES.value, _neighbours(G)])


def _called(name: Any, args: list[Any], _semantic: Any) -> Any:
    return core.extern_elementwise("", "", args, name, is_pure=True, _semantic=_semantic)


@core.extern
def _moved(x: Any, control: Any, _semantic: Any = None) -> Any:
    """int32 of other lanes. control: a constexpr, of DPP"""
    return _called(_MOVE, [x, core._unwrap_if_constexpr(control), _EVERY, _EVERY, True], _semantic)


@core.extern
def _of_lane(x: Any, lane: Any, _semantic: Any = None) -> Any:
    """int32 of a lane, which is one number for the wave. lane: a constexpr"""
    return _called(_READ_LANE, [x, core._unwrap_if_constexpr(lane)], _semantic)


@core.extern
def _lane(_semantic: Any = None) -> Any:
    """The number of each lane: a number for Triton, which does not know that lanes have others."""
    return _called(_LANES_BELOW_FROM_32, [-1, _called(_LANES_BELOW, [-1, 0], _semantic)], _semantic)


@gluon.jit
def _own_chunk(G: gl.constexpr):
    """The chunk of a block whose scales a lane has: a number of each lane."""
    return gl.minimum(_lane() % _LANES * _neighbours(G) // _OWN_KEYS, G.CHUNKS - 1)


@gluon.jit
def _chunks(read, block, G: gl.constexpr):
    """The chunk of each lane's keys, a number of each lane. Those that are not read are clamped like _places."""
    chunk = gl.minimum(block * G.CHUNKS + _own_chunk(G), read.last_chunk)
    return gl.maximum(chunk, read.keys.first // CHUNK) if G.rows.WINDOWED else chunk


@gluon.jit
def _keys(L: gl.constexpr, G: gl.constexpr):
    """The keys of their chunk whose scales a lane has, int32 [4, _LANES, _neighbours]."""
    NUM: gl.constexpr = _neighbours(G)
    row = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None] * _OWN_KEYS
    lane = gl.arange(0, _LANES, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None] * NUM % _OWN_KEYS
    return row + lane + gl.arange(0, NUM, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]


@gluon.jit
def scale_sides(k_scale, v_scale, head, G: gl.constexpr):
    """The scales of a KV head, int64. k_scale, v_scale: float32 [pages, KV heads, page size]"""
    first = head * G.PAGE_SIZE
    return ScaleSides(k_scale + first, v_scale + first, _keys(_layout(G), G).to(gl.int64))


@gluon.jit
def pages_of_lanes(read, block, G: gl.constexpr):
    """The page of each lane's keys of a block, int32: a number of each lane."""
    line = read.line.at.to(gl.pointer_type(gl.int8, const=True))
    at = line + (_chunks(read, block, G) // (G.PAGE_SIZE // CHUNK) * 4).to(gl.uint32)
    return gl.load(at.to(read.line.at.dtype))


@gluon.jit
def page_of_chunk(pages, chunk: gl.constexpr, G: gl.constexpr):
    """The page of a chunk of the block, int32. pages: pages_of_lanes of the block"""
    return _of_lane(pages, chunk * _OWN_KEYS // _neighbours(G))


@gluon.jit
def place_of_scales(read, pages, block, G: gl.constexpr):
    """The place of each lane's scales of a block, int64 [4, _LANES, _neighbours]. pages: pages_of_lanes of the block"""
    A_PAGE: gl.constexpr = G.PAGE_SIZE // CHUNK
    place = read.scales.keys + pages.to(gl.uint32).to(gl.int64) * (G.CODING.KV_HEADS * G.PAGE_SIZE)
    if A_PAGE > 1:
        place += _chunks(read, block, G) % A_PAGE * CHUNK
    return place


@gluon.jit
def wait_for_scales(scales):
    """Waits for KeyScales at once, and not before what comes before: an empty instruction reads them."""
    sched_barrier()
    of_lane = [scales.k, scales.v, scales.pages]
    gl.inline_asm_elementwise("", "=v,v,v,v", of_lane, dtype=gl.int32, is_pure=False, pack=1)
    sched_barrier()


@gluon.jit
def seen_scales(scale, read, block, G: gl.constexpr):
    """Scales of V of a block; 0 of keys that are not seen, since their memory may be NaN."""
    key = (block * G.CHUNKS + _own_chunk(G)) * CHUNK + _keys(_layout(G), G)
    is_seen = in_range(key, read.keys.first, read.keys.end) if G.rows.WINDOWED else key < read.keys.end
    return gl.where(is_seen, scale, 0.0)


@gluon.jit
def largest_scales(scale, L: gl.constexpr):
    """The exponent of the largest scale of each row's keys of a block, plus BIAS, float32 [4, _LANES]. NaN counts as
    none."""
    # With one more in its exponent NaN is a negative integer.
    bits = scale.to(gl.int32, bitcast=True) + (1 << 23)
    bits = gl.maximum(gl.max(bits, 2), _SMALLEST)
    for i in gl.static_range(4):
        bits = gl.maximum(bits, _moved(bits, _ROTATED + (8 >> i)))
    return gl.convert_layout((bits >> 23).to(gl.float32), L, assert_trivial=True)


@gluon.jit
def _of_key(scale, key: gl.constexpr, G: gl.constexpr):
    """The scale of a lane's score number `key` of a block, float32 [4, _LANES]."""
    NUM: gl.constexpr = _neighbours(G)
    bits = scale.to(gl.int32, bitcast=True)
    own = gl.split(bits)[key % NUM] if NUM == 2 else gl.reshape(bits, [4, _LANES])
    return _moved(own, _FROM_ONE + key // NUM).to(gl.float32, bitcast=True)


@gluon.jit
def scales_of_chunk(scale, chunk: gl.constexpr, G: gl.constexpr):
    """Scales of a block's chunk, [CHUNK, ROWS], laid out as its scores."""
    FIRST: gl.constexpr = chunk * _OWN_KEYS
    even = gl.join(_of_key(scale, FIRST, G), _of_key(scale, FIRST + 2, G))
    odd = gl.join(_of_key(scale, FIRST + 1, G), _of_key(scale, FIRST + 3, G))
    both = gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 3, 1)), [CHUNK, _LANES])
    return gl.convert_layout(both, product_layout(G), assert_trivial=True)


@gluon.jit
def single(products):
    """Products with scales_of_chunk, unchanged. LLVM would take them in pairs, whose scales it would move first."""
    SAME: gl.constexpr = "=v,=v,=v,=v,0,1,2,3"
    return gl.inline_asm_elementwise("", SAME, [products], dtype=gl.float32, is_pure=True, pack=4)
