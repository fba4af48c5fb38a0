"""Key blocks of latent decode for CDNA, whose rows go straight from memory into the operands of products.

    S^T = K q^T     K = c | r: a lane loads eight neighbouring elements of a key, as the product wants them
    O^T = V^T P^T   V = c: a lane loads eight neighbouring elements of each of 4 keys, its own operand of eight products
                    whose rows are every eighth element; and the weights that S^T left in it belong to the same keys

So no row moves between lanes, by LDS or otherwise. A row is loaded twice, in both ways: the second time soon after the
first, so that a cache has it. A wave has a chunk of each block, and a softmax state and products of its own: the waves
of a program meet at the end of a row (latent.py). K and V are loaded as pairs of elements, like in key_blocks.py.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.hint import sched_barrier
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.bundles import Softmax
from rocm_attn.kernels.attention.cuts import RowCut
from rocm_attn.kernels.cache.page_format import Coding
from rocm_attn.kernels.cdna.extend_steps import here
from rocm_attn.kernels.cdna.key_blocks import rounded
from rocm_attn.kernels.latent import limits
from rocm_attn.kernels.tuning import cdna_tiles
from rocm_attn.kernels.tuning.cdna_tiles import ExtendUnits
from rocm_attn.kernels.tuning.latent_tiles import CDNA_LATENT_TILES

CHUNK = gl.constexpr(cdna_tiles.CHUNK)
ROWS = gl.constexpr(cdna_tiles.ROWS)
WAVES = gl.constexpr(CDNA_LATENT_TILES[0].num_warps)
KEYS = gl.constexpr(CDNA_LATENT_TILES[0].key_block)
V_DIM = gl.constexpr(limits.MAX_V_HEAD_DIM)
REST = gl.constexpr(limits.MAX_REST_DIM)
_WAVES = [[1, 0, 0], [2, 0, 0]]


class CdnaLatentGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    rows:        how a sequence is cut into rows
    HEADS:       query heads of a program, padded: ROWS, or twice or four times as many (latent_heads.py)
    HEAD_BLOCKS: programs that share a token's query heads
    PAGE_SIZE:   tokens of a page
    BLOCKS:      blocks whose keys are in flight
    UNITS:       the arch's matrix units
    CODING:      of rows: elements in q's dtype, or the codes that the arch's hardware reads
    V_IN_LDS:    whether codes of V pass LDS (latent_codes.py)
    LISTED:      whether keys are those of a list (selected.py)
    """

    rows: RowCut
    HEADS: int
    HEAD_BLOCKS: int
    PAGE_SIZE: int
    BLOCKS: int
    UNITS: ExtendUnits
    CODING: Coding
    V_IN_LDS: bool
    LISTED: bool = False


class LatentLine(NamedTuple):
    """The rows of a sequence: the pool, in words of 4 bytes, its strides between pages and tokens in words, its line of
    the table, and the last key that is read."""

    at: Any
    page: Any
    token: Any
    line: Any
    last_key: Any


class ListedLine(NamedTuple):
    """The rows that a list in LDS names, [blocks, KEYS]: the pool, its stride between slots, both in bytes, slots, what
    is added to their scores, 0 or -inf in bfloat16, and the last block that is read."""

    at: Any
    token: Any
    slots: Any
    bias: Any
    last_block: Any


class Keys(NamedTuple):
    """K of a block, pairs of elements: the columns of V [WAVES, CHUNK, V_DIM / 2], and the rest."""

    low: Any
    rest: Any


@constexpr_function
def score_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of scores, [WAVES, CHUNK, ROWS]: a lane has a column, a query head, and four keys."""
    shape = [16, 16, 2 * G.UNITS.DEPTH]
    return gl.amd.AMDMFMALayout(G.UNITS.VERSION, shape, transposed=False, warps_per_cta=[WAVES.value, 1, 1])


@constexpr_function
def value_layout(G: CdnaLatentGeometry) -> gl.constexpr:
    """The layout of the accumulator, [WAVES, V_DIM, ROWS]. A product is as deep as a chunk."""
    return gl.amd.AMDMFMALayout(
        G.UNITS.VERSION, [16, 16, CHUNK.value], transposed=False, warps_per_cta=[WAVES.value, 1, 1]
    )


@constexpr_function
def total_layout() -> gl.constexpr:
    """The layout of sums of weights, [WAVES, 4, ROWS]: a lane adds up its own keys."""
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout([], lanes, _WAVES, [], [WAVES.value, 4, ROWS.value])


@constexpr_function
def key_pairs(columns: int) -> gl.constexpr:
    """Layout of K as it is loaded: 16 lanes have a key each; four times four pairs side by side make 32 elements."""
    more = [[0, 0, 16 << i] for i in range((columns // 32).bit_length() - 1)]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 4], [0, 0, 8]]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *more], lanes, _WAVES, [], [WAVES.value, CHUNK.value, columns // 2]
    )


@constexpr_function
def value_pairs() -> gl.constexpr:
    """Layout of V as it is loaded: 16 lanes have 128 elements of a key, and each lane those of four keys in turn."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 0, 64], [0, 0, 128]]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 4, 0], [0, 8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, CHUNK.value, V_DIM.value // 2])


@constexpr_function
def query_layout(columns: int) -> gl.constexpr:
    """The layout of q as it is loaded, [WAVES, ROWS, columns]: each wave has all of it; transposed it is an operand."""
    more = [[0, 0, 32 << i] for i in range((columns // 32).bit_length() - 1)]
    lanes = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 8], [0, 0, 16]]
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *more]
    return gl.DistributedLinearLayout(registers, lanes, _WAVES, [], [WAVES.value, ROWS.value, columns])


@gluon.jit
def load_query(q, FIRST: gl.constexpr, COLUMNS: gl.constexpr, G: gl.constexpr):
    """Columns of q of a token, an operand [WAVES, COLUMNS, ROWS]; zero for missing heads. q: HeadRows, of the token"""
    Q: gl.constexpr = query_layout(COLUMNS)
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, gl.SliceLayout(2, Q)))
    head = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, Q)))[None, :, None]
    column = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, Q)))
    at = q.at + head.to(gl.int64) * q.head + column[None, None, :] + 0 * wave[:, None, None]
    query = gl.load(at, mask=head < G.rows.GQA_RATIO, other=0.0)
    operand: gl.constexpr = gl.DotOperandLayout(1, score_layout(G), 8)
    return gl.convert_layout(gl.permute(query, (0, 2, 1)), operand, assert_trivial=True)


@gluon.jit
def _keys(block, L: gl.constexpr):
    """The keys of a block, [WAVES, CHUNK]."""
    wave = gl.arange(0, WAVES, layout=gl.SliceLayout(1, L))[:, None]
    return block * KEYS + (wave * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(0, L))[None, :])


@gluon.jit
def _read_keys(rows, block, L: gl.constexpr):
    """The keys whose rows are read for a block: the last key that is seen stands for later ones."""
    return gl.minimum(_keys(block, gl.SliceLayout(2, L)), rows.last_key).to(gl.uint32)


@gluon.jit
def of_block(numbers, rows, block):
    """LDS of the numbers of a block of a list, [KEYS]; the last block that is read stands for later ones."""
    return numbers.index(gl.minimum(block, rows.last_block))


@gluon.jit
def _pages_of(rows, block, L: gl.constexpr, G: gl.constexpr):
    """The page of each key of a block, or its slot in a list."""
    if G.LISTED:
        found = of_block(rows.slots, rows, block).reshape([WAVES, CHUNK]).load(gl.SliceLayout(2, L))
    else:
        found = gl.load(rows.line + _read_keys(rows, block, L) // G.PAGE_SIZE)
    return found


@gluon.jit
def rows_of_slots(rows, slots):
    """Pointers to the first words of listed rows."""
    return (rows.at + slots.to(gl.int64) * rows.token).to(gl.pointer_type(gl.int32))


@gluon.jit
def _rows_of(rows, pages, block, L: gl.constexpr, G: gl.constexpr):
    """Pointers to the first pairs of a block's rows."""
    if G.LISTED:
        found = rows_of_slots(rows, pages)
    else:
        offset = (_read_keys(rows, block, L) % G.PAGE_SIZE).to(gl.int64)
        found = rows.at + (pages.to(gl.int64) * rows.page + offset * rows.token)
    return found


@gluon.jit
def _load(at, FIRST: gl.constexpr, COLUMNS: gl.constexpr, L: gl.constexpr):
    """Pairs of columns [FIRST, FIRST + COLUMNS) of rows."""
    pair = FIRST // 2 + gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    return gl.load(at[:, :, None] + pair[None, None, :])


@gluon.jit
def _load_keys(rows, pages, block, G: gl.constexpr):
    low: gl.constexpr = key_pairs(V_DIM)
    rest: gl.constexpr = key_pairs(REST)
    at = _rows_of(rows, pages, block, low, G)
    same = gl.convert_layout(at, gl.SliceLayout(2, rest), assert_trivial=True)
    return Keys(_load(at, 0, V_DIM, low), _load(same, V_DIM, REST, rest))


@gluon.jit
def _load_values(rows, pages, block, G: gl.constexpr):
    return _load(_rows_of(rows, pages, block, value_pairs(), G), 0, V_DIM, value_pairs())


@gluon.jit
def _elements(pairs, DTYPE: gl.constexpr):
    """The elements of pairs, [WAVES, CHUNK, columns] in DTYPE."""
    low = pairs.to(gl.uint16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.uint16).to(DTYPE, bitcast=True)
    return gl.reshape(gl.join(low, high), [WAVES, CHUNK, 2 * pairs.shape[2]])


@gluon.jit
def _scores(query, keys, rows, block, end_key, G: gl.constexpr, MASKED: gl.constexpr):
    """The scores of a block, [WAVES, CHUNK, ROWS], without qk_scale."""
    P: gl.constexpr = score_layout(G)
    A: gl.constexpr = gl.DotOperandLayout(0, P, 8)
    low, rest = query
    # The pairs that were loaded last come first: the wait for them is one for all.
    scores = gl.full([WAVES, CHUNK, ROWS], 0.0, gl.float32, layout=P)
    k = gl.convert_layout(_elements(keys.rest, rest.dtype), A, assert_trivial=True)
    scores = gl.amd.cdna3.mfma(k, rest, scores)
    k = gl.convert_layout(_elements(keys.low, low.dtype), A, assert_trivial=True)
    scores = gl.amd.cdna3.mfma(k, low, scores)
    if G.LISTED:
        bias = of_block(rows.bias, rows, block).reshape([WAVES, CHUNK]).load(gl.SliceLayout(2, P))
        scores += bias.to(gl.float32)[:, :, None]
    if MASKED:
        is_seen = _keys(block, gl.SliceLayout(2, P)) < end_key
        scores = gl.where(is_seen[:, :, None], scores, float("-inf"))
    return scores


@gluon.jit
def decayed(*x):
    """A lane's elements, times the decay that follows them, if it is not 1: a branch of the wave."""
    NUM: gl.constexpr = len(x) // 2
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
def _attend(state, scores, values, qk_scale, DTYPE: gl.constexpr, G: gl.constexpr, MASKED: gl.constexpr):
    """Adds a block to a Softmax of each wave: acc [WAVES, V_DIM, ROWS], whose rows are 8 i + j at V_DIM / 8 j + i;
    maximum [WAVES, ROWS]; total [WAVES, 4, ROWS]."""
    A: gl.constexpr = value_layout(G)
    T: gl.constexpr = total_layout()
    maximum = gl.maximum(state.maximum, gl.max(scores, 1) * qk_scale)
    # A wave may have no key of a masked or listed block; the subtractions below must not be inf - inf.
    base = gl.where(maximum == float("-inf"), 0.0, maximum) if MASKED else maximum
    weights = gl.exp2(scores * qk_scale - base[:, None, :])
    decay = gl.exp2(state.maximum - base)
    part = gl.sum(gl.reshape(weights, [WAVES, 4, 4, ROWS]), 2)
    of_total = gl.convert_layout(decay, gl.SliceLayout(1, T), assert_trivial=True)[:, None, :]
    total = state.total * of_total + gl.convert_layout(part, T, assert_trivial=True)
    of_acc = gl.convert_layout(decay, gl.SliceLayout(1, A), assert_trivial=True)[:, None, :]
    of_acc = of_acc.broadcast_to(state.acc.shape)
    (acc,) = gl.map_elementwise(decayed, state.acc, of_acc, pack=V_DIM * ROWS // 64)
    weights = rounded(weights, DTYPE, G.UNITS.ROUNDS_PAIRS)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(1, A, 4), assert_trivial=True)
    v = gl.reshape(_elements(values, DTYPE), [WAVES, CHUNK, V_DIM // 8, 8])
    v = gl.reshape(gl.permute(v, (0, 3, 2, 1)), [WAVES, V_DIM, CHUNK])
    v = gl.convert_layout(v, gl.DotOperandLayout(0, A, 4), assert_trivial=True)
    return Softmax(gl.amd.cdna3.mfma(v, weights, acc), maximum, total)


@gluon.jit
def attend_latent_blocks(query, rows, first, end, kv_len, qk_scale, G: gl.constexpr):
    """Returns each wave's Softmax of its chunks of key blocks [first, end), laid out as in _attend.

    BLOCKS blocks of K and one of V are in flight, and their pages' numbers are loaded a block ahead. Loads return in
    their order: numbers first, then V, then K of the block after, so that a wait for V leaves that one in flight.
    """
    BLOCKS: gl.constexpr = G.BLOCKS
    K: gl.constexpr = key_pairs(V_DIM)
    V: gl.constexpr = value_pairs()
    P: gl.constexpr = score_layout(G)
    DTYPE: gl.constexpr = query[0].dtype
    k_pages = ()
    keys = ()
    for i in gl.static_range(BLOCKS):
        k_pages += (_pages_of(rows, first + i, K, G),)  # type: ignore[assignment]
    # In the order of the loop, whose waits count what is in flight when it begins. LLVM would load these numbers last.
    next_k_pages = here(_pages_of(rows, first + BLOCKS, K, G))
    first_v_pages = _pages_of(rows, first, V, G)
    next_v_pages = here(_pages_of(rows, first + 1, V, G))
    sched_barrier()
    for i in gl.static_range(BLOCKS):
        keys += (_load_keys(rows, k_pages[i], first + i, G),)  # type: ignore[assignment]
        sched_barrier()
        if i == 0:
            values = _load_values(rows, first_v_pages, first, G)
            sched_barrier()
    state = Softmax(
        gl.full([WAVES, V_DIM, ROWS], 0.0, gl.float32, layout=value_layout(G)),
        gl.full([WAVES, ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, P)),
        gl.full([WAVES, 4, ROWS], 0.0, gl.float32, layout=total_layout()),
    )
    # The last block may be seen in part: it is not in the whole rounds, unless all of its keys are seen.
    whole = (gl.minimum(end, kv_len // KEYS) - first) // BLOCKS * BLOCKS
    middle = first + whole
    for block in range(first, middle, BLOCKS):
        next_keys = ()
        for i in gl.static_range(BLOCKS):
            scores = _scores(query, keys[i], rows, block + i, kv_len, G, False)
            state = _attend(state, scores, values, qk_scale, DTYPE, G, G.LISTED)
            v_pages = next_v_pages
            k_of_block = next_k_pages
            next_k_pages = _pages_of(rows, block + i + BLOCKS + 1, K, G)
            sched_barrier()
            next_v_pages = _pages_of(rows, block + i + 2, V, G)
            values = _load_values(rows, v_pages, block + i + 1, G)
            sched_barrier()
            next_keys += (_load_keys(rows, k_of_block, block + i + BLOCKS, G),)  # type: ignore[assignment]
            sched_barrier()
        keys = next_keys
    # Fewer than BLOCKS whole blocks, and one that is not: BLOCKS in all, at most.
    for i in gl.static_range(BLOCKS):
        if middle + i < end:
            scores = _scores(query, keys[i], rows, middle + i, kv_len, G, not G.LISTED)
            state = _attend(state, scores, values, qk_scale, DTYPE, G, True)
            if i + 1 < BLOCKS:
                values = _load_values(rows, next_v_pages, middle + i + 1, G)
    return state
