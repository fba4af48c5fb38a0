"""A recurrence (arguments.RecurrenceRule) token by token: decode, verification, and every step of deterministic mode.

A program has a block of columns of one v head's state of one sequence, and folds its tokens in one after the other: the
pending ones of the source slot, then the new ones. Columns do not depend on each other.

A token that is kept leaves the change that it made to the state, and a later step adds it by the same instruction. So
it gives the same bits as one that is folded in at once, and a sequence's bits depend neither on its batch nor on how
its tokens were cut into steps, as long as states are in float32: one in bfloat16 is rounded after each step.

The rows of the next token are loaded while one is folded in: with few programs a processor has nothing else to do.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.backend import on_nvidia
from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import RecurArgs, RecurrenceRule
from rocm_attn.kernels.states.updates import change_and_out, changed, decayed, load_token
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_BEGINS = tl.constexpr(arguments.BEGINS)
# Most columns of a program's state, and most elements. On NVIDIA a warp has them all: no sum over channels goes through
# shared memory. 128 sequences of 32 heads of 128: 155 us, 163 with half as many (H200).
_MOST_COLUMNS = 64
_STATE_ELEMENTS = 4096
# Fewest channels of a program's state. With fewer, a thread may have one product of a sum. Compilers add it to those of
# other threads unrounded there and rounded elsewhere, so that threads differ in the change that they make, and only one
# of them stores it (Triton 3.6, sm_90, states of 8 x 16).
_LEAST_CHANNELS = 64
# Fewest elements of a wave's state on AMD, for the same reason: two channels of each thread, which loads four columns.
_LEAST_ELEMENTS = 512


class StepGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    RATIO:         v heads for each k head
    DK, DV:        of a state
    DK_BLOCK:      DK or the next power of two
    COLUMNS:       of a program's block
    STATE_ROW:     elements between a state's rows
    MOST_KEPT:     tokens that a slot has room for
    CHANNELS:      whether each channel decays by itself
    CLEARS:        whether rows of out that belong to no sequence are cleared
    EARLY:         whether it starts early (early.py)
    """

    RATIO: int
    DK: int
    DV: int
    DK_BLOCK: int
    COLUMNS: int
    STATE_ROW: int
    MOST_KEPT: int
    CHANNELS: bool
    RULE: RecurrenceRule
    CLEARS: bool
    EARLY: bool


@triton.jit
def _new_token(q_at, k_at, v_at, decay_at, beta_at, is_there, channel, column, G: tl.constexpr):
    """q and all that load_token returns of a new token, and its beta."""
    k_row, v_row, decay_of = load_token(k_at, v_at, decay_at, is_there, channel, column, G)
    q_row = tl.load(q_at + channel, mask=channel < tl.where(is_there, G.DK, 0), other=0.0)
    return q_row, k_row, v_row, decay_of, tl.load(beta_at, mask=is_there, other=0.0)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "most_q_len"])
def _token_steps_kernel(
    q,
    k,
    v,
    decay,
    beta,
    out,
    state,
    kept_k,
    kept_change,
    kept_decay,
    source,
    target,
    pending,
    q_indptr,
    num_seqs,
    num_tokens,
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
    out_token,
    out_head,
    state_slot,
    state_head,
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
):
    wait_for_launch(G.EARLY)
    seq = tl.program_id(1)
    COLUMNS: tl.constexpr = G.COLUMNS
    DK_BLOCK: tl.constexpr = G.DK_BLOCK
    BLOCKS: tl.constexpr = (G.DV + G.COLUMNS - 1) // G.COLUMNS
    head = (tl.program_id(0) // BLOCKS).to(tl.int64)
    k_head_of = head // G.RATIO
    block = tl.program_id(0) % BLOCKS
    column = block * G.COLUMNS + tl.arange(0, G.COLUMNS)
    is_column = column < G.DV
    channel = tl.arange(0, G.DK_BLOCK)
    is_channel = channel < G.DK
    out_rows = out + head * out_head + column
    zeros = tl.zeros([COLUMNS], out.dtype.element_ty)
    # Loaded together: each of these loads takes as long as a small state's.
    first_token = tl.load(q_indptr + seq)
    q_len = tl.load(q_indptr + seq + 1) - first_token
    slot = tl.load(source + seq).to(tl.int64)
    target_slot = tl.load(target + seq).to(tl.int64)
    held = tl.load(pending + seq)
    if G.CLEARS:
        for pad in range(tl.load(q_indptr + num_seqs) + seq, num_tokens, tl.num_programs(1)):
            tl.store(out_rows + tl.cast(pad, tl.int64) * out_token, zeros, mask=is_column)
    if q_len <= most_q_len:
        if slot < _BEGINS:
            for pad in range(first_token, first_token + q_len):
                tl.store(out_rows + tl.cast(pad, tl.int64) * out_token, zeros, mask=is_column)
        else:
            is_kept = q_len <= G.MOST_KEPT
            in_state = is_channel[:, None] & is_column[None, :]
            at = (channel * G.STATE_ROW)[:, None].to(tl.int64) + (head * state_head + column)[None, :]
            to = state + target_slot * state_slot + at
            states = tl.zeros([DK_BLOCK, COLUMNS], tl.float32)
            if slot >= 0:
                states = tl.load(state + slot * state_slot + at, mask=in_state, other=0.0).to(tl.float32)
            k_old = kept_k + slot * kept_k_slot + k_head_of * kept_k_head
            change_old = kept_change + slot * kept_change_slot + head * kept_change_head
            decay_old = kept_decay + slot * kept_decay_slot + head * kept_decay_head
            k_row, change, decay_of = load_token(k_old, change_old, decay_old, held > 0, channel, column, G)
            q_new = q + first_token.to(tl.int64) * q_token + k_head_of * q_head
            k_new = k + first_token.to(tl.int64) * k_token + k_head_of * k_head
            v_new = v + first_token.to(tl.int64) * v_token + head * v_head
            decay_new = decay + first_token.to(tl.int64) * decay_token + head * decay_head
            beta_new = beta + first_token.to(tl.int64) * beta_token + head
            coming = _new_token(q_new, k_new, v_new, decay_new, beta_new, q_len > 0, channel, column, G)
            for step in range(held):
                ahead = tl.cast(step + 1, tl.int64)
                next_k, next_change, next_decay = load_token(
                    k_old + ahead * kept_k_row,
                    change_old + ahead * kept_change_row,
                    decay_old + ahead * kept_decay_row,
                    ahead < held,
                    channel,
                    column,
                    G,
                )
                states = changed(decayed(states, decay_of, G), k_row, change)
                k_row, change, decay_of = next_k, next_change, next_decay
            if is_kept:
                tl.store(to, states.to(state.dtype.element_ty), mask=in_state)
            k_to = kept_k + target_slot * kept_k_slot + k_head_of * kept_k_head + channel
            change_to = kept_change + target_slot * kept_change_slot + head * kept_change_head + column
            decay_to = kept_decay + target_slot * kept_decay_slot + head * kept_decay_head
            # Programs of other columns have the same decay; those of other v heads, too, the same k.
            is_first = block == 0
            is_first_head = is_first & (head % G.RATIO == 0)
            q_row, k_row, v_row, decay_of, beta_of = coming
            for new in range(q_len):
                ahead = tl.cast(new + 1, tl.int64)
                next_q, next_k, next_v, next_decay, next_beta = _new_token(
                    q_new + ahead * q_token,
                    k_new + ahead * k_token,
                    v_new + ahead * v_token,
                    decay_new + ahead * decay_token,
                    beta_new + ahead * beta_token,
                    ahead < q_len,
                    channel,
                    column,
                    G,
                )
                made, row = change_and_out(states, q_row, k_row, v_row, decay_of, beta_of, G)
                out_at = out_rows + (first_token + new).to(tl.int64) * out_token
                tl.store(out_at, row.to(out.dtype.element_ty), mask=is_column)
                if is_kept:
                    room = tl.cast(new, tl.int64)
                    tl.store(change_to + room * kept_change_row, made, mask=is_column)
                    if is_first:
                        if G.CHANNELS:
                            tl.store(decay_to + room * kept_decay_row + channel, decay_of, mask=is_channel)
                        else:
                            tl.store(decay_to + room * kept_decay_row, decay_of)
                    if is_first_head:
                        tl.store(k_to + room * kept_k_row, k_row, mask=is_channel)
                # A last token that is kept changes the state in a later step.
                if (new + 1 < q_len) | (not is_kept):
                    states = changed(decayed(states, decay_of, G), k_row, made)
                q_row, k_row, v_row, decay_of, beta_of = next_q, next_k, next_v, next_decay, next_beta
            if not is_kept:
                tl.store(to, states.to(state.dtype.element_ty), mask=in_state)


def launch_token_steps(args: RecurArgs, *, most_q_len: int, clears: bool) -> None:
    """Writes rows of out and target slots of sequences with at most most_q_len new tokens.

    clears: whether rows of out that belong to no sequence are cleared
    """
    tokens, rule, slots, places, _ = args
    _, num_heads, dk, dv = slots.state.shape
    dk_block = max(_LEAST_CHANNELS, next_power_of_2(dk))
    early = starts_early(slots.state.device)
    columns = max(8, min(next_power_of_2(dv), _MOST_COLUMNS, _STATE_ELEMENTS // dk_block))
    launch(
        _token_steps_kernel,
        (num_heads * triton.cdiv(dv, columns), places.num_seqs),
        *tokens,
        slots.state,
        *slots.kept,
        places.source,
        places.target,
        places.pending,
        places.q_indptr,
        places.num_seqs,
        places.num_tokens,
        most_q_len,
        *tokens.strides,
        *slots.state.stride()[:2],
        *slots.strides[3:],
        G=StepGeometry(
            RATIO=num_heads // slots.k.shape[2],
            DK=dk,
            DV=dv,
            DK_BLOCK=dk_block,
            COLUMNS=columns,
            STATE_ROW=slots.state.stride(2),
            MOST_KEPT=slots.most_kept,
            CHANNELS=slots.has_channels,
            RULE=rule,
            CLEARS=clears,
            EARLY=early,
        ),
        num_warps=1 if on_nvidia() else min(4, dk_block * columns // _LEAST_ELEMENTS),
        **early_options(early),
    )
