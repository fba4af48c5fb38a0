"""One token of a recurrence (arguments.RecurrenceRule), for a block of a state's columns."""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_attn.kernels.states import arguments

NORM_EPSILON = tl.constexpr(arguments.NORM_EPSILON)


@triton.jit
def load_token(k_at, v_at, decay_at, beta_at, channel, is_channel, column, is_column, CHANNELS: tl.constexpr):
    """k [dk] and v [columns] of a token, its decay, one or [dk], and its beta.

    k_at, v_at, decay_at, beta_at: addresses where its rows begin
    """
    k_row = tl.load(k_at + channel, mask=is_channel, other=0.0)
    v_row = tl.load(v_at + column, mask=is_column, other=0.0)
    decay = tl.load(decay_at + channel, mask=is_channel, other=0.0) if CHANNELS else tl.load(decay_at)
    return k_row, v_row, decay, tl.load(beta_at)


@triton.jit
def fold_token(state, k, k_scale, v, decay, beta, DELTA: tl.constexpr):
    """The state [dk, columns] with a token folded in, in float32.

    k: [dk], times k_scale; v: [columns]; decay: [dk], natural logarithms, equal if a head decays as one
    """
    state = state * tl.exp(decay)[:, None]
    change = v
    if DELTA:
        change -= tl.sum(state * k[:, None], 0) * k_scale
    return state + k[:, None] * (beta * k_scale * change)[None, :]


@triton.jit
def scale_of_row(row, NORMALISES: tl.constexpr):
    """The factor of a row in float32: by its norm, or 1. Columns of a state are fewer than channels of a row."""
    return tl.rsqrt(tl.sum(row * row, 0) + NORM_EPSILON) if NORMALISES else 1.0
