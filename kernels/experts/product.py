"""Multiplies each row with the matrix of its expert, and no matrix with a row that did not choose it.

    out[p] = x[source[p]] @ weight[e].T + bias[e]      for each pair p of expert e
    out[p] = gate(the same)                            with a gate, see model/gate.py

Pairs lie by expert (groups.py); without a source, rows of x do too. A program takes a block of one expert's pairs and a
block of columns. It finds its expert by counting blocks, so the grid follows from sizes alone: it has room for the most
blocks that experts can have, and programs without one end at once. A row's bits depend on no other row: a matrix
instruction computes it from itself. All rows may have one matrix: that is a layer of one expert, in which nothing has
to be looked up.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.early import early_options, starts_early, wait_for_launch
from rocm_attn.kernels.experts.arguments import ProductArgs
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.model.gate import gated
from rocm_attn.kernels.tuning.expert_tiles import ExpertTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2


class ProductGeometry(NamedTuple):
    """The values that the product is compiled for.

    EXPERTS, EXPERTS_BLOCK: experts, and a power of 2, at least the number of all but the last one
    IN, OUT:                elements of a row of x and of out
    ROWS, COLUMNS, STEP:    pairs of a program, rows of the matrix, and elements of x that it multiplies at a time
    EARLY:                  whether it starts early (early.py)
    """

    EXPERTS: int
    EXPERTS_BLOCK: int
    IN: int
    OUT: int
    ROWS: int
    COLUMNS: int
    STEP: int
    EARLY: bool


@triton.jit(do_not_specialize=["all_pairs"])
def _expert_product_kernel(
    x,
    weight,
    bias,
    source,
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
        expert, begin, end = 0, block * ROWS, all_pairs
    else:
        each = tl.arange(0, G.EXPERTS_BLOCK)
        is_before_last = each < G.EXPERTS - 1
        begins = tl.load(indptr + each, mask=is_before_last, other=0)
        num_pairs = tl.load(indptr + each + 1, mask=is_before_last, other=0) - begins
        num_blocks = tl.cdiv(num_pairs.to(tl.int32), ROWS)
        expert = tl.sum((is_before_last & (tl.cumsum(num_blocks, 0) <= block)).to(tl.int32), 0)
        own_block = block - tl.sum(tl.where(each < expert, num_blocks, 0), 0)
        begin = tl.load(indptr + expert) + own_block * ROWS
        end = tl.load(indptr + expert + 1)
    # Beyond the last expert's blocks there is none.
    if begin < end:
        place = begin + tl.arange(0, ROWS)
        is_pair = (place < end)[:, None]
        # pair, row: [ROWS, 1]; column: [COLUMNS]
        pair = place[:, None].to(tl.int64)
        row = tl.where(is_pair, pair, 0)
        if source is not None:
            row = tl.load(source + pair, mask=is_pair, other=0)
        first_column = tl.program_id(1) * OUTPUTS
        of_both = tl.arange(0, COLUMNS)
        within = first_column + of_both % OUTPUTS
        weight_column = within + of_both // OUTPUTS * G.OUT
        is_column = within < G.OUT
        element = tl.arange(0, STEP)[None, :]
        rows = x + row * x_row
        # 64-bit before multiplying: the matrices of all experts go beyond int32, and so may the rows of one.
        matrix = weight + tl.cast(expert, tl.int64) * weight_expert + weight_column[:, None].to(tl.int64) * weight_row
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, IN, STEP):
            is_element = first + element < IN
            # Rows without a pair read the first row of x: their results are dropped.
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


def launch_expert_product(args: ProductArgs, *, tiles: ExpertTiles) -> None:
    """Writes each pair's row of x times the matrix of its expert to the pair's row of out."""
    args.check()
    x, weight, out, early = args.x, args.weight, args.out, starts_early(args.x.device)
    num_out = out.shape[1]
    launch(
        _expert_product_kernel,
        (args.most_blocks(tiles.rows, len(out)), triton.cdiv(num_out, tiles.columns // args.sides)),
        x,
        weight,
        args.bias,
        args.source,
        args.indptr,
        out,
        len(out),
        x.stride(0),
        weight.stride(0),
        weight.stride(1),
        out.stride(0),
        G=ProductGeometry(
            EXPERTS=len(weight),
            EXPERTS_BLOCK=next_power_of_2(len(weight) - 1),
            IN=x.shape[1],
            OUT=num_out,
            ROWS=tiles.rows,
            COLUMNS=tiles.columns,
            STEP=tiles.step,
            EARLY=early,
        ),
        GATE=args.gate,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **tiles.options(),
        **early_options(early),
    )
