"""Key blocks of latent decode for CDNA over codes, which products take as they are, for up to 64 query heads.

    S = K q^T       a wave has 32 keys of a block and 32 query heads, or 16: all columns, so that a score is whole
    O^T = V^T P^T   a wave has all keys and a quarter of V's columns, for all heads

A code has four bits of a number, so that q and weights are sums of two codes (codes.py), each of which is multiplied.
Codes of a block's weights are relative to its own largest one by a power of two, since they have no smaller numbers
than 2^-17 of it: many small weights after a large one still add up. CDNA 4 multiplies the power into the product. On
CDNA 3 the accumulator is kept relative to the block's largest weight.

Waves exchange maxima, and codes of weights, by LDS. K goes straight from memory into operands. So does V on CDNA 3,
where a lane turns eight neighbouring codes of each of eight keys. On CDNA 4 a wave's columns of V go into LDS past the
registers, and LDS gives a lane the codes of a column.
"""

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import async_copy
from triton.experimental.gluon.language.amd.hint import sched_barrier

from rocm_attn.kernels.attention.bundles import HeadsOfToken
from rocm_attn.kernels.attention.coded import exponent_to_move
from rocm_attn.kernels.cdna.codes import (
    code_of,
    elements_of,
    largest_exponent,
    moved_to_codes,
    parts_of,
    scale_of_codes,
)
from rocm_attn.kernels.cdna.extend_steps import here, larger_or_nan
from rocm_attn.kernels.cdna.latent_blocks import REST, V_DIM, WAVES, decayed
from rocm_attn.kernels.cdna.latent_code_layouts import (
    group_keys,
    head_tile,
    key_words,
    lane_totals,
    last_layout,
    num_keys,
    query_words,
    reads_weights_in_order,
    rows_in_lds,
    score_layout,
    value_bytes,
    value_depth,
    value_layout,
    value_tile,
    value_words,
    values_in_lds,
    weights_in_lds,
)
from rocm_attn.kernels.cdna.latent_heads import in_accumulators, pages_of, rows_of, store_sums, store_tile, wait_for

# A block whose weights are this far below others (base 2) is weighed relative to those: its weights do not matter.
_MOST_BELOW = gl.constexpr(32.0)
_PARTS = gl.constexpr(2)


class CodeLds(NamedTuple):
    """LDS of a program: each part of the weights [KEYS, HEADS], a number of each head, the power of two of a block's
    weights of each head; and V of BLOCKS blocks as words, None on CDNA 3."""

    weights: Any
    heads: Any
    powers: Any
    columns: Any


class CodeKeys(NamedTuple):
    """Words of K of a block: the columns of V, and the last ones."""

    low: Any
    last: Any


class CodeState(NamedTuple):
    """A softmax whose weights are 2^(score - base): acc, a tuple of [V_DIM, heads] for each tile of heads; the largest
    score so far and base [HEADS]; each lane's sums of weights [lanes, HEADS]."""

    acc: Any
    largest: Any
    base: Any
    total: Any


@gluon.jit
def allocate_codes(G: gl.constexpr):
    """LDS of a program."""
    weights = ()
    for _ in gl.static_range(_PARTS):
        weights += (gl.allocate_shared_memory(gl.uint8, [num_keys(G), G.HEADS], weights_in_lds(G)),)  # type: ignore[assignment]
    one: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    powers, values = None, None
    if G.V_IN_LDS:
        powers = gl.allocate_shared_memory(gl.int32, [G.HEADS], one)
        shape: gl.constexpr = [G.BLOCKS, num_keys(G) // 64, 8 // group_keys(G), group_keys(G), 8, V_DIM // 4]
        values = gl.allocate_shared_memory(gl.int32, shape, values_in_lds(G))
    return CodeLds(weights, gl.allocate_shared_memory(gl.float32, [G.HEADS], one), powers, values)


@gluon.jit
def _query_columns(q, FIRST: gl.constexpr, COLUMNS: gl.constexpr, num_heads, G: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 16], [4, 16], [WAVES, 1], [1, 0])
    head = here(gl.arange(0, G.HEADS, layout=gl.SliceLayout(1, L)))[:, None]
    column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    at = q.at + head.to(gl.int64) * q.head + column
    return gl.load(at, mask=(head < num_heads) & (column >= 0), other=0.0).to(gl.float32)


@gluon.jit
def _query_words(query, exponent, G: gl.constexpr):
    """q [HEADS, columns] moved to the largest codes, as words of codes whose sum it is.

    They pass LDS: numbers from there may lie in any register, results of vector instructions would move in each round.
    """
    WORDS: gl.constexpr = query.shape[1] // 4
    codes = gl.allocate_shared_memory(gl.uint8, [G.HEADS, 4 * WORDS], rows_in_lds(4 * WORDS, 16, G))
    words = codes.reinterpret(gl.int32, [G.HEADS, WORDS], rows_in_lds(WORDS, 4, G))
    parts = parts_of(moved_to_codes(query, exponent[:, None], G.UNITS.VERSION), _PARTS, G.UNITS.VERSION)
    found = ()
    for i in gl.static_range(_PARTS):
        codes.store(parts[i].to(gl.uint8, bitcast=True))
        gl.barrier()
        found += (words.load(query_words(WORDS, G)),)  # type: ignore[assignment]
        gl.barrier()
    return found


@gluon.jit
def _kept(query):
    """q's words in accumulation registers, from which products read them: the compiler would copy them first."""
    (first, second), (first_last, second_last) = query
    low = in_accumulators(first), in_accumulators(second)
    return low, (in_accumulators(first_last), in_accumulators(second_last))


@gluon.jit
def _operand(words, INDEX: gl.constexpr, L: gl.constexpr, G: gl.constexpr):
    """Words of rows of K or q as an operand of a product."""
    codes = gl.reshape(elements_of(words, code_of(G.UNITS.VERSION)), [words.shape[0], 4 * words.shape[1]])
    if INDEX == 1:
        codes = gl.permute(codes, (1, 0))
    return gl.convert_layout(codes, gl.DotOperandLayout(INDEX, L, 16), assert_trivial=True)


@gluon.jit
def load_coded_queries(lds, q, num_heads, G: gl.constexpr):
    """q of a token's heads: operands of its columns but the last, and of the last ones, each a tuple of codes whose sum
    q is; and a factor of products of each head. q: HeadRows, of the first head

    A head's largest element is moved to the largest codes by a power of two, and elements below 2^-9 of it lose bits
    below 2^-16 of it.
    """
    low = _query_columns(q, 0, V_DIM, num_heads, G)
    last = _query_columns(q, V_DIM, REST, num_heads, G)
    S: gl.constexpr = gl.SliceLayout(1, low.type.layout)
    of_last = gl.convert_layout(gl.max(gl.abs(last), 1), S)
    exponent = exponent_to_move(gl.maximum(gl.max(gl.abs(low), 1), of_last))
    of_last = gl.convert_layout(exponent, gl.SliceLayout(1, last.type.layout))
    factor = gl.convert_layout(exponent, gl.SliceLayout(0, score_layout(G)))
    queries = (_query_words(low, exponent, G), _query_words(last, of_last, G))
    return queries, scale_of_codes(factor, G.UNITS.VERSION)


@gluon.jit
def _key_of_row(row, G: gl.constexpr):
    """The key of a row of scores.

    The order of keys in V's products is that of rows' bits 0, 1, 3, 4, 2, 5 and 6, or with 16 heads 0, 1, 6, 4, 2, 3
    and 5, so that a lane's weights lie side by side. On CDNA 4 that order begins with bits 3 to 5 of a key: LDS gives a
    lane the codes of eight keys, and a load has keys that are 8 apart.
    """
    if head_tile(G) == 32:
        at = (row % 4) + (row // 8 % 4) * 4 + (row // 4 % 2) * 16 + row // 32 * 32
    else:
        at = (row % 4) + (row // 64 % 2) * 4 + (row // 16 % 2) * 8 + (row // 4 % 4) * 16 + (row // 32 % 2) * 64
    if G.V_IN_LDS:
        at = at // 8 % 8 + at % 8 * 8 + at // 64 * 64
    return at


@gluon.jit
def _by_order(x, G: gl.constexpr):
    """Rows of scores [KEYS, HEADS] in the order of keys of V's products."""
    KEYS: gl.constexpr = num_keys(G)
    if head_tile(G) == 32:
        x = gl.reshape(x, [KEYS // 32, 4, 2, 4, G.HEADS])
        x = gl.permute(x, (0, 2, 1, 3, 4))
    else:
        x = gl.reshape(x, [2, 2, 2, 4, 4, G.HEADS])
        x = gl.permute(x, (1, 3, 2, 0, 4, 5))
    return gl.reshape(x, [KEYS, G.HEADS])


@gluon.jit
def _read_keys(rows, block, G: gl.constexpr):
    """The keys of a block in the order of scores; the last key that is seen stands for later ones."""
    L: gl.constexpr = gl.SliceLayout(1, key_words(V_DIM // 4, G))
    key = _key_of_row(gl.arange(0, num_keys(G), layout=L), G)
    return gl.minimum(block * num_keys(G) + key, rows.last_key).to(gl.uint32)


@gluon.jit
def _read_groups(rows, block, G: gl.constexpr):
    """The first key of each group of V, [KEYS / 64, 8 / GROUP, 8]; the last group seen stands for later ones."""
    GROUP: gl.constexpr = group_keys(G)
    L: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, value_words(G)))
    half = gl.arange(0, num_keys(G) // 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    inner = gl.arange(0, 8 // GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    outer = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    key = block * num_keys(G) + half * 64 + outer * 8 + inner
    return gl.minimum(key, rows.last_key // GROUP * GROUP).to(gl.uint32)


@gluon.jit
def _load_keys(rows, pages, block, G: gl.constexpr):
    at = rows_of(rows, pages, _read_keys(rows, block, G), G)
    LOW: gl.constexpr = key_words(V_DIM // 4, G)
    LAST: gl.constexpr = key_words(REST // 4, G)
    word = gl.arange(0, V_DIM // 4, layout=gl.SliceLayout(0, LOW))
    low = gl.load(at[:, None] + word[None, :])
    at = gl.convert_layout(at, gl.SliceLayout(1, LAST), assert_trivial=True)
    word = V_DIM // 4 + gl.arange(0, REST // 4, layout=gl.SliceLayout(0, LAST))
    return CodeKeys(low, gl.load(at[:, None] + word[None, :]))


@gluon.jit
def _load_values(lds, rows, pages, block, slot, G: gl.constexpr):
    """Loads a quarter of V's columns of a block's keys; on CDNA 4 into a slot of LDS. Keys of a group after its last
    one lie in its page too."""
    V: gl.constexpr = value_words(G)
    at = rows_of(rows, pages, _read_groups(rows, block, G), G)
    key = gl.arange(
        0, group_keys(G), layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, V))))
    )
    word = gl.arange(
        0, V_DIM // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, V))))
    )
    at = at[:, :, None, :, None] + word[None, None, None, None, :]
    at += (key.to(gl.int64) * rows.token)[None, None, :, None, None]
    if G.V_IN_LDS:
        async_copy.global_load_to_shared(lds.columns.index(slot), at)
        async_copy.commit_group()
        values = ()
    else:
        values = gl.load(at)
    return values


@gluon.jit
def _is_seen(block, kv_len, G: gl.constexpr):
    """True for each key of V's words that is seen, [KEYS / 64, 8 / GROUP, GROUP, 8]."""
    GROUP: gl.constexpr = group_keys(G)
    L: gl.constexpr = gl.SliceLayout(4, value_words(G))
    half = gl.arange(0, num_keys(G) // 64, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    inner = gl.arange(0, 8 // GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    key = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    outer = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    first = block * num_keys(G) + half[:, None, None, None] * 64 + outer[None, None, None, :] * 8
    return first + inner[None, :, None, None] * GROUP + key[None, None, :, None] < kv_len


@gluon.jit
def _mask_values(lds, values, block, kv_len, slot, G: gl.constexpr):
    """V with 0 for keys that are not seen, which have weights of zero: 0 times NaN is NaN."""
    if group_keys(G) > 1:
        # Words, since a pair of scalar registers for each of a lane's keys would be too many.
        seen = here(gl.where(_is_seen(block, kv_len, G), -1, 0))[:, :, :, :, None]
        if G.V_IN_LDS:
            columns = lds.columns.index(slot)
            columns.store(columns.load(value_words(G)) & seen)
        else:
            values = values & seen
    return values


@gluon.jit
def _product(a, b, powers, acc):
    """acc and the product of codes; if it is as deep as CDNA 4's largest, b is scaled by powers of two."""
    DEPTH: gl.constexpr = acc.type.layout.instr_shape[2]
    if DEPTH < 64:
        acc = gl.amd.cdna3.mfma(a, b, acc)
    else:
        acc = gl.amd.cdna4.mfma_scaled(a, None, "e4m3", b, powers, "e4m3", acc)
    return acc


@gluon.jit
def _scores(query, keys, G: gl.constexpr):
    """The scores of a block, [KEYS, HEADS], without qk_scale."""
    P: gl.constexpr = score_layout(G)
    LAST: gl.constexpr = last_layout(G)
    scores = gl.full([num_keys(G), G.HEADS], 0.0, gl.float32, layout=LAST)
    last, low = _operand(keys.last, 0, LAST, G), _operand(keys.low, 0, P, G)
    for i in gl.static_range(_PARTS):
        scores = _product(last, _operand(query[1][i], 1, LAST, G), None, scores)
    scores = gl.convert_layout(scores, P, assert_trivial=True)
    for i in gl.static_range(_PARTS):
        scores = _product(low, _operand(query[0][i], 1, P, G), None, scores)
    return scores


@gluon.jit
def _in_lanes(weights, G: gl.constexpr):
    """Sums of each lane's own weights, [lanes, HEADS]."""
    if head_tile(G) == 32:
        x = gl.sum(gl.reshape(weights, [num_keys(G) // 32, 4, 8, G.HEADS]), 1)
    else:
        x = gl.sum(gl.reshape(weights, [2, 4, 16, G.HEADS]), 0)
    x = gl.reshape(x, [x.shape[0] * x.shape[1], G.HEADS])
    return gl.convert_layout(x, lane_totals(G), assert_trivial=True)


@gluon.jit
def _weigh(lds, state, scores, qk_scale, G: gl.constexpr):
    """The state with a block's keys in all but acc. Codes of its weights, their power of two, and the decays of acc go
    to LDS."""
    MOVED: gl.constexpr = largest_exponent(G.UNITS.VERSION)
    if G.UNITS.MAXIMA_OF_3:
        top = gl.reduce(scores, 0, larger_or_nan) * qk_scale
        largest = larger_or_nan(state.largest, top)
    else:
        top = gl.max(scores, 0) * qk_scale
        largest = gl.maximum(state.largest, top)
    # A whole number, so that powers of two are exact.
    below = gl.floor(gl.minimum(largest - top, _MOST_BELOW))
    weights = gl.exp2(scores * qk_scale[None, :] - (largest - below - MOVED)[None, :])
    if G.V_IN_LDS:
        base = largest
        power = (127 - MOVED) - below.to(gl.int32)
        lds.powers.store(power)
        part = _in_lanes(weights, G)
        factor = (power << 23).to(gl.float32, bitcast=True)
    else:
        base = largest - below - MOVED
        part = _in_lanes(weights, G)
    decay = gl.exp2(state.base - base)
    lds.heads.store(decay)
    codes = parts_of(_by_order(weights, G), _PARTS, G.UNITS.VERSION)
    for i in gl.static_range(_PARTS):
        lds.weights[i].store(codes[i].to(gl.uint8, bitcast=True))
    T: gl.constexpr = gl.SliceLayout(0, lane_totals(G))
    total = state.total * gl.convert_layout(decay, T, assert_trivial=True)[None, :]
    if G.V_IN_LDS:
        total += part * gl.convert_layout(factor, T, assert_trivial=True)[None, :]
    else:
        total += part
    return CodeState(state.acc, largest, base, total)


@gluon.jit
def _of_heads(numbers, G: gl.constexpr):
    """A number of each head from LDS, for each tile of accumulators: a tuple of [1, heads]."""
    A: gl.constexpr = gl.SliceLayout(0, value_layout(G))
    TILE: gl.constexpr = value_tile(G)
    found = ()
    for i in gl.static_range(G.HEADS // TILE):
        found += (numbers.slice(i * TILE, TILE).load(A)[None, :],)  # type: ignore[assignment]
    return found


@gluon.jit
def _values(lds, values, slot, G: gl.constexpr):
    """V of a block, an operand [V_DIM, KEYS]."""
    A: gl.constexpr = gl.DotOperandLayout(0, value_layout(G), value_depth(G))
    CODE: gl.constexpr = code_of(G.UNITS.VERSION)
    KEYS: gl.constexpr = num_keys(G)
    if G.V_IN_LDS:
        async_copy.wait_group(G.BLOCKS - 1)
        v = lds.columns.index(slot).reinterpret(CODE, [KEYS, V_DIM], value_bytes(G))
        v = async_copy.load_shared_relaxed(v.permute((1, 0)), A)
    else:
        wait_for(values, V_DIM * KEYS // (256 * WAVES))
        v = gl.reshape(
            elements_of(here(values), CODE), [KEYS // 64, 8 // group_keys(G), group_keys(G), 8, WAVES, 16, 8]
        )
        v = gl.permute(v, (6, 4, 5, 0, 3, 1, 2))
        v = gl.convert_layout(gl.reshape(v, [V_DIM, KEYS]), A, assert_trivial=True)
    return v


@gluon.jit
def _next_weights(lds, INDEX: gl.constexpr, G: gl.constexpr):
    """Both parts of the weights of a tile of heads, read in this order: operands."""
    TILE: gl.constexpr = value_tile(G)
    W: gl.constexpr = gl.DotOperandLayout(1, value_layout(G), value_depth(G))
    found = ()
    for i in gl.static_range(_PARTS):
        part = lds.weights[i].slice(INDEX * TILE, TILE, dim=1).load(W)
        found += (part.to(code_of(G.UNITS.VERSION), bitcast=True),)  # type: ignore[assignment]
        if reads_weights_in_order(G):
            sched_barrier()
    return found


@gluon.jit
def _add_values(lds, state, values, slot, G: gl.constexpr):
    """Adds weighted values of a block to the accumulators."""
    TILE: gl.constexpr = value_tile(G)
    TILES: gl.constexpr = G.HEADS // TILE
    EARLY: gl.constexpr = reads_weights_in_order(G)
    PACK: gl.constexpr = V_DIM * TILE // (64 * WAVES)
    if G.V_IN_LDS:
        # The barrier before it is that of weights too.
        v = _values(lds, values, slot, G)
    # The numbers that are read last are waited for first, and so once for all.
    if EARLY:
        weights = _next_weights(lds, 0, G)
    powers = (None,) * TILES
    if G.V_IN_LDS:
        powers = _of_powers(lds, G)
    decays = _of_heads(lds.heads, G)
    if EARLY:
        wait_for(decays[-1], 1)
    if not G.V_IN_LDS:
        v = _values(lds, values, slot, G)
    acc = ()
    for i in gl.static_range(TILES):
        each = state.acc[i]
        decay = decays[i].broadcast_to(each.shape)
        if G.V_IN_LDS:
            (each,) = gl.map_elementwise(decayed, each, decay, pack=PACK)
        else:
            each = each * decay
        if i > 0 or not EARLY:
            weights = _next_weights(lds, i, G)
        # The part that is read last is multiplied first, so that one wait is for both.
        for j in gl.static_range(_PARTS):
            each = _product(v, weights[_PARTS - 1 - j], powers[i], each)
        acc += (each,)  # type: ignore[assignment]
    return CodeState(acc, state.largest, state.base, state.total)


@gluon.jit
def _slot(NUMBER: gl.constexpr, block):
    """The number of a slot of V in LDS, for a block. The compiler computes addresses of the second one here: it would
    keep all of both in scalar registers, of which there are too few."""
    slot = NUMBER
    if NUMBER > 0:
        slot = gl.inline_asm_elementwise("s_mov_b32 $0, 1", "=s,s", [block], dtype=gl.int32, is_pure=False, pack=1)
    return slot


@gluon.jit
def _of_powers(lds, G: gl.constexpr):
    """The power of two of the weights of each tile of heads, as scales of products."""
    TILE: gl.constexpr = value_tile(G)
    KEYS: gl.constexpr = num_keys(G)
    W: gl.constexpr = gl.DotOperandLayout(1, value_layout(G), value_depth(G))
    L: gl.constexpr = gl.amd.cdna4.get_mfma_scale_layout(W, [TILE, KEYS // 32])
    found = ()
    for i in gl.static_range(G.HEADS // TILE):
        power = lds.powers.slice(i * TILE, TILE).load(gl.SliceLayout(1, L)).to(gl.uint8)
        found += (power[:, None].broadcast_to([TILE, KEYS // 32]),)  # type: ignore[assignment]
    return found


@gluon.jit
def attend_codes(lds, query, rows, first, end, kv_len, qk_scale, G: gl.constexpr):
    """Returns the CodeState of key blocks [first, end).

    The scores of a block are multiplied while the softmax of the block before it is computed. K and V of BLOCKS later
    blocks are in flight meanwhile.
    """
    P: gl.constexpr = gl.SliceLayout(0, score_layout(G))
    TILE: gl.constexpr = value_tile(G)
    BLOCKS: gl.constexpr = G.BLOCKS
    first_pages = pages_of(rows, _read_keys(rows, first, G), G)
    next_pages = ()
    for i in gl.static_range(BLOCKS):
        next_pages += (here(pages_of(rows, _read_keys(rows, first + 1 + i, G), G)),)  # type: ignore[assignment]
    sched_barrier()
    first_keys = _load_keys(rows, first_pages, first, G)
    sched_barrier()
    for i in gl.static_range(BLOCKS):
        v_pages = pages_of(rows, _read_groups(rows, first + i, G), G)
        values = _load_values(lds, rows, v_pages, first + i, i, G)
    k_pages = here(pages_of(rows, _read_keys(rows, first + 1 + BLOCKS, G), G))
    v_pages = here(pages_of(rows, _read_groups(rows, first + BLOCKS, G), G))
    sched_barrier()
    acc = ()
    for _ in gl.static_range(G.HEADS // TILE):
        acc += (gl.full([V_DIM, TILE], 0.0, gl.float32, layout=value_layout(G)),)  # type: ignore[assignment]
    nothing = gl.full([G.HEADS], float("-inf"), gl.float32, layout=P)
    total: gl.constexpr = lane_totals(G)
    state = CodeState(acc, nothing, nothing, gl.full(total.shape, 0.0, gl.float32, layout=total))
    scores = _scores(query, first_keys, G)
    sched_barrier()
    keys = ()
    for i in gl.static_range(BLOCKS):
        keys += (_load_keys(rows, next_pages[i], first + 1 + i, G),)  # type: ignore[assignment]
        sched_barrier()
    # In the loop V is loaded after K: what is in flight when it begins would be waited for in each round.
    wait_for(keys[0].last, 8)  # type: ignore[misc]
    # The last block may be seen in part: it is not in the whole rounds, unless all of its keys are seen.
    whole = (gl.minimum(end, kv_len // num_keys(G)) - first) // BLOCKS * BLOCKS
    middle = first + whole
    for block in range(first, middle, BLOCKS):
        query = _kept(query)
        next_keys = ()
        for i in gl.static_range(BLOCKS):
            pages = k_pages
            k_pages = pages_of(rows, _read_keys(rows, block + i + BLOCKS + 2, G), G)
            slot = _slot(i, block)
            of_values = v_pages
            v_pages = pages_of(rows, _read_groups(rows, block + i + 2 * BLOCKS - 1, G), G)
            # The compiler deals out these products to the work of the softmax.
            next_scores = _scores(query, keys[i], G)
            state = _weigh(lds, state, scores, qk_scale, G)
            sched_barrier()
            if BLOCKS > 1:
                wait_for(pages, 2)
            next_keys += (_load_keys(rows, pages, block + i + BLOCKS + 1, G),)  # type: ignore[assignment]
            if BLOCKS == 1:
                # V came before these numbers, so that one wait is for both.
                wait_for(v_pages, num_keys(G) * 8 // ((64 if G.V_IN_LDS else 32) * group_keys(G)))
                of_values = v_pages
            state = _add_values(lds, state, values, slot, G)
            sched_barrier()
            if BLOCKS > 1:
                wait_for(of_values, 2)
            values = _load_values(lds, rows, of_values, block + i + BLOCKS, slot, G)
            wait_for((keys + next_keys)[i + 1].last, 8)
            scores = next_scores
        keys = next_keys
    if G.V_IN_LDS:
        async_copy.wait_group(0)
    # Fewer than BLOCKS whole blocks, and one that is not: BLOCKS in all, at most.
    for i in gl.static_range(BLOCKS):
        if middle + i < end:
            if i > 0:
                scores = _scores(query, keys[i - 1], G)
            key = (middle + i) * num_keys(G) + _key_of_row(
                gl.arange(0, num_keys(G), layout=gl.SliceLayout(1, score_layout(G))), G
            )
            scores = gl.where((key < kv_len)[:, None], scores, float("-inf"))
            state = _weigh(lds, state, scores, qk_scale, G)
            values = _mask_values(lds, values, middle + i, kv_len, i, G)
            state = _add_values(lds, state, values, i, G)
    return state


@gluon.jit
def _columns_of_heads(acc, G: gl.constexpr):
    """A tile's accumulators as [heads, V_DIM]."""
    TILE: gl.constexpr = acc.shape[1]
    if G.V_IN_LDS:
        acc = gl.reshape(acc, [V_DIM // (4 * head_tile(G)), WAVES, head_tile(G), TILE])
        acc = gl.permute(acc, (3, 1, 0, 2))
    else:
        acc = gl.permute(gl.reshape(acc, [8, WAVES, 16, TILE]), (3, 1, 2, 0))
    return gl.reshape(acc, [TILE, V_DIM])


@gluon.jit
def store_coded_heads(lds, state, to, token, first_head, num_heads, part, is_whole, row, G: gl.constexpr):
    """Stores the results of a row, or the program's part of a row that others share, for the heads of a program.

    row: the scale of rows
    """
    H: gl.constexpr = gl.SliceLayout(0, score_layout(G))
    TILE: gl.constexpr = value_tile(G)
    total = gl.convert_layout(gl.sum(state.total, 0), H)
    head = here(gl.arange(0, G.HEADS, layout=H))
    heads = HeadsOfToken(token, first_head + head, head < num_heads)
    lds.heads.store(row / store_sums(state.base, total, to, heads, part, is_whole, G))
    out_head = tl.cast(to.out.head, gl.int64)
    out = to.out.at + token * to.out.token + first_head * out_head
    parts = to.parts + (part * G.rows.Q_ROWS + first_head) * V_DIM
    inverse = _of_heads(lds.heads, G)
    for i in gl.static_range(G.HEADS // TILE):
        if is_whole:
            store_tile(out, out_head, _columns_of_heads(state.acc[i] * inverse[i], G), i * TILE, num_heads)
        else:
            store_tile(parts, V_DIM, _columns_of_heads(state.acc[i] * row, G), i * TILE, num_heads)
