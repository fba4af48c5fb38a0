"""Merges the parts of rows from left to right (attention/segments.py), and writes out and LSE.

It works element by element, so the way that rows and columns are shared out decides no bit.
"""

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.bundles import HeadRows, HeadsOfToken, Softmax
from rocm_attn.kernels.attention.segments import UNFUSED, merge_segment
from rocm_attn.kernels.attention.softmax import store_rows
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.sparse.arguments import SelectedArgs
from rocm_attn.kernels.sparse.cuts import SelectedCut
from rocm_attn.kernels.sparse.places import visible_tokens
from rocm_attn.kernels.sparse.rows import SelectedGeometry, heads_of_row, listed_keys
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Elements of an accumulator that a program merges, rows times columns, and parts of a row that are loaded before they
# are merged, one after the other. If a row has many parts, tokens are few and programs may be smaller: one token of
# 16 heads in 64 parts takes 13 us instead of 25, and 64 tokens in 4 parts would take 59 instead of 58 (H200).
_ELEMENTS, _PARTS = 512, 4
_MANY_PARTS = 8
_ELEMENTS_OF_MANY, _PARTS_OF_MANY = 128, 8


@triton.jit(do_not_specialize=["num_parts", "part_keys"])
def _merge_parts_kernel(
    counts,
    position_of_token,
    num_tokens,
    parts,
    sums,
    out,
    lse,
    sinks,
    num_parts,
    part_keys,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    token = (tl.program_id(0) // G.ROWS).to(tl.int64)
    row = tl.program_id(0) % G.ROWS
    kv_head, first_head, num_q_rows = heads_of_row(row, G)
    if counts is None:
        num_keys = tl.minimum(visible_tokens(position_of_token, num_tokens, token.to(tl.int32), True), G.WIDTH)
    else:
        num_keys, _ = listed_keys(counts, token, kv_head, G)
    with_keys = tl.cdiv(num_keys, part_keys)
    q_row = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_row = q_row < num_q_rows
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, COLUMNS], tl.float32)
    for first in range(0, with_keys, PARTS):
        for index in tl.static_range(PARTS):
            # part_maximum, part_total: [HEADS]; part_acc: [HEADS, COLUMNS]
            is_part = q_row < tl.where(first + index < with_keys, num_q_rows, 0)
            line = ((token * G.ROWS + row) * num_parts + first + index) * G.ROW_HEADS + q_row
            part_maximum = tl.load(sums + line * 2, mask=is_part, other=float("-inf"))
            part_total = tl.load(sums + line * 2 + 1, mask=is_part, other=0.0)
            is_acc = is_part[:, None] & (column < G.V_HEAD_DIM)[None, :]
            part_acc = tl.load(parts + line[:, None] * G.V_HEAD_DIM + column[None, :], mask=is_acc, other=0.0)
            merged = merge_segment(Softmax((acc,), maximum, total), Softmax((part_acc,), part_maximum, part_total))
            acc, maximum, total = merged.acc[0], merged.maximum, merged.total
    # Programs of other columns store the same LSE.
    head = first_head + q_row
    out_rows, lse_rows = HeadRows(out, out_token, out_head), HeadRows(lse, lse_token, lse_head)
    store_rows(
        Softmax(acc, maximum, total), HeadsOfToken(token, head, is_row), sinks, out_rows, lse_rows, column, G.V_HEAD_DIM
    )


def launch_merge_parts(
    args: SelectedArgs, cut: SelectedCut, parts: Tensor, sums: Tensor, geometry: SelectedGeometry
) -> None:
    """Writes out and LSE of every row; the arguments are launch_selected_attention's.

    parts: float32 [tokens, rows, parts, row_heads, v_head_dim] flat; sums: [.., 2] flat, maximum (base 2) and sum
    """
    v_head_dim = geometry.V_HEAD_DIM
    columns = min(next_power_of_2(v_head_dim), 128)
    elements, parts_at_once = (_ELEMENTS_OF_MANY, _PARTS_OF_MANY) if cut.parts > _MANY_PARTS else (_ELEMENTS, _PARTS)
    heads = max(min(next_power_of_2(cut.row_heads), elements // columns), 1)
    launch(
        _merge_parts_kernel,
        (len(args.q) * cut.rows, triton.cdiv(cut.row_heads, heads), triton.cdiv(v_head_dim, columns)),
        args.selection.counts,
        args.tokens.position_of_token,
        args.tokens.num_tokens,
        parts,
        sums,
        args.out,
        args.lse,
        args.sinks,
        cut.parts,
        cut.part_keys,
        *args.written_strides,
        G=geometry,
        HEADS=heads,
        COLUMNS=columns,
        PARTS=parts_at_once,
        num_warps=1,
        **UNFUSED,
    )
