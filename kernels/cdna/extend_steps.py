"""Key blocks of extend on CDNA 4: products with keys and values, and the softmax's work between them.

A block of 64 keys takes two rounds of 16 products of a wave each. The order of instructions is written out: a fence
follows each product, and no more work than hides beside it. So the matrix unit waits for nothing but the hand-over
between waves (docs/cycles.md). With m the maximum, which lags, and s the sum:

    round 1   scores of the next block, K^T q       exp2 of three eighths of this block's scores, the sum, and P
    round 2   P V of this block                     the next block's maximum, and exp2 of five eighths of its scores

The maximum follows only if a row's scores pass it by more than 2^LAG: the sums then stay within 2^LAG of what they
would be, and the accumulator is rescaled by few waves, few times. Those that need it branch.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import slice as columns
from triton.experimental.gluon.language.amd.cdna4 import mfma
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.language import PropagateNan

# Maxima of three are one instruction only so.
_NAN = gl.constexpr(PropagateNan.ALL)
LAG = gl.constexpr(8.0)
# Products of a round.
_PRODUCTS = gl.constexpr(16)


@gluon.jit
def _eighth(scores, i: gl.constexpr):
    """Columns [8 i, 8 i + 8) of two tiles of 32 columns. Like the other views of registers here it costs nothing."""
    tile = scores[i // 4]
    return columns(tile, [tile.shape[0], 8], [0, i % 4 * 8])


@gluon.jit
def joined(x, y):
    """The columns of x, then those of y."""
    z = gl.join(x, y).permute(0, 2, 1).reshape([x.shape[0], x.shape[1] + y.shape[1]])
    return gl.convert_layout(z, x.type.layout, assert_trivial=True)


@gluon.jit
def _registers(x):
    """An eighth as four tensors, of which a lane has one register each."""
    a, b = gl.split(x.reshape([x.shape[0], 2, 2, 2]))
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    return a0, b0, a1, b1


@gluon.jit
def _eighth_of(r, L: gl.constexpr):
    """The reverse of _registers."""
    a, b = gl.join(r[0], r[2]), gl.join(r[1], r[3])
    return gl.convert_layout(gl.join(a, b).reshape([r[0].shape[0], 8]), L, assert_trivial=True)


@gluon.jit
def _with(tiles, at: gl.constexpr, tile):
    """The tiles, with another one at a place."""
    found = ()
    for i in gl.static_range(len(tiles)):
        if i == at:
            found += (tile,)  # type: ignore[assignment]
        else:
            found += (tiles[i],)  # type: ignore[assignment]
    return found


@gluon.jit
def _here(x):
    """x, which the compiler computes here and not where it is used: an empty instruction of assembly."""
    return gl.inline_asm_elementwise("", "=v,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=_NAN)


@gluon.jit
def round_1(query, keys, done, raw, maximum, total, scale, P: gl.constexpr):
    """Scores of the next block, two tiles; this block's weights as four operands, and the sum.

    done: five eighths of this block's weights; raw: its other scores
    """
    M: gl.constexpr = raw[0].type.layout
    DTYPE: gl.constexpr = query.dtype
    ROWS: gl.constexpr = query.shape[0]
    zeros = gl.zeros([ROWS, 32], gl.float32, layout=M)
    tiles = (zeros, zeros)
    weights = done
    halves = ()
    operands = ()
    r = _registers(raw[0])
    e = r
    sums = raw[0]
    for i in gl.static_range(_PRODUCTS):
        part = columns(query, [ROWS, 16], [0, i // 2 * 16])
        key = columns(keys, [16, 32], [i // 2 * 16, i % 2 * 32])
        tiles = _with(tiles, i % 2, mfma(part, key, tiles[i % 2]))
        sched_barrier()
        if i < 6 and i % 2 == 0:
            r = _registers(gl.fma(raw[i // 2], scale, -maximum[:, None]))
            e = (_here(gl.exp2(r[0])),)
        if i < 6 and i % 2 == 1:
            e = (e[0], _here(gl.exp2(r[1])), _here(gl.exp2(r[2])), _here(gl.exp2(r[3])))
            weights += (_eighth_of(e, M),)
        if i == 6:
            sums = weights[0] + weights[1]
        if i > 6 and i < 13:
            sums = sums + weights[i - 5]
        if i >= 6 and i < 14:
            sums = _here(sums)
            halves += (weights[i - 6].to(DTYPE),)  # type: ignore[assignment]
            if i % 2 == 1:
                operands += (gl.convert_layout(joined(halves[i - 7], halves[i - 6]), P, assert_trivial=True),)  # type: ignore[assignment]
        if i == 14:
            total = total + gl.reduce(sums, 1, _sum)
        sched_barrier()
    return tiles, operands, total


@gluon.jit
def round_2(acc, operands, values, scores, maximum, scale):
    """acc + P V, four tiles; of scores, the next block's: five eighths of its weights, the rest raw, its maximum."""
    M: gl.constexpr = scores[0].type.layout
    top = _eighth(scores, 0)
    row_top = maximum
    new = maximum
    done = ()
    r = _registers(top)
    e = r
    for i in gl.static_range(_PRODUCTS):
        value = columns(values, [16, 32], [i // 4 * 16, i % 4 * 32])
        acc = _with(acc, i % 4, mfma(operands[i // 4], value, acc[i % 4]))
        sched_barrier()
        if i < 3:
            top = _larger(_larger(top, _eighth(scores, 2 * i + 1)), _eighth(scores, 2 * i + 2))
        if i == 3:
            top = _larger(top, _eighth(scores, 7))
        if i == 4:
            row_top = gl.reduce(top, 1, _larger)
        if i == 5:
            row_top = _larger(maximum, row_top * scale)
            new = gl.where(row_top - maximum > LAG, row_top, maximum)
        if i >= 6 and i % 2 == 0:
            r = _registers(gl.fma(_eighth(scores, (i - 6) // 2), scale, -new[:, None]))
            e = (_here(gl.exp2(r[0])),)
        if i >= 6 and i % 2 == 1:
            e = (e[0], _here(gl.exp2(r[1])), _here(gl.exp2(r[2])), _here(gl.exp2(r[3])))
            done += (_eighth_of(e, M),)  # type: ignore[assignment]
        sched_barrier()
    return acc, done, (_eighth(scores, 5), _eighth(scores, 6), _eighth(scores, 7)), new


@gluon.jit
def _decayed(*x):
    """64 elements of four tiles, times the decay that follows them, if it is not 1: a branch of the wave."""
    if x[64] < 1.0:
        out = ()
        for i in gl.static_range(64):
            out += (x[i] * x[64],)  # type: ignore[assignment]
    else:
        out = ()
        for i in gl.static_range(64):
            out += (x[i],)  # type: ignore[assignment]
    return out


@gluon.jit
def rescaled(acc, total, old, new):
    """acc and total of a maximum that rose from old to new."""
    decay = gl.exp2(old - new)
    all_columns = decay[:, None] + gl.zeros_like(acc[0])
    return gl.map_elementwise(_decayed, acc[0], acc[1], acc[2], acc[3], all_columns, pack=16), total * decay
