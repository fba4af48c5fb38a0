"""Key blocks of latent decode for CDNA, for more query heads than a tile of products has, up to 64.

    S^T = K q^T     a wave has half of a block's keys and half of their columns; halves are added up in LDS
    O^T = V^T P^T   a wave has all keys and a quarter of V's columns, so that it weighs them for all heads once

So a program holds q and the accumulators once, and a wave loads a quarter of the rows as K and as V each, straight into
operands as in latent_blocks.py. Waves exchange scores and not rows: halves of scores, each for the wave that has the
softmax of these heads, and weights and decays for all waves. A block has two barriers.

Codes of records (cache/records.py) become numbers without their scales. A score is the sum of the rest's product and of
those of two groups of columns, each times its scale. A wave's columns of V are one group: it reads weights that are
multiplied by that group's scales. Scales are loaded three blocks ahead, and pass LDS.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.bundles import HeadsOfToken, Softmax
from rocm_attn.kernels.attention.softmax import LN_2, add_sink
from rocm_attn.kernels.cdna.codes import elements_of, in_word, numbers_of
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
    of_block,
    rows_of_slots,
    score_layout,
)
from rocm_attn.kernels.cdna.latent_layouts import (
    HALF,
    HALF_KEYS,
    LAST_LANE,
    QUARTER,
    group_keys,
    half_scores,
    halves_layout,
    has_records,
    key_scales,
    key_words,
    lane_elements,
    last_in_lds,
    last_parts,
    listed_keys,
    num_groups,
    num_tiles,
    query_layout,
    scale_words,
    scores_in_lds,
    softmax_layout,
    total_layout,
    value_words,
    weight_layout,
    weights_in_lds,
)

# Tiles of heads whose scores are multiplied, and whose weights are read, at once.
_PAIR = gl.constexpr(2)


class Shared(NamedTuple):
    """LDS: halves of scores [tiles * WAVES, KEYS / 2, ROWS], weights [KEYS, HEADS], a number of each head, and the last
    columns of q [2 HEADS, REST / 2], which registers have no room for. If rows are records, weights are times the
    scales of each wave's columns, [WAVES, KEYS, HEADS], and scales those of two blocks, [2, WAVES * KEYS]; else None.
    """

    scores: Any
    weights: Any
    heads: Any
    last: Any
    scales: Any


class HalfKeys(NamedTuple):
    """Words of K of a wave: half of the columns of V, [WAVES, KEYS / 2, words] for each group of them, and of the last
    ones."""

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
def in_accumulators(x):
    """x in 32 bits, in accumulation registers from here on: an empty instruction of assembly."""
    return gl.inline_asm_elementwise("", "=a,0", [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon.jit
def allocate(DTYPE: gl.constexpr, G: gl.constexpr):
    """LDS of a program."""
    WEIGHTS: gl.constexpr = [WAVES, KEYS, G.HEADS] if has_records(G) else [KEYS, G.HEADS]
    scales = None
    if has_records(G):
        scales = gl.allocate_shared_memory(gl.float32, [2, WAVES * KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Shared(
        gl.allocate_shared_memory(gl.float32, [num_tiles(G) * WAVES, HALF_KEYS, ROWS], scores_in_lds(G)),
        gl.allocate_shared_memory(DTYPE, WEIGHTS, weights_in_lds(G)),
        gl.allocate_shared_memory(gl.float32, [G.HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(DTYPE, [2 * G.HEADS, REST // 2], last_in_lds(G)),
        scales,
    )


@constexpr_function
def _run(G: CdnaLatentGeometry) -> int:
    """Columns of V that waves take in turn: all of a wave's groups, or 64 bytes."""
    return int(HALF.value if has_records(G) else 16 * in_word(G.CODING))


@gluon.jit
def _query_group(q, TILE: gl.constexpr, GROUP: gl.constexpr, num_heads, G: gl.constexpr):
    """A group of a wave's half of q's columns but the last, of a tile of heads, [WAVES, ROWS, columns]; zero for
    missing heads."""
    Q: gl.constexpr = query_layout(G)
    RUN: gl.constexpr = _run(G)
    FIRST: gl.constexpr = GROUP * (HALF // num_groups(G))
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, Q)))[:, None, None]
    head = here(TILE * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, Q))))[None, :, None]
    column = gl.arange(0, HALF // num_groups(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, Q)))[None, None, :]
    at = q.at + head.to(gl.int64) * q.head + (FIRST + column // RUN * 2 * RUN + wave % 2 * RUN + column % RUN)
    return gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0)


@gluon.jit
def _operand(query, LANE: gl.constexpr, G: gl.constexpr):
    operand: gl.constexpr = gl.DotOperandLayout(1, half_scores(G), LANE)
    return gl.convert_layout(gl.permute(query, (0, 2, 1)), operand, assert_trivial=True)


@gluon.jit
def load_queries(lds, q, num_heads, G: gl.constexpr):
    """q of a token's heads: for each tile and group the operand of its columns but the last, which go to LDS. q:
    HeadRows, of the first head"""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 4], [WAVES, 1], [1, 0])
    line = here(gl.arange(0, 2 * G.HEADS, layout=gl.SliceLayout(1, L)))[:, None]
    head = line // (2 * ROWS) * ROWS + line % ROWS
    column = V_DIM + line // ROWS % 2 * (REST // 2) + gl.arange(0, REST // 2, layout=gl.SliceLayout(0, L))[None, :]
    at = q.at + head.to(gl.int64) * q.head + column
    lds.last.store(gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0))
    query = ()
    for i in gl.static_range(num_tiles(G)):
        for group in gl.static_range(num_groups(G)):
            tile = _query_group(q, i, group, num_heads, G)
            query += (_operand(tile, lane_elements(G), G),)  # type: ignore[assignment]
    return query


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
def pages_of(rows, keys, G: gl.constexpr):
    """The pages of keys."""
    return gl.load(rows.line + keys // G.PAGE_SIZE)


@gluon.jit
def rows_of(rows, pages, keys, G: gl.constexpr):
    """Pointers to the first words of keys' rows."""
    return rows.at + (pages.to(gl.int64) * rows.page + (keys % G.PAGE_SIZE).to(gl.int64) * rows.token)


@gluon.jit
def _load_half(at, FIRST: gl.constexpr, WORDS: gl.constexpr, RUN: gl.constexpr):
    """WORDS words of a wave from FIRST on: waves take RUN words in turn. at: each key's first word"""
    L: gl.constexpr = key_words(WORDS)
    at = gl.convert_layout(at, gl.SliceLayout(2, L), assert_trivial=True)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at += wave % 2 * RUN
    return gl.load(at[:, :, None] + (FIRST + word // RUN * 2 * RUN + word % RUN)[None, None, :])


@gluon.jit
def _key_pages(rows, block, G: gl.constexpr):
    """The pages of the keys that waves score, or their slots in a list."""
    if G.LISTED:
        L: gl.constexpr = gl.SliceLayout(2, key_words(HALF // in_word(G.CODING)))
        slots = of_block(rows.slots, rows, block).reshape([2, HALF_KEYS]).load(gl.SliceLayout(1, listed_keys()))
        slots = gl.reshape(slots[:, None, :].broadcast_to([2, 2, HALF_KEYS]), [WAVES, HALF_KEYS])
        pages = gl.convert_layout(slots, L, assert_trivial=True)
    else:
        pages = pages_of(rows, _read_keys(rows, block, G), G)
    return pages


@gluon.jit
def _value_pages(rows, block, G: gl.constexpr):
    """The pages of groups of V, or their slots in a list."""
    if G.LISTED:
        L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, value_words(G)))
        slots = of_block(rows.slots, rows, block).load(gl.SliceLayout(0, L))
        pages = slots[None, :].broadcast_to([WAVES, KEYS])
    else:
        pages = pages_of(rows, _read_groups(rows, block, G), G)
    return pages


@gluon.jit
def _load_keys(rows, pages, block, G: gl.constexpr):
    at = rows_of_slots(rows, pages) if G.LISTED else rows_of(rows, pages, _read_keys(rows, block, G), G)
    WORDS: gl.constexpr = HALF // in_word(G.CODING) // num_groups(G)
    # In records scales lie before the last columns, which are no codes.
    LAST: gl.constexpr = V_DIM // in_word(G.CODING) + (WAVES if has_records(G) else 0)
    low = ()
    for i in gl.static_range(num_groups(G)):
        low += (_load_half(at, i * WORDS, WORDS, _run(G) // in_word(G.CODING)),)  # type: ignore[assignment]
    return HalfKeys(low, _load_half(at, LAST, REST // 4, REST // 4))


@gluon.jit
def _scale_slots(rows, block, G: gl.constexpr):
    """The slots of the keys whose scales lanes load, ([KEYS],); () if rows are no records."""
    slots = ()
    if has_records(G):
        slots += (of_block(rows.slots, rows, block).load(gl.SliceLayout(1, scale_words())),)  # type: ignore[assignment]
    return slots


@gluon.jit
def _place_of_group(group):
    """The place of a group's scales in LDS, where those of both halves' first groups come first; and the reverse."""
    return group % 2 * 2 + group // 2


@gluon.jit
def _load_scales(rows, slots, G: gl.constexpr):
    """The scales of a block, ([KEYS, WAVES],); () if rows are no records."""
    scales = ()
    if has_records(G):
        word = V_DIM // 4 + _place_of_group(gl.arange(0, WAVES, layout=gl.SliceLayout(0, scale_words())))
        words = gl.load(rows_of_slots(rows, slots[0])[:, None] + word[None, :])
        scales += (words.to(gl.float32, bitcast=True),)  # type: ignore[assignment]
    return scales


@gluon.jit
def _store_scales(lds, scales, block, G: gl.constexpr):
    if has_records(G):
        lds.scales.index(block % 2).reshape([WAVES, KEYS]).permute((1, 0)).store(scales[0])


@gluon.jit
def _key_scales(lds, block, G: gl.constexpr):
    """The scales by which a wave scores the keys of a block, [WAVES, KEYS / 2] for each group; none without records."""
    found = ()
    if has_records(G):
        ONE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        groups = lds.scales.reinterpret(gl.float32, [4, 2 * KEYS], ONE)
        for i in gl.static_range(2):
            of_group = groups.index(block % 2 * 2 + i).reshape([2, 2, HALF_KEYS])
            scale = gl.reshape(of_group.permute((1, 0, 2)).load(key_scales()), [WAVES, HALF_KEYS])
            scale = gl.convert_layout(scale, gl.SliceLayout(2, half_scores(G)), assert_trivial=True)
            found += (scale,)  # type: ignore[assignment]
    return found


@gluon.jit
def _numbers(words, DTYPE: gl.constexpr, G: gl.constexpr):
    """The numbers of words of V's columns in DTYPE, without scales; those of a word are further dims of two."""
    if has_records(G):
        numbers = numbers_of(elements_of(words, gl.uint8), DTYPE, G.CODING, G.UNITS.CONVERTS)
    else:
        numbers = elements_of(words, DTYPE)
    return numbers


@gluon.jit
def _load_values(rows, pages, block, G: gl.constexpr):
    """A quarter of V's columns of a block's keys. Keys of a group after the last one lie in its page too."""
    V: gl.constexpr = value_words(G)
    at = rows_of_slots(rows, pages) if G.LISTED else rows_of(rows, pages, _read_groups(rows, block, G), G)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, V))))[:, None]
    at += wave * (QUARTER // in_word(G.CODING))
    key = gl.arange(0, group_keys(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, V))))
    word = gl.arange(0, QUARTER // in_word(G.CODING), layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, V))))
    at = at[:, :, None] + (key.to(gl.int64) * rows.token)[None, None, :]
    return gl.load(at[:, :, :, None] + word[None, None, None, :])


@gluon.jit
def _values(words, DTYPE: gl.constexpr, G: gl.constexpr):
    """V of a block, an operand [WAVES, V_DIM / WAVES, keys]."""
    values = gl.reshape(_numbers(words, DTYPE, G), [WAVES, KEYS, QUARTER])
    values = gl.permute(gl.reshape(values, [WAVES, KEYS, QUARTER // 8, 8]), (0, 3, 2, 1))
    operand: gl.constexpr = gl.DotOperandLayout(0, score_layout(G), 8)
    return gl.convert_layout(gl.reshape(values, [WAVES, QUARTER, KEYS]), operand, assert_trivial=True)


@gluon.jit
def _last_queries(lds, FIRST: gl.constexpr, G: gl.constexpr):
    """The operands of q's last columns of a pair of tiles, read in this order."""
    found = ()
    for i in gl.static_range(_PAIR):
        found += (_last_columns(lds, FIRST + i, G),)  # type: ignore[assignment]
        sched_barrier()
    return found


@gluon.jit
def _half_scores(last_queries, query, keys, scales, FIRST: gl.constexpr, DTYPE: gl.constexpr, G: gl.constexpr):
    """A wave's halves of a block's scores, of a pair of tiles. scales: of _key_scales"""
    P: gl.constexpr = half_scores(G)
    last = gl.reshape(elements_of(keys.last, DTYPE), [WAVES, HALF_KEYS, REST // 2])
    last = gl.convert_layout(last, gl.DotOperandLayout(0, P, LAST_LANE), assert_trivial=True)
    GROUPS: gl.constexpr = num_groups(G)
    low = ()
    for i in gl.static_range(GROUPS):
        of_group = gl.reshape(_numbers(keys.low[i], DTYPE, G), [WAVES, HALF_KEYS, HALF // GROUPS])
        of_group = gl.convert_layout(of_group, gl.DotOperandLayout(0, P, lane_elements(G)), assert_trivial=True)
        low += (of_group,)  # type: ignore[assignment]
    scores = ()
    for i in gl.static_range(_PAIR):
        part = gl.full([WAVES, HALF_KEYS, ROWS], 0.0, gl.float32, layout=P)
        part = gl.amd.cdna3.mfma(last, last_queries[i], part)
        if has_records(G):
            of_groups = ()
            for j in gl.static_range(GROUPS):
                of_group = gl.full([WAVES, HALF_KEYS, ROWS], 0.0, gl.float32, layout=P)
                of_groups += (gl.amd.cdna3.mfma(low[j], query[(FIRST + i) * GROUPS + j], of_group),)  # type: ignore[assignment]
            for j in gl.static_range(GROUPS):
                part = gl.fma(of_groups[j], scales[j][:, :, None].broadcast_to(part.shape), part)
        else:
            part = gl.amd.cdna3.mfma(low[0], query[FIRST + i], part)  # type: ignore[misc]
        scores += (part,)  # type: ignore[assignment]
    return scores


@gluon.jit
def _store_scores(lds, scores, FIRST: gl.constexpr):
    for i in gl.static_range(_PAIR):
        # The others are few while V waits.
        lds.scores.slice((FIRST + i) * WAVES, WAVES).store(in_accumulators(scores[i]))


@gluon.jit
def _sum_of_scores(halves, rows, block, kv_len, G: gl.constexpr, MASKED: gl.constexpr):
    """The scores of a block, [KEYS, HEADS], without qk_scale."""
    X: gl.constexpr = softmax_layout(G)
    halves = gl.reshape(halves, [num_tiles(G), 2, 2, HALF_KEYS, ROWS])
    scores = gl.reshape(gl.permute(gl.sum(halves, 2), (1, 2, 0, 3)), [KEYS, G.HEADS])
    scores = gl.convert_layout(scores, X, assert_trivial=True)
    if G.LISTED:
        scores += of_block(rows.bias, rows, block).load(gl.SliceLayout(1, X)).to(gl.float32)[:, None]
    if MASKED:
        key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, X))
        scores = gl.where((key < kv_len)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _value_scale(lds, block, GROUP: gl.constexpr, G: gl.constexpr):
    """The scale of a block's values of a group, [KEYS]."""
    X: gl.constexpr = gl.SliceLayout(1, softmax_layout(G))
    return lds.scales.index(block % 2).slice(_place_of_group(GROUP) * KEYS, KEYS).load(X)


@gluon.jit
def _weigh(lds, state, scores, block, qk_scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """The state with a block's keys in all but acc; its weights and decays go to LDS."""
    T: gl.constexpr = total_layout(G)
    # Scales are read while maxima are exchanged; with more heads there are no registers for them yet.
    IS_EARLY: gl.constexpr = has_records(G) and num_tiles(G) == _PAIR
    scales = ()
    if IS_EARLY:
        for i in gl.static_range(WAVES):
            scales += (_value_scale(lds, block, i, G),)  # type: ignore[assignment]
        sched_barrier()
    maximum = gl.maximum(state.maximum, gl.max(scores, 0) * qk_scale)
    # All entries of a list so far may be no keys; the subtractions below must not be inf - inf.
    base = gl.where(maximum == float("-inf"), 0.0, maximum) if G.LISTED else maximum
    weights = gl.exp2(scores * qk_scale - base[None, :])
    decay = gl.exp2(state.maximum - base)
    if has_records(G):
        # All scales are read before the barrier that the first store has.
        scaled = ()
        for i in gl.static_range(WAVES):
            scale = scales[i] if IS_EARLY else _value_scale(lds, block, i, G)
            scaled += (rounded(weights * scale[:, None], DTYPE, G.UNITS.ROUNDS_PAIRS),)  # type: ignore[assignment]
        for i in gl.static_range(WAVES):
            lds.weights.slice(i, 1).store(gl.reshape(scaled[i], [1, KEYS, G.HEADS]))
    else:
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
def _next_weights(lds, FIRST: gl.constexpr, G: gl.constexpr):
    """Weights of a pair of tiles, read in this order: operands."""
    operand: gl.constexpr = gl.DotOperandLayout(1, score_layout(G), 8)
    L: gl.constexpr = gl.SliceLayout(0, weight_layout())
    found = ()
    for i in gl.static_range(_PAIR):
        sched_barrier()
        if has_records(G):
            weights = lds.weights.slice((FIRST + i) * ROWS, ROWS, dim=2).load(weight_layout())
        else:
            weights = lds.weights.slice((FIRST + i) * ROWS, ROWS, dim=1).load(L)
            weights = weights[None, :, :].broadcast_to([WAVES, KEYS, ROWS])
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
    # The numbers that are read last are waited for first, and so once for all.
    weights = _next_weights(lds, 0, G)
    decays = _of_heads(lds, G)
    wait_for(decays[-1], 1)
    sums = ()
    for i in gl.static_range(num_tiles(G)):
        decay = decays[i].broadcast_to([WAVES, QUARTER, ROWS])
        (each,) = gl.map_elementwise(decayed, state.acc[i], decay, pack=QUARTER * ROWS // 64)
        sums += (each,)  # type: ignore[assignment]
    v = _values(values, DTYPE, G)
    acc = ()
    for i in gl.static_range(num_tiles(G)):
        if i % _PAIR == 0 and i > 0:  # the first ones are there
            weights = _next_weights(lds, i, G)
            wait_for(weights[-1], 16)
        acc += (gl.amd.cdna3.mfma(v, weights[i % _PAIR], sums[i]),)  # type: ignore[assignment]
    return Softmax(acc, state.maximum, state.total)


@gluon.jit
def attend_heads(lds, query, rows, first, end, kv_len, qk_scale, DTYPE: gl.constexpr, G: gl.constexpr):
    """Returns the Softmax of key blocks [first, end): acc, a tuple of [WAVES, V_DIM / WAVES, ROWS] as in _add_values,
    one for each tile of heads; maximum [HEADS]; total [8, HEADS].

    The scores of a block's first two tiles are multiplied while the softmax of the block before it is computed, those
    of other tiles after it. K and V of a later block are in flight meanwhile.
    """
    keys = _load_keys(rows, _key_pages(rows, first, G), first, G)
    next_pages = here(_key_pages(rows, first + 1, G))
    sched_barrier()
    values = _load_values(rows, _value_pages(rows, first, G), first, G)
    k_pages = here(_key_pages(rows, first + 2, G))
    sched_barrier()
    for i in gl.static_range(2):
        _store_scales(lds, _load_scales(rows, _scale_slots(rows, first + i, G), G), first + i, G)
    scales = _load_scales(rows, _scale_slots(rows, first + 2, G), G)
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
    key_factors = _key_scales(lds, first, G)
    for i in gl.static_range(0, num_tiles(G), _PAIR):
        _store_scores(lds, _half_scores(_last_queries(lds, i, G), query, keys, key_factors, i, DTYPE, G), i)
    sched_barrier()
    keys = _load_keys(rows, next_pages, first + 1, G)
    # In the loop V is loaded after K: what is in flight when it begins would be waited for in each round.
    wait_for(keys.last, LAST_LANE)
    # The last block may be seen in part, if it is not listed.
    middle = end if G.LISTED else gl.minimum(end, kv_len // KEYS)
    for block in range(first, middle):
        pages = k_pages
        k_pages = _key_pages(rows, block + 3, G)
        if not G.LISTED:
            v_pages = _value_pages(rows, block + 1, G)
        scale_slots = _scale_slots(rows, block + 3, G)
        halves = lds.scores.load(halves_layout(G))
        key_factors = _key_scales(lds, block + 1, G)
        last_queries = _last_queries(lds, 0, G)
        wait_for(last_queries[-1], LAST_LANE)
        scores = _sum_of_scores(halves, rows, block, kv_len, G, False)
        wait_for(keys.last, LAST_LANE)
        # The compiler deals out these products to the work of the softmax. There are no registers for more tiles.
        next_scores = _half_scores(last_queries, query, keys, key_factors, 0, DTYPE, G)
        state = _weigh(lds, state, scores, block, qk_scale, DTYPE, G)
        # Those of this block, in whose place they come, were read before a barrier.
        _store_scales(lds, scales, block, G)
        if num_tiles(G) > _PAIR:
            # Read before the barrier, which is that of weights and of scores.
            last_queries = _last_queries(lds, _PAIR, G)
        _store_scores(lds, next_scores, 0)
        sched_barrier()
        if num_tiles(G) > _PAIR:
            _store_scores(lds, _half_scores(last_queries, query, keys, key_factors, _PAIR, DTYPE, G), _PAIR)
            sched_barrier()
        scales = _load_scales(rows, scale_slots, G)
        keys = _load_keys(rows, pages, block + 2, G)
        if not G.LISTED:
            # V came before these numbers, so that one wait is for both.
            wait_for(v_pages, 16 // group_keys(G))
        state = _add_values(lds, state, values, DTYPE, G)
        sched_barrier()
        if G.LISTED:
            # Earlier there are no registers for all these slots.
            v_pages = _value_pages(rows, block + 1, G)
        values = _load_values(rows, v_pages, block + 1, G)
    if middle < end:
        scores = _sum_of_scores(lds.scores.load(halves_layout(G)), rows, middle, kv_len, G, True)
        state = _weigh(lds, state, scores, middle, qk_scale, DTYPE, G)
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
def store_sums(maximum, total, to, heads, part, is_whole, G: gl.constexpr):
    """Stores LSE of a row's heads, or maxima and sums of the program's part of a row that others share. Returns the
    numbers by which a whole row's accumulators are divided. heads: HeadsOfToken"""
    token, head, is_head = heads
    divisor = total
    if is_whole:
        if to.sinks is not None:
            sink = gl.load(to.sinks + head, mask=is_head, other=float("-inf"))
            maximum, total, decay = add_sink(maximum, total, sink)
            divisor = total / decay
        if to.lse is not None:
            lse = to.lse.at + token * to.lse.token + head.to(gl.int64) * to.lse.head
            gl.store(lse, (maximum + gl.log2(total)) * LN_2, mask=is_head)
    else:
        sums = to.sums + (part * G.rows.Q_ROWS + head) * 2
        gl.store(sums, maximum, mask=is_head)
        gl.store(sums + 1, total, mask=is_head)
    return divisor


@gluon.jit
def store_tile(at, head_stride, values, FIRST: gl.constexpr, num_heads):
    """Stores lines of a tile of heads, the first of which is FIRST. at: the line of the program's first head"""
    L: gl.constexpr = values.type.layout
    # Computed here: the compiler would keep offsets that do not change from row to row in registers that there are not.
    head = here(FIRST + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, L)))[:, None]
    column = gl.arange(0, V_DIM, layout=gl.SliceLayout(0, L))[None, :]
    values = values.to(at.dtype.element_ty)
    gl.store(at + head * head_stride + column, values, mask=(head < num_heads) & (column >= 0))


@gluon.jit
def store_heads(lds, state, to, token, first_head, num_heads, part, is_whole, G: gl.constexpr):
    """Stores the results of a row, or the program's part of a row that others share, for the heads of a program."""
    H: gl.constexpr = gl.SliceLayout(0, softmax_layout(G))
    total = gl.convert_layout(gl.sum(state.total, 0), H)
    head = here(gl.arange(0, G.HEADS, layout=H))
    heads = HeadsOfToken(token, first_head + head, head < num_heads)
    lds.heads.store(1.0 / store_sums(state.maximum, total, to, heads, part, is_whole, G))
    out_head = tl.cast(to.out.head, gl.int64)
    out = to.out.at + token * to.out.token + first_head * out_head
    parts = to.parts + (part * G.rows.Q_ROWS + first_head) * V_DIM
    inverse = _of_heads(lds, G)
    for i in gl.static_range(num_tiles(G)):
        if is_whole:
            store_tile(out, out_head, _columns_of_heads(state.acc[i] * inverse[i]), i * ROWS, num_heads)
        else:
            store_tile(parts, V_DIM, _columns_of_heads(state.acc[i]), i * ROWS, num_heads)
