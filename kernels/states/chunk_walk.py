"""Walks over the chunks of a prompt, with a block of columns of a v head's state in registers.

With the values that chunk_rows.py has written of a chunk, and S the state before it:

    missed  = v - predict S        for sums: v
    out     = read S + products missed
    S       <- exp(G[last]) * S + write^T missed

If a head decays as one, read is q and predict is k, for sums write is: with a factor for each row, by which products
with them are multiplied.
The state before the first chunk is that of the source slot, with its pending tokens folded in one by one.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.backend import on_nvidia
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import RecurArgs
from rocm_attn.kernels.states.chunk_space import chunk_geometry, exact, least_block, rows_of, words_of
from rocm_attn.kernels.states.updates import changed, decayed, load_token

_BEGINS = tl.constexpr(arguments.BEGINS)
_CHUNK = tl.constexpr(arguments.CHUNK)
# Bytes of chunks that are loaded ahead into shared memory, with which an H100 was twice as fast; it has 227 KiB.
_MOST_BYTES_AHEAD = 200 << 10


class WalkedChunks(NamedTuple):
    """A sequence's chunks for a v head.

    q, k, v:            addresses of the head's rows of the step's first token
    q_token and so on:  what brings an address to the next token's row
    rows, words:        the workspace
    head:               int64
    first_token, q_len: of the sequence
    place:              of its first chunk
    """

    q: Any
    q_token: Any
    k: Any
    k_token: Any
    v: Any
    v_token: Any
    rows: Any
    words: Any
    head: Any
    first_token: Any
    q_len: Any
    place: Any


class ChunkValues(NamedTuple):
    """A chunk's v in float32, and its rows and words of the workspace.

    Where a layer has no use for a value, another one is in its place: Triton 3.6 carries no None through a loop.
    """

    v: Any
    predict: Any
    read: Any
    products: Any
    write: Any
    of_q: Any
    of_k: Any
    decay: Any


@triton.jit
def _chunk_at(of, begin, channel, column, G: tl.constexpr):
    """The values of the chunk that begins at a token of the sequence; 0 where no token is."""
    row = tl.arange(0, _CHUNK)
    is_row = row < of.q_len - begin
    token = (of.first_token + begin + row).to(tl.int64)
    in_k = is_row[:, None] & (channel < G.DK)[None, :]
    in_v = is_row[:, None] & (column < G.DV)[None, :]
    at = rows_of(of.rows, token, of.head, G)
    k_at = of.k + token * of.k_token
    words = words_of(of.words, of.place + begin // _CHUNK, of.head, G)
    is_there = begin < of.q_len
    v_rows = tl.load((of.v + token * of.v_token)[:, None] + column[None, :], mask=in_v, other=0.0).to(tl.float32)
    read_at = at.read if G.CHANNELS else of.q + token * of.q_token
    read = tl.load(read_at[:, None] + channel[None, :], mask=in_k, other=0.0)
    products = tl.load(at.products[:, None] + row[None, :], mask=is_row[:, None], other=0.0)
    write_at = at.write if G.CHANNELS or G.RULE.corrects else k_at
    write = tl.load(write_at[:, None] + channel[None, :], mask=in_k, other=0.0)
    predict = write
    if G.RULE.corrects:
        predict_at = at.predict if G.CHANNELS else k_at
        predict = tl.load(predict_at[:, None] + channel[None, :], mask=in_k, other=0.0)
    if G.CHANNELS:
        decay = tl.load(words.decay + channel, mask=channel < tl.where(is_there, G.DK, 0), other=0.0)
        of_q, of_k = decay, decay
    else:
        decay = tl.load(words.decay, mask=is_there, other=0.0)
        of_q = tl.load(words.of_q + row, mask=is_row, other=0.0)
        of_k = tl.load(words.of_k + row, mask=is_row, other=0.0)
    return ChunkValues(v_rows, predict, read, products, write, of_q, of_k, decay)


@triton.jit(do_not_specialize=["most_q_len"])
def _chunk_walk_kernel(
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
    G: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    DK_BLOCK: tl.constexpr = G.DK_BLOCK
    # True: a chunk is loaded while the one before ends. By counts for MI300 and MI355 an iteration takes 0.69 to 0.96
    # of the clocks so; where two programs share a CU 0.72 to 0.87, but GDN's on MI300 1.11 (Qwen3-Next, Kimi-Linear,
    # Mamba2).
    AHEAD: tl.constexpr = not on_nvidia()
    BLOCKS: tl.constexpr = (G.DV + COLUMNS - 1) // COLUMNS
    seq = tl.program_id(1)
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    k_head_of = head // G.RATIO
    column = (tl.program_id(0) % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < G.DV
    channel = tl.arange(0, G.DK_BLOCK)
    is_channel = channel < G.DK
    first_token = tl.load(q_indptr + seq)
    q_len = tl.load(q_indptr + seq + 1) - first_token
    slot = tl.load(source + seq).to(tl.int64)
    if (q_len > most_q_len) & (slot >= _BEGINS):
        in_state = is_channel[:, None] & is_column[None, :]
        at = (channel.to(tl.int64) * state_row)[:, None] + (head * state_head + column)[None, :]
        states = tl.zeros([DK_BLOCK, COLUMNS], tl.float32)
        if slot >= 0:
            states = tl.load(state + slot * state_slot + at, mask=in_state, other=0.0).to(tl.float32)
            held = tl.load(pending + seq)
            for step in range(held):
                old = tl.cast(step, tl.int64)
                k_row, change, decay_of = load_token(
                    kept_k + slot * kept_k_slot + old * kept_k_row + k_head_of * kept_k_head,
                    kept_change + slot * kept_change_slot + old * kept_change_row + head * kept_change_head,
                    kept_decay + slot * kept_decay_slot + old * kept_decay_row + head * kept_decay_head,
                    old < held,
                    channel,
                    column,
                    G,
                )
                states = changed(decayed(states, decay_of, G), k_row, change)
        of_chunks = WalkedChunks(
            q + k_head_of * q_head,
            q_token,
            k + k_head_of * k_head,
            k_token,
            v + head * v_head,
            v_token,
            rows,
            chunk_words,
            head,
            first_token,
            q_len,
            first_token // _CHUNK + seq,
        )
        row = tl.arange(0, _CHUNK)
        chunk = _chunk_at(of_chunks, 0, channel, column, G)
        for begin in range(0, q_len, _CHUNK):
            if not AHEAD:
                chunk = _chunk_at(of_chunks, begin, channel, column, G)
            operand = states.to(rows.dtype.element_ty)
            missed = chunk.v
            if G.RULE.corrects:
                predicted = tl.dot(chunk.predict, operand, input_precision=exact())
                missed -= predicted if G.CHANNELS else predicted * chunk.of_k[:, None]
            result = tl.dot(chunk.read, operand, input_precision=exact())
            if not G.CHANNELS:
                result *= chunk.of_q[:, None]
            result = tl.dot(chunk.products, missed.to(rows.dtype.element_ty), result, input_precision=exact())
            token = (first_token + begin + row).to(tl.int64)
            out_at = out + (token * out_token + head * out_head)[:, None] + column[None, :]
            in_v = (row < q_len - begin)[:, None] & is_column[None, :]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=in_v)
            if not (G.CHANNELS or G.RULE.corrects):
                missed *= chunk.of_k[:, None]
            states = states * (chunk.decay[:, None] if G.CHANNELS else chunk.decay)
            states = tl.dot(tl.trans(chunk.write), missed.to(rows.dtype.element_ty), states, input_precision=exact())
            if AHEAD:
                chunk = _chunk_at(of_chunks, begin + _CHUNK, channel, column, G)
        to = state + tl.load(target + seq).to(tl.int64) * state_slot + at
        tl.store(to, states.to(state.dtype.element_ty), mask=in_state)


def walked(args: RecurArgs, rows: Tensor, chunk_words: Tensor, most_q_len: int) -> tuple[object, ...]:
    """The arguments of a launch, up to G."""
    tokens, slots, places = args.tokens, args.slots, args.places
    return (
        tokens.q,
        tokens.k,
        tokens.v,
        tokens.out,
        rows,
        chunk_words,
        slots.state,
        *slots.kept,
        places.source,
        places.target,
        places.pending,
        places.q_indptr,
        most_q_len,
        *tokens.q.stride()[:2],
        *tokens.k.stride()[:2],
        *tokens.v.stride()[:2],
        *tokens.out.stride()[:2],
        *slots.strides,
    )


def launch_chunk_walk(args: RecurArgs, *, most_q_len: int) -> None:
    """Writes rows of out and target slots of sequences with more than most_q_len new tokens, which must be at least D.

    args: with a workspace as chunk_rows.py has written it for these sequences
    """
    slots = args.slots
    assert most_q_len >= slots.most_kept
    _, num_heads, _, dv = slots.state.shape
    geometry, rows, chunk_words = chunk_geometry(args)
    # Columns of a program's state, and bytes of the copy of it that is an operand. On an H100 several prompts were
    # faster with twice as many.
    most_columns, state_bytes = (64, 16384) if on_nvidia() else (32, 8192)
    itemsize = slots.k.itemsize
    of_bytes = state_bytes // (geometry.DK_BLOCK * itemsize)
    columns = max(least_block(slots), min(geometry.DV_BLOCK, most_columns, of_bytes))
    rows_of_k = 3 if args.rule.corrects else 2
    chunk_bytes = arguments.CHUNK * (rows_of_k * geometry.DK_BLOCK + columns + arguments.CHUNK) * itemsize
    stages = max(1, min(3, _MOST_BYTES_AHEAD // chunk_bytes))
    options = {"num_stages": stages} if on_nvidia() else {"num_stages": 1, "waves_per_eu": 2}
    launch(
        _chunk_walk_kernel,
        (num_heads * triton.cdiv(dv, columns), args.places.num_seqs),
        *walked(args, rows, chunk_words, most_q_len),
        G=geometry,
        COLUMNS=columns,
        num_warps=4 if geometry.DK_BLOCK * columns <= 8192 else 8,
        **options,
    )
