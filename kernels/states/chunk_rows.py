"""Tells a walk over chunks of a prompt (chunk_walk.py) all that it needs of each, except for the state.

Numbers of a chunk are i, j in [0, CHUNK). With G[i] the sum of the decays of tokens 0 to i, for each channel:

    A[i, j] = beta[i] * sum over channels: k[i] * k[j] * exp(G[i] - G[j])      for j < i, else 0
    P[i, j] = scale * sum over channels: q[i] * k[j] * exp(G[i] - G[j])        for j <= i, else 0
    T       = (1 + A)^-1                                                       1 without delta
    u       = T (beta * v)                     w = T (beta * k * exp(G))
    read[i] = scale * q[i] * exp(G[i])         write[i] = k[i] * exp(G[last] - G[i])

With S the state before the chunk, the changes that its tokens make are u - w S, as chunk_walk.py goes on to say. The
form is that of Gated Delta Networks (arXiv 2412.06464, section 3.3) and Kimi Linear (arXiv 2510.26692, section 3.2).

No exponent is positive, and none is a difference of sums: those of strong decays have too few digits left for weak ones
after them. If channels decay by themselves, exp(G[i] - G[j]) is no factor of a whole row and column: it is taken apart
at the end of j's BAND of tokens and at the begin of i's, and within a band token by token, by how far j lies before i.
T is computed in float32 by forward substitution within bands, and then from band to band: powers of A would lose all
digits where keys repeat.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import Recurrence, RecurrentSlots, RecurrentTokens, StatePlaces
from rocm_attn.kernels.states.chunk_space import chunk_decay_at, chunk_geometry, rows_of
from rocm_attn.kernels.states.fold_token import normal_rows
from rocm_attn.kernels.states.token_tiles import num_tiles, tile_at

_BEGINS = tl.constexpr(arguments.BEGINS)
_CHUNK = tl.constexpr(arguments.CHUNK)
# Rows of a chunk that T is first computed for.
_BAND = tl.constexpr(16)


@triton.jit
def _inverse(a, num_rows):
    """(1 + a)^-1 of a strictly lower triangular matrix [CHUNK, CHUNK]; a is 0 from row num_rows on."""
    BANDS: tl.constexpr = _CHUNK // _BAND
    row = tl.arange(0, _CHUNK)
    # The blocks on the diagonal: [BANDS, BAND, BAND].
    cut = tl.reshape(a, [BANDS, _BAND, BANDS, _BAND])
    band = tl.arange(0, BANDS)
    on_diagonal = band[:, None, None, None] == band[None, None, :, None]
    blocks = tl.sum(tl.where(on_diagonal, cut, 0.0), 2)
    place = tl.arange(0, _BAND)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(blocks)
    for i in range(1, tl.minimum(_BAND, num_rows)):
        is_row = (place == i)[None, :, None]
        factors = tl.sum(tl.where(is_row, blocks, 0.0), 1)
        change = tl.sum(factors[:, :, None] * inverse, 1)
        inverse = tl.where(is_row, inverse - change[:, None, :], inverse)
    whole = tl.where(on_diagonal, inverse[:, :, None, :], 0.0)
    inverse = tl.reshape(whole, [_CHUNK, _CHUNK])
    # With B the part of a between two neighbouring blocks, B T B = 0: (1 + D + B)^-1 = T - T B T, T = (1 + D)^-1.
    for doubled in range(2):
        of = row // (_BAND * (1 + doubled))
        is_pair = (of[:, None] // 2 == of[None, :] // 2) & (of[:, None] > of[None, :])
        between = tl.dot(tl.where(is_pair, a, 0.0), inverse, input_precision="ieee")
        inverse -= tl.dot(inverse, between, input_precision="ieee")
    return inverse


@triton.jit
def _rows(at, in_k, G: tl.constexpr):
    """Rows of q or k at addresses [CHUNK, dk], divided by their norms if the recurrence says so."""
    rows = tl.load(at, mask=in_k, other=0.0)
    if G.NORMALISES:
        rows = normal_rows(rows.to(tl.float32)).to(G.DTYPE)
    return rows


@triton.jit
def _sums(at, in_k, is_row, reverse: tl.constexpr, G: tl.constexpr):
    """Running sums of decays at addresses of heads, [CHUNK]: [CHUNK, dk], or [CHUNK, 1]."""
    if G.CHANNELS:
        channel = tl.arange(0, G.DK_BLOCK)
        decays = tl.load(at[:, None] + channel[None, :], mask=in_k, other=0.0)
        sums = tl.cumsum(decays, 0, reverse=reverse)
    else:
        sums = tl.cumsum(tl.load(at, mask=is_row, other=0.0), 0, reverse=reverse)[:, None]
    return sums


@triton.jit
def _channel_products(k_rows, q_rows, k_at, decay_at, num_rows, in_k, k_token, decay_token, G: tl.constexpr):
    """A without beta, and P without scale, for j <= i: [CHUNK, CHUNK].

    k_at, decay_at: addresses of the tokens' keys and decays, [CHUNK, dk]
    """
    BANDS: tl.constexpr = _CHUNK // _BAND
    k = k_rows.to(tl.float32)
    q = q_rows.to(tl.float32)
    row = tl.arange(0, _CHUNK)
    band_of = (row // _BAND)[:, None]
    products = tl.zeros([_CHUNK, _CHUNK], tl.float32)
    others = tl.zeros([_CHUNK, _CHUNK], tl.float32)
    # From a band's begin until a token, that one included, and from the next token until the band's end.
    decays = tl.load(decay_at, mask=in_k, other=0.0)
    has_next = ((row % _BAND < _BAND - 1) & (row < num_rows - 1))[:, None] & in_k
    nexts = tl.load(decay_at + decay_token, mask=has_next, other=0.0)
    since = tl.reshape(tl.cumsum(tl.reshape(decays, [BANDS, _BAND, G.DK_BLOCK]), 1), [_CHUNK, G.DK_BLOCK])
    until = tl.reshape(tl.cumsum(tl.reshape(nexts, [BANDS, _BAND, G.DK_BLOCK]), 1, reverse=True), [_CHUNK, G.DK_BLOCK])
    for band in range(1, tl.cdiv(num_rows, _BAND)):
        of_last = tl.sum(tl.where(band_of == band - 1, decays, 0.0), 0)[None, :]
        until += tl.where(band_of < band - 1, of_last, 0.0)
        earlier = tl.trans((k * tl.exp(tl.where(band_of < band, until, float("-inf")))).to(G.DTYPE))
        factor = tl.exp(tl.where(band_of == band, since, float("-inf")))
        products += tl.dot((k * factor).to(G.DTYPE), earlier, input_precision="ieee")
        others += tl.dot((q * factor).to(G.DTYPE), earlier, input_precision="ieee")
    decayed = tl.zeros_like(k)
    for back in range(tl.minimum(_BAND, num_rows)):
        is_there = row % _BAND >= back
        there = is_there[:, None] & in_k
        factor = _rows(k_at - back * k_token, there, G).to(tl.float32) * tl.exp(decayed)
        at = (row[None, :] == row[:, None] - back) & is_there[:, None]
        products += tl.where(at, tl.sum(k * factor, 1)[:, None], 0.0)
        others += tl.where(at, tl.sum(q * factor, 1)[:, None], 0.0)
        decayed += tl.load(decay_at - back * decay_token, mask=there, other=0.0)
    return products, others


@triton.jit
def _chunk_rows_kernel(
    q,
    k,
    v,
    decay,
    beta,
    out,
    rows,
    chunk_decays,
    source,
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
    G: tl.constexpr,
):
    place = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    k_head_of = head // G.RATIO
    DV_BLOCK: tl.constexpr = G.DV_BLOCK
    column = tl.arange(0, DV_BLOCK)
    channel = tl.arange(0, G.DK_BLOCK)
    is_column = column < G.DV
    is_channel = channel < G.DK
    zeros = tl.zeros([DV_BLOCK], out.dtype.element_ty)
    out_rows = out + head * out_head + column
    for pad in range(tl.load(q_indptr + num_seqs) + place, num_tokens, tl.num_programs(0)):
        tl.store(out_rows + tl.cast(pad, tl.int64) * out_token, zeros, mask=is_column)
    tile = tile_at(place, q_indptr, num_seqs, _CHUNK, False)
    num_rows = tl.minimum(tile.q_len - tile.begin, _CHUNK)
    if (tile.q_len > most_q_len) & (num_rows > 0):
        row = tl.arange(0, _CHUNK)
        is_row = row < num_rows
        token = (tile.first_token + tile.begin + row).to(tl.int64)
        # On AMD a mask takes scalar registers: one for columns that are all there would take too many.
        in_v = is_row[:, None]
        if G.DV != G.DV_BLOCK:
            in_v = in_v & is_column[None, :]
        if tl.load(source + tile.seq) < _BEGINS:
            none = tl.zeros([_CHUNK, DV_BLOCK], out.dtype.element_ty)
            tl.store(out_rows[None, :] + token[:, None] * out_token, none, mask=in_v)
        else:
            in_k = is_row[:, None]
            if G.DK != G.DK_BLOCK:
                in_k = in_k & is_channel[None, :]
            k_at = k + (token * k_token + k_head_of * k_head)[:, None] + channel[None, :]
            q_at = q + (token * q_token + k_head_of * q_head)[:, None] + channel[None, :]
            decay_at = decay + token * decay_token + head * decay_head
            to = rows_of(rows, token, head, G)
            strength = tl.load(beta + token * beta_token + head, mask=is_row, other=0.0)
            k_rows = _rows(k_at, in_k, G)
            q_rows = _rows(q_at, in_k, G)
            is_before = row[:, None] > row[None, :]
            if G.CHANNELS:
                decays_at = decay_at[:, None] + channel[None, :]
                a, p = _channel_products(k_rows, q_rows, k_at, decays_at, num_rows, in_k, k_token, decay_token, G)
            else:
                decays = tl.load(decay_at, mask=is_row, other=0.0)
                factor = tl.exp(tl.cumsum(tl.where(is_before, decays[:, None], 0.0), 0))
                a = tl.dot(k_rows, tl.trans(k_rows), input_precision="ieee") * factor
                p = tl.dot(q_rows, tl.trans(k_rows), input_precision="ieee") * factor
            p = tl.where(row[:, None] >= row[None, :], p * G.SCALE, 0.0)
            tl.store(to.products[:, None] + row[None, :], p.to(G.DTYPE), mask=is_row[:, None])
            since = _sums(decay_at, in_k, is_row, False, G)
            read = q_rows.to(tl.float32) * (tl.exp(since) * G.SCALE)
            tl.store(to.read[:, None] + channel[None, :], read.to(G.DTYPE), mask=in_k)
            # Tokens past the end have no decay: the last sum is that of the last token.
            last = tl.exp(tl.sum(tl.where(row[:, None] == _CHUNK - 1, since, 0.0), 0))
            decay_to = chunk_decay_at(chunk_decays, place, head, G)
            if G.CHANNELS:
                tl.store(decay_to + channel, last, mask=is_channel)
            else:
                tl.store(decay_to + tl.arange(0, 1), last)
            has_next = row < num_rows - 1
            until = _sums(decay_at + decay_token, in_k & has_next[:, None], has_next, True, G)
            write = k_rows.to(tl.float32) * tl.exp(until)
            tl.store(to.write[:, None] + channel[None, :], write.to(G.DTYPE), mask=in_k)
            v_at = v + (token * v_token + head * v_head)[:, None] + column[None, :]
            if G.DELTA:
                inverse = _inverse(tl.where(is_before, a * strength[:, None], 0.0), num_rows).to(G.DTYPE)
                # Loaded again: registers have no room for them while the inverse is computed.
                decayed = tl.exp(_sums(decay_at, in_k, is_row, False, G)) * strength[:, None]
                w = _rows(k_at, in_k, G).to(tl.float32) * decayed
                w = tl.dot(inverse, w.to(G.DTYPE), input_precision="ieee")
                tl.store(to.w[:, None] + channel[None, :], w.to(G.DTYPE), mask=in_k)
                u = tl.load(v_at, mask=in_v, other=0.0).to(tl.float32) * strength[:, None]
                u = tl.dot(inverse, u.to(G.DTYPE), input_precision="ieee")
            else:
                u = tl.load(v_at, mask=in_v, other=0.0).to(tl.float32) * strength[:, None]
            tl.store(to.u[:, None] + column[None, :], u.to(G.DTYPE), mask=in_v)


def launch_chunk_rows(
    tokens: RecurrentTokens,
    recurrence: Recurrence,
    slots: RecurrentSlots,
    places: StatePlaces,
    workspace: Tensor,
    *,
    most_q_len: int,
) -> None:
    """Writes the workspace for sequences with more than most_q_len new tokens.

    It also clears rows of out: those of such sequences that are left out, and those that belong to no sequence.
    """
    num_heads = slots.state.shape[1]
    geometry, rows, chunk_decays = chunk_geometry(recurrence, slots, places, workspace)
    launch(
        _chunk_rows_kernel,
        (num_tiles(places.num_tokens, places.num_seqs, arguments.CHUNK), num_heads),
        *tokens,
        rows,
        chunk_decays,
        places.source,
        places.q_indptr,
        places.num_seqs,
        places.num_tokens,
        most_q_len,
        *tokens.q.stride()[:2],
        *tokens.k.stride()[:2],
        *tokens.v.stride()[:2],
        *tokens.decay.stride()[:2],
        tokens.beta.stride(0),
        *tokens.out.stride()[:2],
        G=geometry,
        num_warps=8,
        num_stages=1,
    )
