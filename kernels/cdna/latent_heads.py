"""Key blocks of latent decode for CDNA, for more query heads than a tile of products has, up to 64, and over codes.

    S^T = K q^T     a wave has half of a block's keys and half of their columns; halves are added up in LDS
    O^T = V^T P^T   a wave has all keys and a quarter of V's columns, so that it weighs them for all heads once

So a program holds q and the accumulators once, and a wave loads a quarter of the rows as K and as V each, straight into
operands as in latent_blocks.py. What waves exchange has the size of scores and not of rows: halves of scores, each for
the wave that has the softmax of these heads, and weights and decays for all waves. A block has two barriers.

Codes of K are operands as they are: q is the sum of two codes, each of which is multiplied. Codes of V become numbers
of 16 bits, each in one wave and once for all heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.coded import exponent_to_move
from rocm_attn.kernels.attention.softmax import LN_2
from rocm_attn.kernels.cache.codes import decoded, is_coded
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

# Keys and columns of a wave's scores, columns of its accumulator, neighbouring elements of a lane in the last columns.
_HALF_KEYS = gl.constexpr(KEYS.value // 2)
_HALF = gl.constexpr(V_DIM.value // 2)
_QUARTER = gl.constexpr(V_DIM.value // WAVES.value)
_LAST_LANE = gl.constexpr(8)
_LANES = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]]
_WAVES = [[1, 0, 0], [2, 0, 0]]


class Shared(NamedTuple):
    """LDS: halves of scores [tiles * WAVES, KEYS / 2, ROWS], weights [KEYS, HEADS], a number of each head, and the last
    columns of q [2 HEADS, REST / 2], which registers have no room for; over codes they have."""

    scores: Any
    weights: Any
    heads: Any
    last: Any


class HalfKeys(NamedTuple):
    """Words of K of a wave: half of the columns of V, [WAVES, KEYS / 2, words], and of the last ones."""

    low: Any
    last: Any


@constexpr_function
def shares_rows(G: CdnaLatentGeometry) -> bool:
    """True if waves share rows as this file says: with more than ROWS heads, and over codes."""
    return bool(ROWS.value < G.HEADS or is_coded(G.CODING.ENCODING))


@constexpr_function
def in_word(G: CdnaLatentGeometry) -> int:
    """Elements of a word of 4 bytes."""
    return 4 if is_coded(G.CODING.ENCODING) else 2


@constexpr_function
def _tiles(G: CdnaLatentGeometry) -> int:
    return int(G.HEADS // ROWS.value)


@constexpr_function
def _lane(G: CdnaLatentGeometry) -> int:
    """Neighbouring elements of a key that a lane has: 16 bytes."""
    return int(4 * in_word(G))


@constexpr_function
def _half_scores(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of halves of scores, [WAVES, KEYS / 2, ROWS]; a product of codes has 32 columns on both archs."""
    depth = 32 if is_coded(G.CODING.ENCODING) else 2 * G.UNITS.DEPTH
    return gl.amd.AMDMFMALayout(G.UNITS.VERSION, [16, 16, depth], transposed=False, warps_per_cta=[WAVES.value, 1, 1])


@constexpr_function
def _code(G: CdnaLatentGeometry) -> gl.constexpr:
    """The dtype of codes."""
    return gl.float8e4b8 if G.UNITS.VERSION == 3 else gl.float8e4nv


@constexpr_function
def _largest_exponent(G: CdnaLatentGeometry) -> int:
    """The exponent of the largest power of two that is a code: codes go to 240 or 448."""
    return 7 if G.UNITS.VERSION == 3 else 8


@constexpr_function
def _key_words(words: int) -> gl.constexpr:
    """Layout of K as it is loaded: 16 lanes have a key each; four times four words side by side, or two of the last
    columns in codes."""
    own = min(4, words // 4)
    registers = [[0, 0, 1 << i] for i in range(own.bit_length() - 1)]
    more = [[0, 0, 16 << i] for i in range((words // 16).bit_length() - 1)]
    lanes = [*_LANES, [0, 0, own], [0, 0, 2 * own]]
    shape = [WAVES.value, _HALF_KEYS.value, words]
    return gl.DistributedLinearLayout([*registers, *more, [0, 16, 0]], lanes, _WAVES, [], shape)


@constexpr_function
def _group(G: CdnaLatentGeometry) -> int:
    """Neighbouring keys of V in a lane that lie in one page."""
    return 8 if G.PAGE_SIZE % 8 == 0 else 1


@constexpr_function
def _value_words(G: CdnaLatentGeometry) -> gl.constexpr:
    """Layout of V as it is loaded, [WAVES, groups, keys of a group, words]: a lane has eight neighbouring elements of
    each of eight neighbouring keys, twice."""
    group, own = _group(G), 8 // in_word(G)
    keys = [[0, 0, 1 << i, 0] if 1 << i < group else [0, (1 << i) // group, 0, 0] for i in range(6)]
    registers = [*([0, 0, 0, 1 << i] for i in range(own.bit_length() - 1)), *keys[:3], keys[5]]
    lanes = [[0, 0, 0, own << i] for i in range(4)] + keys[3:5]
    shape = [WAVES.value, KEYS.value // group, group, 16 * own]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0, 0], [2, 0, 0, 0]], [], shape)


@constexpr_function
def _parts(G: CdnaLatentGeometry) -> int:
    """Parts of a block's V, one after the other: there are no registers for the numbers of all of its codes."""
    return 2 if is_coded(G.CODING.ENCODING) else 1


@constexpr_function
def _two_keys() -> gl.constexpr:
    """Layout of V's codes in a lane's registers: those of two keys, a product's neighbours, next to each other."""
    registers = [[0, 1, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 2, 0], [0, 4, 0]]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 0, 64], [0, 8, 0], [0, 16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, _HALF_KEYS.value, _QUARTER.value])


@constexpr_function
def _query_layout() -> gl.constexpr:
    """The layout of q as it is loaded, [WAVES, ROWS, V_DIM / 2]; transposed it is an operand."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 32], [0, 0, 64], [0, 0, 128]]
    lanes = [*_LANES, [0, 0, 8], [0, 0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, ROWS.value, _HALF.value])


@constexpr_function
def _last_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """Half of a head's last columns side by side. A row of the tensor is a head in a tile, a half, and then a tile."""
    bits = [[0, 1 << i] for i in range(5)] + [[1 << i, 0] for i in range(G.HEADS.bit_length())]
    return gl.PaddedSharedLayout([[REST.value // 2, 8]], bits, [], [2 * G.HEADS, REST.value // 2])


@constexpr_function
def _last_parts() -> gl.constexpr:
    """The layout of the last columns of q of a tile as waves read them, [2, 2 ROWS, REST / 2]: wave 2 i + j has half j
    and both i the same."""
    registers, lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [*_LANES, [0, 0, 8], [0, 0, 16]]
    shape = [2, 2 * ROWS.value, REST.value // 2]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 16, 0], [1, 0, 0]], [], shape)


@constexpr_function
def _weight_layout(keys: int) -> gl.constexpr:
    """The layout of weights of a tile of heads as waves read them, [WAVES, keys, ROWS]: an operand."""
    registers = [[0, 1, 0], [0, 2, 0], [0, 4, 0], *([[0, 32, 0]] if keys > 32 else [])]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 8, 0], [0, 16, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, keys, ROWS.value])


@constexpr_function
def _softmax_bits(G: CdnaLatentGeometry) -> tuple[list[int], list[int], list[int]]:
    """Bits of [KEYS, HEADS], key bits before head bits, in the registers, lanes and waves that have a softmax."""
    in_lane = G.HEADS.bit_length() - 3
    keys = list(range(6))
    lanes = [6 + i for i in range(in_lane)] + keys[2 : 8 - in_lane]
    return [0, 1, *keys[8 - in_lane :]], lanes, [6 + in_lane, 7 + in_lane]


@constexpr_function
def _head_bits(G: CdnaLatentGeometry) -> list[list[int]]:
    return [[0, 1 << i] for i in range(G.HEADS.bit_length() - 1)]


@constexpr_function
def _softmax_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of scores [KEYS, HEADS] in which a wave has all keys of its heads."""
    bits = [[1 << i, 0] for i in range(6)] + _head_bits(G)
    registers, lanes, waves = ([bits[i] for i in each] for each in _softmax_bits(G))
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [KEYS.value, G.HEADS])


@constexpr_function
def _halves_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of halves of scores as they are read, [tiles * WAVES, KEYS / 2, ROWS]; wave 2 i + j has keys of half i
    and columns of half j."""
    keys = [[0, 1 << i, 0] for i in range(5)] + [[2, 0, 0]]
    bits = [*keys, *([0, 0, 1 << i] for i in range(4)), [4, 0, 0], [8, 0, 0]]
    registers, lanes, waves = ([bits[i] for i in each] for each in _softmax_bits(G))
    shape = [_tiles(G) * WAVES.value, _HALF_KEYS.value, ROWS.value]
    return gl.DistributedLinearLayout([*registers, [1, 0, 0]], lanes, waves, [], shape)


@constexpr_function
def _total_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of sums of weights, [8, HEADS]: a lane adds up its own keys."""
    bits = [None, None, [1, 0], [2, 0], [4, 0], None, *_head_bits(G)]
    registers, lanes, waves = ([found for i in each if (found := bits[i])] for each in _softmax_bits(G))
    if len(lanes) < 6:
        lanes.append([0, 0])
    return gl.DistributedLinearLayout(registers, lanes, waves, [], [8, G.HEADS])


@constexpr_function
def _scores_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """Four neighbouring keys of a head, then heads: a wave stores and loads whole KiB."""
    keys, heads = [[0, 1 << i, 0] for i in range(5)], [[0, 0, 1 << i] for i in range(4)]
    tiles = [[1 << i, 0, 0] for i in range((_tiles(G) * WAVES.value).bit_length() - 1)]
    return gl.SharedLinearLayout([*keys[:2], *heads, *keys[2:], *tiles])


@constexpr_function
def _weights_in_lds(G: CdnaLatentGeometry) -> gl.constexpr:
    """The keys of a head side by side."""
    bits = [[1 << i, 0] for i in range(6)] + _head_bits(G)
    return gl.PaddedSharedLayout([[KEYS.value, 8]], bits, [], [KEYS.value, G.HEADS])


@constexpr_function
def _reads(num: int, bits: int) -> str:
    """The constraints of an instruction of assembly that reads num numbers of a lane, and could write half as many."""
    return ",".join(["=v"] * -(-num // 2) + ["v"] * (num * bits // 32))


@gluon.jit
def _wait_for(x, NUM: gl.constexpr):
    """Waits for NUM numbers of a lane at once, and for all that was loaded before: an empty instruction reads them."""
    CONSTRAINTS: gl.constexpr = _reads(NUM, x.dtype.primitive_bitwidth)
    sched_barrier()
    gl.inline_asm_elementwise("", CONSTRAINTS, [x], dtype=gl.int16, is_pure=False, pack=NUM)
    sched_barrier()


@gluon.jit
def allocate(DTYPE: gl.constexpr, G: gl.constexpr):
    """LDS of a program."""
    last = None
    if not is_coded(G.CODING.ENCODING):
        last = gl.allocate_shared_memory(DTYPE, [2 * G.HEADS, REST // 2], _last_in_lds(G))
    return Shared(
        gl.allocate_shared_memory(gl.float32, [_tiles(G) * WAVES, _HALF_KEYS, ROWS], _scores_in_lds(G)),
        gl.allocate_shared_memory(DTYPE, [KEYS, G.HEADS], _weights_in_lds(G)),
        gl.allocate_shared_memory(gl.float32, [G.HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        last,
    )


@gluon.jit
def _query_tile(q, TILE: gl.constexpr, num_heads):
    """A wave's half of q's columns but the last, of a tile of heads, [WAVES, ROWS, V_DIM / 2]; zero for missing heads.
    Waves take 32 columns in turn."""
    Q: gl.constexpr = _query_layout()
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, Q)))[:, None, None]
    head = here(TILE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, Q))))[None, :, None]
    column = gl.arange(0, _HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, Q)))[None, None, :]
    at = q.at + head.to(gl.int64) * q.head + (column // 32 * 64 + wave % 2 * 32 + column % 32)
    return gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0)


@gluon.jit
def _operand(query, LANE: gl.constexpr, G: gl.constexpr):
    operand: gl.constexpr = gl.DotOperandLayout(1, _half_scores(G), LANE)
    return gl.convert_layout(gl.permute(query, (0, 2, 1)), operand, assert_trivial=True)


@constexpr_function
def _halves_in_lds(columns: int) -> gl.constexpr:
    """Halves of codes of a tile's q, [2, ROWS, columns]."""
    bits = [*([0, 0, 1 << i] for i in range(columns.bit_length() - 1)), *_LANES, [1, 0, 0]]
    return gl.PaddedSharedLayout([[columns, 16]], bits, [], [2, ROWS.value, columns])


@constexpr_function
def _halves_of_waves(columns: int, lane: int) -> gl.constexpr:
    """The layout of halves as waves read them, [2, 2, ROWS, columns]: wave 2 i + j has half j."""
    own = [[0, 0, 0, 1 << i] for i in range(lane.bit_length() - 1)]
    more = [[0, 0, 0, 4 * lane << i] for i in range((columns // (4 * lane)).bit_length() - 1)]
    lanes = [*([0, 0, 1 << i, 0] for i in range(4)), [0, 0, 0, lane], [0, 0, 0, 2 * lane]]
    shape = [2, 2, ROWS.value, columns]
    return gl.DistributedLinearLayout([*own, *more], lanes, [[0, 1, 0, 0], [1, 0, 0, 0]], [], shape)


@gluon.jit
def _by_lds(codes, LANE: gl.constexpr, G: gl.constexpr):
    """Codes of a tile's q [ROWS, columns] as an operand. Waves take 4 LANE columns in turn."""
    COLUMNS: gl.constexpr = codes.shape[1] // 2
    halves = gl.reshape(codes, [ROWS, COLUMNS // (4 * LANE), 2, 4 * LANE])
    halves = gl.reshape(gl.permute(halves, (2, 0, 1, 3)), [2, ROWS, COLUMNS])
    # Numbers from memory or LDS may lie in any register; results of vector instructions would move in every round.
    lds = gl.allocate_shared_memory(gl.uint8, [2, ROWS, COLUMNS], _halves_in_lds(COLUMNS))
    lds.store(halves)
    own = lds.load(gl.SliceLayout(0, _halves_of_waves(COLUMNS, LANE)))
    own = gl.reshape(own[None, :, :, :].broadcast_to([2, 2, ROWS, COLUMNS]), [WAVES, ROWS, COLUMNS])
    return _operand(own.to(_code(G), bitcast=True), LANE, G)


@gluon.jit
def _two_codes(query, exponent, LANE: gl.constexpr, G: gl.constexpr):
    """q of a tile [ROWS, columns] moved to the largest codes, as operands of codes whose sum it is: the first four bits
    of an element, and the others. NaN and infinity leave a NaN. exponent: of each head"""
    # One less than that of the largest code, since an element may be nearly twice its power of two.
    by = ((253 + _largest_exponent(G) - exponent) << 23).to(gl.float32, bitcast=True)
    moved = query * by[:, None]
    first = (moved.to(gl.uint32, bitcast=True) & 0xFFF00000).to(gl.float32, bitcast=True)
    others = (moved - first).to(_code(G)).to(gl.uint8, bitcast=True)
    return _by_lds(first.to(_code(G)).to(gl.uint8, bitcast=True), LANE, G), _by_lds(others, LANE, G)


@gluon.jit
def _columns_of_query(q, TILE: gl.constexpr, FIRST: gl.constexpr, COLUMNS: gl.constexpr, num_heads):
    """COLUMNS columns of q from FIRST on, of a tile of heads, in float32; zero for missing heads."""
    L: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 16], [4, 16], [WAVES, 1], [1, 0])
    head = here(TILE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, L)))[:, None]
    column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    at = q.at + head.to(gl.int64) * q.head + column
    return gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0).to(gl.float32)


@gluon.jit
def _coded_query(lds, q, TILE: gl.constexpr, num_heads, G: gl.constexpr):
    """The operands of a tile of heads over codes. The exponent of each head goes to LDS, as the bits of a float32."""
    low = _columns_of_query(q, TILE, 0, V_DIM, num_heads)
    last = _columns_of_query(q, TILE, V_DIM, REST, num_heads)
    S: gl.constexpr = gl.SliceLayout(1, low.type.layout)
    of_last = gl.convert_layout(gl.max(gl.abs(last), 1), S)
    exponent = exponent_to_move(gl.maximum(gl.max(gl.abs(low), 1), of_last))
    lds.heads.slice(TILE * ROWS, ROWS).store(exponent.to(gl.float32, bitcast=True))
    of_last = gl.convert_layout(exponent, gl.SliceLayout(1, last.type.layout))
    return _two_codes(low, exponent, _lane(G), G), _two_codes(last, of_last, _LAST_LANE, G)


@gluon.jit
def load_queries(lds, q, num_heads, G: gl.constexpr):
    """q of a token's heads: for each tile the operands of its columns but the last, and of the last ones; and a factor
    of products, 1 or one of each head. q: HeadRows, of the first head

    Elements of 16 bits are operands; those of the last columns go to LDS. Over codes q is the sum of two codes: a
    head's largest element is moved to the largest codes by a power of two, and elements below 2^-9 of it lose bits
    below 2^-16 of it.
    """
    query = ()
    if is_coded(G.CODING.ENCODING):
        for i in gl.static_range(_tiles(G)):
            query += (_coded_query(lds, q, i, num_heads, G),)  # type: ignore[assignment]
        exponent = lds.heads.load(gl.SliceLayout(0, _softmax_layout(G))).to(gl.int32, bitcast=True)
        factor = ((exponent + 1 - _largest_exponent(G)) << 23).to(gl.float32, bitcast=True)
    else:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 4], [WAVES, 1], [1, 0])
        line = here(gl.arange(0, 2 * G.HEADS, layout=gl.SliceLayout(1, L)))[:, None]
        head = line // (2 * ROWS) * ROWS + line % ROWS
        column = V_DIM + line // ROWS % 2 * (REST // 2) + gl.arange(0, REST // 2, layout=gl.SliceLayout(0, L))[None, :]
        at = q.at + head.to(gl.int64) * q.head + column
        lds.last.store(gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0))
        for i in gl.static_range(_tiles(G)):
            query += (((_operand(_query_tile(q, i, num_heads), _lane(G), G),), None),)  # type: ignore[assignment]
        factor = 1.0
    return query, factor


@gluon.jit
def _last_columns(lds, TILE: gl.constexpr, G: gl.constexpr):
    """A wave's half of the last columns of q of a tile of heads, an operand from LDS."""
    part = lds.last.slice(TILE * 2 * ROWS, 2 * ROWS).load(gl.SliceLayout(0, _last_parts()))
    part = part[None, :, :].broadcast_to([2, 2 * ROWS, REST // 2])
    return _operand(gl.reshape(part, [WAVES, ROWS, REST // 2]), _LAST_LANE, G)


@gluon.jit
def _read_keys(rows, block, G: gl.constexpr):
    """The keys of a block that waves score, [WAVES, KEYS / 2]; the last key that is seen stands for later ones."""
    L: gl.constexpr = gl.SliceLayout(2, _key_words(_HALF // in_word(G)))
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, L))[:, None]
    key = gl.arange(0, _HALF_KEYS, layout=gl.SliceLayout(0, L))[None, :]
    return gl.minimum(block * KEYS + (wave // 2 * _HALF_KEYS + key), rows.last_key).to(gl.uint32)


@gluon.jit
def _read_groups(rows, block, G: gl.constexpr):
    """The first key of each group of V, [WAVES, groups]; the last group that is seen stands for later ones."""
    L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, _value_words(G)))
    GROUP: gl.constexpr = _group(G)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, L))[:, None]
    group = gl.arange(0, KEYS // GROUP, layout=gl.SliceLayout(0, L))[None, :] + 0 * wave
    return gl.minimum(block * KEYS + group * GROUP, rows.last_key // GROUP * GROUP).to(gl.uint32)


@gluon.jit
def _pages_of(rows, keys, G: gl.constexpr):
    return gl.load(rows.line + keys // G.PAGE_SIZE)


@gluon.jit
def _rows_of(rows, pages, keys, G: gl.constexpr):
    """Pointers to the first words of keys' rows."""
    return rows.at + (pages.to(gl.int64) * rows.page + (keys % G.PAGE_SIZE).to(gl.int64) * rows.token)


@gluon.jit
def _load_half(at, FIRST: gl.constexpr, COLUMNS: gl.constexpr, G: gl.constexpr):
    """A wave's words of COLUMNS columns from FIRST on: waves take up to 16 words in turn. at: each key's first word"""
    WORDS: gl.constexpr = COLUMNS // 2 // in_word(G)
    RUN: gl.constexpr = 16 if WORDS > 16 else WORDS
    L: gl.constexpr = _key_words(WORDS)
    at = gl.convert_layout(at, gl.SliceLayout(2, L), assert_trivial=True)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at += wave % 2 * RUN
    return gl.load(at[:, :, None] + (FIRST // in_word(G) + word // RUN * 2 * RUN + word % RUN)[None, None, :])


@gluon.jit
def _load_keys(rows, pages, block, G: gl.constexpr):
    at = _rows_of(rows, pages, _read_keys(rows, block, G), G)
    return HalfKeys(_load_half(at, 0, V_DIM, G), _load_half(at, V_DIM, REST, G))


@gluon.jit
def _load_values(rows, pages, block, G: gl.constexpr):
    """A quarter of V's columns of a block's keys. Keys of a group after the last one lie in its page too."""
    V: gl.constexpr = _value_words(G)
    at = _rows_of(rows, pages, _read_groups(rows, block, G), G)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, V))))[:, None]
    at += wave * (_QUARTER // in_word(G))
    key = gl.arange(0, _group(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, V))))
    word = gl.arange(0, _QUARTER // in_word(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, V))))
    at = at[:, :, None] + (key.to(gl.int64) * rows.token)[None, None, :]
    return gl.load(at[:, :, :, None] + word[None, None, None, :])


@gluon.jit
def _elements(words, NUM: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    """The elements of words, [WAVES, NUM, COLUMNS] in DTYPE, of 8 or 16 bits."""
    elements = gl.join(words.to(gl.uint16), (words >> 16).to(gl.uint16))
    if DTYPE.primitive_bitwidth == 8:
        elements = gl.join(elements.to(gl.uint8), (elements >> 8).to(gl.uint8))
    return gl.reshape(elements.to(DTYPE, bitcast=True), [WAVES, NUM, COLUMNS])


@gluon.jit
def _words_of_parts(words, G: gl.constexpr):
    """The words of V of each part of the keys."""
    if is_coded(G.CODING.ENCODING):
        words = gl.reshape(words, [WAVES, 2, _HALF_KEYS, _QUARTER // 4])
        parts = gl.split(gl.permute(words, (0, 2, 3, 1)))
    else:
        parts = (words,)
    return parts


@gluon.jit
def _values(words, DTYPE: gl.constexpr, G: gl.constexpr):
    """V of a part of the keys, an operand [WAVES, V_DIM / WAVES, keys]; codes become numbers exactly."""
    NUM: gl.constexpr = KEYS // _parts(G)
    if is_coded(G.CODING.ENCODING):
        # Words are taken apart here: the compiler would do it before branches, and put bytes together after them.
        codes = _elements(here(words), NUM, _QUARTER, gl.uint8)
        if G.UNITS.CONVERTS:
            values = gl.convert_layout(codes, _two_keys()).to(_code(G), bitcast=True).to(DTYPE)
        else:
            values = decoded(codes, G.CODING.ENCODING, DTYPE)
    else:
        values = _elements(words, NUM, _QUARTER, DTYPE)
    values = gl.permute(gl.reshape(values, [WAVES, NUM, _QUARTER // 8, 8]), (0, 3, 2, 1))
    operand: gl.constexpr = gl.DotOperandLayout(0, score_layout(G), 8)
    return gl.convert_layout(gl.reshape(values, [WAVES, _QUARTER, NUM]), operand, assert_trivial=True)


@gluon.jit
def _last_queries(lds, query, G: gl.constexpr):
    """The operands of q's last columns of each tile."""
    found = ()
    if is_coded(G.CODING.ENCODING):
        for i in gl.static_range(_tiles(G)):
            found += (query[i][1],)  # type: ignore[assignment]
    else:
        for i in gl.static_range(_tiles(G)):
            tile = _last_columns(lds, i, G)
            found += ((tile,),)  # type: ignore[assignment]
            sched_barrier()
        _wait_for(tile, _LAST_LANE)
    return found


@gluon.jit
def _store_scores(lds, query, keys, DTYPE: gl.constexpr, G: gl.constexpr):
    """Stores a wave's halves of a block's scores."""
    P: gl.constexpr = _half_scores(G)
    K: gl.constexpr = _code(G) if is_coded(G.CODING.ENCODING) else DTYPE
    last = _elements(keys.last, _HALF_KEYS, REST // 2, K)
    last = gl.convert_layout(last, gl.DotOperandLayout(0, P, _LAST_LANE), assert_trivial=True)
    low = _elements(keys.low, _HALF_KEYS, _HALF, K)
    low = gl.convert_layout(low, gl.DotOperandLayout(0, P, _lane(G)), assert_trivial=True)
    last_queries = _last_queries(lds, query, G)
    scores = ()
    for i in gl.static_range(_tiles(G)):
        part = gl.full([WAVES, _HALF_KEYS, ROWS], 0.0, gl.float32, layout=P)
        for j in gl.static_range(len(query[i][0])):
            part = gl.amd.cdna3.mfma(last, last_queries[i][j], part)
            part = gl.amd.cdna3.mfma(low, query[i][0][j], part)
        scores += (part,)  # type: ignore[assignment]
    for i in gl.static_range(_tiles(G)):
        lds.scores.slice(i * WAVES, WAVES).store(scores[i])


@gluon.jit
def _sum_of_scores(lds, block, kv_len, G: gl.constexpr, MASKED: gl.constexpr):
    """The scores of a block, [KEYS, HEADS], without qk_scale."""
    X: gl.constexpr = _softmax_layout(G)
    halves = lds.scores.load(_halves_layout(G))
    _wait_for(halves, G.HEADS // 2)
    halves = gl.reshape(halves, [_tiles(G), 2, 2, _HALF_KEYS, ROWS])
    scores = gl.reshape(gl.permute(gl.sum(halves, 2), (1, 2, 0, 3)), [KEYS, G.HEADS])
    scores = gl.convert_layout(scores, X, assert_trivial=True)
    if MASKED:
        key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, X))
        scores = gl.where((key < kv_len)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _weigh(lds, state, scores, qk_scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """The state with a block's keys in all but acc; its weights and decays go to LDS."""
    T: gl.constexpr = _total_layout(G)
    of_scores = qk_scale[None, :] if is_coded(G.CODING.ENCODING) else qk_scale
    maximum = gl.maximum(state.maximum, gl.max(scores, 0) * qk_scale)
    weights = gl.exp2(scores * of_scores - maximum[None, :])
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
def _next_weights(lds, PART: gl.constexpr, TILE: gl.constexpr, G: gl.constexpr):
    """Weights of a part of the keys, of two tiles of heads, read in this order, or of the only one: operands."""
    operand: gl.constexpr = gl.DotOperandLayout(1, score_layout(G), 8)
    KEYS_OF_PART: gl.constexpr = KEYS // _parts(G)
    L: gl.constexpr = gl.SliceLayout(0, _weight_layout(KEYS_OF_PART))
    found = ()
    for i in gl.static_range(2 if _tiles(G) > 1 else 1):
        sched_barrier()
        tile = lds.weights.slice((TILE + i) * ROWS, ROWS, dim=1)
        weights = tile.slice(PART * KEYS_OF_PART, KEYS_OF_PART).load(L)
        weights = weights[None, :, :].broadcast_to([WAVES, KEYS_OF_PART, ROWS])
        found += (gl.convert_layout(weights, operand, assert_trivial=True),)  # type: ignore[assignment]
    sched_barrier()
    return found


@gluon.jit
def _seen_values(values, block, kv_len, G: gl.constexpr):
    """Words of V; 0 for keys that are not seen, which have weights of zero: 0 times NaN is NaN."""
    S: gl.constexpr = gl.SliceLayout(3, _value_words(G))
    group = gl.arange(0, KEYS // _group(G), layout=gl.SliceLayout(0, gl.SliceLayout(2, S)))[None, :, None]
    key = gl.arange(0, _group(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, S)))[None, None, :]
    is_seen = block * KEYS + group * _group(G) + key < kv_len
    return gl.where(is_seen[:, :, :, None], values, 0)


@gluon.jit
def _add_values(lds, state, values, DTYPE: gl.constexpr, G: gl.constexpr):
    """Adds weighted values of a block to the accumulators, whose row 16 j + i of a wave is column 8 i + j."""
    parts = _words_of_parts(values, G)
    # The numbers that are read last are waited for first, and so once for all.
    weights = _next_weights(lds, 0, 0, G)
    decays = _of_heads(lds, G)
    _wait_for(decays[-1], 1)
    sums = ()
    for i in gl.static_range(_tiles(G)):
        decay = decays[i].broadcast_to([WAVES, _QUARTER, ROWS])
        (each,) = gl.map_elementwise(decayed, state.acc[i], decay, pack=_QUARTER * ROWS // 64)
        sums += (each,)  # type: ignore[assignment]
    for part in gl.static_range(_parts(G)):
        v = _values(parts[part], DTYPE, G)
        acc = sums
        sums = ()
        for i in gl.static_range(_tiles(G)):
            if i % 2 == 0 and i + part > 0:  # the first ones are there
                weights = _next_weights(lds, part, i, G)
                _wait_for(weights[-1], 16 // _parts(G))
            sums += (gl.amd.cdna3.mfma(v, weights[i % 2], acc[i]),)  # type: ignore[assignment]
    return Softmax(sums, state.maximum, state.total)


@gluon.jit
def attend_heads(lds, query, rows, first, end, kv_len, qk_scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """Returns the Softmax of key blocks [first, end): acc, a tuple of [WAVES, V_DIM / WAVES, ROWS] as in _add_values,
    one for each tile of heads; maximum [HEADS]; total [8, HEADS].

    K and V of a block are in flight while those of the block before it are used. Loads return in their order: K, the
    numbers of the next one's pages, V, and the same of V, so that a wait for numbers is one for what came before.
    """
    keys = _load_keys(rows, _pages_of(rows, _read_keys(rows, first, G), G), first, G)
    k_pages = here(_pages_of(rows, _read_keys(rows, first + 1, G), G))
    sched_barrier()
    values = _load_values(rows, _pages_of(rows, _read_groups(rows, first, G), G), first, G)
    v_pages = here(_pages_of(rows, _read_groups(rows, first + 1, G), G))
    sched_barrier()
    # q is in LDS, and no wave waits for it in the loop.
    gl.barrier()
    acc = ()
    for _ in gl.static_range(_tiles(G)):
        acc += (gl.full([WAVES, _QUARTER, ROWS], 0.0, gl.float32, layout=score_layout(G)),)  # type: ignore[assignment]
    state = Softmax(
        acc,
        gl.full([G.HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, _softmax_layout(G))),
        gl.full([8, G.HEADS], 0.0, gl.float32, layout=_total_layout(G)),
    )
    # The last block may be seen in part.
    middle = gl.minimum(end, kv_len // KEYS)
    for block in range(first, middle):
        _wait_for(k_pages, 2)
        _store_scores(lds, query, keys, DTYPE, G)
        sched_barrier()
        keys = _load_keys(rows, k_pages, block + 1, G)
        sched_barrier()
        scores = _sum_of_scores(lds, block, kv_len, G, False)
        state = _weigh(lds, state, scores, qk_scale, DTYPE, G)
        _wait_for(v_pages, 16 // _group(G))
        state = _add_values(lds, state, values, DTYPE, G)
        sched_barrier()
        k_pages = _pages_of(rows, _read_keys(rows, block + 2, G), G)
        sched_barrier()
        values = _load_values(rows, v_pages, block + 1, G)
        v_pages = _pages_of(rows, _read_groups(rows, block + 2, G), G)
        sched_barrier()
    if middle < end:
        _store_scores(lds, query, keys, DTYPE, G)
        scores = _sum_of_scores(lds, middle, kv_len, G, True)
        state = _weigh(lds, state, scores, qk_scale, DTYPE, G)
        if _group(G) > 1:
            values = _seen_values(values, middle, kv_len, G)
        state = _add_values(lds, state, values, DTYPE, G)
    return state


@gluon.jit
def _columns_of_heads(acc):
    """A tile's accumulators as [ROWS, V_DIM]."""
    acc = gl.reshape(acc, [WAVES, 8, _QUARTER // 8, ROWS])
    return gl.reshape(gl.permute(acc, (3, 0, 2, 1)), [ROWS, V_DIM])


@gluon.jit
def _store_tile(acc, inverse, to, token, first_head, num_heads, line, row, OF_TILE: gl.constexpr, is_whole):
    """Stores the results or a part of a tile of heads, the first of which is OF_TILE."""
    part = _columns_of_heads(acc * row)
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
def store_heads(lds, state, to, token, first_head, num_heads, part, is_whole, row, G: gl.constexpr):
    """Stores the results of a row, or the program's part of a row that others share, for the heads of a program.

    row: the scale of rows
    """
    H: gl.constexpr = gl.SliceLayout(0, _softmax_layout(G))
    maximum = state.maximum
    total = gl.convert_layout(gl.sum(state.total, 0), H)
    head = here(gl.arange(0, G.HEADS, layout=H))
    is_head = head < num_heads
    line = part * G.rows.Q_ROWS + first_head
    lds.heads.store(row / total)
    if is_whole:
        if to.lse is not None:
            lse = to.lse.at + token * to.lse.token + (first_head + head).to(gl.int64) * to.lse.head
            gl.store(lse, (maximum + gl.log2(total)) * LN_2, mask=is_head)
    else:
        gl.store(to.sums + (line + head) * 2, maximum, mask=is_head)
        gl.store(to.sums + (line + head) * 2 + 1, total, mask=is_head)
    inverse = _of_heads(lds, G)
    for i in gl.static_range(_tiles(G)):
        _store_tile(state.acc[i], inverse[i], to, token, first_head, num_heads, line, row, i * ROWS, is_whole)
