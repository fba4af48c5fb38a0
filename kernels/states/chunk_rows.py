"""Tells a walk over chunks of a prompt (chunk_walk.py) all that it needs of each, except for the state.

Numbers of a chunk are i, j in [0, CHUNK). With G[i] the sum of the decays of tokens 0 to i, for each channel:

    A[i, j] = beta[i] * sum over channels: k[i] * k[j] * exp(G[i] - G[j])      for j < i, else 0
    P[i, j] = scale * sum over channels: q[i] * k[j] * exp(G[i] - G[j])        for j <= i, else 0
    T        = (1 + A)^-1 diag(beta)                                           diag(beta) for sums
    products = P T                              write     = T^T (k * exp(G[last] - G))
    read[i]  = scale * q[i] * exp(G[i])         predict[i] = k[i] * exp(G[i])

With S the state before the chunk, the changes that its tokens make are T (v - predict S); T and T^T in products and
write do the rest (chunk_walk.py). The changes are those of Gated Delta Networks (arXiv 2412.06464, section 3.3) and
Kimi Linear (arXiv 2510.26692, section 3.2), which multiply T by v and by predict; so no rows of v are written here, nor
read. If a head decays as one, read and predict are rows of q and k, whose factors are stored; for sums so is write.

No exponent is a difference of sums: those of strong decays have too few digits left for weak ones after them. If
channels decay by themselves, exp(G[i] - G[j]) is no factor of a whole row and column. In blocks of tokens over which no
channel decays too much, it is the quotient of two, since the block's first token. Those and longer blocks, up to half a
chunk, are taken in pairs: it is the product of exp(G[i] - G[b]) and exp(G[b] - G[j]), with j in the first block of a
pair, b its last token, and i in the second. Matrix units sum the decays of each.

T is computed in float32 from pair to pair of blocks: powers of A would lose all digits where keys repeat.
"""

import math

import triton
import triton.language as tl
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import RecurArgs
from rocm_attn.kernels.states.chunk_space import LEFT, STRONGEST, chunk_geometry, exact, rows_of, words_of
from rocm_attn.kernels.states.token_tiles import num_tiles, tile_at
from rocm_attn.kernels.states.updates import NORM_EPSILON, solved, solved_rows, solver_of

_BEGINS = tl.constexpr(arguments.BEGINS)
_CHUNK = tl.constexpr(arguments.CHUNK)
_LOG2_E = tl.constexpr(math.log2(math.e))
# Heads of a program that looks for chunks that are left: there are few, and programs to start take longer than a look.
_HEADS_LOOKED_AT = tl.constexpr(8)


@constexpr_function
def _most_decay(dtype: tl.dtype) -> float:
    """The logarithm to base 2 of the strongest decay that operands of dtype are divided by: no digit is lost."""
    return {tl.bfloat16: -80.0, tl.float16: -3.0}.get(dtype, -1.0)


@triton.jit
def _rows(first, is_row, column, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """Columns of rows that begin at addresses [CHUNK], in float32; 0 where there are none."""
    # On AMD a mask takes scalar registers: one of columns that are all there would take too many.
    mask = is_row[:, None]
    if COLUMNS % PART:
        mask = mask & (column < COLUMNS)[None, :]
    return tl.load(first[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(first, is_row, column, rows, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """Writes columns of rows that begin at addresses [CHUNK]."""
    mask = is_row[:, None]
    if COLUMNS % PART:
        mask = mask & (column < COLUMNS)[None, :]
    tl.store(first[:, None] + column[None, :], rows.to(first.dtype.element_ty), mask=mask)


@triton.jit
def _decays(first, is_row, column, COLUMNS: tl.constexpr, PART: tl.constexpr):
    """Logarithms of decays to base 2, as _rows loads them; the strongest ones' powers are 0 in float32."""
    rows = _rows(first, is_row, column, COLUMNS, PART)
    return tl.where(rows < STRONGEST, STRONGEST, rows) * _LOG2_E


@triton.jit
def _sums(decays, is_in_sum, dtype: tl.constexpr):
    """[CHUNK, PART]: sums over tokens for each row. is_in_sum: [CHUNK, CHUNK], which ones of all

    dtype: of operands that are multiplied by powers of two of these
    """
    if dtype.primitive_bitwidth == 32:
        return tl.dot(tl.where(is_in_sum, 1.0, 0.0), decays, input_precision=exact())
    # Two float16 have the digits of such a sum that its power's rounding leaves.
    summed = tl.where(is_in_sum, tl.full([], 1.0, tl.float16), tl.full([], 0.0, tl.float16))
    leading = decays.to(tl.float16)
    rest = tl.dot(summed, (decays - leading.to(tl.float32)).to(tl.float16))
    return tl.dot(summed, leading, rest)


@triton.jit
def _add_decayed_products(a, p, q, k, decays, num_rows, dtype: tl.constexpr):
    """A and P with the products of a block of channels, decayed channel by channel; above the diagonal is anything.

    q, k, decays: [CHUNK, PART], 0 from row num_rows on
    dtype:        of operands
    """
    row = tl.arange(0, _CHUNK)
    size = 2 * _CHUNK
    # From after a block's first token until a token, that one included.
    sums = tl.zeros_like(decays)
    least = -float("inf")
    while least < _most_decay(dtype):
        size //= 2
        begin = row & -size
        sums = _sums(decays, (row[None, :] > begin[:, None]) & (row[:, None] >= row[None, :]), dtype)
        least = tl.min(sums)
    factors = tl.exp2(sums)
    earlier = tl.trans((k * tl.exp2(-sums)).to(dtype))
    is_in_block = (row[:, None] ^ row[None, :]) < size
    a += tl.where(is_in_block, tl.dot((k * factors).to(dtype), earlier, input_precision=exact()), 0.0)
    p += tl.where(is_in_block, tl.dot((q * factors).to(dtype), earlier, input_precision=exact()), 0.0)
    while size < num_rows:
        # From a second block's begin until a token, that one included; from the next one until a first block's end.
        apart = row[:, None] ^ row[None, :]
        is_first = (row & size)[:, None] == 0
        is_in_sum = (apart < size) & ((row[:, None] < row[None, :]) == is_first)
        factors = tl.exp2(_sums(decays, is_in_sum, dtype))
        of_k = (k * factors).to(dtype)
        earlier = tl.trans(of_k)
        is_pair = (apart & -size) == size
        a += tl.where(is_pair, tl.dot(of_k, earlier, input_precision=exact()), 0.0)
        p += tl.where(is_pair, tl.dot((q * factors).to(dtype), earlier, input_precision=exact()), 0.0)
        size *= 2
    return a, p


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "most_q_len"])
def _chunk_rows_kernel(
    q,
    k,
    decay,
    beta,
    out,
    rows,
    chunk_words,
    source,
    q_indptr,
    num_seqs,
    num_tokens,
    most_q_len,
    q_token,
    q_head,
    k_token,
    k_head,
    decay_token,
    decay_head,
    beta_token,
    out_token,
    out_head,
    G: tl.constexpr,
    ONLY_LEFT: tl.constexpr,
):
    # Programs of one place, whose rows are next to each other, run at the same time.
    place = tl.program_id(1)
    row = tl.arange(0, _CHUNK)
    DV_BLOCK: tl.constexpr = G.DV_BLOCK
    all_columns = tl.arange(0, DV_BLOCK)
    zeros = tl.zeros([DV_BLOCK], out.dtype.element_ty)
    if ONLY_LEFT:
        heads = tl.program_id(0) + tl.arange(0, _HEADS_LOOKED_AT) * tl.num_programs(0)
        first_words = words_of(chunk_words, place, heads, G).decay
        are_left = tl.load(first_words, mask=heads < G.HEADS, other=0.0) == LEFT
        is_refused = tl.load(source + tile_at(place, q_indptr, num_seqs, _CHUNK, False).seq) < _BEGINS
        is_pad = tl.load(q_indptr + num_seqs) + place < num_tokens
        turns = tl.where(is_refused | is_pad | (tl.max(are_left.to(tl.int32), 0) > 0), _HEADS_LOOKED_AT, 0)
        turns = tl.minimum(turns, tl.cdiv(G.HEADS - tl.program_id(0), tl.num_programs(0)))
    # A loop would take registers for values that are the same for all heads.
    for turn in (tl.range if ONLY_LEFT else tl.static_range)(turns if ONLY_LEFT else 1):
        head = tl.cast(tl.program_id(0) + turn * tl.num_programs(0), tl.int64)
        k_head_of = head // G.RATIO
        out_rows = out + head * out_head + all_columns
        for pad in range(tl.load(q_indptr + num_seqs) + place, num_tokens, tl.num_programs(1)):
            tl.store(out_rows + tl.cast(pad, tl.int64) * out_token, zeros, mask=all_columns < G.DV)
        tile = tile_at(place, q_indptr, num_seqs, _CHUNK, False)
        num_rows = tl.minimum(tile.q_len - tile.begin, _CHUNK)
        if (tile.q_len > most_q_len) & (num_rows > 0):
            words = words_of(chunk_words, place, head, G)
            is_left = True
            if ONLY_LEFT:
                is_left = tl.load(words.decay) == LEFT
            if tl.load(source + tile.seq) < _BEGINS:
                for pad in range(tile.first_token + tile.begin, tile.first_token + tile.begin + num_rows):
                    tl.store(out_rows + tl.cast(pad, tl.int64) * out_token, zeros, mask=all_columns < G.DV)
            elif is_left:
                is_row = row < num_rows
                first_row = (tile.first_token + tile.begin).to(tl.int64)
                is_before = row[:, None] > row[None, :]
                q_at = q + (first_row * q_token + k_head_of * q_head) + row * q_token
                k_at = k + (first_row * k_token + k_head_of * k_head) + row * k_token
                decay_at = decay + (first_row * decay_token + head * decay_head) + row * decay_token
                to = rows_of(rows + row * (G.HEADS * G.ROW), first_row, head, G)
                strength = tl.load(beta + (first_row * beta_token + head) + row * beta_token, mask=is_row, other=0.0)
                # Products of rows that are not divided by their norms, and the squares of these.
                a = tl.zeros([_CHUNK, _CHUNK], tl.float32)
                p = tl.zeros([_CHUNK, _CHUNK], tl.float32)
                of_q = tl.zeros([_CHUNK], tl.float32)
                of_k = tl.zeros([_CHUNK], tl.float32)
                for first in range(0, G.DK, G.DK_PART):
                    channel = first + tl.arange(0, G.DK_PART)
                    q_rows = _rows(q_at, is_row, channel, G.DK, G.DK_PART)
                    k_rows = _rows(k_at, is_row, channel, G.DK, G.DK_PART)
                    if G.RULE.normalises:
                        of_q += tl.sum(q_rows * q_rows, 1)
                        of_k += tl.sum(k_rows * k_rows, 1)
                    if G.CHANNELS:
                        decays = _decays(decay_at, is_row, channel, G.DK, G.DK_PART)
                        a, p = _add_decayed_products(a, p, q_rows, k_rows, decays, num_rows, k.dtype.element_ty)
                    else:
                        earlier = tl.trans(k_rows.to(k.dtype.element_ty))
                        a = tl.dot(k_rows.to(k.dtype.element_ty), earlier, a, input_precision=exact())
                        p = tl.dot(q_rows.to(k.dtype.element_ty), earlier, p, input_precision=exact())
                if G.RULE.normalises:
                    of_q = tl.rsqrt(of_q + NORM_EPSILON)
                    of_k = tl.rsqrt(of_k + NORM_EPSILON)
                    a *= of_k[:, None] * of_k[None, :]
                    p *= of_q[:, None] * of_k[None, :]
                else:
                    of_q += 1.0
                    of_k += 1.0
                # By a head's decays until a token, that one included.
                since_first = tl.zeros([_CHUNK], tl.float32)
                if not G.CHANNELS:
                    decays = tl.load(decay_at, mask=is_row, other=0.0)
                    between = tl.exp(tl.cumsum(tl.where(is_before, decays[:, None], 0.0), 0))
                    a *= between
                    p *= between
                    nexts = tl.load(decay_at + decay_token, mask=row < num_rows - 1, other=0.0)
                    since_first = tl.exp(tl.cumsum(decays, 0))
                    until_last = tl.exp(tl.cumsum(nexts, 0, reverse=True))
                    tl.store(words.decay, tl.exp(tl.sum(decays, 0)))
                    # Every chunk has words for all of its rows: those of rows that are not there are finite.
                    tl.store(words.of_q + row, since_first * of_q * G.RULE.scale)
                    of_rows = since_first if G.RULE.corrects else until_last * strength
                    tl.store(words.of_k + row, of_rows * of_k)
                p = tl.where(row[:, None] >= row[None, :], p * G.RULE.scale, 0.0)
                if G.RULE.corrects:
                    # An operand, which takes fewer registers while T is computed.
                    p = p.to(k.dtype.element_ty)
                a = tl.where(is_before, a * strength[:, None], 0.0)
                solver = solver_of(a, strength, num_rows, G, k.dtype.element_ty)
                _store_rows(to.products, is_row, row, solved(p, solver, G), _CHUNK, _CHUNK)
                if G.CHANNELS or G.RULE.corrects:
                    for first in range(0, G.DK, G.DK_PART):
                        channel = first + tl.arange(0, G.DK_PART)
                        k_rows = _rows(k_at, is_row, channel, G.DK, G.DK_PART) * of_k[:, None]
                        if G.CHANNELS:
                            decays = _decays(decay_at, is_row, channel, G.DK, G.DK_PART)
                            tl.store(words.decay + channel, tl.exp2(tl.sum(decays, 0)), mask=channel < G.DK)
                            since = tl.exp2(_sums(decays, row[:, None] >= row[None, :], k.dtype.element_ty))
                            q_rows = _rows(q_at, is_row, channel, G.DK, G.DK_PART) * (of_q * G.RULE.scale)[:, None]
                            _store_rows(to.read, is_row, channel, q_rows * since, G.DK, G.DK_PART)
                            if G.RULE.corrects:
                                _store_rows(to.predict, is_row, channel, k_rows * since, G.DK, G.DK_PART)
                            k_rows *= tl.exp2(_sums(decays, row[:, None] < row[None, :], k.dtype.element_ty))
                        else:
                            k_rows *= until_last[:, None]
                        _store_rows(to.write, is_row, channel, solved_rows(solver, k_rows, G), G.DK, G.DK_PART)


def launch_chunk_rows(args: RecurArgs, *, most_q_len: int, only_left: bool = False) -> None:
    """Writes the workspace for sequences with more than most_q_len new tokens.

    It also clears rows of out: those of such sequences that are left out, and those that belong to no sequence.

    only_left: whether the workspace is written already, but for chunks whose decay is chunk_space.LEFT
    """
    tokens, places, num_heads = args.tokens, args.places, args.slots.state.shape[1]
    programs = triton.cdiv(num_heads, _HEADS_LOOKED_AT.value) if only_left else num_heads
    geometry, rows, chunk_words = chunk_geometry(args)
    launch(
        _chunk_rows_kernel,
        (programs, num_tiles(places.num_tokens, places.num_seqs, arguments.CHUNK)),
        tokens.q,
        tokens.k,
        tokens.decay,
        tokens.beta,
        tokens.out,
        rows,
        chunk_words,
        places.source,
        places.q_indptr,
        places.num_seqs,
        places.num_tokens,
        most_q_len,
        *tokens.q.stride()[:2],
        *tokens.k.stride()[:2],
        *tokens.decay.stride()[:2],
        tokens.beta.stride(0),
        *tokens.out.stride()[:2],
        G=geometry,
        ONLY_LEFT=only_left,
        # By counts for MI300 and MI355 eight take twice the clocks of a chunk, and so do parts of fewer channels, even
        # if channels decay by themselves, when no second program fits on a compute unit.
        num_warps=4,
        num_stages=1,
    )
