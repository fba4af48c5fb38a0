"""Key blocks of decode for CDNA, whose keys and values go straight from memory into the operands of products.

    S^T = K q^T     a lane loads eight neighbouring elements of a key, as the product wants them
    O^T = V^T P^T   a lane loads eight neighbouring elements of each of 4 keys, or 8 (CDNA 4, and codes). They are its
                    own operand of eight products, whose rows are every eighth element; and the weights that S^T left in
                    it belong to the same keys

So none of them moves between lanes, by LDS or otherwise. K and V are loaded as words of two elements or four codes:
single elements would be taken apart after the load. A lane has sixteen neighbouring codes of a key, eight of one of V.
A block is some chunks of CHUNK keys, each in one page. Its K is in flight while the block before it meets V, and its V
while its own scores are computed: a wave waits once for each.

Codes of K and V are operands as they are. A code has four bits of a number, so that q and weights are sums of codes
(parts_of), each of which is multiplied: two for the eight bits of bfloat16, three for the eleven of float16.
"""

import math
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.bundles import KeyRange, Softmax, TableLine
from rocm_attn.kernels.attention.coded import exponent_to_move
from rocm_attn.kernels.attention.softmax import capped, in_range
from rocm_attn.kernels.cache.codes import is_coded
from rocm_attn.kernels.cdna.codes import (
    elements_of,
    in_word,
    largest_exponent,
    moved_to_codes,
    parts_of,
    scale_of_codes,
)
from rocm_attn.kernels.cdna.extend_steps import larger_or_nan
from rocm_attn.kernels.cdna.key_layouts import (
    CHUNK,
    ROWS,
    CdnaGeometry,
    depth,
    key_elements,
    product_layout,
    value_words,
)
from rocm_attn.kernels.cdna.key_scales import (
    BIAS,
    KeyScales,
    has_scales,
    largest_scales,
    page_of_chunk,
    pages_of_lanes,
    place_of_scales,
    scales_of_chunk,
    seen_scales,
    single,
    wait_for_scales,
)

# Codes of a block's weights are relative to its own largest one, since they have no smaller numbers than 2^-17 of it:
# many small weights after a large one still add up. But a block that is this far below others (base 2), whose weights
# do not matter, is weighed relative to those, so that acc stays finite.
_MOST_BELOW = gl.constexpr(32.0)


class ChunkPlace(NamedTuple):
    """The place of neighbouring chunks: page number, and their first token there."""

    page: Any
    token: Any


class ChunkSide(NamedTuple):
    """K or V of a row: pointer, strides between pages and between tokens, offsets of words in a chunk."""

    at: Any
    page: Any
    token: Any
    offsets: Any


class Weighed(NamedTuple):
    """A Softmax whose weights are 2^(score - base), and the largest score so far: base, unless keys are coded."""

    acc: Any
    largest: Any
    base: Any
    total: Any


class LoadedBlock(NamedTuple):
    """Words of K and V of a block's chunks, and the places of the next block; or, if tokens have scales, KeyScales."""

    k: Any
    v: Any
    places: Any
    scales: Any


class ChunkBlocks(NamedTuple):
    """Key blocks of a sequence: its line of the table, which ones, the keys that a row sees, the last chunk of them.

    scales: ScaleSides of the row; None if tokens have none
    """

    line: TableLine
    blocks: KeyRange
    keys: KeyRange
    last_chunk: Any
    scales: Any


@gluon.jit
def word_offsets(token, head, L: gl.constexpr, G: gl.constexpr):
    """Offsets of a chunk's words from its first one, in words, int32 [CHUNK, words of a row]. token, head: strides"""
    IN_WORD: gl.constexpr = in_word(G.CODING)
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, L))[:, None] * (token // IN_WORD)
    word = gl.arange(0, G.COLUMNS // IN_WORD, layout=gl.SliceLayout(0, L))
    if G.rows.HEADS_PER_ROW > 1:
        HALF: gl.constexpr = G.HEAD_DIM // IN_WORD
        word = word // HALF * (head // IN_WORD) + word % HALF
    return row + word[None, :]


@constexpr_function
def _chunks_of_place(G: CdnaGeometry) -> gl.constexpr:
    """Chunks of a block that lie next to each other, in one page."""
    return math.gcd(G.PAGE_SIZE // CHUNK.value, G.CHUNKS)


@gluon.jit
def _places(read, pages, block, G: gl.constexpr):
    """The places of a block, a tuple of ChunkPlace. The last one that is read stands for later ones.

    With a window the first place that is seen stands for those before it, whose pages may have been given back.
    pages: pages_of_lanes of the block; None if they are loaded here
    """
    OF_PLACE: gl.constexpr = _chunks_of_place(G)
    PLACES: gl.constexpr = G.CHUNKS // OF_PLACE
    A_PAGE: gl.constexpr = G.PAGE_SIZE // (CHUNK * OF_PLACE)
    line = read.line.at.to(gl.pointer_type(gl.int8, const=True))
    found = ()
    for i in gl.static_range(PLACES):
        place = gl.minimum(block * PLACES + i, read.last_chunk // OF_PLACE)
        if G.rows.WINDOWED and i + 1 < PLACES:
            place = gl.maximum(place, read.keys.first // (CHUNK * OF_PLACE))
        if pages is None:
            # An offset in bytes without a sign is a part of the scalar load.
            page = gl.load((line + (place // A_PAGE * 4).to(gl.uint32)).to(read.line.at.dtype))
        else:
            page = page_of_chunk(pages, i * OF_PLACE, G)
        found += (ChunkPlace(page, place % A_PAGE * (CHUNK * OF_PLACE)),)  # type: ignore[assignment]
    return found


@gluon.jit
def _load(side, places, G: gl.constexpr):
    """Words of each chunk, none of which lies outside its page. Keys that no row sees are masked when they are used."""
    CHUNKS: gl.constexpr = G.CHUNKS
    OF_PLACE: gl.constexpr = _chunks_of_place(G)
    chunks = ()
    for i in gl.static_range(CHUNKS):
        if is_coded(G.CODING.ENCODING):
            # Addresses of all chunks at once would take more scalar registers than there are.
            sched_barrier()
        page, token = places[i // OF_PLACE]
        at = side.at + page.to(gl.int64) * side.page + (token + i % OF_PLACE * CHUNK) * side.token
        chunks += (gl.amd.cdna3.buffer_load(at.to(gl.pointer_type(gl.int32)), side.offsets),)  # type: ignore[assignment]
    return chunks


@constexpr_function
def _reads(num: int, chunks: int) -> str:
    """The constraints of an instruction of assembly that reads num registers of each chunk, and could write as many."""
    return ",".join(["=v"] * num + ["v"] * num * chunks)


@gluon.jit
def _wait_for(chunks, G: gl.constexpr):
    """Waits for chunks at once, and not before what comes before: an empty instruction reads them."""
    NUM: gl.constexpr = G.COLUMNS // (4 * in_word(G.CODING))
    sched_barrier()
    gl.inline_asm_elementwise("", _reads(NUM, G.CHUNKS), chunks, dtype=gl.int32, is_pure=False, pack=NUM)
    sched_barrier()


@gluon.jit
def query_operands(query, G: gl.constexpr):
    """q [ROWS, COLUMNS] as operands [COLUMNS, ROWS] whose sum it is, a tuple, and a factor of their products.

    The factor is 1, or of codes a power of two for each of ROWS: a row's largest element is moved to the largest codes,
    and those below 2^-9 of it (2^-6 in float16) lose bits below 2^-16 of it.
    """
    P: gl.constexpr = product_layout(G)
    parts, factor = (query,), 1.0
    if is_coded(G.CODING.ENCODING):
        PARTS: gl.constexpr = 2 if query.dtype == gl.bfloat16 else 3
        query = query.to(gl.float32)
        exponent = exponent_to_move(gl.max(gl.abs(query), 1))
        parts = parts_of(moved_to_codes(query, exponent[:, None], G.CDNA), PARTS, G.CDNA)
        factor = scale_of_codes(exponent, G.CDNA)
        factor = gl.convert_layout(factor, gl.SliceLayout(0, P), assert_trivial=True)
    operands = ()
    for i in gl.static_range(len(parts)):
        part = gl.permute(parts[i], (1, 0))
        part = gl.convert_layout(part, gl.DotOperandLayout(1, P, key_elements(G)), assert_trivial=True)
        operands += (part,)  # type: ignore[assignment]
    return operands, factor


@gluon.jit
def _is_seen(first, keys, L: gl.constexpr, G: gl.constexpr):
    """True for each key of a chunk that is seen, bool [CHUNK]. first: its first key"""
    key = first + gl.arange(0, CHUNK, layout=L)
    return in_range(key, keys.first, keys.end) if G.rows.WINDOWED else key < keys.end


@gluon.jit
def _by_row(scale):
    """A factor of all scores, or of those of each row, for blocks of scores."""
    return scale[None, :] if len(scale.shape) == 1 else scale


@gluon.jit
def _scores(query, words, scale, first, keys, logits, G: gl.constexpr, MASKED: gl.constexpr):
    """The scores of a chunk, [CHUNK, ROWS], without qk_scale.

    query: of query_operands; words: its K; scale: of its keys, laid out as scores, or None
    """
    P: gl.constexpr = product_layout(G)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, P, key_elements(G))
    k = gl.reshape(elements_of(words, query[0].dtype), [CHUNK, G.COLUMNS])
    k = gl.convert_layout(k, OPERAND, assert_trivial=True)
    scores = gl.full([CHUNK, ROWS], 0.0, gl.float32, layout=P)
    for i in gl.static_range(len(query)):
        scores = gl.amd.cdna3.mfma(k, query[i], scores)
    if scale is not None:
        scores = single(scores * scale)
    if G.CAPPED:
        scores = capped(scores, _by_row(logits.tanh_scale))
    if MASKED:
        # Masks of all chunks at once would take more scalar registers than there are.
        sched_barrier()
        scores = gl.where(_is_seen(first, keys, gl.SliceLayout(1, P), G)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _values(words, first, keys, G: gl.constexpr, MASKED: gl.constexpr):
    """Words of V of a chunk, [CHUNK, words]. Keys that are not seen have 0, since 0 times NaN is NaN."""
    if MASKED:
        words = gl.where(_is_seen(first, keys, gl.SliceLayout(1, value_words(G)), G)[:, None], words, 0)
    return words


@gluon.jit
def _of_four_keys(chunk):
    """A chunk [CHUNK, X] as [CHUNK / 4, X, 4 keys]. The middle ones change places.

    Those of weights that LLVM takes for pairs, the first and the third of four that become codes, are then next to each
    other in registers, as packed operations want them.
    """
    pairs = gl.permute(gl.reshape(chunk, [CHUNK // 4, 2, 2, chunk.shape[1]]), (0, 3, 2, 1))
    return gl.reshape(pairs, [CHUNK // 4, chunk.shape[1], 4])


@constexpr_function
def _chunks_at_once(G: CdnaGeometry) -> gl.constexpr:
    """Chunks that a product with V takes."""
    return depth(G) // CHUNK.value


@gluon.jit
def _by_key(chunks, G: gl.constexpr):
    """The chunks of _of_four_keys that a product with V takes, as [X, keys] in the product's order.

    A lane has four keys of a chunk, and four neighbouring ones of a product, or eight: four each of two chunks.
    """
    AT_ONCE: gl.constexpr = _chunks_at_once(G)
    X: gl.constexpr = chunks[0].shape[1]
    both = gl.reshape(chunks[0], [CHUNK // 4, X, 4, 1]) if AT_ONCE == 1 else gl.join(chunks[0], chunks[1])
    return gl.reshape(gl.permute(both, (1, 0, 3, 2)), [X, AT_ONCE * CHUNK])


@gluon.jit
def rounded(weights, DTYPE: gl.constexpr, HAS_ROUNDING: gl.constexpr):
    """Weights in DTYPE: the nearest number, the even one of two. bfloat16 by hand on CDNA 3, see softmax.rounded."""
    if not HAS_ROUNDING and gl.bfloat16 == DTYPE:
        bits = weights.to(gl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        result = bits.to(gl.uint16).to(gl.bfloat16, bitcast=True)
    else:
        result = weights.to(DTYPE)
    return result


@gluon.jit
def _all_scores(query, chunks, scales, first, keys, logits, G: gl.constexpr, MASKED: gl.constexpr):
    """The scores of a block's chunks. scales: KeyScales, or None"""
    CHUNKS: gl.constexpr = G.CHUNKS
    scores = ()
    for i in gl.static_range(CHUNKS):
        scale = scales_of_chunk(scales.k, i, G) if has_scales(G) else None
        of_chunk = _scores(query, chunks[i], scale, first + i * CHUNK, keys, logits, G, MASKED)
        scores += (of_chunk,)  # type: ignore[assignment]
    return scores


@gluon.jit
def _largest(scores, scale, scales_of_v, G: gl.constexpr):
    """The largest logit of each row; with scales of V the largest sum of one and of a scale's biased exponent.

    The sum is that of lanes which have the same keys: it may be a little larger than that of any key.
    """
    CHUNKS: gl.constexpr = G.CHUNKS
    top = scores[0]
    for i in gl.static_range(1, CHUNKS):
        top = gl.maximum(top, scores[i]) if G.CDNA == 3 else larger_or_nan(top, scores[i])
    if has_scales(G):
        # A lane has four rows of sixteen.
        top = gl.reshape(top, [4, CHUNK // 4, ROWS])
        top = gl.max(top, 1) if G.CDNA == 3 else gl.reduce(top, 1, larger_or_nan)
        L: gl.constexpr = top.type.layout
        top = top * _of_rows(scale, gl.SliceLayout(0, L)) + largest_scales(scales_of_v, L)
        top = gl.max(top, 0) if G.CDNA == 3 else gl.reduce(top, 0, larger_or_nan)
        top = gl.convert_layout(top, gl.SliceLayout(0, product_layout(G)), assert_trivial=True)
    else:
        top = (gl.max(top, 0) if G.CDNA == 3 else gl.reduce(top, 0, larger_or_nan)) * scale
    return top


@gluon.jit
def _of_rows(scale, L: gl.constexpr):
    """A factor of all scores, or of those of each row, in another layout."""
    return gl.convert_layout(scale, L, assert_trivial=True)[None, :] if len(scale.shape) == 1 else scale


@constexpr_function
def _above_base(G: CdnaGeometry) -> int:
    """The largest sum of _largest is this far above the base: the exponent of the largest weight, with its bias."""
    return int(largest_exponent(G.CDNA) + (BIAS.value if has_scales(G) else 0))


@gluon.jit
def _weigh(state, scores, scale, scales_of_v, query, G: gl.constexpr):
    """The state with a block's keys in all but acc, which decays, and the weights' operands, for each product a tuple.

    The operands are of query's number and dtype. scales_of_v: of KeyScales, 0 where keys are not seen; None if there
    are none. With them a block's largest weight is that with its largest scale.
    """
    CHUNKS: gl.constexpr = G.CHUNKS
    AT_ONCE: gl.constexpr = _chunks_at_once(G)
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, product_layout(G), 4 * AT_ONCE)
    CODED: gl.constexpr = is_coded(G.CODING.ENCODING)
    top = _largest(scores, scale, scales_of_v, G)
    largest = gl.maximum(state.largest, top)
    base = gl.maximum(top, largest - _MOST_BELOW) - _above_base(G) if CODED else largest
    decay = gl.exp2(state.base - base)
    total = state.total * decay[None, :]
    weights = ()
    for i in gl.static_range(CHUNKS):
        weight = gl.exp2(scores[i] * _by_row(scale) - base[None, :])
        total += weight
        if has_scales(G):
            weight = single(weight * scales_of_chunk(scales_of_v, i, G))
        weights += (_of_four_keys(weight),)  # type: ignore[assignment]
    operands = ()
    for i in gl.static_range(0, CHUNKS, AT_ONCE):
        weight = gl.permute(_by_key(weights[i : i + AT_ONCE], G), (1, 0))
        weight = gl.convert_layout(weight, OPERAND, assert_trivial=True)
        parts = parts_of(weight, len(query), G.CDNA) if CODED else (rounded(weight, query[0].dtype, G.CDNA > 3),)
        operands += (parts,)  # type: ignore[assignment]
    return Weighed(state.acc * decay[None, :], largest, base, total), operands


@gluon.jit
def _add_values(state, weights, chunks, first, keys, G: gl.constexpr, MASKED: gl.constexpr):
    """The state with the weights' part of acc: [COLUMNS, ROWS], whose rows are 8 i + j at COLUMNS / 8 j + i."""
    AT_ONCE: gl.constexpr = _chunks_at_once(G)
    WIDTH: gl.constexpr = 4 * AT_ONCE
    P: gl.constexpr = product_layout(G)
    acc = state.acc
    if MASKED:
        # Masks of the scores are not kept for V.
        first = gl.inline_asm_elementwise("", "=s,0", [first], dtype=gl.int32, is_pure=False, pack=1)
    # The last chunks come first: their loads are the last ones, so that one wait is enough.
    for i in gl.static_range(G.CHUNKS - AT_ONCE, -1, -AT_ONCE):
        # Elements are not taken apart before: that would wait for their loads, and take registers.
        sched_barrier()
        values = ()
        for j in gl.static_range(i, i + AT_ONCE):
            v = _values(chunks[j], first + j * CHUNK, keys, G, MASKED)
            values += (_of_four_keys(v),)  # type: ignore[assignment]
        v = gl.permute(_by_key(values, G), (1, 0))
        v = gl.reshape(elements_of(v, weights[0][0].dtype), [AT_ONCE * CHUNK, G.COLUMNS // 8, 8])
        v = gl.permute(v, (2, 1, 0))
        v = gl.reshape(v, [G.COLUMNS, v.shape[2]])
        v = gl.convert_layout(v, gl.DotOperandLayout(0, P, WIDTH), assert_trivial=True)
        for part in gl.static_range(len(weights[0])):
            acc = gl.amd.cdna3.mfma(v, weights[i // AT_ONCE][part], acc)
    return Weighed(acc, state.largest, state.base, state.total)


@gluon.jit
def _attend(state, query, loaded, sides, block, read, logits, G: gl.constexpr, MASKED: gl.constexpr):
    """Adds a block to a state, and loads the next one: returns the state, and what is loaded then."""
    k_side, v_side = sides
    k, v, places, scales = loaded
    first = block * (G.CHUNKS * CHUNK)
    if has_scales(G):
        # K came before them.
        wait_for_scales(scales)
    else:
        _wait_for(k, G)
    scores = _all_scores(query, k, scales, first, read.keys, logits, G, MASKED)
    scales_of_v = None
    if has_scales(G):
        scales_of_v = seen_scales(scales.v, read, block, G) if MASKED else scales.v
        places = _places(read, scales.pages, block + 1, G)
        place = place_of_scales(read, scales.pages, block + 1, G)
        scales_of_k = gl.load(read.scales.k + place)
    k = _load(k_side, places, G)
    next_places = None
    if not has_scales(G):
        # Page numbers come while weights are computed, and take the registers of those that K was loaded by.
        next_places = _places(read, None, block + 2, G)
    state, weights = _weigh(state, scores, logits.qk_scale, scales_of_v, query, G)
    if has_scales(G):
        # They take the registers of those that were multiplied.
        sched_barrier()
        scales = KeyScales(scales_of_k, gl.load(read.scales.v + place), pages_of_lanes(read, block + 2, G))
    _wait_for(v, G)
    state = _add_values(state, weights, v, first, read.keys, G, MASKED)
    return state, LoadedBlock(k, _load(v_side, places, G), next_places, scales)


@gluon.jit
def attend_key_blocks(query, k_side, v_side, read, logits, G: gl.constexpr):
    """Returns the softmax state of some key blocks for each row of q, its acc laid out as in _add_values.

    query: of query_operands; of logits one scale is a number, the one with the factor of query_operands may be [ROWS]
    The numbers of a block's pages are loaded two blocks ahead.
    """
    P: gl.constexpr = product_layout(G)
    KEYS: gl.constexpr = G.CHUNKS * CHUNK
    blocks, sides = read.blocks, (k_side, v_side)
    pages, scales, places = None, None, None
    if has_scales(G):
        pages = pages_of_lanes(read, blocks.first, G)
    here = _places(read, pages, blocks.first, G)
    k = _load(k_side, here, G)
    if has_scales(G):
        place = place_of_scales(read, pages, blocks.first, G)
        scales = KeyScales(
            gl.load(read.scales.k + place), gl.load(read.scales.v + place), pages_of_lanes(read, blocks.first + 1, G)
        )
    v = _load(v_side, here, G)
    if not has_scales(G):
        places = _places(read, None, blocks.first + 1, G)
    loaded = LoadedBlock(k, v, places, scales)
    # Each lane adds up the weights of its own keys until the end.
    nothing = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, P))
    state = Weighed(
        gl.full([G.COLUMNS, ROWS], 0.0, gl.float32, layout=P),
        nothing,
        nothing,
        gl.full([CHUNK, ROWS], 0.0, gl.float32, layout=P),
    )
    first = blocks.first
    if G.rows.WINDOWED:
        # The window's first block may be seen in part, as may the last block.
        state, loaded = _attend(state, query, loaded, sides, first, read, logits, G, True)
        first += 1
    end = gl.maximum(gl.minimum(blocks.end, read.keys.end // KEYS), first)
    for block in range(first, end):
        state, loaded = _attend(state, query, loaded, sides, block, read, logits, G, False)
    if end < blocks.end:
        state, _ = _attend(state, query, loaded, sides, end, read, logits, G, True)
    return Softmax(state.acc, state.base, gl.sum(state.total, 0))
