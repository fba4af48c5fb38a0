"""The walk of states/chunk_walk.py over the chunks of a prompt for Hopper, in Gluon.

A warp group has 64 columns of a v head's state in registers, and another one loads chunks into shared memory. Products
of a chunk need the state after the chunk before, so they wait for each other, and for nothing else: the state is kept
transposed, so that it and the changes that tokens make are operands as they lie in registers.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rocm_attn.kernels.any_alignment import begin_at_16
from rocm_attn.kernels.hopper.rings import GATHERING_THREADS
from rocm_attn.kernels.hopper.warp_groups import leave
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import RecurArgs
from rocm_attn.kernels.states.chunk_space import chunk_geometry, rows_of, words_of
from rocm_attn.kernels.states.chunk_walk import launch_chunk_walk, walked
from rocm_attn.kernels.states.updates import load_token

_BEGINS = gl.constexpr(arguments.BEGINS)
_CHUNK = gl.constexpr(arguments.CHUNK)
_DIM = gl.constexpr(128)
COLUMNS = gl.constexpr(64)
_STAGES = gl.constexpr(3)

# Copies of 16 bytes of 64 columns, or of 128.
_COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_COPIED_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_WORDS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# [64 columns, 128 channels] and [64 columns, 64 tokens], and the same as operands.
_STATES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_RESULTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_OF_STATES = gl.constexpr(gl.DotOperandLayout(0, _STATES.value, 2))
_OF_RESULTS = gl.constexpr(gl.DotOperandLayout(0, _RESULTS.value, 2))
_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


class WalkedRows(NamedTuple):
    """Where rows of a sequence's first token lie, and what brings an address to the next token's row.

    words: of the first chunk
    """

    v: Any
    v_token: Any
    products: Any
    predict: Any
    predict_token: Any
    read: Any
    read_token: Any
    write: Any
    write_token: Any
    row: Any
    words: Any


class ChunkRooms(NamedTuple):
    """Shared memory for chunks, by stages. full, free: barriers of a stage: loaded, and read"""

    v: Any
    products: Any
    predict: Any
    read: Any
    write: Any
    words: Any
    full: Any
    free: Any


class WalkedState(NamedTuple):
    """A sequence's states: before the first chunk, kept tokens that it is without, and the place of the one after.

    state_row: what brings an address to the next channel's row
    """

    state: Any
    slot: Any
    state_row: Any
    k: Any
    k_row: Any
    change: Any
    change_row: Any
    decay: Any
    decay_row: Any
    held: Any
    to: Any


@gluon.jit
def _offsets(token, layout: gl.constexpr, MANY: gl.constexpr):
    """Offsets of a chunk's elements [64, MANY] from its first row."""
    row = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, layout)).to(gl.int64)
    column = gl.arange(0, MANY, layout=gl.SliceLayout(0, layout))
    return gl.expand_dims(row * token, 1) + gl.expand_dims(column, 0)


@gluon.jit
def _load(rows, rooms, q_len, G: gl.constexpr):
    """Loads all chunks; zeros of rows that are not there."""
    of_v = _offsets(rows.v_token, _COPIED, COLUMNS)
    of_products = _offsets(rows.row, _COPIED, _CHUNK)
    of_predict = _offsets(rows.predict_token, _COPIED_WIDE, _DIM)
    of_read = _offsets(rows.read_token, _COPIED_WIDE, _DIM)
    of_write = _offsets(rows.write_token, _COPIED_WIDE, _DIM)
    row_of_wide = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _COPIED_WIDE)), 1)
    row_of_narrow = gl.expand_dims(gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _COPIED)), 1)
    word = gl.arange(0, rooms.words.shape[1], layout=_WORDS)
    for chunk in range(gl.cdiv(q_len, _CHUNK)):
        stage = chunk % _STAGES
        left = q_len - chunk * _CHUNK
        in_wide = row_of_wide < left
        in_narrow = row_of_narrow < left
        first = gl.cast(chunk, gl.int64) * _CHUNK
        mbarrier.wait(rooms.free.index(stage), ((chunk // _STAGES) & 1) ^ 1)
        if G.RULE.corrects:
            predict = rows.predict + first * rows.predict_token + of_predict
            async_copy.async_copy_global_to_shared(rooms.predict.index(stage), predict, mask=in_wide)
        read = rows.read + first * rows.read_token + of_read
        async_copy.async_copy_global_to_shared(rooms.read.index(stage), read, mask=in_wide)
        v = rows.v + first * rows.v_token + of_v
        async_copy.async_copy_global_to_shared(rooms.v.index(stage), v, mask=in_narrow)
        products = rows.products + first * rows.row + of_products
        async_copy.async_copy_global_to_shared(rooms.products.index(stage), products, mask=in_narrow)
        write = rows.write + first * rows.write_token + of_write
        async_copy.async_copy_global_to_shared(rooms.write.index(stage), write, mask=in_wide)
        words = rows.words + first // _CHUNK * (G.HEADS * G.WORDS) + word
        async_copy.async_copy_global_to_shared(rooms.words.index(stage), words, mask=word < G.WORDS)
        async_copy.mbarrier_arrive(rooms.full.index(stage), increment_count=False)
    # No thread ends before its copies do.
    async_copy.commit_group()
    async_copy.wait_group(0)
    leave()


@gluon.jit
def _new_rooms(DTYPE: gl.constexpr, MANY: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    return gl.allocate_shared_memory(DTYPE, [MANY, ROWS, WIDTH], _SWIZZLED)


@gluon.jit
def _elements(state_row):
    """Offsets of the block's elements [64, 128] within a slot."""
    channel = gl.arange(0, _DIM, layout=gl.SliceLayout(0, _STATES)).to(gl.int64)
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, _STATES))
    return gl.expand_dims(channel * state_row, 0) + gl.expand_dims(column, 1)


@gluon.jit
def _state_before(of, G: gl.constexpr):
    """The state [64, 128] before the first chunk, with the kept tokens folded in as updates.py does it."""
    states = gl.zeros([COLUMNS, _DIM], gl.float32, layout=_STATES)
    if of.slot >= 0:
        channel = gl.arange(0, _DIM, layout=gl.SliceLayout(0, _STATES))
        column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, _STATES))
        states = gl.load(of.state + _elements(of.state_row)).to(gl.float32)
        for step in range(of.held):
            old = gl.cast(step, gl.int64)
            k_row, change, decay = load_token(
                of.k + old * of.k_row,
                of.change + old * of.change_row,
                of.decay + old * of.decay_row,
                old < of.held,
                channel,
                column,
                G,
            )
            factor = gl.exp(decay)
            states *= gl.expand_dims(factor, 0) if G.CHANNELS else factor
            k_row = gl.expand_dims(k_row.to(gl.float32), 0) + gl.zeros_like(states)
            states = gl.fma(k_row, gl.expand_dims(change, 1) + gl.zeros_like(states), states)
    return states


@gluon.jit
def _words(words, FIRST: gl.constexpr, MANY: gl.constexpr, layout: gl.constexpr):
    """A row [1, MANY] of words in shared memory."""
    return gl.expand_dims(words.slice(FIRST, MANY).load(gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _values_and_words(rooms, chunk, G: gl.constexpr):
    """v [64 columns, 64 tokens], decays and factors of rows of q and k (if channels decay: decays) of a chunk.

    Waits until it is there.
    """
    stage = chunk % _STAGES
    mbarrier.wait(rooms.full.index(stage), (chunk // _STAGES) & 1)
    values = rooms.v.index(stage).permute((1, 0)).load(_RESULTS)
    words = rooms.words.index(stage)
    decay = _words(words, 0 if G.CHANNELS else 2 * _CHUNK, _DIM if G.CHANNELS else 1, _STATES)
    of_q, of_k = decay, decay
    if not G.CHANNELS:
        of_q = _words(words, 0, _CHUNK, _RESULTS)
        of_k = _words(words, _CHUNK, _CHUNK, _RESULTS)
    return values, decay, of_q, of_k


@gluon.jit
def _walk(before, rooms, of_out, q_len, out, out_token, G: gl.constexpr):
    """Walks over all chunks, and writes their outputs and the state after them."""
    DTYPE: gl.constexpr = of_out.dtype
    num_chunks = gl.cdiv(q_len, _CHUNK)
    if num_chunks > 0:
        states = _state_before(before, G)
        none = gl.zeros([COLUMNS, _CHUNK], gl.float32, layout=_RESULTS)
        row = gl.arange(0, _CHUNK, layout=gl.SliceLayout(1, _COPIED))
        out_at = out + _offsets(out_token, _COPIED, COLUMNS)
        values, decay, of_q, of_k = _values_and_words(rooms, 0, G)
        for chunk in range(num_chunks):
            stage = chunk % _STAGES
            operand = gl.convert_layout(states.to(DTYPE), _OF_STATES)
            # Before products begin: ptxas waits for all of them before it touches registers that hold earlier ones.
            states *= decay
            fence_async_shared()
            if G.RULE.corrects:
                predict = rooms.predict.index(stage).permute((1, 0))
                predicted = warpgroup_mma(operand, predict, none, use_acc=False, is_async=True)
            read = rooms.read.index(stage).permute((1, 0))
            result = warpgroup_mma(operand, read, none, use_acc=False, is_async=True)
            missed = values.to(gl.float32)
            if G.RULE.corrects:
                predicted = warpgroup_mma_wait(1, (predicted,))
                missed -= predicted if G.CHANNELS else predicted * of_k
            to_read = gl.convert_layout(missed.to(DTYPE), _OF_RESULTS)
            to_write = to_read
            products = rooms.products.index(stage).permute((1, 0))
            if G.CHANNELS:
                result = warpgroup_mma(to_read, products, result, is_async=True)
            else:
                if not G.RULE.corrects:
                    to_write = gl.convert_layout((missed * of_k).to(DTYPE), _OF_RESULTS)
                within = warpgroup_mma(to_read, products, none, use_acc=False, is_async=True)
            states = warpgroup_mma(to_write, rooms.write.index(stage), states, is_async=True)
            if G.CHANNELS:
                result = warpgroup_mma_wait(1, (result,))
            else:
                result, within = warpgroup_mma_wait(1, (result, within))
                result = result * of_q + within
            of_out.store(gl.permute(result.to(DTYPE), (1, 0)))
            gl.thread_barrier()
            gl.store(out_at, of_out.load(_COPIED), mask=gl.expand_dims(row < q_len - chunk * _CHUNK, 1))
            out_at += out_token * _CHUNK
            # While the product with the state runs; of the last chunk once more.
            values, decay, of_q, of_k = _values_and_words(rooms, gl.minimum(chunk + 1, num_chunks - 1), G)
            states = warpgroup_mma_wait(0, (states,))
            # No warp reads the stage or the outputs in shared memory after this.
            gl.thread_barrier()
            mbarrier.arrive(rooms.free.index(stage), count=1)
        gl.store(before.to + _elements(before.state_row), states.to(before.to.dtype.element_ty))
    leave()


@gluon.jit(do_not_specialize=["most_q_len"])
def _hopper_chunk_walk_kernel(
    q,
    k,
    v,
    out,
    rows,
    chunk_words,
    state,
    kept_k,
    kept_change,
    kept_decay,
    source,
    target,
    pending,
    q_indptr,
    most_q_len,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    state_slot,
    state_head,
    state_row,
    kept_k_slot,
    kept_k_row,
    kept_k_head,
    kept_change_slot,
    kept_change_row,
    kept_change_head,
    kept_decay_slot,
    kept_decay_row,
    kept_decay_head,
    G: gl.constexpr,
):
    BLOCKS: gl.constexpr = G.DV // COLUMNS
    DTYPE: gl.constexpr = rows.dtype.element_ty
    seq = gl.program_id(1)
    head = (gl.program_id(0) // BLOCKS).to(gl.int64)
    k_head_of = head // G.RATIO
    first_column = (gl.program_id(0) % BLOCKS) * COLUMNS
    first_token = gl.load(q_indptr + seq)
    q_len = gl.load(q_indptr + seq + 1) - first_token
    slot = gl.load(source + seq).to(gl.int64)
    if (q_len <= most_q_len) | (slot < _BEGINS):
        q_len = 0
    first = first_token.to(gl.int64)
    of = rows_of(rows, first, head, G)
    words = words_of(chunk_words, first_token // _CHUNK + seq, head, G).of_q
    ROW: gl.constexpr = G.HEADS * G.ROW
    predict, predict_token = of.predict, ROW
    read, read_token = of.read, ROW
    write, write_token = of.write, ROW
    if not G.CHANNELS:
        predict, predict_token = k + (first * k_token + k_head_of * k_head), k_token
        read, read_token = q + (first * q_token + k_head_of * q_head), q_token
        if not G.RULE.corrects:
            write, write_token = predict, predict_token
    of_v = v + (first * v_token + head * v_head + first_column)
    of_chunks = WalkedRows(
        of_v, v_token, of.products, predict, predict_token, read, read_token, write, write_token, ROW, words
    )
    of_block = head * state_head + first_column
    before = WalkedState(
        state + (slot * state_slot + of_block),
        slot,
        state_row,
        kept_k + (slot * kept_k_slot + k_head_of * kept_k_head),
        kept_k_row,
        kept_change + (slot * kept_change_slot + head * kept_change_head + first_column),
        kept_change_row,
        kept_decay + (slot * kept_decay_slot + head * kept_decay_head),
        kept_decay_row,
        gl.load(pending + seq),
        state + (gl.load(target + seq).to(gl.int64) * state_slot + of_block),
    )
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=GATHERING_THREADS)
        mbarrier.init(free.index(i), count=1)
    rooms = ChunkRooms(
        _new_rooms(DTYPE, _STAGES, _CHUNK, COLUMNS),
        _new_rooms(DTYPE, _STAGES, _CHUNK, _CHUNK),
        _new_rooms(DTYPE, _STAGES, _CHUNK, _DIM),
        _new_rooms(DTYPE, _STAGES, _CHUNK, _DIM),
        _new_rooms(DTYPE, _STAGES, _CHUNK, _DIM),
        gl.allocate_shared_memory(gl.float32, [_STAGES, _DIM if G.CHANNELS else 2 * _DIM], _PLAIN),
        full,
        free,
    )
    of_out = gl.allocate_shared_memory(DTYPE, [_CHUNK, COLUMNS], _SWIZZLED)
    fence_async_shared()
    gl.thread_barrier()
    out_rows = out + (first * out_token + head * out_head + first_column)
    gl.warp_specialize(
        [
            (_walk, (before, rooms, of_out, q_len, out_rows, out_token, G)),
            (_load, (of_chunks, rooms, q_len, G)),
        ],
        [4],
        [104],
    )


def _takes(args: RecurArgs) -> bool:
    """True if the kernel computes such a layer, and its copies begin where they must."""
    tokens = args.tokens
    dk, dv = args.slots.state.shape[2:]
    dims = dk == _DIM.value and dv % COLUMNS.value == 0 and tokens.k.itemsize == 2
    return dims and args.workspace.data_ptr() % 16 == 0 and begin_at_16(tokens.q, tokens.k, tokens.v)


def launch_hopper_chunk_walk(args: RecurArgs, *, most_q_len: int) -> None:
    """Like `launch_chunk_walk`, which it launches for layers that the kernel does not take."""
    if not _takes(args):
        launch_chunk_walk(args, most_q_len=most_q_len)
        return
    assert most_q_len >= args.slots.most_kept
    _, num_heads, _, dv = args.slots.state.shape
    geometry, rows, chunk_words = chunk_geometry(args)
    launch(
        _hopper_chunk_walk_kernel,
        (num_heads * (dv // COLUMNS.value), args.places.num_seqs),
        *walked(args, rows, chunk_words, most_q_len),
        G=geometry,
        num_warps=4,
    )
