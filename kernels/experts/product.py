"""Multiplies each row with the matrix of its expert, and no matrix with a row that did not choose it.

    out[p] = x[p // rows_per_source] @ weight[e].T + bias[e]      for each pair p of expert e
    out[p] = gate(the same)                                       with a gate, see model/gate.py

Pairs lie by expert (groups.py). A program takes a block of one expert's pairs and a block of columns. It finds its
expert by counting blocks, so the grid follows from sizes alone: it has room for the most blocks that experts can have,
and programs without one end at once. A row's bits depend on no other row: a matrix instruction computes it from itself.
All rows may have one matrix: that is a layer of one expert, in which nothing has to be looked up.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.backend import on_hopper
from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.experts.groups import ExpertGroups
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.model.gate import GateForm, gated
from rocm_attn.kernels.tuning.expert_tiles import ExpertTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2


class ProductGeometry(NamedTuple):
    """The values that the product is compiled for.

    EXPERTS, EXPERTS_BLOCK: experts, and the next power of 2
    IN, OUT:                elements of a row of x and of out
    PAIRS_OF_ROW:           pairs that read one row of x
    ROWS, COLUMNS, STEP:    pairs of a program, rows of the matrix, and elements of x that it multiplies at a time
    EARLY:                  whether it starts early (early.py)
    """

    EXPERTS: int
    EXPERTS_BLOCK: int
    IN: int
    OUT: int
    PAIRS_OF_ROW: int
    ROWS: int
    COLUMNS: int
    STEP: int
    EARLY: bool


@triton.jit(do_not_specialize=["all_pairs"])
def _expert_product_kernel(
    x,
    weight,
    bias,
    order,
    indptr,
    out,
    all_pairs,
    x_row,
    weight_expert,
    weight_row,
    out_row,
    G: tl.constexpr,
    GATE: tl.constexpr,
):
    ROWS: tl.constexpr = G.ROWS
    COLUMNS: tl.constexpr = G.COLUMNS
    STEP: tl.constexpr = G.STEP
    IN: tl.constexpr = G.IN
    # A gate has rows of the matrix first, then those of up.
    SIDES: tl.constexpr = 1 if GATE is None else 2
    OUTPUTS: tl.constexpr = COLUMNS // SIDES
    wait_for_launch(G.EARLY)
    block = tl.program_id(0)
    if G.EXPERTS == 1:
        first_place, end_place = block * ROWS, all_pairs
        expert = (first_place >= end_place).to(tl.int32)
    else:
        each = tl.arange(0, G.EXPERTS_BLOCK)
        is_expert = each < G.EXPERTS
        num_pairs = tl.load(indptr + each + 1, mask=is_expert, other=0) - tl.load(
            indptr + each, mask=is_expert, other=0
        )
        num_blocks = tl.cdiv(num_pairs.to(tl.int32), ROWS)
        expert = tl.sum((tl.cumsum(num_blocks, 0) <= block).to(tl.int32), 0)
        own_block = block - tl.sum(tl.where(each < expert, num_blocks, 0), 0)
        is_any = expert < G.EXPERTS
        first_place = tl.load(indptr + expert, mask=is_any, other=0) + own_block * ROWS
        end_place = tl.load(indptr + expert + 1, mask=is_any, other=0)
    if first_place < end_place:
        place = first_place + tl.arange(0, ROWS)
        is_pair = (place < end_place)[:, None]
        # pair: [ROWS, 1]; column: [COLUMNS]
        if G.EXPERTS == 1:
            pair = tl.where(is_pair, place[:, None].to(tl.int64), 0)
        else:
            pair = tl.load(order + place[:, None], mask=is_pair, other=0)
        first_column = tl.program_id(1) * OUTPUTS
        of_both = tl.arange(0, COLUMNS)
        within = first_column + of_both % OUTPUTS
        weight_column = within + of_both // OUTPUTS * G.OUT
        is_column = within < G.OUT
        element = tl.arange(0, STEP)[None, :]
        rows = x + pair // G.PAIRS_OF_ROW * x_row
        # 64-bit before multiplying: the matrices of all experts go beyond int32, and so may the rows of one.
        matrix = weight + expert.to(tl.int64) * weight_expert + weight_column[:, None].to(tl.int64) * weight_row
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, IN, STEP):
            is_element = first + element < IN
            # Rows without a pair read the first pair's: their results are dropped.
            a = tl.load(rows + first + element, mask=is_element, other=0.0)
            b = tl.load(
                matrix + first + element,
                mask=is_column[:, None] & is_element,
                other=0.0,
            )
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        if bias is not None:
            of_expert = bias + expert * (SIDES * G.OUT)
            acc += tl.load(of_expert + weight_column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATE is not None:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, OUTPUTS)), (0, 2, 1)))
            acc = gated(gate, up, GATE.kind, GATE.limit, GATE.alpha)
        column = first_column + tl.arange(0, OUTPUTS)
        tl.store(
            out + pair * out_row + column[None, :],
            acc.to(out.dtype.element_ty),
            mask=is_pair & (column < G.OUT)[None, :],
        )


def suits_hopper(x: Tensor, weight: Tensor) -> bool:
    """True if hopper/expert_product.py may be launched: on such a GPU, with rows that its copies may begin at.

    A step's number of rows plays no part in it.
    """
    aligned = x.data_ptr(), x.stride(0), x.shape[1], weight.data_ptr(), *weight.stride()[:2]
    return on_hopper() and x.dtype.itemsize == 2 and not any(each % 16 for each in aligned)


def launch_expert_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: ExpertGroups,
    out: Tensor,
    gate: GateForm | None = None,
    *,
    tiles: ExpertTiles,
) -> None:
    """Writes each pair's row of x times the matrix of its expert to the pair's row of out.

    x:      [rows, in]; each row belongs to as many pairs, in a row, as there are pairs for each row
    weight: [experts, out, in]; with a gate [experts, 2 * out, in], the gate's rows first
    bias:   [experts, out] or [experts, 2 * out], contiguous
    out:    [pairs, out], of x's dtype, written
    The last dimension of each is contiguous.
    """
    assert groups.num_experts > 1 or len(groups.order) == len(out)
    _launch(x, weight, bias, groups.order, groups.indptr, out, gate, tiles)


def launch_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, gate: GateForm | None = None, *, tiles: ExpertTiles
) -> None:
    """Writes x @ weight.T + bias, or its halves, combined. A row's bits depend on no other row.

    x:      [rows, in]; weight: [out, in], with a gate [2 * out, in], the gate's rows first
    bias:   [out] or [2 * out], contiguous
    out:    [rows, out], of x's dtype, written
    The last dimension of each is contiguous.
    """
    _launch(x, weight[None], None if bias is None else bias[None], out, out, out, gate, tiles)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    order: Tensor,
    indptr: Tensor,
    out: Tensor,
    gate: GateForm | None,
    tiles: ExpertTiles,
) -> None:
    """order, indptr: of ExpertGroups; anything if there is one expert"""
    (num_pairs, num_out), early, sides = out.shape, starts_early(x.device), 1 if gate is None else 2
    num_experts = len(weight)
    assert weight.shape == (num_experts, sides * num_out, x.shape[1])
    assert bias is None or (bias.shape == weight.shape[:2] and bias.is_contiguous())
    assert x.stride(1) == weight.stride(2) == out.stride(1) == 1
    # Each expert with a pair may have one block that is not full.
    most_blocks = num_pairs // tiles.rows + min(num_pairs, num_experts)
    launch(
        _expert_product_kernel,
        (most_blocks, triton.cdiv(num_out, tiles.columns // sides)),
        x,
        weight,
        bias,
        order,
        indptr,
        out,
        num_pairs,
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        G=ProductGeometry(
            EXPERTS=num_experts,
            EXPERTS_BLOCK=next_power_of_2(num_experts),
            IN=x.shape[1],
            OUT=num_out,
            PAIRS_OF_ROW=num_pairs // max(1, x.shape[0]),
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            STEP=tiles.step,
            EARLY=early,
        ),
        GATE=gate,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **tiles.options(),
        **early_options(early),
    )
