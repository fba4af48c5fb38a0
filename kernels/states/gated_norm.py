"""The output of a recurrent layer: rows of groups, normalised and gated.

    x   = rows + skip[head] * v                     where there is a skip
    out = norm(x) * weight * act(gate)              each group divided by the root of its mean square
    out = norm(x * act(gate)) * weight              with the gate first

A program has some groups. Sums are in float32, and nothing is rounded before out.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.launch import launch, only_launches
from rocm_attn.kernels.states.arguments import GatedForm
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Elements of a program, and of a warp.
_ELEMENTS, _OF_WARP = 1024, 512


class GatedGeometry(NamedTuple):
    """The values that the kernel is compiled for.

    WIDTH:      elements of a group; BLOCK: the next power of 2
    GROUPS:     of a row
    ROWS:       groups of a program
    OF_WEIGHT:  elements of weight: of a group, or of a row
    HEAD:       elements of a head of v
    """

    EPS: float
    SILU: bool
    GATE_FIRST: bool
    WIDTH: int
    BLOCK: int
    GROUPS: int
    ROWS: int
    OF_WEIGHT: int
    HEAD: int
    EARLY: bool


@triton.jit(do_not_specialize=["num_groups", "gate_row", "v_row"])
def _gated_norm_kernel(rows, gate, weight, skip, v, out, num_groups, gate_row, v_row, G: tl.constexpr):
    WIDTH: tl.constexpr = G.WIDTH
    wait_for_launch(G.EARLY)
    number = tl.program_id(0).to(tl.int64) * G.ROWS + tl.arange(0, G.ROWS)
    token = number // G.GROUPS
    within = tl.arange(0, G.BLOCK)
    column = (number % G.GROUPS)[:, None] * WIDTH + within[None, :]
    mask = (number < num_groups)[:, None] & (within < WIDTH)[None, :]
    x = tl.load(rows + (number * WIDTH)[:, None] + within[None, :], mask=mask, other=0.0).to(tl.float32)
    if skip is not None:
        given = tl.load(v + (token * v_row)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        x += given * tl.load(skip + column // G.HEAD, mask=mask, other=0.0)
    opened = tl.load(gate + (token * gate_row)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    opened = tl.sigmoid(opened) * (opened if G.SILU else 1.0)
    if G.GATE_FIRST:
        x *= opened
    if weight is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + G.EPS)
        x *= scale[:, None] * tl.load(weight + column % G.OF_WEIGHT)
    if not G.GATE_FIRST:
        x *= opened
    tl.store(out + (number * WIDTH)[:, None] + within[None, :], x.to(out.dtype.element_ty), mask=mask)


@only_launches
def launch_gated_norm(
    rows: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    skip: Tensor | None,
    v: Tensor,
    out: Tensor,
    *,
    num_groups: int,
    form: GatedForm,
) -> None:
    """Writes the rows, normalised and gated.

    rows:       float32, float16 or bfloat16 [T, H, D], contiguous
    gate:       [T, H * D], of any of these dtypes; rows have any stride
    weight:     float32 [H * D / num_groups] or [H * D]; None: nothing is normalised
    skip:       float32 [H, 1], or None: v is not read
    v:          [T, H, D], of any of these dtypes; rows have any stride
    out:        [T, H * D], contiguous, written
    num_groups: of a row; they have the same size
    """
    num_tokens, heads, dim = rows.shape
    width = heads * dim // num_groups
    assert heads * dim == num_groups * width
    assert v.shape == rows.shape
    assert gate.shape == out.shape == (num_tokens, heads * dim)
    assert rows.is_contiguous()
    assert out.is_contiguous()
    assert gate.stride(1) == v.stride(2) == 1
    assert v.stride(1) == dim
    for given, sizes in ((weight, (width, heads * dim)), (skip, (heads,))):
        assert given is None or (given.dtype == torch.float32 and given.is_contiguous() and given.numel() in sizes)
    early, block = starts_early(out.device), next_power_of_2(width)
    of_program = max(1, _ELEMENTS // block)
    launch(
        _gated_norm_kernel,
        (triton.cdiv(num_tokens * num_groups, of_program), 1),
        rows,
        gate,
        weight,
        skip,
        v,
        out,
        num_tokens * num_groups,
        gate.stride(0),
        v.stride(0),
        G=GatedGeometry(
            *form,
            WIDTH=width,
            BLOCK=block,
            GROUPS=num_groups,
            ROWS=of_program,
            OF_WEIGHT=heads * dim if weight is None else weight.numel(),
            HEAD=dim,
            EARLY=early,
        ),
        num_warps=min(16, max(1, of_program * block // _OF_WARP)),
        **early_options(early),
    )
