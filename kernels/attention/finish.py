"""Finishes attention's output before a layer's projection, in one launch and in place.

    out[token] = unturn(out[token]) * sigmoid(gate[token])

unturn is the rotary embedding of rope.py by the negative angle, for layers whose V turns with K: the result depends on
distances alone. Padded tokens keep attention's zeros, whatever their gate holds. Float32, rounded once.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.softmax import LOG2_E
from rocm_attn.kernels.cache.rope import RowGeometry, angles_at, places_of_pairs, turned, warps_in_place
from rocm_attn.kernels.cache.row_work import RopeTable
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Elements of a row's block that a program holds.
_ELEMENTS = 4096


class FinishGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    row:         how a row is cut
    HEADS:       rows of a token; HEADS_BLOCK: those of a program
    GATED:       whether there is a gate; OF_ELEMENTS: one for each element, and not for each head
    """

    row: RowGeometry
    HEADS: int
    HEADS_BLOCK: int
    GATED: bool
    OF_ELEMENTS: bool


@triton.jit
def _gated(x, gates, place, is_head, mask, G: tl.constexpr):
    """x times its gates; gates: [HEADS_BLOCK, 1], of a head's first element or of the head."""
    if G.OF_ELEMENTS:
        gate = tl.load(gates + place, mask=mask, other=0.0).to(tl.float32)
    else:
        gate = tl.load(gates, mask=is_head, other=0.0).to(tl.float32)
    # A sigmoid has two forms; this one does not overflow.
    small = tl.exp2(tl.abs(gate) * -LOG2_E)
    return x * tl.where(gate < 0.0, small, 1.0) / (1.0 + small)


@triton.jit
def _finish_kernel(
    out,
    gate,
    cos_sin,
    positions,
    counts,
    num_positions,
    out_token,
    out_head,
    gate_token,
    gate_head,
    G: tl.constexpr,
):
    R: tl.constexpr = G.row
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0)
    if token < tl.load(counts + 1):
        t = token.to(tl.int64)
        head = tl.program_id(1) * G.HEADS_BLOCK + tl.arange(0, G.HEADS_BLOCK)[:, None]
        is_head = head < G.HEADS
        rows = out + t * out_token + head.to(tl.int64) * out_head
        gates = gate + t * gate_token + head.to(tl.int64) * gate_head
        if G.GATED and R.REST > 0:
            lane = tl.arange(0, R.REST_COLUMNS)[None, :]
            place = R.REST_FIRST + lane
            is_rest = is_head & (lane < R.REST)
            rest = tl.load(rows + place, mask=is_rest, other=0.0).to(tl.float32)
            rest = _gated(rest, gates, place, is_head, is_rest, G)
            tl.store(rows + place, rest.to(dtype), mask=is_rest)
        if R.PAIRS > 0:
            cos, sin = angles_at(cos_sin, tl.load(positions + token), num_positions, R)
            pair, near_place, far_place = places_of_pairs(R)
            is_pair = is_head & (pair < R.PAIRS)
            near = tl.load(rows + near_place, mask=is_pair, other=0.0).to(tl.float32)
            far = tl.load(rows + far_place, mask=is_pair, other=0.0).to(tl.float32)
            near, far = turned(near, far, cos, -sin)
            if G.GATED:
                near = _gated(near, gates, near_place, is_head, is_pair, G)
                far = _gated(far, gates, far_place, is_head, is_pair, G)
            tl.store(rows + near_place, near.to(dtype), mask=is_pair)
            tl.store(rows + far_place, far.to(dtype), mask=is_pair)


def launch_finish(out: Tensor, gate: Tensor | None, rope: RopeTable | None, positions: Tensor, counts: Tensor) -> None:
    """Undoes the turn of out if there is a rope, and multiplies it by the sigmoid of its gate if there is a gate.

    out:       [T, q_heads, v_head_dim], any strides but the last; changed in place
    gate:      [T, q_heads] or [T, q_heads, v_head_dim], floating point, any strides but the last of three
    rope:      how out turns, at most v_head_dim elements
    positions: int32 [T], lines of the table
    counts:    int32 [4]; [1] is num_tokens, and the tokens from there on stay unchanged
    """
    assert gate is not None or rope is not None
    num_tokens, heads, dim = out.shape
    row = RowGeometry.of(dim, rope, None)
    # Without a gate, only pairs are touched.
    rest = 0 if gate is None else row.REST_COLUMNS
    block = max(1, min(next_power_of_2(heads), _ELEMENTS // next_power_of_2(rest + 2 * row.PAIR_COLUMNS)))
    geometry = FinishGeometry(row, heads, block, gate is not None, gate is not None and gate.dim() == 3)
    gates = out if gate is None else gate
    launch(
        _finish_kernel,
        (num_tokens, triton.cdiv(heads, block)),
        out,
        gates,
        None if rope is None else rope.cos_sin,
        positions,
        counts,
        0 if rope is None else rope.num_positions,
        *out.stride()[:2],
        *gates.stride()[:2],
        G=geometry,
        num_warps=warps_in_place(block, row.PAIR_COLUMNS, rest),
    )
