"""A causal convolution of each channel, over new tokens and the inputs before them, which lie in slots.

    out[t, c] = act(bias[c] + sum over j in [0, WIDTH):   weight[c, j] * x[t - WIDTH + 1 + j, c])

act is the identity or SiLU. Sums are in float32, from the earliest input to the latest one. arguments.py has the rule
of slots. Inputs are rows: new tokens have rows from 0 on, and the source slot has those before them, from row
-(WIDTH - 1) - pending on. Before a sequence begins they are 0.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import launch, only_launches
from rocm_attn.kernels.states import arguments
from rocm_attn.kernels.states.arguments import ConvolutionSlots, ConvolutionWeights, StatePlaces
from rocm_attn.kernels.states.token_tiles import num_tiles, tile_at
from rocm_attn.kernels.tuning.tiles import next_power_of_2

_BEGINS = tl.constexpr(arguments.BEGINS)
# Bytes of a program's channels.
_BLOCK_BYTES = 512
# Most tokens of a tile.
_TILE = 16


@triton.jit
def _rows_of_stream(x_rows, slot_rows, first_row, row, is_row, is_channel, x_token, inputs_row):
    """Inputs [rows, BLOCK]; 0 for rows before the first one.

    x_rows:    the channels of row 0, which is the first new token
    slot_rows: the channels of the source slot's first row
    first_row: which row that is; 0 if the sequence has no slot
    """
    is_new = is_row & (row >= 0)
    is_old = is_row & (row < 0) & (row >= first_row)
    new_at = x_rows + row.to(tl.int64)[:, None] * x_token
    old_at = slot_rows + (row - first_row).to(tl.int64)[:, None] * inputs_row
    new = tl.load(new_at, mask=is_new[:, None] & is_channel, other=0.0)
    old = tl.load(old_at, mask=is_old[:, None] & is_channel, other=0.0)
    return tl.where(is_new[:, None], new, old)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _convolve_kernel(
    x,
    out,
    weight,
    bias,
    inputs,
    source,
    target,
    pending,
    q_indptr,
    num_seqs,
    num_tokens,
    x_token,
    out_token,
    inputs_slot,
    inputs_row,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    MOST_KEPT: tl.constexpr,
    SILU: tl.constexpr,
    TILE: tl.constexpr,
    ONE_EACH: tl.constexpr,
    SLOT_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    place = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    zeros = tl.zeros([BLOCK], out.dtype.element_ty)
    for pad in range(tl.load(q_indptr + num_seqs) + place, num_tokens, tl.num_programs(0)):
        tl.store(out + tl.cast(pad, tl.int64) * out_token + channel, zeros, mask=is_channel)
    tile = tile_at(place, q_indptr, num_seqs, TILE, ONE_EACH)
    slot = tl.load(source + tile.seq)
    first_row = 0
    if slot >= 0:
        first_row = -(WIDTH - 1) - tl.load(pending + tile.seq)
    first_token = tile.first_token.to(tl.int64)
    x_rows = (x + first_token * x_token + channel)[None, :]
    slot_rows = (inputs + slot.to(tl.int64) * inputs_slot + channel)[None, :]
    mask = is_channel[None, :]
    row = tile.begin + tl.arange(0, TILE)
    is_row = row < tile.q_len
    total = tl.zeros([TILE, BLOCK], tl.float32)
    if slot >= _BEGINS:
        if bias is not None:
            total += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        for j in tl.static_range(WIDTH):
            x_row = _rows_of_stream(
                x_rows, slot_rows, first_row, row - (WIDTH - 1) + j, is_row, mask, x_token, inputs_row
            )
            factor = tl.load(weight + channel * WIDTH + j, mask=is_channel, other=0.0)
            total += x_row.to(tl.float32) * factor.to(tl.float32)[None, :]
        if SILU:
            total = total * tl.sigmoid(total)
        if tile.begin == 0:
            # The slot's rows, from the first of the last WIDTH - 1 before the first kept token, or before the end.
            at = tl.arange(0, SLOT_ROWS)
            num_rows = WIDTH - 1
            shift = tile.q_len
            if tile.q_len <= MOST_KEPT:
                num_rows += tile.q_len
                shift = 0
            is_slot_row = at < num_rows
            kept = _rows_of_stream(
                x_rows, slot_rows, first_row, at - (WIDTH - 1) + shift, is_slot_row, mask, x_token, inputs_row
            )
            to = inputs + tl.load(target + tile.seq).to(tl.int64) * inputs_slot + at.to(tl.int64)[:, None] * inputs_row
            tl.store(to + channel[None, :], kept, mask=is_slot_row[:, None] & mask)
    out_rows = out + (first_token + row)[:, None] * out_token + channel[None, :]
    tl.store(out_rows, total.to(out.dtype.element_ty), mask=is_row[:, None] & mask)


@only_launches
def launch_convolve(
    x: Tensor, out: Tensor, convolution: ConvolutionWeights, slots: ConvolutionSlots, places: StatePlaces
) -> None:
    """Writes every row of out, and the target slots.

    x, out: float32, float16 or bfloat16 [T, C], any strides but the last, not the same memory
    """
    slots.check(x, out, convolution, places)
    channels, width = convolution.weight.shape
    most_kept, block = slots.most_kept(width), _BLOCK_BYTES // x.itemsize
    one_each, early = places.max_q_len <= _TILE, starts_early(x.device)
    tile = next_power_of_2(min(places.max_q_len, _TILE))
    grid = places.num_seqs if one_each else num_tiles(places.num_tokens, places.num_seqs, tile)
    launch(
        _convolve_kernel,
        (grid, triton.cdiv(channels, block)),
        x,
        out,
        convolution.weight,
        convolution.bias,
        slots.inputs,
        places.source,
        places.target,
        places.pending,
        places.q_indptr,
        places.num_seqs,
        places.num_tokens,
        x.stride(0),
        out.stride(0),
        slots.inputs.stride(0),
        slots.inputs.stride(1),
        CHANNELS=channels,
        WIDTH=width,
        MOST_KEPT=most_kept,
        SILU=convolution.silu,
        TILE=tile,
        ONE_EACH=one_each,
        SLOT_ROWS=next_power_of_2(width - 1 + most_kept),
        BLOCK=block,
        EARLY=early,
        num_warps=4,
        **early_options(early),
    )
