"""Key blocks of extend on CDNA: products with keys and values, and the softmax's work between them.

A block of 64 keys takes two rounds of products of a wave. The order of instructions is written out: a fence follows
each product, and no more work than hides next to it (extend_order.py). So the matrix unit waits for nothing but the
hand-over between waves (docs/cycles.md). With m the maximum, which lags, and s the sum:

    round 1   scores of the next block, K^T q *     exp2 of five eighths of this block's scores, the sum, and P
    round 2   P V of this block                     the next block's maximum, and the same of its first three eighths

* of half of its keys and then of the others, if registers do not hold all of K (cdna_tiles.ExtendHeads).

The maximum follows only if a row's scores pass it by more than 2^LAG: the sums then stay within 2^LAG of what they
would be, and the accumulator is rescaled by few waves, few times. Those that need it branch.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import slice as columns
from triton.experimental.gluon.language.amd.cdna3 import mfma
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.language import PropagateNan

from rocm_attn.kernels.cdna.extend_layouts import KEYS, operand
from rocm_attn.kernels.cdna.extend_order import EIGHTHS_IN_ROUND_2, Work, end_of, num_hidden, num_steps, step_of

_NAN = gl.constexpr(PropagateNan.ALL)
LAG = gl.constexpr(8.0)
_FMA = gl.constexpr(Work.FMA.value)
_EXP_2 = gl.constexpr(Work.EXP_2.value)
_ADD = gl.constexpr(Work.ADD.value)
_ROUND = gl.constexpr(Work.ROUND.value)
_PACK = gl.constexpr(Work.PACK.value)
_LARGEST = gl.constexpr(Work.LARGEST.value)
_OF_LANE = gl.constexpr(Work.OF_LANE.value)
_OF_ROW = gl.constexpr(Work.OF_ROW.value)


@gluon.jit
def eighths_of(tiles):
    """Eight times eight columns of two tiles of 32. Like the other views of registers here they cost nothing."""
    found = ()
    for i in gl.static_range(8):
        tile = tiles[i // 4]
        found += (columns(tile, [tile.shape[0], 8], [0, i % 4 * 8]),)  # type: ignore[assignment]
    return found


@gluon.jit
def joined(x, y):
    """The columns of x, then those of y."""
    z = gl.join(x, y).permute(0, 2, 1).reshape([x.shape[0], x.shape[1] + y.shape[1]])
    return gl.convert_layout(z, x.type.layout, assert_trivial=True)


@gluon.jit
def registers(x):
    """An eighth as four tensors, of which a lane has one register each."""
    a, b = gl.split(x.reshape([x.shape[0], 2, 2, 2]))
    a0, a1 = gl.split(a)
    b0, b1 = gl.split(b)
    return a0, b0, a1, b1


@gluon.jit
def _eighth_of(r, L: gl.constexpr):
    """The reverse of registers."""
    a, b = gl.join(r[0], r[2]), gl.join(r[1], r[3])
    return gl.convert_layout(gl.join(a, b).reshape([r[0].shape[0], 8]), L, assert_trivial=True)


@gluon.jit
def all_lanes(x, L: gl.constexpr):
    """A number of each row [ROWS] for both of its lanes, [ROWS, 2]."""
    return gl.convert_layout(x, gl.SliceLayout(1, L), assert_trivial=True)[:, None].broadcast_to([x.shape[0], 2])


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
def here(x):
    """x, which the compiler computes here and not where it is used: an empty instruction of assembly."""
    return gl.inline_asm_elementwise(
        "", "=v,0", [x], dtype=x.dtype, is_pure=False, pack=32 // x.dtype.primitive_bitwidth
    )


@gluon.jit
def larger_or_nan(a, b):
    """CDNA 4 has maxima of three in one instruction only if they keep NaN; CDNA 3 has none that does."""
    return gl.maximum(a, b, propagate_nan=_NAN)


@gluon.jit
def _larger(a, b, G: gl.constexpr):
    return larger_or_nan(a, b) if G.UNITS.MAXIMA_OF_3 else gl.maximum(a, b)


@gluon.jit
def _weigh(STEP: gl.constexpr, r, raw, done, maximum, total, scale, DTYPE: gl.constexpr):
    """A step of the work with an eighth: r, the sum, and the weights that are done. raw: scores of all of them"""
    KIND: gl.constexpr = STEP[0]
    EIGHTH: gl.constexpr = STEP[1]
    AT: gl.constexpr = STEP[2]
    if KIND == _FMA:
        if AT == 0:
            r = registers(raw[EIGHTH])
        base = gl.convert_layout(maximum, r[AT].type.layout, assert_trivial=True)
        r = _with(r, AT, here(gl.fma(r[AT], scale, -base)))
    if KIND == _EXP_2:
        r = _with(r, AT, here(gl.exp2(r[AT])))
    if KIND == _ADD:
        total = here(total + r[AT])
    if KIND == _ROUND:
        bits = r[AT].to(gl.uint32, bitcast=True)
        r = _with(r, AT, here(bits + 0x8000))
    if KIND == _PACK:
        if r[0].dtype == gl.uint32:
            r = (r[0] >> 16, r[1] >> 16, r[2] >> 16, r[3] >> 16)
            weights = _eighth_of(r, raw[EIGHTH].type.layout).to(gl.uint16).to(DTYPE, bitcast=True)
        else:
            weights = _eighth_of(r, raw[EIGHTH].type.layout).to(DTYPE)
        done += (here(weights),)
    return r, total, done


class Rise(NamedTuple):
    """Work with the next block's scores: the largest of each register, of each lane and its neighbour, the new maximum;
    the eighth that is begun, the weights that are done, and their sum."""

    top: Any
    both: Any
    new: Any
    r: Any
    done: Any
    total: Any


@gluon.jit
def _largest_of(x, y, L: gl.constexpr, G: gl.constexpr):
    """The largest element of a lane's row in two eighths, in maxima of three."""
    a, b = registers(x), registers(y)
    top = _larger(_larger(a[0], b[0], G), b[1], G)
    top = _larger(_larger(top, b[2], G), b[3], G)
    top = _larger(_larger(top, a[1], G), a[2], G)
    return here(gl.convert_layout(_larger(top, a[3], G), L, assert_trivial=True))


@gluon.jit
def _rise(STEP: gl.constexpr, rise, raw, maximum, scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """A step of the work with the next block's scores: its maximum, and then weights."""
    KIND: gl.constexpr = STEP[0]
    EIGHTH: gl.constexpr = STEP[1]
    top, both, new, r, done, total = rise
    if KIND == _LARGEST:
        # The compiler would pair maxima of different steps, so that some would have two numbers.
        top = here(_larger(_larger(top, raw[EIGHTH + 1], G), raw[EIGHTH + 2], G))
    if KIND == _OF_LANE:
        # Each lane has the largest of its columns of the row, and gets that of the other lane.
        own = _largest_of(top, raw[7], maximum.type.layout, G)
        if G.UNITS.EXCHANGE:
            other = 1 - gl.arange(0, 2, layout=gl.SliceLayout(0, own.type.layout))[None, :]
            both = (own, gl.gather(own, other.broadcast_to([own.shape[0], 2]), axis=1))
        else:
            both = (own, all_lanes(gl.reduce(own, 1, larger_or_nan), own.type.layout))
    if KIND == _OF_ROW:
        row_top = _larger(maximum, _larger(both[0], both[1], G) * scale, G)
        new = gl.where(row_top - maximum > LAG, row_top, maximum)
    r, total, done = _weigh(STEP, r, raw, done, new, total, scale, DTYPE)
    return Rise(top, both, new, r, done, total)


@gluon.jit
def round_1(query, keys, PART: gl.constexpr, tiles, r, done, raw, maximum, total, scale, G: gl.constexpr):
    """Scores of the next block, two tiles; this block's weights, eight times eight columns, and the sum.

    query: parts of q's columns; keys: the same parts of K, of a part of the block's keys; PART: which one
    r, done: the eighth that is begun, and those of this block's weights that are done; raw: the scores of the others
    """
    DTYPE: gl.constexpr = query[0].dtype
    ROWS: gl.constexpr = query[0].shape[0]
    DEPTH: gl.constexpr = G.UNITS.DEPTH
    OF_TILE: gl.constexpr = G.HEADS.DIM // DEPTH
    A_PART: gl.constexpr = G.HEADS.PART // DEPTH
    TILES: gl.constexpr = keys[0].shape[1] // 32
    FIRST: gl.constexpr = PART * TILES
    for i in gl.static_range(FIRST * OF_TILE, (FIRST + TILES) * OF_TILE):
        part = columns(query[i % OF_TILE // A_PART], [ROWS, DEPTH], [0, i % A_PART * DEPTH])
        key = columns(keys[i % OF_TILE // A_PART], [DEPTH, 32], [i % A_PART * DEPTH, (i // OF_TILE - FIRST) * 32])
        tiles = _with(tiles, i // OF_TILE, mfma(part, key, tiles[i // OF_TILE]))
        sched_barrier()
        for s in gl.static_range(end_of(G, DTYPE, 1, i - 1), end_of(G, DTYPE, 1, i)):
            r, total, done = _weigh(step_of(G, DTYPE, 1, s), r, raw, done, maximum, total, scale, DTYPE)
        sched_barrier()
    return tiles, r, done, total


@gluon.jit
def after_round_1(r, done, raw, maximum, total, scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """The work of round 1 that does not hide next to its products: this block's weights, and the sum."""
    sched_barrier()
    for s in gl.static_range(num_hidden(G, DTYPE, 1), num_steps(G, DTYPE, 1)):
        r, total, done = _weigh(step_of(G, DTYPE, 1, s), r, raw, done, maximum, total, scale, DTYPE)
    sched_barrier()
    return done, total


@gluon.jit
def weights_of(done, i: gl.constexpr, G: gl.constexpr):
    """The operand of the i-th products with V: weights of DEPTH keys."""
    W: gl.constexpr = operand(G, 0, False)
    weights = done[i] if G.UNITS.DEPTH == 8 else joined(done[2 * i], done[2 * i + 1])
    return gl.convert_layout(weights, W, assert_trivial=True)


@gluon.jit
def value_of(values, tile: gl.constexpr, i: gl.constexpr, G: gl.constexpr):
    """The operand of the i-th product with V: DEPTH values, the 32 columns of a tile. values: parts of V's columns"""
    A_PART: gl.constexpr = G.HEADS.PART // 32
    DEPTH: gl.constexpr = G.UNITS.DEPTH
    if tile * 32 < G.HEADS.V_DIM:
        value = columns(values[tile // A_PART], [DEPTH, 32], [i * DEPTH, tile % A_PART * 32])
    else:
        value = gl.full([DEPTH, 32], 1.0, values[0].dtype, layout=operand(G, 1, False))
    return value


@gluon.jit
def round_2(acc, weights, values, scores, maximum, scale, G: gl.constexpr):
    """acc + P V, in tiles; and the Rise of scores, the next block's, that is begun. values: parts of V's columns"""
    DTYPE: gl.constexpr = values[0].dtype
    DEPTH: gl.constexpr = G.UNITS.DEPTH
    TILES: gl.constexpr = len(acc)
    raw = eighths_of(scores)
    r = registers(raw[0])
    rise = Rise(raw[0], (r[0], r[0]), maximum, r, (), gl.zeros_like(r[0]))
    for i in gl.static_range(KEYS // DEPTH * TILES):
        value = value_of(values, i % TILES, i // TILES, G)
        acc = _with(acc, i % TILES, mfma(weights_of(weights, i // TILES, G), value, acc[i % TILES]))
        sched_barrier()
        for s in gl.static_range(end_of(G, DTYPE, 2, i - 1), end_of(G, DTYPE, 2, i)):
            rise = _rise(step_of(G, DTYPE, 2, s), rise, raw, maximum, scale, DTYPE, G)
        sched_barrier()
    return acc, rise


@gluon.jit
def after_round_2(rise, scores, maximum, scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """The work of round 2 that does not hide next to its products.

    Returns the first eighths of the weights, the scores of the others, the new maximum, and the sum of these weights.
    """
    raw = eighths_of(scores)
    sched_barrier()
    for s in gl.static_range(num_hidden(G, DTYPE, 2), num_steps(G, DTYPE, 2)):
        rise = _rise(step_of(G, DTYPE, 2, s), rise, raw, maximum, scale, DTYPE, G)
    sched_barrier()
    return rise.done, raw[EIGHTHS_IN_ROUND_2:], rise.new, rise.total


@gluon.jit
def _decayed(*x):
    """Sixteen elements of each tile, times the decay that follows them, if it is not 1: a branch of the wave."""
    NUM: gl.constexpr = len(x) - 16
    if x[NUM] < 1.0:
        out = ()
        for i in gl.static_range(NUM):
            out += (x[i] * x[NUM],)  # type: ignore[assignment]
    else:
        out = ()
        for i in gl.static_range(NUM):
            out += (x[i],)  # type: ignore[assignment]
    return out


@gluon.jit
def rescaled(acc, decay):
    """acc times a row's decay [ROWS, 2]."""
    eight = _eighth_of((decay, decay, decay, decay), acc[0].type.layout)
    all_columns = joined(joined(eight, eight), joined(eight, eight))
    return gl.map_elementwise(_decayed, *acc, all_columns, pack=16)
