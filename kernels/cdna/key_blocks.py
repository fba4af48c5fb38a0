"""Key blocks of decode for CDNA, whose keys and values go straight from memory into the operands of products.

    S^T = K q^T     a lane loads eight neighbouring elements of a key, as the product wants them
    O^T = V^T P^T   a lane loads eight neighbouring elements of each of 4 (CDNA 3) or 8 keys (CDNA 4). They are its own
                    operand of eight products, whose rows are every eighth element; and the weights that S^T left in it
                    belong to the same keys

So none of them moves between lanes, by LDS or otherwise. K and V are loaded as pairs of elements: single elements
would be taken apart after the load. A block is one or two chunks of CHUNK keys, each in one page.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.bundles import KeyRange, Softmax, TableLine
from rocm_attn.kernels.attention.cuts import RowCut
from rocm_attn.kernels.attention.softmax import capped, in_range
from rocm_attn.kernels.tuning import cdna_tiles

CHUNK = gl.constexpr(cdna_tiles.CHUNK)
ROWS = gl.constexpr(cdna_tiles.ROWS)


class CdnaGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    rows:       how a sequence is cut into rows
    CDNA:       3 or 4
    HEAD_DIM:   elements of a row of K and of V of one KV head
    COLUMNS:    of a row of work: its KV heads' elements side by side, 128 or 256
    PAGE_SIZE:  tokens of a page, a multiple of CHUNK
    CHUNKS:     chunks of a block
    BLOCKS:     blocks that are in flight
    SAME_OFFSETS: whether K and V of a token lie at the same place of their pages: takes fewer scalar registers
    WHOLE_ROWS: whether every row has a program of its own
    CAPPED:     whether scores have a cap
    """

    rows: RowCut
    CDNA: int
    HEAD_DIM: int
    COLUMNS: int
    PAGE_SIZE: int
    CHUNKS: int
    BLOCKS: int
    SAME_OFFSETS: bool
    WHOLE_ROWS: bool
    CAPPED: bool


class ChunkPlace(NamedTuple):
    """The place of a chunk: page number, and its first token there."""

    page: Any
    token: Any


class Chunk(NamedTuple):
    """K and V of a chunk, int32 [CHUNK, COLUMNS / 2]: pairs of elements."""

    k: Any
    v: Any


class ChunkSide(NamedTuple):
    """K or V of a row: pointer, strides between pages and between tokens, offsets of pairs in a chunk."""

    at: Any
    page: Any
    token: Any
    offsets: Any


class ChunkBlocks(NamedTuple):
    """Key blocks of a sequence: its line of the table, which ones, the keys that a row sees, the last chunk of them."""

    line: TableLine
    blocks: KeyRange
    keys: KeyRange
    last_chunk: Any


@constexpr_function
def product_layout(G: CdnaGeometry) -> gl.constexpr:
    """The layout of the result of a product: a lane has a column, and four rows in turn."""
    depth = 16 if G.CDNA == 3 else 32
    return gl.amd.AMDMFMALayout(version=G.CDNA, instr_shape=[16, 16, depth], transposed=False, warps_per_cta=[1, 1])


@constexpr_function
def key_pairs(G: CdnaGeometry) -> gl.constexpr:
    """Layout of K as it is loaded: 16 lanes have a key each; four times four pairs side by side make 32 elements."""
    more = [[0, 16 << i] for i in range((G.COLUMNS // 32).bit_length() - 1)]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [0, 4], [0, 8]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *more], lanes, [], [], [16, G.COLUMNS // 2])


@constexpr_function
def value_pairs(G: CdnaGeometry) -> gl.constexpr:
    """Layout of V as it is loaded: 16 lanes have 128 elements of a key, and each lane those of four keys in turn."""
    more = [[0, 64 << i] for i in range((G.COLUMNS // 128).bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [0, 16], [0, 32], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [1, 0], [2, 0], *more], lanes, [], [], [16, G.COLUMNS // 2])


@constexpr_function
def query_layout(G: CdnaGeometry) -> gl.constexpr:
    """The layout of q as it is loaded, [ROWS, COLUMNS]; transposed it is an operand."""
    more = [[0, 32 << i] for i in range((G.COLUMNS // 32).bit_length() - 1)]
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], *more], lanes, [], [], [16, G.COLUMNS])


@gluon.jit
def pair_offsets(token, head, L: gl.constexpr, G: gl.constexpr):
    """Offsets of a chunk's pairs from its first element, in pairs, int32 [CHUNK, COLUMNS / 2]. token, head: strides"""
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, L))[:, None] * (token // 2)
    pair = gl.arange(0, G.COLUMNS // 2, layout=gl.SliceLayout(0, L))
    if G.rows.HEADS_PER_ROW > 1:
        HALF: gl.constexpr = G.HEAD_DIM // 2
        pair = pair // HALF * (head // 2) + pair % HALF
    return row + pair[None, :]


@gluon.jit
def _places(read, block, G: gl.constexpr):
    """A tuple of ChunkPlace, for a block's chunks. The last chunk that is read stands for later ones.

    With a window the first chunk that is seen stands for those before it, whose pages may have been given back.
    """
    A_PAGE: gl.constexpr = G.PAGE_SIZE // CHUNK
    CHUNKS: gl.constexpr = G.CHUNKS
    found = ()
    for i in gl.static_range(CHUNKS):
        chunk = gl.minimum(block * CHUNKS + i, read.last_chunk)
        if G.rows.WINDOWED and i + 1 < CHUNKS:
            chunk = gl.maximum(chunk, read.keys.first // CHUNK)
        found += (ChunkPlace(gl.load(read.line.at + chunk // A_PAGE), chunk % A_PAGE * CHUNK),)  # type: ignore[assignment]
    return found


@gluon.jit
def _load(side, place):
    """Pairs of a chunk, none of which lies outside its page. Pairs that no row sees are masked when they are used."""
    page, token = place
    at = side.at + page.to(gl.int64) * side.page + token * side.token
    return gl.amd.cdna3.buffer_load(at.to(gl.pointer_type(gl.int32)), side.offsets)


@gluon.jit
def _load_block(k_side, v_side, places, G: gl.constexpr):
    """Loads a block, a tuple of Chunk."""
    CHUNKS: gl.constexpr = G.CHUNKS
    block = ()
    for i in gl.static_range(CHUNKS):
        k = _load(k_side, places[i])
        block += (Chunk(k, _load(v_side, places[i])),)  # type: ignore[assignment]
    return block


@gluon.jit
def _elements(pairs, DTYPE: gl.constexpr, G: gl.constexpr):
    """The elements of pairs, [CHUNK, COLUMNS] in DTYPE."""
    low = pairs.to(gl.uint16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.uint16).to(DTYPE, bitcast=True)
    return gl.reshape(gl.join(low, high), [CHUNK, G.COLUMNS])


@gluon.jit
def _is_seen(first, keys, L: gl.constexpr, G: gl.constexpr):
    """True for each key of a chunk that is seen, bool [CHUNK]. first: its first key"""
    key = first + gl.arange(0, CHUNK, layout=L)
    return in_range(key, keys.first, keys.end) if G.rows.WINDOWED else key < keys.end


@gluon.jit
def _scores(query, chunk, first, keys, logits, G: gl.constexpr, MASKED: gl.constexpr):
    """The scores of a chunk, [CHUNK, ROWS], without qk_scale."""
    P: gl.constexpr = product_layout(G)
    pairs, _ = chunk
    k = gl.convert_layout(_elements(pairs, query.dtype, G), gl.DotOperandLayout(0, P, 8), assert_trivial=True)
    scores = gl.amd.cdna3.mfma(k, query, gl.full([CHUNK, ROWS], 0.0, gl.float32, layout=P))
    if G.CAPPED:
        scores = capped(scores, logits.tanh_scale)
    if MASKED:
        scores = gl.where(_is_seen(first, keys, gl.SliceLayout(1, P), G)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _values(chunk, first, keys, DTYPE: gl.constexpr, G: gl.constexpr, MASKED: gl.constexpr):
    """V of a chunk; 0 for keys that are not seen, whatever their memory holds: 0 times NaN is NaN."""
    _, pairs = chunk
    if MASKED:
        pairs = gl.where(_is_seen(first, keys, gl.SliceLayout(1, value_pairs(G)), G)[:, None], pairs, 0)
    return _elements(pairs, DTYPE, G)


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
def _attend(state, query, block, first, keys, logits, G: gl.constexpr, MASKED: gl.constexpr):
    """Adds a block to a Softmax: acc [COLUMNS, ROWS], whose rows are 8 i + j at COLUMNS / 8 j + i."""
    P: gl.constexpr = product_layout(G)
    DEPTH: gl.constexpr = 4 if G.CDNA == 3 else 8
    EIGHTHS: gl.constexpr = G.COLUMNS // 8
    DTYPE: gl.constexpr = query.dtype
    scores = _scores(query, block[0], first, keys, logits, G, MASKED)
    v = _values(block[0], first, keys, DTYPE, G, MASKED)
    if G.CHUNKS == 2:
        more = _scores(query, block[1], first + CHUNK, keys, logits, G, MASKED)
        maximum = gl.maximum(state.maximum, gl.max(gl.maximum(scores, more), 0) * logits.qk_scale)
        others = gl.exp2(more * logits.qk_scale - maximum[None, :])
        weights = gl.exp2(scores * logits.qk_scale - maximum[None, :])
        total = gl.sum(weights + others, 0)
        # A lane's keys are four of one chunk and four of the other.
        weights = gl.reshape(gl.join(weights, others), [4, 4, ROWS, 2])
        weights = gl.reshape(gl.permute(weights, (0, 3, 1, 2)), [2 * CHUNK, ROWS])
        v = gl.join(v, _values(block[1], first + CHUNK, keys, DTYPE, G, MASKED))
        v = gl.permute(gl.reshape(v, [4, 4, EIGHTHS, 8, 2]), (3, 2, 0, 4, 1))
    else:
        maximum = gl.maximum(state.maximum, gl.max(scores, 0) * logits.qk_scale)
        weights = gl.exp2(scores * logits.qk_scale - maximum[None, :])
        total = gl.sum(weights, 0)
        v = gl.permute(gl.reshape(v, [CHUNK, EIGHTHS, 8]), (2, 1, 0))
    v = gl.reshape(v, [G.COLUMNS, G.CHUNKS * CHUNK])
    decay = gl.exp2(state.maximum - maximum)
    weights = gl.convert_layout(
        rounded(weights, DTYPE, G.CDNA > 3), gl.DotOperandLayout(1, P, DEPTH), assert_trivial=True
    )
    v = gl.convert_layout(v, gl.DotOperandLayout(0, P, DEPTH), assert_trivial=True)
    acc = gl.amd.cdna3.mfma(v, weights, state.acc * decay[None, :])
    return Softmax(acc, maximum, state.total * decay + total)


@gluon.jit
def attend_key_blocks(query, k_side, v_side, read, logits, G: gl.constexpr):
    """Returns the softmax state of some key blocks for each row of q, laid out as in _attend.

    BLOCKS blocks are in flight, each in registers of its own, and their pages' numbers are loaded two rounds ahead. The
    loop is written out BLOCKS times, so that nothing moves from one register to another, which would wait for its load.
    """
    P: gl.constexpr = product_layout(G)
    L: gl.constexpr = gl.SliceLayout(0, P)
    BLOCKS: gl.constexpr = G.BLOCKS
    KEYS: gl.constexpr = G.CHUNKS * CHUNK
    # With a window the first block may be seen in part, so all are masked: one loop is less code, and blocks are few.
    WINDOWED: gl.constexpr = G.rows.WINDOWED
    _, blocks, keys, _ = read
    in_flight = ()
    places = ()
    for i in gl.static_range(BLOCKS):
        in_flight += (_load_block(k_side, v_side, _places(read, blocks.first + i, G), G),)  # type: ignore[assignment]
    for i in gl.static_range(BLOCKS):
        places += (_places(read, blocks.first + BLOCKS + i, G),)  # type: ignore[assignment]
    state = Softmax(
        gl.full([G.COLUMNS, ROWS], 0.0, gl.float32, layout=P),
        gl.full([ROWS], float("-inf"), gl.float32, layout=L),
        gl.full([ROWS], 0.0, gl.float32, layout=L),
    )
    # The last block may be seen in part: it is not in the whole rounds, unless all of its keys are seen.
    whole = (gl.minimum(blocks.end, keys.end // KEYS) - blocks.first) // BLOCKS * BLOCKS
    end = blocks.first + whole
    for block in range(blocks.first, end, BLOCKS):
        next_blocks = ()
        next_places = ()
        for i in gl.static_range(BLOCKS):
            state = _attend(state, query, in_flight[i], (block + i) * KEYS, keys, logits, G, WINDOWED)
            next_places += (_places(read, block + i + 2 * BLOCKS, G),)  # type: ignore[assignment]
            next_blocks += (_load_block(k_side, v_side, places[i], G),)  # type: ignore[assignment]
        in_flight = next_blocks
        places = next_places
    # Fewer than BLOCKS whole blocks, and one that is not: BLOCKS in all, at most.
    for i in gl.static_range(BLOCKS):
        if end + i < blocks.end:
            state = _attend(state, query, in_flight[i], (end + i) * KEYS, keys, logits, G, True)
    return state
