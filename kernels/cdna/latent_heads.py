"""Key blocks of latent decode for CDNA, for more query heads than one tile of products has: up to 64 of a program.

    S^T = K q^T     a wave has half of a block's keys and half of their columns; halves are added up in LDS
    O^T = V^T P^T   a wave has all keys and a quarter of V's columns, so that it weighs them for all heads once

So a program holds q and the accumulators once, and a wave loads a quarter of the rows as K and as V each, straight into
operands as in latent_blocks.py. What waves exchange has the size of scores and not of rows: halves of scores, each for
the wave that has the softmax of these heads, and weights and decays for all waves. A block has two barriers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.softmax import LN_2
from rocm_attn.kernels.cdna.extend_steps import here
from rocm_attn.kernels.cdna.key_blocks import rounded
from rocm_attn.kernels.cdna.latent_blocks import (
    KEYS,
    REST,
    ROWS,
    V_DIM,
    WAVES,
    CdnaLatentGeometry,
    decayed,
    score_layout,
)

# Keys and columns of a wave's scores, columns of its accumulator.
_HALF_KEYS = gl.constexpr(KEYS.value // 2)
_HALF = gl.constexpr(V_DIM.value // 2)
_QUARTER = gl.constexpr(V_DIM.value // WAVES.value)
_LANES_OF_KEYS = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]]
_WAVES = [[1, 0, 0], [2, 0, 0]]


class Shared(NamedTuple):
    """LDS: halves of scores [tiles * WAVES, KEYS / 2, ROWS], weights [KEYS, HEADS], a number of each head, and the last
    columns of q [2 HEADS, REST / 2], which registers have no room for."""

    scores: Any
    weights: Any
    heads: Any
    rest: Any


class HalfKeys(NamedTuple):
    """K of a wave, pairs of elements: a half of the columns of V [WAVES, KEYS / 2, V_DIM / 4], and of the rest."""

    low: Any
    rest: Any


@constexpr_function
def _tiles(G: CdnaLatentGeometry) -> int:
    return G.HEADS // ROWS.value


@constexpr_function
def _key_pairs(columns: int) -> gl.constexpr:
    """Layout of K as it is loaded: 16 lanes have a key each; four times four pairs side by side make 32 elements."""
    more = [[0, 0, 16 << i] for i in range((columns // 32).bit_length() - 1)]
    lanes = [*_LANES_OF_KEYS, [0, 0, 4], [0, 0, 8]]
    registers = [[0, 0, 1], [0, 0, 2], *more, [0, 16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, _HALF_KEYS.value, columns // 2])


@constexpr_function
def _group(G: CdnaLatentGeometry) -> gl.constexpr:
    """Neighbouring keys of V in a lane that lie in one page."""
    return 8 if G.PAGE_SIZE % 8 == 0 else 1


@constexpr_function
def _value_pairs(G: CdnaLatentGeometry) -> gl.constexpr:
    """Layout of V as it is loaded, [WAVES, groups, keys of a group, pairs]: a lane has eight neighbouring elements of
    each of eight neighbouring keys, twice."""
    group = 8 if G.PAGE_SIZE % 8 == 0 else 1
    keys = [[0, 0, 1 << i, 0] if 1 << i < group else [0, (1 << i) // group, 0, 0] for i in range(6)]
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], *keys[:3], keys[5]]
    lanes = [[0, 0, 0, 4 << i] for i in range(4)] + keys[3:5]
    waves = [[1, 0, 0, 0], [2, 0, 0, 0]]
    shape = [WAVES.value, KEYS.value // group, group, _QUARTER.value // 2]
    return gl.DistributedLinearLayout(registers, lanes, waves, [], shape)


@constexpr_function
def _query_layout() -> gl.constexpr:
    """The layout of q as it is loaded, [WAVES, ROWS, V_DIM / 2]; transposed it is an operand."""
    more = [[0, 0, 32 << i] for i in range(3)]
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *more]
    lanes = [*_LANES_OF_KEYS, [0, 0, 8], [0, 0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, ROWS.value, _HALF.value])


@constexpr_function
def _weight_layout() -> gl.constexpr:
    """The layout of weights of a tile of heads as waves read them, [WAVES, KEYS, ROWS]: an operand."""
    registers = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 32, 0]]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0], [0, 16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, KEYS.value, ROWS.value])


@constexpr_function
def _softmax_bits(G: CdnaLatentGeometry) -> tuple[list[int], list[int], list[int]]:
    """Bits of [KEYS, HEADS], key bits before head bits, in the registers, lanes and waves that have a softmax."""
    in_lane = 4 if G.HEADS == 64 else 3
    keys = list(range(6))
    lanes = [6 + i for i in range(in_lane)] + keys[2 : 8 - in_lane]
    return [0, 1, *keys[8 - in_lane :]], lanes, [6 + in_lane, 7 + in_lane]


@constexpr_function
def softmax_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of scores [KEYS, HEADS] in which a wave has all keys of its heads."""
    bits = [[1 << i, 0] for i in range(6)] + [[0, 1 << i] for i in range(G.HEADS.bit_length() - 1)]
    registers, lanes, waves = ([bits[i] for i in each] for each in _softmax_bits(G))
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [KEYS.value, G.HEADS])


@constexpr_function
def _halves_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of halves of scores as they are read, [tiles * WAVES, KEYS / 2, ROWS]; wave 2 i + j has keys of half i
    and columns of half j."""
    keys = [[0, 1 << i, 0] for i in range(5)] + [[2, 0, 0]]
    heads = [[0, 0, 1 << i] for i in range(4)] + [[4, 0, 0], [8, 0, 0]]
    bits = keys + heads
    registers, lanes, waves = ([bits[i] for i in each] for each in _softmax_bits(G))
    shape = [G.HEADS // ROWS.value * WAVES.value, _HALF_KEYS.value, ROWS.value]
    return gl.DistributedLinearLayout([*registers, [1, 0, 0]], lanes, waves, [], shape)


@constexpr_function
def _total_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of sums of weights, [8, HEADS]: a lane adds up its own keys."""
    bits: list[Any] = [None, None, [1, 0], [2, 0], [4, 0], None]
    bits += [[0, 1 << i] for i in range(G.HEADS.bit_length() - 1)]
    registers, lanes, waves = ([bits[i] for i in each if bits[i]] for each in _softmax_bits(G))
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [8, G.HEADS])


@constexpr_function
def _scores_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """Four neighbouring keys of a head, then heads: a wave stores and loads whole KiB."""
    keys = [[0, 1 << i, 0] for i in range(5)]
    heads = [[0, 0, 1 << i] for i in range(4)]
    waves_and_tiles = [[1 << i, 0, 0] for i in range((G.HEADS // ROWS.value * WAVES.value).bit_length() - 1)]
    return gl.SharedLinearLayout([*keys[:2], *heads, *keys[2:], *waves_and_tiles])


@constexpr_function
def _weights_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """The keys of a head side by side."""
    bits = [[1 << i, 0] for i in range(6)] + [[0, 1 << i] for i in range(G.HEADS.bit_length() - 1)]
    return gl.PaddedSharedLayout([[KEYS.value, 8]], bits, [], [KEYS.value, G.HEADS])


@constexpr_function
def _rest_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """A half of a head's last columns side by side: heads of the first half, tile by tile, next to those of the second.

    A row of the tensor is a head in a tile, a half, and then a tile.
    """
    bits = [[0, 1 << i] for i in range(5)] + [[1 << i, 0] for i in range(G.HEADS.bit_length())]
    return gl.PaddedSharedLayout([[REST.value // 2, 8]], bits, [], [2 * G.HEADS, REST.value // 2])


@constexpr_function
def _rest_parts() -> gl.constexpr:
    """The layout of the last columns of q of a tile as waves read them, [2, 2 ROWS, REST / 2]: wave 2 i + j has half j
    and both i the same."""
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 8], [0, 0, 16]]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]], lanes, [[0, 16, 0], [1, 0, 0]], [], [2, 2 * ROWS.value, REST.value // 2]
    )


@constexpr_function
def _reads(num: int, bits: int) -> str:
    """The constraints of an instruction of assembly that reads num numbers of a lane, and could write half as many."""
    return ",".join(["=v"] * -(-num // 2) + ["v"] * (num * bits // 32))


@gluon.jit
def _wait_for(x, NUM: gl.constexpr):
    """Waits for NUM numbers of a lane at once, and so for all that was loaded before: an empty instruction reads them."""
    CONSTRAINTS: gl.constexpr = _reads(NUM, x.dtype.primitive_bitwidth)
    sched_barrier()
    gl.inline_asm_elementwise("", CONSTRAINTS, [x], dtype=gl.int16, is_pure=False, pack=NUM)
    sched_barrier()


@gluon.jit
def allocate(DTYPE: gl.constexpr, G: gl.constexpr):
    """LDS of a program."""
    return Shared(
        gl.allocate_shared_memory(gl.float32, [_tiles(G) * WAVES, _HALF_KEYS, ROWS], _scores_in_lds(G)),
        gl.allocate_shared_memory(DTYPE, [KEYS, G.HEADS], _weights_in_lds(G)),
        gl.allocate_shared_memory(gl.float32, [G.HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(DTYPE, [2 * G.HEADS, REST // 2], _rest_in_lds(G)),
    )


@gluon.jit
def _query_tile(q, TILE: gl.constexpr, num_heads, G: gl.constexpr):
    """A wave's half of q's columns but the last ones, of a tile of heads, an operand; zero for missing heads."""
    Q: gl.constexpr = _query_layout()
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, Q)))[:, None, None]
    head = here(TILE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, Q))))[None, :, None]
    column = gl.arange(0, _HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, Q)))[None, None, :]
    at = q.at + head.to(gl.int64) * q.head + (wave % 2 * _HALF + column)
    query = gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0)
    operand: gl.constexpr = gl.DotOperandLayout(1, score_layout(G), 8)
    return gl.convert_layout(gl.permute(query, (0, 2, 1)), operand, assert_trivial=True)


@gluon.jit
def load_queries(lds, q, num_heads, G: gl.constexpr):
    """q of a token's heads, an operand for each tile; its last columns go to LDS. q: HeadRows, of the first head"""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 4], [WAVES, 1], [1, 0])
    line = here(gl.arange(0, 2 * G.HEADS, layout=gl.SliceLayout(1, L)))[:, None]
    head = line // (2 * ROWS) * ROWS + line % ROWS
    column = V_DIM + line // ROWS % 2 * (REST // 2) + gl.arange(0, REST // 2, layout=gl.SliceLayout(0, L))[None, :]
    at = q.at + head.to(gl.int64) * q.head + column
    lds.rest.store(gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0))
    query = ()
    for i in gl.static_range(_tiles(G)):
        query += (_query_tile(q, i, num_heads, G),)  # type: ignore[assignment]
    return query


@gluon.jit
def _query_rest(lds, TILE: gl.constexpr, G: gl.constexpr):
    """A wave's half of the last columns of q of a tile of heads, an operand."""
    L: gl.constexpr = _rest_parts()
    part = lds.rest.slice(TILE * 2 * ROWS, 2 * ROWS).load(gl.SliceLayout(0, L))
    part = part[None, :, :].broadcast_to([2, 2 * ROWS, REST // 2])
    part = gl.permute(gl.reshape(part, [WAVES, ROWS, REST // 2]), (0, 2, 1))
    return gl.convert_layout(part, gl.DotOperandLayout(1, score_layout(G), 8), assert_trivial=True)


@gluon.jit
def _half_keys(block, L: gl.constexpr):
    """The keys of a block that waves score, [WAVES, KEYS / 2]."""
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, L))[:, None]
    key = gl.arange(0, _HALF_KEYS, layout=gl.SliceLayout(0, L))[None, :]
    return block * KEYS + (wave // 2 * _HALF_KEYS + key)


@gluon.jit
def _read_keys(rows, block, G: gl.constexpr):
    L: gl.constexpr = gl.SliceLayout(2, _key_pairs(_HALF))
    return gl.minimum(_half_keys(block, L), rows.last_key).to(gl.uint32)


@gluon.jit
def _key_pages(rows, block, G: gl.constexpr):
    return gl.load(rows.line + _read_keys(rows, block, G) // G.PAGE_SIZE)


@gluon.jit
def _load_half(at, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """A wave's half of the pairs of COLUMNS columns from FIRST on."""
    L: gl.constexpr = _key_pairs(COLUMNS // 2)
    at = gl.convert_layout(at, gl.SliceLayout(2, L), assert_trivial=True)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None]
    pair = gl.arange(0, COLUMNS // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at += FIRST // 2 + wave % 2 * (COLUMNS // 4)
    return gl.load(at[:, :, None] + pair[None, None, :])


@gluon.jit
def _load_keys(rows, pages, block, G: gl.constexpr):
    offset = (_read_keys(rows, block, G) % G.PAGE_SIZE).to(gl.int64)
    at = rows.at + (pages.to(gl.int64) * rows.page + offset * rows.token)
    return HalfKeys(_load_half(at, 0, V_DIM), _load_half(at, V_DIM, REST))


@gluon.jit
def _read_groups(rows, block, G: gl.constexpr):
    """Each group's first key; the last group that is seen stands for later ones. [WAVES, groups]"""
    V: gl.constexpr = _value_pairs(G)
    L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, V))
    GROUP: gl.constexpr = _group(G)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, L))[:, None]
    group = gl.arange(0, KEYS // GROUP, layout=gl.SliceLayout(0, L))[None, :] + 0 * wave
    return gl.minimum(block * KEYS + group * GROUP, rows.last_key // GROUP * GROUP).to(gl.uint32)


@gluon.jit
def _value_pages(rows, block, G: gl.constexpr):
    return gl.load(rows.line + _read_groups(rows, block, G) // G.PAGE_SIZE)


@gluon.jit
def _load_values(rows, pages, block, G: gl.constexpr):
    """A quarter of V's columns of a block's keys. Keys of a group after the last one lie in its page too."""
    V: gl.constexpr = _value_pairs(G)
    offset = (_read_groups(rows, block, G) % G.PAGE_SIZE).to(gl.int64)
    at = rows.at + (pages.to(gl.int64) * rows.page + offset * rows.token)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, V))))[:, None]
    at += wave * (_QUARTER // 2)
    key = gl.arange(0, _group(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, V))))
    pair = gl.arange(0, _QUARTER // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, V))))
    at = at[:, :, None] + (key.to(gl.int64) * rows.token)[None, None, :]
    return gl.load(at[:, :, :, None] + pair[None, None, None, :])


@gluon.jit
def _elements(pairs, ROWS_OF_WAVE: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    """The elements of pairs, [WAVES, ROWS_OF_WAVE, COLUMNS] in DTYPE."""
    low = pairs.to(gl.uint16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.uint16).to(DTYPE, bitcast=True)
    return gl.reshape(gl.join(low, high), [WAVES, ROWS_OF_WAVE, COLUMNS])


@gluon.jit
def _store_scores(lds, query, keys, DTYPE: gl.constexpr, G: gl.constexpr):
    """Stores a wave's halves of a block's scores."""
    P: gl.constexpr = score_layout(G)
    A: gl.constexpr = gl.DotOperandLayout(0, P, 8)
    rest = gl.convert_layout(_elements(keys.rest, _HALF_KEYS, REST // 2, DTYPE), A, assert_trivial=True)
    low = gl.convert_layout(_elements(keys.low, _HALF_KEYS, _HALF, DTYPE), A, assert_trivial=True)
    queries = ()
    for i in gl.static_range(_tiles(G)):
        queries += (_query_rest(lds, i, G),)  # type: ignore[assignment]
        sched_barrier()
    _wait_for(queries[-1], 8)
    scores = ()
    for i in gl.static_range(_tiles(G)):
        part = gl.full([WAVES, _HALF_KEYS, ROWS], 0.0, gl.float32, layout=P)
        part = gl.amd.cdna3.mfma(rest, queries[i], part)
        scores += (gl.amd.cdna3.mfma(low, query[i], part),)  # type: ignore[assignment]
    for i in gl.static_range(_tiles(G)):
        lds.scores.slice(i * WAVES, WAVES).store(scores[i])


@gluon.jit
def _sum_of_scores(lds, block, end_key, G: gl.constexpr, MASKED: gl.constexpr):
    """The scores of a block, [KEYS, HEADS], without qk_scale."""
    X: gl.constexpr = softmax_layout(G)
    halves = lds.scores.load(_halves_layout(G))
    _wait_for(halves, G.HEADS // 2)
    halves = gl.reshape(halves, [_tiles(G), 2, 2, _HALF_KEYS, ROWS])
    scores = gl.reshape(gl.permute(gl.sum(halves, 2), (1, 2, 0, 3)), [KEYS, G.HEADS])
    scores = gl.convert_layout(scores, X, assert_trivial=True)
    if MASKED:
        key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, X))
        scores = gl.where((key < end_key)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _weigh(lds, state, scores, qk_scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """The state with a block's keys in all but acc; its weights and decays go to LDS."""
    T: gl.constexpr = _total_layout(G)
    maximum = gl.maximum(state.maximum, gl.max(scores, 0) * qk_scale)
    weights = gl.exp2(scores * qk_scale - maximum[None, :])
    decay = gl.exp2(state.maximum - maximum)
    lds.weights.store(rounded(weights, DTYPE, G.UNITS.ROUNDS_PAIRS))
    lds.heads.store(decay)
    part = gl.sum(gl.sum(gl.reshape(weights, [2, 8, 4, G.HEADS]), 2), 0)
    of_total = gl.convert_layout(decay, gl.SliceLayout(0, T), assert_trivial=True)[None, :]
    total = state.total * of_total + gl.convert_layout(part, T, assert_trivial=True)
    return Softmax(state.acc, maximum, total)


@gluon.jit
def _of_heads(lds, G: gl.constexpr):
    """A number of each head from LDS, for each tile of accumulators: a tuple of [1, 1, ROWS]."""
    A: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, score_layout(G)))
    found = ()
    for i in gl.static_range(_tiles(G)):
        found += (lds.heads.slice(i * ROWS, ROWS).load(A)[None, None, :],)  # type: ignore[assignment]
    return found


@gluon.jit
def _weights(lds, TILE: gl.constexpr, G: gl.constexpr):
    """Weights of a tile of heads, an operand."""
    weights = lds.weights.slice(TILE * ROWS, ROWS, dim=1).load(gl.SliceLayout(0, _weight_layout()))
    weights = weights[None, :, :].broadcast_to([WAVES, KEYS, ROWS])
    return gl.convert_layout(weights, gl.DotOperandLayout(1, score_layout(G), 8), assert_trivial=True)


@gluon.jit
def _two_weights(lds, TILE: gl.constexpr, G: gl.constexpr):
    """Weights of two tiles of heads, read in this order."""
    sched_barrier()
    first = _weights(lds, TILE, G)
    sched_barrier()
    second = _weights(lds, TILE + 1, G)
    sched_barrier()
    return first, second


@gluon.jit
def _add_values(lds, state, values, last, block, DTYPE: gl.constexpr, G: gl.constexpr, MASKED: gl.constexpr):
    """Adds weighted values of a block to the accumulators, whose row 16 j + i of a wave is column 8 i + j."""
    P: gl.constexpr = score_layout(G)
    V: gl.constexpr = _value_pairs(G)
    if MASKED and _group(G) > 1:
        # Keys that are not seen have weights of zero, and 0 times NaN is NaN.
        S: gl.constexpr = gl.SliceLayout(3, V)
        group = gl.arange(0, KEYS // _group(G), layout=gl.SliceLayout(0, gl.SliceLayout(2, S)))[None, :, None]
        key = gl.arange(0, _group(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, S)))[None, None, :]
        is_seen = block * KEYS + group * _group(G) + key <= last
        values = gl.where(is_seen[:, :, :, None], values, 0)
    v = gl.reshape(_elements(values, KEYS, _QUARTER, DTYPE), [WAVES, KEYS, _QUARTER // 8, 8])
    v = gl.reshape(gl.permute(v, (0, 3, 2, 1)), [WAVES, _QUARTER, KEYS])
    v = gl.convert_layout(v, gl.DotOperandLayout(0, P, 8), assert_trivial=True)
    # The numbers that are read last are waited for first, and so once for all.
    weights = _two_weights(lds, 0, G)
    decays = _of_heads(lds, G)
    _wait_for(decays[-1], 1)
    acc = ()
    for i in gl.static_range(_tiles(G)):
        decay = decays[i].broadcast_to([WAVES, _QUARTER, ROWS])
        (each,) = gl.map_elementwise(decayed, state.acc[i], decay, pack=_QUARTER * ROWS // 64)
        acc += (each,)  # type: ignore[assignment]
    sums = ()
    for i in gl.static_range(_tiles(G)):
        if i == 2:
            weights = _two_weights(lds, 2, G)
            _wait_for(weights[1], 16)
        sums += (gl.amd.cdna3.mfma(v, weights[i % 2], acc[i]),)  # type: ignore[assignment]
    return Softmax(sums, state.maximum, state.total)


@gluon.jit
def attend_heads(lds, query, rows, first, end, kv_len, qk_scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """Returns the Softmax of key blocks [first, end): acc, a tuple of [WAVES, V_DIM / WAVES, ROWS] as in _add_values,
    one for each tile of heads; maximum [HEADS]; total [8, HEADS].

    K and V of a block are in flight while those of the block before it are used. Loads return in their order.
    """
    k_pages = _key_pages(rows, first, G)
    v_pages = _value_pages(rows, first, G)
    keys = _load_keys(rows, k_pages, first, G)
    k_pages = here(_key_pages(rows, first + 1, G))
    sched_barrier()
    # The last columns of q are in LDS.
    gl.barrier()
    acc = ()
    for _ in gl.static_range(_tiles(G)):
        acc += (gl.full([WAVES, _QUARTER, ROWS], 0.0, gl.float32, layout=score_layout(G)),)  # type: ignore[assignment]
    state = Softmax(
        acc,
        gl.full([G.HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, softmax_layout(G))),
        gl.full([8, G.HEADS], 0.0, gl.float32, layout=_total_layout(G)),
    )
    middle = gl.minimum(end, kv_len // KEYS)
    for block in range(first, middle):
        _wait_for(k_pages, 2)
        _store_scores(lds, query, keys, DTYPE, G)
        sched_barrier()
        values = _load_values(rows, v_pages, block, G)
        v_pages = _value_pages(rows, block + 1, G)
        sched_barrier()
        keys = _load_keys(rows, k_pages, block + 1, G)
        k_pages = _key_pages(rows, block + 2, G)
        sched_barrier()
        scores = _sum_of_scores(lds, block, kv_len, G, False)
        state = _weigh(lds, state, scores, qk_scale, DTYPE, G)
        _wait_for(v_pages, 16 // _group(G))
        state = _add_values(lds, state, values, kv_len, block, DTYPE, G, False)
        sched_barrier()
    if middle < end:
        _store_scores(lds, query, keys, DTYPE, G)
        values = _load_values(rows, v_pages, middle, G)
        scores = _sum_of_scores(lds, middle, kv_len, G, True)
        state = _weigh(lds, state, scores, qk_scale, DTYPE, G)
        state = _add_values(lds, state, values, kv_len - 1, middle, DTYPE, G, True)
    return state


@gluon.jit
def _columns_of_heads(acc):
    """A tile's accumulators as [ROWS, V_DIM]."""
    acc = gl.reshape(acc, [WAVES, 8, _QUARTER // 8, ROWS])
    return gl.reshape(gl.permute(acc, (3, 0, 2, 1)), [ROWS, V_DIM])


@gluon.jit
def _store_tile(acc, inverse, to, token, first_head, num_heads, line, OF_TILE: gl.constexpr, is_whole):
    """Stores the results or a part of a tile of heads, the first of which is OF_TILE."""
    part = _columns_of_heads(acc)
    L: gl.constexpr = part.type.layout
    # Computed here: the compiler would keep offsets that do not change from row to row in registers that there are not.
    head = here(OF_TILE + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)))[:, None]
    column = gl.arange(0, V_DIM, layout=gl.SliceLayout(0, L))[None, :]
    mask = (head < num_heads) & (column >= 0)
    if is_whole:
        out = to.out.at + token * to.out.token + (first_head + head).to(gl.int64) * to.out.head
        gl.store(out + column, _columns_of_heads(acc * inverse).to(to.out.at.dtype.element_ty), mask=mask)
    else:
        gl.store(to.parts + (line + head) * V_DIM + column, part, mask=mask)


@gluon.jit
def store_heads(lds, state, to, token, first_head, num_heads, part, is_whole, G: gl.constexpr):
    """Stores the results of a row, or the program's part of a row that others share, for the heads of a program."""
    H: gl.constexpr = gl.SliceLayout(0, softmax_layout(G))
    maximum = state.maximum
    total = gl.convert_layout(gl.sum(state.total, 0), H)
    head = here(gl.arange(0, G.HEADS, layout=H))
    is_head = head < num_heads
    line = part * G.rows.Q_ROWS + first_head
    # Waves may still read decays.
    lds.heads.store(1.0 / total)
    if is_whole:
        if to.lse is not None:
            lse = to.lse.at + token * to.lse.token + (first_head + head).to(gl.int64) * to.lse.head
            gl.store(lse, (maximum + gl.log2(total)) * LN_2, mask=is_head)
    else:
        gl.store(to.sums + (line + head) * 2, maximum, mask=is_head)
        gl.store(to.sums + (line + head) * 2 + 1, total, mask=is_head)
    inverse = _of_heads(lds, G)
    for i in gl.static_range(_tiles(G)):
        _store_tile(state.acc[i], inverse[i], to, token, first_head, num_heads, line, i * ROWS, is_whole)
