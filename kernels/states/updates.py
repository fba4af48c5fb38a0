"""The updates of a recurrence (arguments.RecurrenceRule): by one token, and by all tokens of a chunk at once.

Kernels ask here for all that depends on how tokens change a state. chunk_rows.py has the formulas of chunks. G is a
StepGeometry or a ChunkGeometry; Triton 3.6 passes no tuple within it to a function.
"""

import triton
import triton.language as tl

from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.chunk_space import close, exact

_CHUNK = tl.constexpr(arguments.CHUNK)
NORM_EPSILON = tl.constexpr(arguments.NORM_EPSILON)


@triton.jit
def load_token(k_at, v_at, decay_at, is_there, channel, column, G: tl.constexpr):
    """k [dk] of a token, its v or its change [columns], and its decay, one or [dk]; 0 if it is not there.

    k_at, v_at, decay_at: addresses where its rows begin
    """
    # Not is_there & ...: Triton's interpreter makes integers of it.
    is_channel = channel < tl.where(is_there, G.DK, 0)
    k_row = tl.load(k_at + channel, mask=is_channel, other=0.0)
    v_row = tl.load(v_at + column, mask=column < tl.where(is_there, G.DV, 0), other=0.0)
    if G.CHANNELS:
        decay = tl.load(decay_at + channel, mask=is_channel, other=0.0)
    else:
        decay = tl.load(decay_at, mask=is_there, other=0.0)
    return k_row, v_row, decay


@triton.jit
def decayed(state, decay, G: tl.constexpr):
    """The state [dk, columns], float32, after a token's decay, as load_token returns it."""
    factor = tl.exp(decay)
    return state * (factor[:, None] if G.CHANNELS else factor)


@triton.jit
def change_and_out(state, q_row, k_row, v_row, decay, beta, G: tl.constexpr):
    """The change [columns], float32, that a token makes to the decayed state (RecurrentSlots.change), and its output.

    state: before the decay. Sums over channels do not wait for each other, nor for the state after the token.
    """
    q, k, factor = q_row.to(tl.float32), k_row.to(tl.float32), tl.exp(decay)
    k_scale = scale_of_row(k, G)
    out = tl.sum(state * (q * factor)[:, None], 0)
    change = v_row.to(tl.float32)
    if G.RULE.corrects:
        change -= tl.sum(state * (k * factor)[:, None], 0) * k_scale
    change *= beta * k_scale
    return change, (out + tl.sum(q * k, 0) * change) * (scale_of_row(q, G) * G.RULE.scale)


@triton.jit
def changed(state, k_row, change):
    """The decayed state with a token's change.

    The product is added without a rounding between them: a compiler that may choose, and does so in two ways, would
    give a kept token other bits when it is folded in once more.
    """
    k = tl.broadcast_to(k_row.to(tl.float32)[:, None], state.shape)
    return tl.fma(k, tl.broadcast_to(change[None, :], state.shape), state)


@triton.jit
def scale_of_row(row, G: tl.constexpr):
    """The factor of a row in float32: by its norm, or 1. Columns of a state are fewer than channels of a row."""
    return tl.rsqrt(tl.sum(row * row, 0) + NORM_EPSILON) if G.RULE.normalises else 1.0


@triton.jit
def solver_of(a, strength, num_rows, G: tl.constexpr, dtype: tl.constexpr):
    """T of a chunk, [CHUNK, CHUNK] of dtype; of sums its diagonal alone, [CHUNK] of float32.

    a: A, [CHUNK, CHUNK], 0 from row num_rows on; strength: beta, [CHUNK]
    """
    solver = strength
    if G.RULE.corrects:
        row = tl.arange(0, _CHUNK)
        # With D the part of A within blocks, B that between the blocks of a pair, and T = (1 + D)^-1: B T B = 0, and
        # (1 + D + B)^-1 = T - T B T. Blocks of one token have T = 1.
        exact_inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0) - tl.where(_is_pair(row), a, 0.0)
        size = 2
        while size < num_rows:
            between = tl.dot(tl.where(_is_pair(row // size), a, 0.0), exact_inverse, input_precision=close(dtype))
            exact_inverse -= tl.dot(exact_inverse, between, input_precision=close(dtype))
            size *= 2
        solver = (exact_inverse * strength[None, :]).to(dtype)
    return solver


@triton.jit
def solved(products, solver, G: tl.constexpr):
    """Products [CHUNK, CHUNK] times T. products: of T's dtype"""
    if G.RULE.corrects:
        products = tl.dot(products, solver, input_precision=exact())
    else:
        products *= solver[None, :]
    return products


@triton.jit
def solved_rows(solver, rows, G: tl.constexpr):
    """T, transposed, times rows [CHUNK, n] of float32."""
    if G.RULE.corrects:
        rows = tl.dot(tl.trans(solver), rows.to(solver.dtype), input_precision=exact())
    else:
        rows *= solver[:, None]
    return rows


@triton.jit
def _is_pair(block):
    """[CHUNK, CHUNK]: whether a row's block is the second one of a pair, and a column's the first one of the same pair.

    block: the number of each token's block
    """
    return (block % 2 == 1)[:, None] & (block[:, None] == block[None, :] + 1)
