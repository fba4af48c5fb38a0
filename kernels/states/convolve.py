"""A causal convolution of each channel, over new tokens and the inputs before them, which lie in slots.

    out[t, c] = act(bias[c] + sum over j in [0, WIDTH):   weight[c, j] * x[t - WIDTH + 1 + j, c])

act is the identity or SiLU. Sums are in float32, from the earliest input to the latest one. arguments.py has the rule
of slots. Inputs are rows: new tokens have rows from 0 on, and the source slot has those before them, from row
-(WIDTH - 1) - pending on. Before a sequence begins they are 0. A lane has the same channels of all rows of a tile, and
reads each row once.
"""

from typing import Any, NamedTuple

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
# Bytes of a program's channels, which a warp or a wave loads at once.
_BLOCK_BYTES = 512
# Most tokens of a tile. More of them take more registers, so that fewer programs run at a time. H200, 8,192 tokens of
# 8,192 channels: 116 us with 16, 89 with 8, and 101 with 4.
_TILE = 8


class _Stream(NamedTuple):
    """A sequence's inputs.

    new, q_len: the channels of row 0, which is the first new token, and the number of new ones
    old, first: the channels of the source slot's first row, and which row that is; 0 if the sequence has no slot
    is_channel: which channels exist
    """

    new: Any
    q_len: Any
    old: Any
    first: Any
    is_channel: Any


@triton.jit
def _new_row(stream, row, x_token):
    """A new token's input [BLOCK]; 0 for other rows. row: [BLOCK], the same for all channels"""
    is_new = (row >= 0) & (row < stream.q_len)
    return tl.load(stream.new + row.to(tl.int64) * x_token, mask=is_new & stream.is_channel, other=0.0)


@triton.jit
def _row(stream, row, x_token, inputs_row):
    """An input [BLOCK]; 0 for rows before the first one and after the last one."""
    is_old = (row < 0) & (row >= stream.first)
    at = stream.old + (row - stream.first).to(tl.int64) * inputs_row
    old = tl.load(at, mask=is_old & stream.is_channel, other=0.0)
    return tl.where(row < 0, old, _new_row(stream, row, x_token))


@triton.jit
def _factors(weight, channel, is_channel, WIDTH: tl.constexpr):
    """The weights of the channels, float32 [BLOCK] for each of WIDTH. They are loaded as they lie."""
    TAPS: tl.constexpr = triton.next_power_of_2(WIDTH)
    tap = tl.arange(0, TAPS)[None, :]
    mask = is_channel[:, None] & (tap < WIDTH)
    taps = tl.load(weight + channel[:, None] * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
    factors = ()
    for j in tl.static_range(WIDTH):
        factors += (tl.sum(tl.where(tap == j, taps, 0.0), 1),)  # type: ignore[assignment]
    return factors


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
    new, old = x + first_token * x_token + channel, inputs + slot.to(tl.int64) * inputs_slot + channel
    stream = _Stream(new, tile.q_len, old, first_row, is_channel)
    begin = tile.begin + tl.zeros([BLOCK], tl.int32)
    if slot >= _BEGINS:
        factors = _factors(weight, channel, is_channel, WIDTH)
        added = tl.zeros([BLOCK], tl.float32)
        if bias is not None:
            added += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
        rows = ()
        for j in tl.static_range(WIDTH - 1):
            row = begin - (WIDTH - 1) + j
            rows += (_row(stream, row, x_token, inputs_row),)  # type: ignore[assignment]
        for i in tl.static_range(TILE):
            rows += (_new_row(stream, begin + i, x_token),)  # type: ignore[assignment]
        for i in tl.static_range(TILE):
            total = added
            for j in tl.static_range(WIDTH):
                total += rows[i + j].to(tl.float32) * factors[j]
            if SILU:
                total = total * tl.sigmoid(total)
            is_row = begin + i < tile.q_len
            out_row = out + (first_token + begin + i) * out_token + channel
            tl.store(out_row, total.to(out.dtype.element_ty), mask=is_row & is_channel)
        if tile.begin == 0:
            # The slot's rows, from the first of the last WIDTH - 1 before the first kept token, or before the end.
            q_len = tile.q_len + tl.zeros([BLOCK], tl.int32)
            are_kept = q_len <= MOST_KEPT
            num_rows = (WIDTH - 1) + tl.where(are_kept, q_len, 0)
            shift = tl.where(are_kept, 0, q_len)
            kept = ()
            for i in tl.static_range(WIDTH - 1 + MOST_KEPT):
                row = i - (WIDTH - 1) + shift
                kept += (_row(stream, row, x_token, inputs_row),)  # type: ignore[assignment]
            to = inputs + tl.load(target + tile.seq).to(tl.int64) * inputs_slot + channel
            for i in tl.static_range(WIDTH - 1 + MOST_KEPT):
                tl.store(to + tl.cast(i, tl.int64) * inputs_row, kept[i], mask=(i < num_rows) & is_channel)
    else:
        for token in range(first_token + tile.begin, first_token + tl.minimum(tile.begin + TILE, tile.q_len)):
            tl.store(out + token * out_token + channel, zeros, mask=is_channel)


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
        BLOCK=block,
        EARLY=early,
        num_warps=1,
        **early_options(early),
    )
