"""Combines the two inner products of a gated MLP: gate and up, the halves of a row.

SILU:    gate * sigmoid(gate) * up
GELU:    gelu(gate) * up, with the tanh approximation: gelu(g) = g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 g^3))
CLAMPED: g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit) and u = up within +-limit (gpt-oss)
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import only_launches, repeated_launches

SILU, GELU, CLAMPED = range(3)
_GELU, _CLAMPED = tl.constexpr(GELU), tl.constexpr(CLAMPED)
_GELU_SLOPE = tl.constexpr(2 * math.sqrt(2 / math.pi))
_BLOCK = 1024


class GateForm(NamedTuple):
    """The gate that a kernel is compiled for: SILU, GELU or CLAMPED, whose limit and alpha the others do not read."""

    kind: int
    limit: float = 0.0
    alpha: float = 0.0


@triton.jit
def gated(gate, up, KIND: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """The output of two inner products, float32."""
    slope = gate
    if KIND == _GELU:
        slope = _GELU_SLOPE * (gate + 0.044715 * gate * gate * gate)
    if KIND == _CLAMPED:
        # A comparison keeps NaN, which tl.minimum and tl.maximum may drop.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        slope = ALPHA * gate
    return gate * tl.sigmoid(slope) * up


@triton.jit
def _gate_kernel(
    both,
    out,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    EARLY: tl.constexpr,
):
    wait_for_launch(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < INNER
    gate = tl.load(both + row * (2 * INNER) + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(both + row * (2 * INNER) + INNER + column, mask=is_column, other=0.0).to(tl.float32)
    mixed = gated(gate, up, KIND, LIMIT, ALPHA)
    tl.store(out + row * INNER + column, mixed.to(out.dtype.element_ty), mask=is_column)


_variant = repeated_launches(_gate_kernel)


@only_launches
def launch_gate(both: Tensor, out: Tensor, form: GateForm) -> None:
    """Writes the combined halves of each row.

    both: float32, float16 or bfloat16 [rows, 2 * inner]: gate, then up
    out:  [rows, inner], of the same dtype, written
    Both are contiguous and begin at a multiple of 16 bytes.
    """
    rows, inner = out.shape
    assert both.shape == (rows, 2 * inner)
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (both, out))
    if rows:
        early = starts_early(both.device)
        _variant(both.dtype, inner, form)(
            both.device,
            (rows, triton.cdiv(inner, _BLOCK), 1),
            both,
            out,
            inner,
            _BLOCK,
            *form,
            early,
            num_warps=4,
            **early_options(early),
        )
