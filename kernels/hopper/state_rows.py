"""The workspace of states/chunk_rows.py for chunks of 64 tokens of a delta rule, for Hopper, in Gluon.

If channels decay by themselves, a thread has two channels of a quarter of a chunk: 16 tokens, whose decays it adds up
by itself. Factors of rows are bfloat16, and so are rows of q and k after they were divided by their norms. Operands of
products lie in shared memory. Loads, products and stores of a program overlap with those of another one.

No exponent is a difference of long sums here either. Factors of q and k are powers of the sums since the middle of a
chunk's half, and the sums of quarters bring them to the other half, or to the chunk's begin or end. A chunk with a
quarter that decays too much for that is left to chunk_rows.py, which is launched afterwards: its words say so.

The inverse is computed by elimination in blocks of 16 tokens, and then from pair to pair of blocks, as in updates.py,
but in float16: no entry is above 2 as long as no strength is, since decays, keys of norm 1 and such strengths enlarge
no state. Chunks with other strengths are left, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from rocm_attn.kernels.any_alignment import begin_at_16
from rocm_attn.kernels.attention.softmax import LOG2_E
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import RecurrenceRule, RecurrentSlots, RecurrentTokens, StatePlaces
from rocm_attn.kernels.states.chunk_rows import launch_chunk_rows
from rocm_attn.kernels.states.chunk_space import LEFT, STRONGEST, chunk_geometry, rows_of, words_of
from rocm_attn.kernels.states.token_tiles import num_tiles, tile_at

_BEGINS = gl.constexpr(arguments.BEGINS)
_CHUNK = gl.constexpr(arguments.CHUNK)
_QUARTER = gl.constexpr(arguments.CHUNK // 4)
_DIM = gl.constexpr(128)
# The logarithm to base 2 of the strongest decay of a quarter. Elements of normalised rows that are above 2^-10 keep all
# digits, and smaller ones lose less than their rows' rounding. A model whose tokens decay by exp(-5) at most, as KDA's
# do with a lower bound, has no stronger one.
_MOST_DECAY = gl.constexpr(116.0)

# [64, 128]: two channels of a quarter of the rows; the same as [4, 16, 128].
_ELEMENTS = gl.constexpr(gl.BlockedLayout([16, 2], [1, 32], [4, 2], [1, 0]))
_QUARTERS = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 2], [2, 1, 0]))
# Copies of 16 bytes, of two bytes or four each.
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
_COPIED_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0]))
# [64, 128]: rows by eight threads each.
_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
_PRODUCTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
_SOLVED = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
# [4, 16, 16]: a column of a block's inverse; and [4, 16, 4, 16], with a block's rows before its columns.
_COLUMNS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 8, 4], [4, 2, 1], [2, 1, 0]))
_BLOCKS = gl.constexpr(gl.BlockedLayout([1, 1, 4, 4], [1, 8, 1, 4], [4, 2, 1, 1], [3, 2, 1, 0]))

_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_LINEAR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_LINEAR_BLOCKS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


class ChunkRows(NamedTuple):
    """Addresses of a chunk's first rows, and what brings an address to the next token's row."""

    q: Any
    q_token: Any
    k: Any
    k_token: Any
    v: Any
    v_token: Any
    decay: Any
    decay_token: Any
    beta: Any
    beta_token: Any


@gluon.jit
def _new_room():
    """Shared memory for an operand."""
    return gl.allocate_shared_memory(gl.bfloat16, [_CHUNK, _DIM], _SWIZZLED)


@gluon.jit
def _add(left, right):
    return left + right


@gluon.jit
def _copy(at, token, num_rows, to, layout: gl.constexpr):
    """Begins a copy of rows [64, 128] to shared memory; zeros of rows that are not there."""
    row = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, _DIM, layout=gl.SliceLayout(0, layout)), 0)
    async_copy.async_copy_global_to_shared(to, at + row * token + column, mask=row + column * 0 < num_rows)
    async_copy.commit_group()


@gluon.jit
def _quarters_of(rows):
    return gl.convert_layout(gl.reshape(rows, [4, _QUARTER, _DIM]), _QUARTERS)


@gluon.jit
def _times(rows, factors):
    """Products of bfloat16, two at once."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [rows, factors], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _put(rows, to):
    """Writes rows [4, 16, 128] to shared memory as an operand [64, 128]."""
    to.store(gl.convert_layout(gl.reshape(rows, [_CHUNK, _DIM]), _ELEMENTS))


@gluon.jit
def _store(first, num_rows, rows, layout: gl.constexpr, COLUMNS: gl.constexpr):
    """Writes rows [64, COLUMNS] that begin at addresses [64]."""
    row = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, layout))
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    mask = gl.expand_dims(row < num_rows, 1) & (column >= 0)
    gl.store(gl.expand_dims(first, 1) + column, rows, mask=mask)


@gluon.jit
def _store_quarters(first, num_rows, rows):
    _store(first, num_rows, gl.convert_layout(gl.reshape(rows, [_CHUNK, _DIM]), _ELEMENTS), _ELEMENTS, _DIM)


@gluon.jit
def _scale_rows(rows, scale):
    """Multiplies rows [64, 128] in shared memory by a scale, and divides them by their norms. Returns both as one."""
    values = rows.load(_ROWS).to(gl.float32)
    scales = gl.rsqrt(gl.sum(values * values, 1) + arguments.NORM_EPSILON) * scale
    rows.store((values * gl.expand_dims(scales, 1)).to(gl.bfloat16))
    return scales


@gluon.jit
def _inverse_of_blocks(a):
    """The inverse [64, 64] of 1 + A within blocks of 16, by columns: a row is final before it changes later ones."""
    first = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, _BLOCKS))))
    first = gl.expand_dims(gl.expand_dims(gl.expand_dims(first, 1), 2), 3)
    second = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, _BLOCKS))))
    second = gl.expand_dims(gl.expand_dims(gl.expand_dims(second, 0), 0), 3)
    blocks = gl.convert_layout(gl.reshape(a, [4, _QUARTER, 4, _QUARTER]), _BLOCKS)
    blocks = gl.sum(gl.where(first == second, blocks, 0.0), 2)
    room = gl.allocate_shared_memory(gl.float32, [4, _QUARTER, _QUARTER], _LINEAR_BLOCKS)
    room.store(gl.permute(blocks, (0, 2, 1)))
    gl.thread_barrier()
    at = gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, gl.SliceLayout(0, _COLUMNS)))
    at = gl.expand_dims(gl.expand_dims(at, 0), 0)
    of = gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, gl.SliceLayout(2, _COLUMNS)))
    of = gl.expand_dims(gl.expand_dims(of, 0), 2)
    x = gl.where(at == of, 1.0, 0.0) + gl.zeros([4, _QUARTER, _QUARTER], gl.float32, layout=_COLUMNS)
    for i in gl.static_range(_QUARTER - 1):
        final = gl.sum(gl.where(at == i, x.to(gl.int32, bitcast=True), 0), 2).to(gl.float32, bitcast=True)
        x -= room.slice(i, 1, 1).load(_COLUMNS) * gl.expand_dims(final, 2)
    by_row = gl.convert_layout(gl.permute(x, (0, 2, 1)), gl.SliceLayout(2, _BLOCKS))
    diagonal = gl.where(first == second, gl.expand_dims(by_row, 2), 0.0)
    return gl.convert_layout(gl.reshape(diagonal, [_CHUNK, _CHUNK]), _PRODUCTS)


@gluon.jit
def _product(left, right):
    """The product of matrices [64, 64] in float16."""
    left_room = gl.allocate_shared_memory(gl.float16, [_CHUNK, _CHUNK], _SWIZZLED)
    right_room = gl.allocate_shared_memory(gl.float16, [_CHUNK, _CHUNK], _SWIZZLED)
    left_room.store(left.to(gl.float16))
    right_room.store(right.to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    product = gl.zeros([_CHUNK, _CHUNK], gl.float32, layout=_PRODUCTS)
    product = warpgroup_mma(left_room, right_room, product, use_acc=False, is_async=True)
    product = warpgroup_mma_wait(0, (product,))
    left_room._keep_alive()
    right_room._keep_alive()
    gl.thread_barrier()
    return product


@gluon.jit
def _with_pairs(inverse, a, row, column, SIZE: gl.constexpr):
    """The inverse within blocks of twice the size. SIZE: of blocks within which it is given"""
    pairs = gl.where(((row ^ column) & -SIZE) == SIZE, a, 0.0)
    pairs = _product(pairs, inverse)
    return inverse - _product(inverse, pairs)


@gluon.jit
def _inverse(a, row, column):
    """The inverse [64, 64] of 1 + A."""
    inverse = _with_pairs(_inverse_of_blocks(a), a, row, column, _QUARTER)
    return _with_pairs(inverse, a, row, column, 2 * _QUARTER)


@gluon.jit
def _solver(inverse):
    """The inverse as an operand."""
    room = gl.allocate_shared_memory(gl.bfloat16, [_CHUNK, _CHUNK], _SWIZZLED)
    room.store(inverse.to(gl.bfloat16))
    return room


@gluon.jit
def _store_solved(of_u, values, of_w, keys, to, num_rows):
    """Writes u and w: products of operands [64, 64] and of rows [64, 128] in shared memory."""
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    none = gl.zeros([_CHUNK, _DIM], gl.float32, layout=_SOLVED)
    u = warpgroup_mma(of_u, values, none, use_acc=False, is_async=True)
    w = warpgroup_mma(of_w, keys, none, use_acc=False, is_async=True)
    u, w = warpgroup_mma_wait(0, (u, w))
    of_u._keep_alive()
    of_w._keep_alive()
    values._keep_alive()
    keys._keep_alive()
    row = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _COPIED))
    _store(to.u + row * to.row, num_rows, gl.convert_layout(u.to(gl.bfloat16), _COPIED), _COPIED, _DIM)
    _store(to.w + row * to.row, num_rows, gl.convert_layout(w.to(gl.bfloat16), _COPIED), _COPIED, _DIM)


@gluon.jit
def _grows(of, num_rows):
    """True if a token's strength is not in [0, 2]: it may then enlarge a state by more than its v."""
    token = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _ROWS))
    beta = gl.load(of.beta + token * of.beta_token, mask=token < num_rows, other=0.0)
    return gl.max(gl.abs(beta - 1.0), 0) > 1.0


@gluon.jit
def _as_columns(of_row):
    """Values of rows [64] for columns, [1, 64]."""
    return gl.expand_dims(gl.convert_layout(of_row, gl.SliceLayout(0, _PRODUCTS)), 0)


@gluon.jit
def _rows_by_channel(of, to, words, num_rows, G: gl.constexpr):
    """Writes a chunk's values if channels decay by themselves."""
    raw_k, raw_q, of_w = _new_room(), _new_room(), _new_room()
    decays = gl.allocate_shared_memory(gl.float32, [_CHUNK, _DIM], _LINEAR)
    of_sums = gl.allocate_shared_memory(gl.float32, [4, _DIM], _LINEAR)
    _copy(of.decay, of.decay_token, num_rows, decays, _COPIED_WORDS)
    _copy(of.k, of.k_token, num_rows, raw_k, _COPIED)
    _copy(of.q, of.q_token, num_rows, raw_q, _COPIED)
    async_copy.wait_group(2)
    gl.thread_barrier()
    decay = decays.load(_ELEMENTS)
    decay = _quarters_of(gl.where(decay < STRONGEST, STRONGEST, decay) * LOG2_E)
    sums = gl.sum(decay, 1)
    async_copy.wait_group(0)
    of_sums.store(sums)
    gl.thread_barrier()
    _scale_rows(raw_k, 1.0)
    _scale_rows(raw_q, G.RULE.scale)
    gl.thread_barrier()
    if (gl.min(gl.reshape(sums, [4 * _DIM]), 0) < -_MOST_DECAY) | _grows(of, num_rows):
        gl.store(words.decay, LEFT)
    else:
        in_quarter: gl.constexpr = gl.SliceLayout(1, _QUARTERS)
        quarter = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, in_quarter)), 1)
        of_channel: gl.constexpr = gl.SliceLayout(0, in_quarter)
        channel = gl.arange(0, _DIM, layout=of_channel)
        sum_0 = of_sums.slice(0, 1).load(in_quarter)
        sum_1 = of_sums.slice(1, 1).load(in_quarter)
        sum_2 = of_sums.slice(2, 1).load(in_quarter)
        sum_3 = of_sums.slice(3, 1).load(in_quarter)
        gl.store(gl.expand_dims(words.decay + channel, 0), gl.exp2(sum_0 + sum_1 + sum_2 + sum_3))
        before = gl.exp2(gl.where(quarter < 2, sum_0, sum_0 + sum_1 + sum_2))
        after = gl.exp2(gl.where(quarter < 2, sum_1 + sum_2 + sum_3, sum_3))
        between = gl.where(quarter < 2, sum_1, sum_2)
        since_middle = gl.associative_scan(decay, 1, _add)
        since_middle -= gl.expand_dims(gl.where(quarter % 2 == 0, sums, 0.0), 1)
        row = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _ELEMENTS))
        of_k, of_q, earlier = _new_room(), _new_room(), _new_room()
        k = _quarters_of(raw_k.load(_ELEMENTS))
        powers = gl.exp2(since_middle)
        factors = powers.to(gl.bfloat16)
        since = (powers * gl.expand_dims(before, 1)).to(gl.bfloat16)
        _put(_times(k, factors), of_k)
        _put(_times(k, since), of_w)
        powers = gl.exp2(-since_middle)
        _put(_times(k, powers.to(gl.bfloat16)), earlier)
        until = (powers * gl.expand_dims(after, 1)).to(gl.bfloat16)
        _store_quarters(to.write + row * to.row, num_rows, _times(k, until))
        in_pair = gl.where(gl.expand_dims(quarter < 2, 1), -since_middle, since_middle) + gl.expand_dims(between, 1)
        in_pair = gl.exp2(in_pair).to(gl.bfloat16)
        _put(_times(k, in_pair), raw_k)
        q = _quarters_of(raw_q.load(_ELEMENTS))
        _put(_times(q, factors), of_q)
        _put(_times(q, in_pair), raw_q)
        fence_async_shared()
        gl.thread_barrier()
        zeros = gl.zeros([_CHUNK, _CHUNK], gl.float32, layout=_PRODUCTS)
        near, far = earlier.permute((1, 0)), raw_k.permute((1, 0))
        a_near = warpgroup_mma(of_k, near, zeros, use_acc=False, is_async=True)
        p_near = warpgroup_mma(of_q, near, zeros, use_acc=False, is_async=True)
        a_far = warpgroup_mma(raw_k, far, zeros, use_acc=False, is_async=True)
        p_far = warpgroup_mma(raw_q, far, zeros, use_acc=False, is_async=True)
        _store_quarters(to.read + row * to.row, num_rows, _times(q, since))
        a_near, p_near, a_far, p_far = warpgroup_mma_wait(0, (a_near, p_near, a_far, p_far))
        # Products read these rooms until here: no new room may lie there.
        of_k._keep_alive()
        of_q._keep_alive()
        earlier._keep_alive()
        raw_k._keep_alive()
        raw_q._keep_alive()
        gl.thread_barrier()
        values = _new_room()
        _copy(of.v, of.v_token, num_rows, values, _COPIED)

        row = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _PRODUCTS)), 1)
        column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, _PRODUCTS)), 0)
        is_near = (row ^ column) < _CHUNK // 2
        p = gl.where(row >= column, gl.where(is_near, p_near, p_far), 0.0)
        of_rows = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _PRODUCTS))
        _store(to.products + of_rows * to.row, num_rows, p.to(gl.bfloat16), _PRODUCTS, _CHUNK)
        beta_of_row = gl.load(of.beta + row * of.beta_token, mask=row < num_rows, other=0.0)
        a = gl.where(row > column, gl.where(is_near, a_near, a_far) * beta_of_row, 0.0)
        inverse = _inverse(a, row, column)
        beta = gl.load(of.beta + column * of.beta_token, mask=column < num_rows, other=0.0)
        solver = _solver(inverse * beta)
        _store_solved(solver, values, solver, of_w, to, num_rows)


@gluon.jit
def _rows_by_head(of, to, words, num_rows, G: gl.constexpr):
    """Writes a chunk's values if all channels decay as one."""
    raw_k, raw_q, values = _new_room(), _new_room(), _new_room()
    _copy(of.k, of.k_token, num_rows, raw_k, _COPIED)
    _copy(of.q, of.q_token, num_rows, raw_q, _COPIED)
    _copy(of.v, of.v_token, num_rows, values, _COPIED)
    row = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _PRODUCTS)), 1)
    column = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(0, _PRODUCTS)), 0)
    decay = gl.load(of.decay + column * of.decay_token, mask=column < num_rows, other=0.0)
    decay = gl.where(decay < STRONGEST, STRONGEST, decay) * LOG2_E
    middle = (row & -(_CHUNK // 2)) + (_QUARTER - 1)
    is_until_middle = (column <= middle) & (column > row)
    since_middle = gl.where((column > middle) & (column <= row), decay, gl.where(is_until_middle, -decay, 0.0))
    since_middle = gl.sum(since_middle, 1)
    if (gl.max(gl.abs(since_middle), 0) > _MOST_DECAY) | _grows(of, num_rows):
        gl.store(words.decay, LEFT)
        async_copy.wait_group(0)
    else:
        is_second = row >= _CHUNK // 2
        is_in_pair = (is_second == (column <= row)) & (is_second == (column >= _CHUNK // 2))
        in_pair = gl.exp2(gl.sum(gl.where(is_in_pair, decay, 0.0), 1))
        since = gl.exp2(gl.sum(gl.where(column <= row, decay, 0.0), 1))
        until = gl.exp2(gl.sum(gl.where(column > row, decay, 0.0), 1))
        near = gl.expand_dims(gl.exp2(since_middle), 1) * _as_columns(gl.exp2(-since_middle))
        between = gl.where((row ^ column) < _CHUNK // 2, near, gl.expand_dims(in_pair, 1) * _as_columns(in_pair))
        async_copy.wait_group(1)
        gl.thread_barrier()
        of_k = gl.convert_layout(_scale_rows(raw_k, 1.0), gl.SliceLayout(1, _PRODUCTS))
        of_q = gl.convert_layout(_scale_rows(raw_q, G.RULE.scale), gl.SliceLayout(1, _PRODUCTS))
        fence_async_shared()
        gl.thread_barrier()
        zeros = gl.zeros([_CHUNK, _CHUNK], gl.float32, layout=_PRODUCTS)
        earlier = raw_k.permute((1, 0))
        a = warpgroup_mma(raw_k, earlier, zeros, use_acc=False, is_async=True)
        p = warpgroup_mma(raw_q, earlier, zeros, use_acc=False, is_async=True)
        a, p = warpgroup_mma_wait(0, (a, p))
        raw_q._keep_alive()
        of_rows = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _PRODUCTS))
        gl.store(words.read + of_rows, since * of_q)
        gl.store(words.write + of_rows, until * of_k)
        channel = gl.arange(0, _DIM, layout=gl.SliceLayout(0, _PRODUCTS))
        total = gl.exp2(gl.sum(decay, 1))
        gl.store(words.decay + gl.expand_dims(channel, 0), gl.expand_dims(total, 1) + gl.expand_dims(channel * 0.0, 0))
        p = gl.where(row >= column, p * between, 0.0)
        _store(to.products + of_rows * to.row, num_rows, p.to(gl.bfloat16), _PRODUCTS, _CHUNK)
        beta_of_row = gl.load(of.beta + row * of.beta_token, mask=row < num_rows, other=0.0)
        inverse = _inverse(gl.where(row > column, a * between * beta_of_row, 0.0), row, column)
        inverse *= gl.load(of.beta + column * of.beta_token, mask=column < num_rows, other=0.0)
        of_w = _solver(inverse * _as_columns(since))
        _store_solved(_solver(inverse), values, of_w, raw_k, to, num_rows)


class WrittenRows(NamedTuple):
    """Addresses of a chunk's first rows of the workspace, and what brings one to the next token's row."""

    u: Any
    products: Any
    w: Any
    read: Any
    write: Any
    row: Any


@gluon.jit(do_not_specialize=["num_seqs", "most_q_len"])
def _hopper_chunk_rows_kernel(
    q,
    k,
    v,
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
    v_token,
    v_head,
    decay_token,
    decay_head,
    beta_token,
    G: gl.constexpr,
):
    place = gl.program_id(1)
    head = gl.program_id(0).to(gl.int64)
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
            v + (first * v_token + head * v_head),
            v_token,
            decay + (first * decay_token + head * decay_head),
            decay_token,
            beta + (first * beta_token + head),
            beta_token,
        )
        at = rows_of(rows, first, head, G)
        to = WrittenRows(at.u, at.products, at.w, at.read, at.write, G.HEADS * G.ROW)
        words = words_of(chunk_words, place, head, G)
        if G.CHANNELS:
            _rows_by_channel(of, to, words, num_rows, G)
        else:
            _rows_by_head(of, to, words, num_rows, G)


def _takes(tokens: RecurrentTokens, recurrence: RecurrenceRule, slots: RecurrentSlots, workspace: Tensor) -> bool:
    """True if the kernel computes such a layer, and its copies of 16 bytes begin where they must."""
    of_layer = recurrence.corrects and recurrence.normalises and tokens.k.dtype == torch.bfloat16
    dims = slots.state.shape[2:] == (_DIM.value, _DIM.value)
    copied = (tokens.q, tokens.k, tokens.v, *(tokens.decay,) * slots.has_channels)
    return of_layer and dims and workspace.data_ptr() % 16 == 0 and begin_at_16(*copied)


def launch_hopper_chunk_rows(
    tokens: RecurrentTokens,
    recurrence: RecurrenceRule,
    slots: RecurrentSlots,
    places: StatePlaces,
    workspace: Tensor,
    *,
    most_q_len: int,
) -> None:
    """Like `launch_chunk_rows`, which it launches for layers and chunks that the kernel does not take."""
    if not _takes(tokens, recurrence, slots, workspace):
        launch_chunk_rows(tokens, recurrence, slots, places, workspace, most_q_len=most_q_len)
        return
    num_heads = slots.state.shape[1]
    geometry, rows, chunk_words = chunk_geometry(recurrence, slots, places, workspace)
    launch(
        _hopper_chunk_rows_kernel,
        (num_heads, num_tiles(places.num_tokens, places.num_seqs, arguments.CHUNK)),
        tokens.q,
        tokens.k,
        tokens.v,
        tokens.decay,
        tokens.beta,
        rows,
        chunk_words,
        places.source,
        places.q_indptr,
        places.num_seqs,
        most_q_len,
        *tokens.strides[:9],
        G=geometry,
        num_warps=8,
        # Two programs run on a multiprocessor.
        maxnreg=128,
    )
    launch_chunk_rows(tokens, recurrence, slots, places, workspace, most_q_len=most_q_len, only_left=True)
