"""Merge the segments of every decoded row from left to right (segments.py), and write out and LSE.

Element by element, so how rows, heads and columns are shared out decides no bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.decode_schedule import PROGRAM_WORDS, SEQ_WORDS
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.attention.segments import UNFUSED, merge_segment
from rocm_attn.kernels.attention.softmax import LN_2, add_sink, visible_tiles
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2

# Parts of a row that are loaded before they are merged, one after the other.
_PARTS = 8


@triton.jit(do_not_specialize=["num_programs", "window_left"])
def _segment_merge_kernel(
    q_indptr,
    schedule,
    parts,
    sums,
    out,
    lse,
    sinks,
    num_programs,
    window_left,
    out_token,
    out_head,
    lse_token,
    lse_head,
    ROWS: tl.constexpr,
    GQA_RATIO: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    SEGMENT_LEN: tl.constexpr,
    ROW_COST: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    Q_ROWS: tl.constexpr = (GQA_RATIO + HEAD_BLOCKS - 1) // HEAD_BLOCKS
    seq = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    seq_words = schedule + num_programs * PROGRAM_WORDS + seq * SEQ_WORDS
    kv_len = tl.load(seq_words + 1)
    if kv_len >= 0:
        _, _, num_parts = visible_tiles(kv_len, window_left, SEGMENT_LEN, WINDOWED)
        first_part = (tl.load(seq_words) + row * (num_parts + ROW_COST) + ROW_COST).to(tl.int64)
        q_row = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        # The last block of a KV head's query heads may be shorter.
        head_block = row % HEAD_BLOCKS
        num_q_rows = tl.minimum(Q_ROWS, GQA_RATIO - head_block * Q_ROWS)
        is_row = q_row < num_q_rows
        is_column = (column < V_HEAD_DIM)[None, :]
        maximum = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, COLUMNS], tl.float32)
        for first in range(0, num_parts, PARTS):
            for part in tl.static_range(PARTS):
                is_part = q_row < tl.where(first + part < num_parts, num_q_rows, 0)
                line = (first_part + first + part) * Q_ROWS + q_row
                part_maximum = tl.load(sums + line * 2, mask=is_part, other=float("-inf"))
                part_total = tl.load(sums + line * 2 + 1, mask=is_part, other=0.0)
                block = parts + line[:, None] * V_HEAD_DIM + column[None, :]
                part_acc = tl.load(block, mask=is_part[:, None] & is_column, other=0.0)
                acc, maximum, total = merge_segment(acc, maximum, total, part_acc, part_maximum, part_total)
        token = tl.load(q_indptr + seq).to(tl.int64)
        head = (row // HEAD_BLOCKS * GQA_RATIO + head_block * Q_ROWS + q_row).to(tl.int64)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
            maximum, total, decay = add_sink(maximum, total, sink)
            acc = acc * decay[:, None]
        # A sequence of length 0 has seen no key: 0 / 1, and LSE -inf + log2(1).
        total = tl.where(total == 0.0, 1.0, total)
        value = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(
            out + token * out_token + head[:, None] * out_head + column[None, :],
            value,
            mask=is_row[:, None] & is_column,
        )
        if lse is not None:
            # Programs of other column chunks store the same number.
            tl.store(lse + token * lse_token + head * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)


def launch_segment_merge(
    q_indptr: Tensor,
    schedule: Tensor,
    parts: Tensor,
    sums: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    *,
    window_left: int,
    num_seqs: int,
    num_kv_heads: int,
    num_programs: int,
    tiles: SegmentTiles,
) -> None:
    """out and lse of every sequence with one new token; see launch_segment_decode for the arguments.

    parts: float32 [slots, q_rows, v_head_dim] flat; sums: float32 [slots, q_rows, 2] flat, maximum and sum
    """
    _, num_q_heads, v_head_dim = out.shape
    gqa_ratio = num_q_heads // num_kv_heads
    decode = tiles.decode(gqa_ratio)
    rows_per_seq, q_rows = decode.rows_per_seq(num_kv_heads), decode.q_rows(gqa_ratio)
    # Few rows need many programs; with many rows a program takes as many heads as its registers hold.
    num_rows, block = num_seqs * rows_per_seq, max(16, next_power_of_2(v_head_dim))
    is_small = num_rows <= 64
    heads = 1 if is_small else min(next_power_of_2(q_rows), max(1, 512 // block))
    columns = min(block, 32) if is_small else block
    lse_token, lse_head = (0, 0) if lse is None else lse.stride()
    launch(
        _segment_merge_kernel,
        (num_rows, triton.cdiv(q_rows, heads), triton.cdiv(v_head_dim, columns)),
        q_indptr,
        schedule,
        parts,
        sums,
        out,
        lse,
        sinks,
        num_programs,
        window_left,
        out.stride(0),
        out.stride(1),
        lse_token,
        lse_head,
        ROWS=rows_per_seq,
        GQA_RATIO=gqa_ratio,
        HEAD_BLOCKS=decode.head_blocks,
        V_HEAD_DIM=v_head_dim,
        SEGMENT_LEN=tiles.segment_len,
        ROW_COST=decode.row_cost,
        WINDOWED=window_left != UNLIMITED_WINDOW,
        HEADS=heads,
        COLUMNS=columns,
        PARTS=_PARTS,
        num_warps=1,
        **UNFUSED,
    )
