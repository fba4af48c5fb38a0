"""Walks over the chunks of a prompt, with a block of columns of a v head's state in registers.

With the values that chunk_rows.py has written of a chunk, and S the state before it:

    missed  = v - predict S        for sums: v
    out     = read S + products missed
    S       <- exp(G[last]) * S + write^T missed

If a head decays as one, read is q and predict is k, for sums write is: with a factor for each row, by which products
with them are multiplied.
The state before the first chunk is that of the source slot, with its pending tokens folded in one by one.
"""

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
        row = tl.arange(0, _CHUNK)
        place = first_token // _CHUNK + seq
        for begin in range(0, q_len, _CHUNK):
            is_row = row < q_len - begin
            token = (first_token + begin + row).to(tl.int64)
            of = rows_of(rows, token, head, G)
            in_k = is_row[:, None] & is_channel[None, :]
            in_v = is_row[:, None] & is_column[None, :]
            v_at = v + (token * v_token + head * v_head)[:, None] + column[None, :]
            missed = tl.load(v_at, mask=in_v, other=0.0).to(tl.float32)
            operand = states.to(rows.dtype.element_ty)
            words = words_of(chunk_words, place + begin // _CHUNK, head, G)
            k_at = k + token * k_token + k_head_of * k_head
            if G.RULE.corrects:
                predict_at = of.predict if G.CHANNELS else k_at
                predict = tl.load(predict_at[:, None] + channel[None, :], mask=in_k, other=0.0)
                predicted = tl.dot(predict, operand, input_precision=exact())
                missed -= predicted if G.CHANNELS else predicted * tl.load(words.of_k + row)[:, None]
            if G.CHANNELS:
                read = tl.load(of.read[:, None] + channel[None, :], mask=in_k, other=0.0)
                result = tl.dot(read, operand, input_precision=exact())
            else:
                q_at = q + token * q_token + k_head_of * q_head
                read = tl.load(q_at[:, None] + channel[None, :], mask=in_k, other=0.0)
                result = tl.dot(read, operand, input_precision=exact()) * tl.load(words.of_q + row)[:, None]
            products = tl.load(of.products[:, None] + row[None, :], mask=is_row[:, None], other=0.0)
            result = tl.dot(products, missed.to(rows.dtype.element_ty), result, input_precision=exact())
            out_at = out + (token * out_token + head * out_head)[:, None] + column[None, :]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=in_v)
            # On AMD fewer registers are in use if this is loaded after outputs are stored.
            write_at = of.write if G.CHANNELS or G.RULE.corrects else k_at
            write = tl.load(write_at[:, None] + channel[None, :], mask=in_k, other=0.0)
            if not (G.CHANNELS or G.RULE.corrects):
                missed *= tl.load(words.of_k + row)[:, None]
            if G.CHANNELS:
                states = states * tl.load(words.decay + channel, mask=is_channel, other=0.0)[:, None]
            else:
                states = states * tl.load(words.decay)
            states = tl.dot(tl.trans(write), missed.to(rows.dtype.element_ty), states, input_precision=exact())
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
