"""The workspace of states/chunk_rows.py for chunks of 64 tokens, for Hopper, in Gluon.

A program has one warp group, so that most products are operands of the next one as they lie in registers. All that it
loads is on its way before it waits for the first rows. Its loads, products and stores overlap with those of others.

A program of sums has several v heads of a k head, whose products of q and k are the same but for decays and strengths.

If channels decay by themselves, a thread has two channels of a quarter of a chunk: 16 tokens, whose decays it adds up
by itself; half of the channels at a time, because registers are few. Factors of rows are bfloat16, and so are rows of q
and k after they were divided by their norms.

No exponent is a difference of long sums here either. Decays are added up since the middle of a chunk's first half, for
products with that half's tokens and with the state, and since the middle of the second half for products with those of
the second one. A chunk with a quarter that decays too much for that is left to chunk_rows.py, which is launched
afterwards: its words say so.

The inverse is computed by elimination in blocks of 16 tokens, and then from pair to pair of blocks, as in updates.py,
but in float16: no entry is above 2 as long as no strength is, since decays, keys of norm 1 and such strengths enlarge
no state. Chunks with other strengths are left, too.
"""

import math
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from rocm_attn.kernels.any_alignment import begin_at_16
from rocm_attn.kernels.attention.softmax import LOG2_E
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import RecurArgs
from rocm_attn.kernels.states.chunk_rows import launch_chunk_rows
from rocm_attn.kernels.states.chunk_space import (
    LEFT,
    STRONGEST,
    WordsOfChunk,
    chunk_geometry,
    rows_of,
    words_of,
)
from rocm_attn.kernels.states.token_tiles import num_tiles, tile_at

_BEGINS = gl.constexpr(arguments.BEGINS)
_CHUNK = gl.constexpr(arguments.CHUNK)
_QUARTER = gl.constexpr(arguments.CHUNK // 4)
_DIM = gl.constexpr(128)
_HALF = gl.constexpr(_DIM.value // 2)
# The logarithm to base 2 of the strongest decay of a quarter. Elements of normalised rows that are above 2^-10 keep all
# digits, and smaller ones lose less than their rows' rounding. A model whose tokens decay by exp(-5) at most, as KDA's
# do with a lower bound, has no stronger one.
_MOST_DECAY = gl.constexpr(116.0)

# [64, 64]: two channels of a quarter of the rows; and the same as [4, 16, 64].
_ELEMENTS = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 1], [1, 0]))
_QUARTERS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
# Copies of 16 bytes, of elements or of float32 words; eight threads compute a row's norm.
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_COPIED_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
_WORDS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
# Products with all tokens of a chunk, and with half of them.
_PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_ROWS = gl.constexpr(gl.SliceLayout(1, _PRODUCTS.value))
_HALF_PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_OF_PRODUCTS = gl.constexpr(gl.DotOperandLayout(0, _PRODUCTS.value, 2))
# [heads * 4, 16]: a quarter of a head's tokens; and [heads, 64].
_BY_QUARTER = gl.constexpr(gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0]))
_TOKENS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))
# [4, 16, 16]: a quarter's tokens for each of them; a column of a block's inverse.
_COLUMNS = gl.constexpr(gl.BlockedLayout([1, 1, 16], [1, 32, 1], [4, 1, 1], [2, 1, 0]))

_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LINEAR_WORDS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_LINEAR_BLOCKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
# V heads of a program of sums, at most. On an H200 Mamba2 prompts take 1.04 times as long with 4, and 0.99 with 16, but
# short ones have too few programs then.
_MOST_TOGETHER = 8


class ChunkRows(NamedTuple):
    """Addresses of a chunk's first rows, and what brings an address to the next token's row.

    decay_head: what brings an address to the next head's decays
    """

    q: Any
    q_token: Any
    k: Any
    k_token: Any
    decay: Any
    decay_token: Any
    decay_head: Any
    beta: Any
    beta_token: Any


@gluon.jit
def _new_room(DTYPE: gl.constexpr):
    """Shared memory for an operand."""
    return gl.allocate_shared_memory(DTYPE, [_CHUNK, _HALF], _SWIZZLED)


@gluon.jit
def _new_halves():
    """Shared memory for the halves of rows, each of which is an operand."""
    return gl.allocate_shared_memory(gl.bfloat16, [2, _CHUNK, _HALF], _SWIZZLED)


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _row_and_column(layout: gl.constexpr, ROWS: gl.constexpr = _CHUNK):
    """The numbers of rows [ROWS, 1] and of columns [1, 64]."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, _HALF, layout=gl.SliceLayout(0, layout))
    return gl.expand_dims(row, 1), gl.expand_dims(column, 0)


@gluon.jit
def _half_of(token):
    """0 for tokens of a chunk's first half. It takes fewer registers than to compare bits of two tokens."""
    return token & (_CHUNK // 2)


@gluon.jit
def _copy(at, token, num_rows, to, layout: gl.constexpr):
    """Begins a copy of rows [64, 128] to shared memory; zeros of rows that are not there."""
    row, column = _row_and_column(layout)
    for half in gl.static_range(2):
        rows = at + row * token + (column + half * _HALF)
        async_copy.async_copy_global_to_shared(to.index(half), rows, mask=row + column * 0 < num_rows)
    async_copy.commit_group()


@gluon.jit
def _quarters_of(rows):
    return gl.convert_layout(gl.reshape(rows, [4, _QUARTER, _HALF]), _QUARTERS)


@gluon.jit
def _times(rows, factors):
    """Products of bfloat16, two at once."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [rows, factors], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _put(rows, to):
    """Writes rows [4, 16, 64] to shared memory as an operand [64, 64]."""
    to.store(gl.convert_layout(gl.reshape(rows, [_CHUNK, _HALF]), _ELEMENTS))


@gluon.jit
def _store(first, row_of, num_rows, rows, layout: gl.constexpr):
    """Writes rows [64, 64]. first: the address of the first row; row_of: what brings one to the next row"""
    row, column = _row_and_column(layout)
    gl.store(first + row * row_of + column, rows.to(gl.bfloat16), mask=row + column * 0 < num_rows)


@gluon.jit
def _store_quarters(first, row_of, num_rows, rows):
    rows = gl.convert_layout(gl.reshape(rows, [_CHUNK, _HALF]), _ELEMENTS)
    _store(first, row_of, num_rows, rows, _ELEMENTS)


@gluon.jit
def _scales_of(first, second, scale):
    """A scale divided by the norms of rows, which are given by halves, [64, 64] each."""
    return gl.rsqrt(gl.sum(first * first + second * second, 1) + arguments.NORM_EPSILON) * scale


@gluon.jit
def _scale_rows(halves, scale):
    """Multiplies rows [64, 128] in shared memory by a scale, and divides them by their norms."""
    first, second = halves.index(0).load(_COPIED).to(gl.float32), halves.index(1).load(_COPIED).to(gl.float32)
    by_row = gl.expand_dims(_scales_of(first, second, scale), 1)
    halves.index(0).store((first * by_row).to(gl.bfloat16))
    halves.index(1).store((second * by_row).to(gl.bfloat16))


@gluon.jit
def _scales_of_rows(halves, scale):
    """A scale divided by the norms of rows [64, 128] in shared memory."""
    first, second = halves.index(0).load(_COPIED).to(gl.float32), halves.index(1).load(_COPIED).to(gl.float32)
    return gl.convert_layout(_scales_of(first, second, scale), _ROWS)


@gluon.jit
def _quarters_and_tokens():
    """The numbers of quarters [4, 1, 1], and of tokens of one: of threads [1, 16, 1], of a thread [1, 1, 16]."""
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, _COLUMNS)))
    of = gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, gl.SliceLayout(2, _COLUMNS)))
    at = gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, gl.SliceLayout(0, _COLUMNS)))
    by_quarter = gl.expand_dims(gl.expand_dims(quarter, 1), 2)
    return by_quarter, gl.expand_dims(gl.expand_dims(of, 0), 2), gl.expand_dims(gl.expand_dims(at, 0), 0)


@gluon.jit
def _inverse_of_blocks(a):
    """The inverse [64, 64] of 1 + A within blocks of 16, by columns: a row is final before it changes later ones."""
    blocks = gl.reshape(a, [_CHUNK, 4, _QUARTER])
    by_block: gl.constexpr = blocks.type.layout
    row = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, gl.SliceLayout(2, by_block)))
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, by_block)))
    is_own = gl.expand_dims(gl.expand_dims(row // _QUARTER, 1) == gl.expand_dims(block, 0), 2)
    own = gl.reshape(gl.sum(gl.where(is_own, blocks, 0.0), 1), [4, _QUARTER, _QUARTER])
    room = gl.allocate_shared_memory(gl.float32, [4, _QUARTER, _QUARTER], _LINEAR_BLOCKS)
    room.store(gl.permute(own, (0, 2, 1)))
    gl.thread_barrier()
    _, of, at = _quarters_and_tokens()
    x = gl.where(at == of, 1.0, 0.0) + gl.zeros([4, _QUARTER, _QUARTER], gl.float32, layout=_COLUMNS)
    for i in gl.static_range(_QUARTER - 1):
        final = gl.sum(gl.where(at == i, x.to(gl.int32, bitcast=True), 0), 2).to(gl.float32, bitcast=True)
        x -= room.slice(i, 1, 1).load(_COLUMNS) * gl.expand_dims(final, 2)
    own = gl.convert_layout(gl.reshape(gl.permute(x, (0, 2, 1)), [_CHUNK, _QUARTER]), gl.SliceLayout(1, by_block))
    inverse = gl.where(is_own, gl.expand_dims(own, 1), 0.0)
    return gl.convert_layout(gl.reshape(inverse, [_CHUNK, _CHUNK]), _PRODUCTS)


@gluon.jit
def _product(left, right, room):
    """The product of matrices [64, 64] in float16. room: for the right one; no warp reads it now"""
    room.store(right.to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    operand = gl.convert_layout(left.to(gl.float16), _OF_PRODUCTS)
    product = gl.zeros([_CHUNK, _CHUNK], gl.float32, layout=_PRODUCTS)
    product = warpgroup_mma(operand, room, product, use_acc=False, is_async=True)
    product = warpgroup_mma_wait(0, (product,))
    room._keep_alive()
    return product


@gluon.jit
def _inverse(a, row, column):
    """The inverse [64, 64] of 1 + A: of blocks, then of pairs of blocks, and of pairs of those."""
    inverse = _inverse_of_blocks(a)
    operand = a.to(gl.float16)
    # By turns: when a warp has passed a product's barrier, all warps have waited for the product before.
    room, other = _new_room(gl.float16), _new_room(gl.float16)
    for doublings in gl.static_range(2):
        between = gl.where(((row ^ column) & -(_QUARTER << doublings)) == (_QUARTER << doublings), operand, 0.0)
        inverse -= _product(inverse, _product(between, inverse, room), other)
    return inverse


@gluon.jit
def _store_solved(products, solver, of_rows, k_rows, to, num_rows):
    """Writes the products [64, 64] times T, and T, transposed, times rows of k [64, 128].

    products, k_rows: in shared memory
    of_rows:          factors of rows of k, [64, 1] in the layout of products
    """
    room, for_rows = _new_room(gl.bfloat16), _new_room(gl.bfloat16)
    room.store(solver.to(gl.bfloat16))
    for_rows.store((solver * of_rows).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    none = gl.zeros([_CHUNK, _CHUNK], gl.float32, layout=_PRODUCTS)
    transposed = for_rows.permute((1, 0))
    solved = (
        warpgroup_mma(products, room, none, use_acc=False, is_async=True),
        warpgroup_mma(transposed, k_rows.index(0), none, use_acc=False, is_async=True),
        warpgroup_mma(transposed, k_rows.index(1), none, use_acc=False, is_async=True),
    )
    solved = warpgroup_mma_wait(0, solved)
    products._keep_alive()
    room._keep_alive()
    for_rows._keep_alive()
    k_rows._keep_alive()
    for i in gl.static_range(3):
        first = to.products if i == 0 else to.write + (i - 1) * _HALF
        _store(first, to.row, num_rows, gl.convert_layout(solved[i].to(gl.bfloat16), _COPIED), _COPIED)


@gluon.jit
def _new_words(HEADS: gl.constexpr):
    """Shared memory for a word of each token of heads."""
    return gl.allocate_shared_memory(gl.float32, [HEADS, _CHUNK], _LINEAR)


@gluon.jit
def _of_head(words, head):
    """A head's words [64] of those in shared memory."""
    return words._reinterpret(gl.float32, words.shape, _LINEAR_WORDS).index(head)


@gluon.jit
def _strengths(of, num_rows, HEADS: gl.constexpr):
    """Shared memory with the tokens' strengths. They are there after the next barrier."""
    head, token = _row_and_column(_TOKENS, HEADS)
    strengths = _new_words(HEADS)
    strengths.store(gl.load(of.beta + (token * of.beta_token + head), mask=token + head * 0 < num_rows, other=0.0))
    return strengths


@gluon.jit
def _leave_if(is_left, decay_words):
    """Leaves chunks to the other kernel where is_left is true. Decays were stored before the last barrier.

    decay_words: addresses of the chunks' first words of decays, one or [HEADS, 1]
    """
    gl.store(decay_words + is_left.to(gl.int32) * 0, LEFT, mask=is_left)


@gluon.jit
def _leave_if_strong(strengths, decay_word):
    """Leaves a chunk whose strengths are not in [0, 2]: such a token may enlarge a state by more than its v."""
    _leave_if(gl.abs(strengths.load(_WORDS) - 1.0) > 1.0, decay_word)


@gluon.jit
def _of_rows(words):
    """Words in shared memory for rows of products, [64, 1]."""
    return gl.expand_dims(words.load(_ROWS), 1)


@gluon.jit
def _of_columns(words):
    """Words in shared memory for columns of products, [1, 64]."""
    return gl.expand_dims(words.load(gl.SliceLayout(0, _PRODUCTS)), 0)


@gluon.jit
def _as_columns(of_row):
    """Values of rows [64] for columns, [1, 64]."""
    return gl.expand_dims(gl.convert_layout(of_row, gl.SliceLayout(0, _PRODUCTS)), 0)


@gluon.jit
def _halves(first, second):
    """A matrix [64, 64] of products with the two halves of tokens, [64, 32] each."""
    both = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [_CHUNK, _CHUNK])
    return gl.convert_layout(both, _PRODUCTS)


@gluon.jit
def _rows_by_channel(of, to, words, num_rows, G: gl.constexpr):
    """Writes a chunk's values if channels decay by themselves."""
    k_rows, q_rows = _new_halves(), _new_halves()
    # Operands take the place of decays that were read: L1 has what shared memory leaves of it.
    space = gl.allocate_shared_memory(gl.bfloat16, [4, _CHUNK, _HALF], _SWIZZLED)
    decays = space._reinterpret(gl.float32, [2, _CHUNK, _HALF], _LINEAR)
    of_sums = gl.allocate_shared_memory(gl.float32, [2, 4, _HALF], _LINEAR)
    _copy(of.decay, of.decay_token, num_rows, decays, _COPIED_WORDS)
    _copy(of.k, of.k_token, num_rows, k_rows, _COPIED)
    _copy(of.q, of.q_token, num_rows, q_rows, _COPIED)
    strengths = _strengths(of, num_rows, 1)
    async_copy.wait_group(0)
    gl.thread_barrier()
    _scale_rows(k_rows, 1.0)
    _scale_rows(q_rows, G.RULE.scale)
    in_quarter: gl.constexpr = gl.SliceLayout(1, _QUARTERS)
    quarter = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, in_quarter)), 1)
    channel = gl.expand_dims(gl.arange(0, _HALF, layout=gl.SliceLayout(0, in_quarter)), 0)
    in_first = quarter < 2
    earlier = _new_room(gl.bfloat16)
    a = gl.zeros([_CHUNK, _CHUNK // 2], gl.float32, layout=_HALF_PRODUCTS)
    p, a_later, p_later = a, a, a
    least = gl.zeros([4, _HALF], gl.float32, layout=in_quarter)
    for half in range(2):
        decay = decays.index(half).load(_ELEMENTS)
        decay = _quarters_of(gl.where(decay < STRONGEST, STRONGEST, decay) * LOG2_E)
        sums = gl.sum(decay, 1)
        least = gl.minimum(least, sums)
        of_sums.index(half).store(sums)
        gl.thread_barrier()
        sum_0 = of_sums.index(half).slice(0, 1).load(in_quarter)
        sum_1 = of_sums.index(half).slice(1, 1).load(in_quarter)
        sum_2 = of_sums.index(half).slice(2, 1).load(in_quarter)
        sum_3 = of_sums.index(half).slice(3, 1).load(in_quarter)
        gl.store(words.decay + (channel + half * _HALF), gl.exp2(sum_0 + sum_1 + sum_2 + sum_3))
        since_middle = gl.associative_scan(decay, 1, _add)
        since_middle -= gl.expand_dims(gl.where(quarter % 2 == 0, sums, 0.0), 1)
        k = _quarters_of(k_rows.index(half).load(_ELEMENTS))
        q = _quarters_of(q_rows.index(half).load(_ELEMENTS))
        # All warps have read these rows before others are written in their place.
        gl.thread_barrier()
        powers = gl.exp2(-since_middle)
        after = gl.exp2(gl.where(in_first, sum_1 + sum_2 + sum_3, sum_3))
        until = (powers * gl.expand_dims(after, 1)).to(gl.bfloat16)
        k_until = _times(k, until)
        _put(_times(k, powers.to(gl.bfloat16)), earlier)
        powers = gl.exp2(since_middle)
        factors = powers.to(gl.bfloat16)
        k_later, q_later = space.index(2 * half), space.index(2 * half + 1)
        _put(_times(k, factors), k_later)
        _put(_times(q, factors), q_later)
        # Now since the middle of the first half. The factors are not multiplied first: their product may underflow.
        powers *= gl.expand_dims(gl.where(in_first, 1.0, gl.exp2(sum_2)), 1)
        powers *= gl.expand_dims(gl.where(in_first, 1.0, gl.exp2(sum_1)), 1)
        factors = powers.to(gl.bfloat16)
        _put(_times(k, factors), k_rows.index(half))
        _put(_times(q, factors), q_rows.index(half))
        since = (powers * gl.expand_dims(gl.exp2(sum_0), 1)).to(gl.bfloat16)
        fence_async_shared()
        gl.thread_barrier()
        first = earlier.slice(0, _CHUNK // 2).permute((1, 0))
        second = earlier.slice(_CHUNK // 2, _CHUNK // 2).permute((1, 0))
        a = warpgroup_mma(k_rows.index(half), first, a, is_async=True)
        p = warpgroup_mma(q_rows.index(half), first, p, is_async=True)
        a_later = warpgroup_mma(k_later, second, a_later, is_async=True)
        p_later = warpgroup_mma(q_later, second, p_later, is_async=True)
        _store_quarters(to.read + half * _HALF, to.row, num_rows, _times(q, since))
        _store_quarters(to.predict + half * _HALF, to.row, num_rows, _times(k, since))
        a, p, a_later, p_later = warpgroup_mma_wait(0, (a, p, a_later, p_later))
        gl.thread_barrier()
        _put(k_until, k_rows.index(half))
    # Products read these rooms until here: no new room may lie there.
    q_rows._keep_alive()
    space._keep_alive()
    earlier._keep_alive()
    row, column = _row_and_column(_PRODUCTS)
    products = _new_room(gl.bfloat16)
    products.store(gl.where(row >= column, _halves(p, p_later), 0.0).to(gl.bfloat16))
    beta = _of_head(strengths, 0)
    a = gl.where(row > column, _halves(a, a_later) * _of_rows(beta), 0.0)
    solver = _inverse(a, row, column) * _of_columns(beta)
    _store_solved(products, solver, 1.0, k_rows, to, num_rows)
    _leave_if(least < -_MOST_DECAY, words.decay)
    _leave_if_strong(beta, words.decay)


class HeadDecays(NamedTuple):
    """Sums of logarithms of decays to base 2, for each token of heads.

    since_middle: from the middle of the token's half of the chunk; before it, the negative sum until there
    pair:         from the middle of the chunk until the token, or from the token until there
    since:        from where the chunk begins until the token, that one included
    until:        from after the token until the chunk ends
    """

    since_middle: Any
    pair: Any
    since: Any
    until: Any


class AddedDecays(NamedTuple):
    """Sums of decays in shared memory: of a token's quarter until the token, after it [HEADS, 64], of quarters."""

    begun: Any
    left: Any
    sums: Any


@gluon.jit
def _decays_at(of, quarter, at, num_rows):
    """Logarithms of decays to base 2, of heads that follow each other. quarter: a number of those of all heads"""
    token = quarter % 4 * _QUARTER + at
    decay_at = of.decay + ((quarter // 4).to(gl.int64) * of.decay_head + token * of.decay_token)
    decay = gl.load(decay_at, mask=token < num_rows, other=0.0)
    return gl.where(decay < STRONGEST, STRONGEST, decay) * LOG2_E


@gluon.jit
def _add_decays(of, num_rows, HEADS: gl.constexpr):
    """Adds up the decays of heads. They are there after the next barrier."""
    if HEADS == 1:
        quarter, until, at = _quarters_and_tokens()
        decay = _decays_at(of, quarter, at, num_rows)
        begun, left = gl.sum(gl.where(at <= until, decay, 0.0), 2), gl.sum(gl.where(at > until, decay, 0.0), 2)
        sums = gl.sum(decay, 2)
    else:
        # A thread adds up a quarter, of which one head has too few. Differences of such short sums have digits enough.
        quarter = gl.expand_dims(gl.arange(0, 4 * HEADS, layout=gl.SliceLayout(1, _BY_QUARTER)), 1)
        at = gl.expand_dims(gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, _BY_QUARTER)), 0)
        decay = _decays_at(of, quarter, at, num_rows)
        begun, sums = gl.associative_scan(decay, 1, _add), gl.sum(decay, 1)
        left = gl.expand_dims(sums, 1) - begun
    added = AddedDecays(
        _new_words(HEADS), _new_words(HEADS), gl.allocate_shared_memory(gl.float32, [HEADS, 4], _LINEAR)
    )
    added.begun.store(gl.reshape(begun, [HEADS, _CHUNK]))
    added.left.store(gl.reshape(left, [HEADS, _CHUNK]))
    added.sums.store(gl.reshape(sums, [HEADS, 4]))
    return added


@gluon.jit
def _decays_of(begun, left, sum_0, sum_1, sum_2, sum_3, token):
    """HeadDecays of tokens. begun, left: AddedDecays of these; sum_0 to sum_3: of the quarters"""
    quarter = token // _QUARTER
    in_first = left + gl.where(quarter == 0, sum_1, 0.0)
    in_second = begun + gl.where(quarter == 3, sum_2, 0.0)
    earlier = gl.where(quarter == 0, 0.0, sum_0) + gl.where(quarter == 3, sum_1 + sum_2, 0.0)
    later = gl.where(quarter == 3, 0.0, sum_3) + gl.where(quarter == 0, sum_1 + sum_2, 0.0)
    return HeadDecays(
        gl.where(quarter % 2 == 0, -left, begun),
        gl.where(quarter < 2, in_first, in_second),
        begun + (earlier + gl.where(quarter == 2, sum_1, 0.0)),
        left + (later + gl.where(quarter == 1, sum_2, 0.0)),
    )


@gluon.jit
def _store_factors(words, of_q, of_k):
    """Writes factors [64] of a chunk's rows."""
    number = gl.arange(0, _CHUNK, layout=_ROWS)
    gl.store(words.of_q + number, of_q)
    gl.store(words.of_k + number, of_k)


@gluon.jit
def _with_keys(rows, k_rows):
    """Products [64, 64] of rows and rows of k, in shared memory."""
    products = gl.zeros([_CHUNK, _CHUNK], gl.float32, layout=_PRODUCTS)
    for half in gl.static_range(2):
        earlier = k_rows.index(half).permute((1, 0))
        products = warpgroup_mma(rows.index(half), earlier, products, use_acc=half == 1, is_async=True)
    products = warpgroup_mma_wait(0, (products,))
    rows._keep_alive()
    k_rows._keep_alive()
    return products


@gluon.jit
def _rows_by_head(of, to, words, num_rows, G: gl.constexpr):
    """Writes a chunk's values if all channels decay as one."""
    k_rows, q_rows = _new_halves(), _new_halves()
    _copy(of.k, of.k_token, num_rows, k_rows, _COPIED)
    _copy(of.q, of.q_token, num_rows, q_rows, _COPIED)
    strengths = _strengths(of, num_rows, 1)
    added = _add_decays(of, num_rows, 1)
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    begun, left = _of_head(added.begun, 0).load(_ROWS), _of_head(added.left, 0).load(_ROWS)
    sums = added.sums._reinterpret(gl.float32, [4], _LINEAR_WORDS)
    sum_0, sum_1 = sums.slice(0, 1).load(_ROWS), sums.slice(1, 1).load(_ROWS)
    sum_2, sum_3 = sums.slice(2, 1).load(_ROWS), sums.slice(3, 1).load(_ROWS)
    decays = _decays_of(begun, left, sum_0, sum_1, sum_2, sum_3, gl.arange(0, _CHUNK, layout=_ROWS))
    since, until, pair = gl.exp2(decays.since), gl.exp2(decays.until), gl.exp2(decays.pair)
    of_k, of_q = _scales_of_rows(k_rows, 1.0), _scales_of_rows(q_rows, G.RULE.scale)
    _store_factors(words, since * of_q, since * of_k)
    gl.store(words.decay + gl.arange(0, 1, layout=_ROWS), gl.exp2(sum_0 + sum_1 + sum_2 + sum_3))
    row, column = _row_and_column(_PRODUCTS)
    near = gl.expand_dims(gl.exp2(decays.since_middle), 1) * _as_columns(gl.exp2(-decays.since_middle) * of_k)
    pair = gl.expand_dims(pair, 1) * _as_columns(pair * of_k)
    between = gl.where(_half_of(row) == _half_of(column), near, pair)
    # One after the other: registers are few.
    products = _new_room(gl.bfloat16)
    p = _with_keys(q_rows, k_rows) * gl.expand_dims(of_q, 1)
    products.store(gl.where(row >= column, p * between, 0.0).to(gl.bfloat16))
    beta = _of_head(strengths, 0)
    a = _with_keys(k_rows, k_rows) * (_of_rows(beta) * gl.expand_dims(of_k, 1))
    a = gl.where(row > column, a * between, 0.0)
    solver = _inverse(a, row, column) * _of_columns(beta)
    _store_solved(products, solver, gl.expand_dims(until * of_k, 1), k_rows, to, num_rows)
    _leave_if(gl.abs(decays.since_middle) > _MOST_DECAY, words.decay)
    _leave_if_strong(beta, words.decay)


class HeadFactors(NamedTuple):
    """Powers of HeadDecays in shared memory, [HEADS, 64] each. far: 1 / near"""

    near: Any
    far: Any
    pair: Any
    since: Any
    until: Any


@gluon.jit
def _rows_of_sums(of, to, words, num_rows, HEADS: gl.constexpr, G: gl.constexpr):
    """Writes a chunk's values of a k head's v heads for sums; of: those of the first one."""
    k_rows, q_rows = _new_halves(), _new_halves()
    _copy(of.k, of.k_token, num_rows, k_rows, _COPIED)
    _copy(of.q, of.q_token, num_rows, q_rows, _COPIED)
    strengths = _strengths(of, num_rows, HEADS)
    added = _add_decays(of, num_rows, HEADS)
    gl.thread_barrier()
    head, token = _row_and_column(_TOKENS, HEADS)
    sum_0, sum_1 = added.sums.slice(0, 1, 1).load(_TOKENS), added.sums.slice(1, 1, 1).load(_TOKENS)
    sum_2, sum_3 = added.sums.slice(2, 1, 1).load(_TOKENS), added.sums.slice(3, 1, 1).load(_TOKENS)
    decays = _decays_of(added.begun.load(_TOKENS), added.left.load(_TOKENS), sum_0, sum_1, sum_2, sum_3, token)
    factors = HeadFactors(_new_words(HEADS), _new_words(HEADS), _new_words(HEADS), _new_words(HEADS), _new_words(HEADS))
    factors.near.store(gl.exp2(decays.since_middle))
    factors.far.store(gl.exp2(-decays.since_middle))
    factors.pair.store(gl.exp2(decays.pair))
    factors.since.store(gl.exp2(decays.since))
    factors.until.store(gl.exp2(decays.until))
    decay_words = words.decay + head * G.WORDS
    gl.store(decay_words, gl.exp2(sum_0 + sum_1 + sum_2 + sum_3))
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    _leave_if(gl.abs(decays.since_middle) > _MOST_DECAY, decay_words)
    p = _with_keys(q_rows, k_rows) * G.RULE.scale
    row, column = _row_and_column(_PRODUCTS)
    for i in range(HEADS):
        beta, pair, since = _of_head(strengths, i), _of_head(factors.pair, i), _of_head(factors.since, i)
        near, far = _of_rows(_of_head(factors.near, i)), _of_columns(_of_head(factors.far, i))
        between = gl.where(_half_of(row) == _half_of(column), near * far, _of_rows(pair) * _of_columns(pair))
        products = gl.where(row >= column, p * (between * _of_columns(beta)), 0.0)
        products = gl.convert_layout(products.to(gl.bfloat16), _COPIED)
        _store(to.products + i * G.ROW, to.row, num_rows, products, _COPIED)
        of_head = WordsOfChunk(words.decay, words.of_q + i * G.WORDS, words.of_k + i * G.WORDS)
        until = _of_head(factors.until, i).load(_ROWS) * beta.load(_ROWS)
        _store_factors(of_head, since.load(_ROWS) * G.RULE.scale, until)


class WrittenRows(NamedTuple):
    """Addresses of a chunk's first rows of the workspace, and what brings one to the next token's row."""

    products: Any
    write: Any
    read: Any
    predict: Any
    row: Any


@gluon.jit(do_not_specialize=["num_seqs", "most_q_len"])
def _hopper_chunk_rows_kernel(
    q,
    k,
    decay,
    beta,
    rows,
    chunk_words,
    source,
    q_indptr,
    num_seqs,
    most_q_len,
    q_token,
    q_head,
    k_token,
    k_head,
    decay_token,
    decay_head,
    beta_token,
    G: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    place = gl.program_id(1)
    head = gl.program_id(0).to(gl.int64) * TOGETHER
    tile = tile_at(place, q_indptr, num_seqs, _CHUNK, False)
    slot = gl.load(source + tile.seq)
    num_rows = gl.minimum(tile.q_len - tile.begin, _CHUNK)
    if (tile.q_len > most_q_len) & (num_rows > 0) & (slot >= _BEGINS):
        first = (tile.first_token + tile.begin).to(gl.int64)
        of_k = head // G.RATIO
        of = ChunkRows(
            q + (first * q_token + of_k * q_head),
            q_token,
            k + (first * k_token + of_k * k_head),
            k_token,
            decay + (first * decay_token + head * decay_head),
            decay_token,
            decay_head,
            beta + (first * beta_token + head),
            beta_token,
        )
        at = rows_of(rows, first, head, G)
        to = WrittenRows(at.products, at.write, at.read, at.predict, G.HEADS * G.ROW)
        words = words_of(chunk_words, place, head, G)
        if G.CHANNELS:
            _rows_by_channel(of, to, words, num_rows, G)
        elif G.RULE.corrects:
            _rows_by_head(of, to, words, num_rows, G)
        else:
            _rows_of_sums(of, to, words, num_rows, TOGETHER, G)


def _takes(args: RecurArgs) -> bool:
    """True if the kernel computes such a layer, and its copies of 16 bytes begin where they must."""
    tokens, recurrence, slots, _, workspace = args
    of_layer = recurrence.normalises if recurrence.corrects else not (recurrence.normalises or slots.has_channels)
    dims = slots.state.shape[2] == _DIM.value and tokens.k.dtype == torch.bfloat16
    copied = (tokens.q, tokens.k, *(tokens.decay,) * slots.has_channels)
    return of_layer and dims and workspace.data_ptr() % 16 == 0 and begin_at_16(*copied)


def launch_hopper_chunk_rows(args: RecurArgs, *, most_q_len: int) -> None:
    """Like `launch_chunk_rows`, which it launches for layers and chunks that the kernel does not take."""
    if not _takes(args):
        launch_chunk_rows(args, most_q_len=most_q_len)
        return
    tokens, places, num_heads = args.tokens, args.places, args.slots.state.shape[1]
    geometry, rows, chunk_words = chunk_geometry(args)
    together = 1 if args.rule.corrects else math.gcd(geometry.RATIO, _MOST_TOGETHER)
    launch(
        _hopper_chunk_rows_kernel,
        (num_heads // together, num_tiles(places.num_tokens, places.num_seqs, arguments.CHUNK)),
        tokens.q,
        tokens.k,
        tokens.decay,
        tokens.beta,
        rows,
        chunk_words,
        places.source,
        places.q_indptr,
        places.num_seqs,
        most_q_len,
        *tokens.q.stride()[:2],
        *tokens.k.stride()[:2],
        *tokens.decay.stride()[:2],
        tokens.beta.stride(0),
        G=geometry,
        TOGETHER=together,
        num_warps=4,
        # Two programs run on a multiprocessor if channels decay by themselves, and else four.
        maxnreg=255 if args.slots.has_channels else 128,
    )
    launch_chunk_rows(args, most_q_len=most_q_len, only_left=True)
