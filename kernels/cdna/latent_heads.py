"""Key blocks of latent decode for CDNA, for more query heads than a tile of products has, up to 64, and over codes.

    S^T = K q^T     a wave has half of a block's keys and half of their columns; halves are added up in LDS
    O^T = V^T P^T   a wave has all keys and a quarter of V's columns, so that it weighs them for all heads once

So a program holds q and the accumulators once, and a wave loads a quarter of the rows as K and as V each, straight into
operands as in latent_blocks.py. Waves exchange scores and not rows: halves of scores, each for the wave that has the
softmax of these heads, and weights and decays for all waves. A block has two barriers.

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
from rocm_attn.kernels.cdna.codes import code_of, elements_of, in_word, moved_to_codes, parts_of, scale_of_codes
from rocm_attn.kernels.cdna.extend_steps import here
from rocm_attn.kernels.cdna.key_blocks import rounded
from rocm_attn.kernels.cdna.latent_blocks import (
    KEYS,
    REST,
    ROWS,
    V_DIM,
    WAVES,
    decayed,
    score_layout,
)
from rocm_attn.kernels.cdna.latent_layouts import (
    HALF,
    HALF_KEYS,
    LAST_LANE,
    QUARTER,
    group_keys,
    half_scores,
    halves_in_lds,
    halves_layout,
    halves_of_waves,
    key_words,
    lane_elements,
    last_in_lds,
    last_parts,
    num_parts,
    num_tiles,
    query_layout,
    scores_in_lds,
    softmax_layout,
    total_layout,
    two_keys,
    value_words,
    weight_layout,
    weights_in_lds,
)


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
def _reads(num: int, bits: int) -> str:
    """The constraints of an instruction of assembly that reads num numbers of a lane, and could write half as many."""
    return ",".join(["=v"] * -(-num // 2) + ["v"] * (num * bits // 32))


@gluon.jit
def wait_for(x, NUM: gl.constexpr):
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
        last = gl.allocate_shared_memory(DTYPE, [2 * G.HEADS, REST // 2], last_in_lds(G))
    return Shared(
        gl.allocate_shared_memory(gl.float32, [num_tiles(G) * WAVES, HALF_KEYS, ROWS], scores_in_lds(G)),
        gl.allocate_shared_memory(DTYPE, [KEYS, G.HEADS], weights_in_lds(G)),
        gl.allocate_shared_memory(gl.float32, [G.HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        last,
    )


@gluon.jit
def _query_tile(q, TILE: gl.constexpr, num_heads):
    """A wave's half of q's columns but the last, of a tile of heads, [WAVES, ROWS, V_DIM / 2]; zero for missing heads.
    Waves take 32 columns in turn."""
    Q: gl.constexpr = query_layout()
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, Q)))[:, None, None]
    head = here(TILE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, Q))))[None, :, None]
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, gl.SliceLayout(1, Q)))[None, None, :]
    at = q.at + head.to(gl.int64) * q.head + (column // 32 * 64 + wave % 2 * 32 + column % 32)
    return gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0)


@gluon.jit
def _operand(query, LANE: gl.constexpr, G: gl.constexpr):
    operand: gl.constexpr = gl.DotOperandLayout(1, half_scores(G), LANE)
    return gl.convert_layout(gl.permute(query, (0, 2, 1)), operand, assert_trivial=True)


@gluon.jit
def _by_lds(codes, LANE: gl.constexpr, G: gl.constexpr):
    """Codes of a tile's q [ROWS, columns] as an operand. Waves take 4 LANE columns in turn."""
    COLUMNS: gl.constexpr = codes.shape[1] // 2
    halves = gl.reshape(codes, [ROWS, COLUMNS // (4 * LANE), 2, 4 * LANE])
    halves = gl.reshape(gl.permute(halves, (2, 0, 1, 3)), [2, ROWS, COLUMNS])
    # Numbers from memory or LDS may lie in any register; results of vector instructions would move in every round.
    lds = gl.allocate_shared_memory(gl.uint8, [2, ROWS, COLUMNS], halves_in_lds(COLUMNS))
    lds.store(halves)
    own = lds.load(gl.SliceLayout(0, halves_of_waves(COLUMNS, LANE)))
    own = gl.reshape(own[None, :, :, :].broadcast_to([2, 2, ROWS, COLUMNS]), [WAVES, ROWS, COLUMNS])
    return _operand(own.to(code_of(G.UNITS.VERSION), bitcast=True), LANE, G)


@gluon.jit
def _two_codes(query, exponent, LANE: gl.constexpr, G: gl.constexpr):
    """q of a tile [ROWS, columns] moved to the largest codes, as operands of codes whose sum it is: the first four bits
    of an element, and the others. NaN and infinity leave a NaN. exponent: of each head"""
    first, others = parts_of(moved_to_codes(query, exponent[:, None], G.UNITS.VERSION), 2, G.UNITS.VERSION)
    first, others = first.to(gl.uint8, bitcast=True), others.to(gl.uint8, bitcast=True)
    return _by_lds(first, LANE, G), _by_lds(others, LANE, G)


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
    return _two_codes(low, exponent, lane_elements(G), G), _two_codes(last, of_last, LAST_LANE, G)


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
        for i in gl.static_range(num_tiles(G)):
            query += (_coded_query(lds, q, i, num_heads, G),)  # type: ignore[assignment]
        exponent = lds.heads.load(gl.SliceLayout(0, softmax_layout(G))).to(gl.int32, bitcast=True)
        factor = scale_of_codes(exponent, G.UNITS.VERSION)
    else:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 4], [WAVES, 1], [1, 0])
        line = here(gl.arange(0, 2 * G.HEADS, layout=gl.SliceLayout(1, L)))[:, None]
        head = line // (2 * ROWS) * ROWS + line % ROWS
        column = V_DIM + line // ROWS % 2 * (REST // 2) + gl.arange(0, REST // 2, layout=gl.SliceLayout(0, L))[None, :]
        at = q.at + head.to(gl.int64) * q.head + column
        lds.last.store(gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0))
        for i in gl.static_range(num_tiles(G)):
            query += (((_operand(_query_tile(q, i, num_heads), lane_elements(G), G),), None),)  # type: ignore[assignment]
        factor = 1.0
    return query, factor


@gluon.jit
def _last_columns(lds, TILE: gl.constexpr, G: gl.constexpr):
    """A wave's half of the last columns of q of a tile of heads, an operand from LDS."""
    part = lds.last.slice(TILE * 2 * ROWS, 2 * ROWS).load(gl.SliceLayout(0, last_parts()))
    part = part[None, :, :].broadcast_to([2, 2 * ROWS, REST // 2])
    return _operand(gl.reshape(part, [WAVES, ROWS, REST // 2]), LAST_LANE, G)


@gluon.jit
def _read_keys(rows, block, G: gl.constexpr):
    """The keys of a block that waves score, [WAVES, KEYS / 2]; the last key that is seen stands for later ones."""
    L: gl.constexpr = gl.SliceLayout(2, key_words(HALF // in_word(G.CODING)))
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, L))[:, None]
    key = gl.arange(0, HALF_KEYS, layout=gl.SliceLayout(0, L))[None, :]
    return gl.minimum(block * KEYS + (wave // 2 * HALF_KEYS + key), rows.last_key).to(gl.uint32)


@gluon.jit
def _read_groups(rows, block, G: gl.constexpr):
    """The first key of each group of V, [WAVES, groups]; the last group that is seen stands for later ones."""
    L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, value_words(G)))
    GROUP: gl.constexpr = group_keys(G)
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
    WORDS: gl.constexpr = COLUMNS // 2 // in_word(G.CODING)
    RUN: gl.constexpr = 16 if WORDS > 16 else WORDS
    L: gl.constexpr = key_words(WORDS)
    at = gl.convert_layout(at, gl.SliceLayout(2, L), assert_trivial=True)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at += wave % 2 * RUN
    return gl.load(at[:, :, None] + (FIRST // in_word(G.CODING) + word // RUN * 2 * RUN + word % RUN)[None, None, :])


@gluon.jit
def _load_keys(rows, pages, block, G: gl.constexpr):
    at = _rows_of(rows, pages, _read_keys(rows, block, G), G)
    return HalfKeys(_load_half(at, 0, V_DIM, G), _load_half(at, V_DIM, REST, G))


@gluon.jit
def _load_values(rows, pages, block, G: gl.constexpr):
    """A quarter of V's columns of a block's keys. Keys of a group after the last one lie in its page too."""
    V: gl.constexpr = value_words(G)
    at = _rows_of(rows, pages, _read_groups(rows, block, G), G)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, V))))[:, None]
    at += wave * (QUARTER // in_word(G.CODING))
    key = gl.arange(0, group_keys(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, V))))
    word = gl.arange(0, QUARTER // in_word(G.CODING), layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, V))))
    at = at[:, :, None] + (key.to(gl.int64) * rows.token)[None, None, :]
    return gl.load(at[:, :, :, None] + word[None, None, None, :])


@gluon.jit
def _words_of_parts(words, G: gl.constexpr):
    """The words of V of each part of the keys."""
    if is_coded(G.CODING.ENCODING):
        words = gl.reshape(words, [WAVES, 2, HALF_KEYS, QUARTER // 4])
        parts = gl.split(gl.permute(words, (0, 2, 3, 1)))
    else:
        parts = (words,)
    return parts


@gluon.jit
def _values(words, DTYPE: gl.constexpr, G: gl.constexpr):
    """V of a part of the keys, an operand [WAVES, V_DIM / WAVES, keys]; codes become numbers exactly."""
    NUM: gl.constexpr = KEYS // num_parts(G)
    if is_coded(G.CODING.ENCODING):
        # Words are taken apart here: the compiler would do it before branches, and put bytes together after them.
        codes = gl.reshape(elements_of(here(words), gl.uint8), [WAVES, NUM, QUARTER])
        if G.UNITS.CONVERTS:
            values = gl.convert_layout(codes, two_keys()).to(code_of(G.UNITS.VERSION), bitcast=True).to(DTYPE)
        else:
            values = decoded(codes, G.CODING.ENCODING, DTYPE)
    else:
        values = gl.reshape(elements_of(words, DTYPE), [WAVES, NUM, QUARTER])
    values = gl.permute(gl.reshape(values, [WAVES, NUM, QUARTER // 8, 8]), (0, 3, 2, 1))
    operand: gl.constexpr = gl.DotOperandLayout(0, score_layout(G), 8)
    return gl.convert_layout(gl.reshape(values, [WAVES, QUARTER, NUM]), operand, assert_trivial=True)


@gluon.jit
def _last_queries(lds, query, G: gl.constexpr):
    """The operands of q's last columns of each tile."""
    found = ()
    if is_coded(G.CODING.ENCODING):
        for i in gl.static_range(num_tiles(G)):
            found += (query[i][1],)  # type: ignore[assignment]
    else:
        for i in gl.static_range(num_tiles(G)):
            tile = _last_columns(lds, i, G)
            found += ((tile,),)  # type: ignore[assignment]
            sched_barrier()
        wait_for(tile, LAST_LANE)
    return found


@gluon.jit
def _store_scores(lds, query, keys, DTYPE: gl.constexpr, G: gl.constexpr):
    """Stores a wave's halves of a block's scores."""
    P: gl.constexpr = half_scores(G)
    K: gl.constexpr = code_of(G.UNITS.VERSION) if is_coded(G.CODING.ENCODING) else DTYPE
    last = gl.reshape(elements_of(keys.last, K), [WAVES, HALF_KEYS, REST // 2])
    last = gl.convert_layout(last, gl.DotOperandLayout(0, P, LAST_LANE), assert_trivial=True)
    low = gl.reshape(elements_of(keys.low, K), [WAVES, HALF_KEYS, HALF])
    low = gl.convert_layout(low, gl.DotOperandLayout(0, P, lane_elements(G)), assert_trivial=True)
    last_queries = _last_queries(lds, query, G)
    scores = ()
    for i in gl.static_range(num_tiles(G)):
        part = gl.full([WAVES, HALF_KEYS, ROWS], 0.0, gl.float32, layout=P)
        for j in gl.static_range(len(query[i][0])):
            part = gl.amd.cdna3.mfma(last, last_queries[i][j], part)
            part = gl.amd.cdna3.mfma(low, query[i][0][j], part)
        scores += (part,)  # type: ignore[assignment]
    for i in gl.static_range(num_tiles(G)):
        lds.scores.slice(i * WAVES, WAVES).store(scores[i])


@gluon.jit
def _sum_of_scores(lds, block, kv_len, G: gl.constexpr, MASKED: gl.constexpr):
    """The scores of a block, [KEYS, HEADS], without qk_scale."""
    X: gl.constexpr = softmax_layout(G)
    halves = lds.scores.load(halves_layout(G))
    wait_for(halves, G.HEADS // 2)
    halves = gl.reshape(halves, [num_tiles(G), 2, 2, HALF_KEYS, ROWS])
    scores = gl.reshape(gl.permute(gl.sum(halves, 2), (1, 2, 0, 3)), [KEYS, G.HEADS])
    scores = gl.convert_layout(scores, X, assert_trivial=True)
    if MASKED:
        key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, X))
        scores = gl.where((key < kv_len)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _weigh(lds, state, scores, qk_scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """The state with a block's keys in all but acc; its weights and decays go to LDS."""
    T: gl.constexpr = total_layout(G)
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
    for i in gl.static_range(num_tiles(G)):
        found += (lds.heads.slice(i * ROWS, ROWS).load(A)[None, None, :],)  # type: ignore[assignment]
    return found


@gluon.jit
def _next_weights(lds, PART: gl.constexpr, TILE: gl.constexpr, G: gl.constexpr):
    """Weights of a part of the keys, of two tiles of heads, read in this order, or of the only one: operands."""
    operand: gl.constexpr = gl.DotOperandLayout(1, score_layout(G), 8)
    KEYS_OF_PART: gl.constexpr = KEYS // num_parts(G)
    L: gl.constexpr = gl.SliceLayout(0, weight_layout(KEYS_OF_PART))
    found = ()
    for i in gl.static_range(2 if num_tiles(G) > 1 else 1):
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
    S: gl.constexpr = gl.SliceLayout(3, value_words(G))
    group = gl.arange(0, KEYS // group_keys(G), layout=gl.SliceLayout(0, gl.SliceLayout(2, S)))[None, :, None]
    key = gl.arange(0, group_keys(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, S)))[None, None, :]
    is_seen = block * KEYS + group * group_keys(G) + key < kv_len
    return gl.where(is_seen[:, :, :, None], values, 0)


@gluon.jit
def _add_values(lds, state, values, DTYPE: gl.constexpr, G: gl.constexpr):
    """Adds weighted values of a block to the accumulators, whose row 16 j + i of a wave is column 8 i + j."""
    parts = _words_of_parts(values, G)
    # The numbers that are read last are waited for first, and so once for all.
    weights = _next_weights(lds, 0, 0, G)
    decays = _of_heads(lds, G)
    wait_for(decays[-1], 1)
    sums = ()
    for i in gl.static_range(num_tiles(G)):
        decay = decays[i].broadcast_to([WAVES, QUARTER, ROWS])
        (each,) = gl.map_elementwise(decayed, state.acc[i], decay, pack=QUARTER * ROWS // 64)
        sums += (each,)  # type: ignore[assignment]
    for part in gl.static_range(num_parts(G)):
        v = _values(parts[part], DTYPE, G)
        acc = sums
        sums = ()
        for i in gl.static_range(num_tiles(G)):
            if i % 2 == 0 and i + part > 0:  # the first ones are there
                weights = _next_weights(lds, part, i, G)
                wait_for(weights[-1], 16 // num_parts(G))
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
    for _ in gl.static_range(num_tiles(G)):
        acc += (gl.full([WAVES, QUARTER, ROWS], 0.0, gl.float32, layout=score_layout(G)),)  # type: ignore[assignment]
    state = Softmax(
        acc,
        gl.full([G.HEADS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, softmax_layout(G))),
        gl.full([8, G.HEADS], 0.0, gl.float32, layout=total_layout(G)),
    )
    # The last block may be seen in part.
    middle = gl.minimum(end, kv_len // KEYS)
    for block in range(first, middle):
        wait_for(k_pages, 2)
        _store_scores(lds, query, keys, DTYPE, G)
        sched_barrier()
        keys = _load_keys(rows, k_pages, block + 1, G)
        sched_barrier()
        scores = _sum_of_scores(lds, block, kv_len, G, False)
        state = _weigh(lds, state, scores, qk_scale, DTYPE, G)
        wait_for(v_pages, 16 // group_keys(G))
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
        if group_keys(G) > 1:
            values = _seen_values(values, middle, kv_len, G)
        state = _add_values(lds, state, values, DTYPE, G)
    return state


@gluon.jit
def _columns_of_heads(acc):
    """A tile's accumulators as [ROWS, V_DIM]."""
    acc = gl.reshape(acc, [WAVES, 8, QUARTER // 8, ROWS])
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
    H: gl.constexpr = gl.SliceLayout(0, softmax_layout(G))
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
    for i in gl.static_range(num_tiles(G)):
        _store_tile(state.acc[i], inverse[i], to, token, first_head, num_heads, line, row, i * ROWS, is_whole)
