"""Add up the partial results of rows that several decode programs shared.

Part i of a row holds, for each q row, an accumulator a_i, a maximum m_i and a sum l_i in base 2. With m = max m_i:

    out = sum_i 2^(m_i - m) a_i / sum_i 2^(m_i - m) l_i        lse = ln 2 * (m + log2(sum_i 2^(m_i - m) l_i))

Which programs hold parts of a row follows from the schedule (see decode_schedule.py), in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.decode_schedule import PROGRAM_WORDS, SEQ_WORDS
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW
from rocm_attn.kernels.attention.softmax import LN_2, add_sink, visible_tiles
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import DecodeTiles, next_power_of_2


@triton.jit
def _merge_parts(
    partials,
    sums,
    first_program,
    num_parts,
    q_row,
    column,
    Q_ROWS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Accumulator [HEADS, COLUMNS], maximum and sum [HEADS] over the parts of one row, PARTS at a time."""
    lane = tl.arange(0, PARTS)
    maximum = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, COLUMNS], tl.float32)
    for first in range(0, num_parts, PARTS):
        index = first + lane
        # The row began in its first program (slot 2p + 1) and was begun earlier for all the others (slot 2p).
        part = 2 * (first_program + index) + (index == 0).to(tl.int32)
        line = part[:, None] * Q_ROWS + q_row[None, :]
        live = (index < num_parts)[:, None] & (q_row < Q_ROWS)[None, :]
        part_maximum = tl.load(sums + line * 2, mask=live, other=float("-inf"))
        part_total = tl.load(sums + line * 2 + 1, mask=live, other=0.0)
        is_acc = live[:, :, None]
        if V_HEAD_DIM % COLUMNS != 0:
            is_acc = is_acc & (column < V_HEAD_DIM)[None, None, :]
        part_acc = tl.load(partials + line[:, :, None] * V_HEAD_DIM + column[None, None, :], mask=is_acc, other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(part_maximum, 0))
        # Only q rows past Q_ROWS have no part; the subtraction below must not be inf - inf for them.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - base)
        weight = tl.exp2(part_maximum - base[None, :])
        total = total * decay + tl.sum(part_total * weight, 0)
        acc = acc * decay[:, None] + tl.sum(part_acc * weight[:, :, None], 0)
        maximum = new_maximum
    return acc, maximum, total


@triton.jit(do_not_specialize=["num_programs", "window_left"])
def _merge_kernel(
    q_indptr,
    schedule,
    partials,
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
    HEADS_PER_ROW: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_COST: tl.constexpr,
    WINDOWED: tl.constexpr,
    BY_ROW: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    BLOCK_HEADS: tl.constexpr = (GQA_RATIO + HEAD_BLOCKS - 1) // HEAD_BLOCKS
    Q_ROWS: tl.constexpr = BLOCK_HEADS * HEADS_PER_ROW
    index = tl.program_id(0)
    if BY_ROW:
        seq = index // ROWS
        row = index % ROWS
        seq_words = schedule + num_programs * PROGRAM_WORDS + seq * SEQ_WORDS
        share = tl.load(schedule + 4)
        _, _, num_tiles = visible_tiles(tl.load(seq_words + 1), window_left, BLOCK_N, WINDOWED)
        first_position = tl.load(seq_words) + row * (num_tiles + ROW_COST) + ROW_COST
        first_program = first_position // share
        mine = num_tiles > 0
    else:
        # The row that goes on from program `index` into the next one, if that program is the first with a part of it.
        words = schedule + (index + 1) * PROGRAM_WORDS
        seq = tl.load(words)
        row = tl.load(words + 1)
        share = tl.load(words + 4)
        _, _, num_tiles = visible_tiles(tl.load(words + 6), window_left, BLOCK_N, WINDOWED)
        first_position = tl.load(words + 5) + ROW_COST
        first_program = first_position // share
        mine = (tl.load(words + 3) > 0) & (tl.load(words + 2) > ROW_COST) & (first_program == index)
    num_parts = (first_position + num_tiles - 1) // share - first_program + 1
    if mine & (num_parts > 1):
        q_row = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        sums = partials + num_programs * (2 * Q_ROWS * V_HEAD_DIM)
        acc, maximum, total = _merge_parts(
            partials, sums, first_program, num_parts, q_row, column, Q_ROWS, V_HEAD_DIM, HEADS, COLUMNS, PARTS
        )
        # The last block of a KV head's query heads may be shorter; its other lanes hold whatever decode left there.
        head_block = row % HEAD_BLOCKS
        is_row = q_row < tl.minimum(Q_ROWS, GQA_RATIO * HEADS_PER_ROW - head_block * BLOCK_HEADS)
        token = tl.load(q_indptr + seq).to(tl.int64)
        first_head = row // HEAD_BLOCKS * (HEADS_PER_ROW * GQA_RATIO) + head_block * BLOCK_HEADS
        head = (first_head + q_row).to(tl.int64)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
            maximum, total, decay = add_sink(maximum, total, sink)
            acc = acc * decay[:, None]
        value = (acc / tl.where(is_row, total, 1.0)[:, None]).to(out.dtype.element_ty)
        mask = is_row[:, None] & (column < V_HEAD_DIM)[None, :]
        tl.store(out + token * out_token + head[:, None] * out_head + column[None, :], value, mask=mask)
        if lse is not None:
            # Programs of other column chunks store the same number.
            value = (maximum + tl.log2(tl.where(is_row, total, 1.0))) * LN_2
            tl.store(lse + token * lse_token + head * lse_head, value, mask=is_row)


@dataclass(frozen=True, slots=True)
class MergeShape:
    """How the merge is cut.

    by_row:     a program for each row; or for each pair of neighbouring decode programs, where rows outnumber them
    heads:      q rows of a program
    columns:    output columns of a program
    parts:      parts that are added up in one step
    num_warps:  warps of a program
    """

    by_row: bool
    heads: int
    columns: int
    parts: int
    num_warps: int


def merge_shape(num_rows: int, num_programs: int, q_rows: int, v_head_dim: int) -> MergeShape:
    """The cut for num_rows rows of q_rows query heads.

    Two things count (measured on one H200): all parts of a typical row in one step, and enough programs.
    1 row, 264 parts: 45 us with 8 parts a step, 16 us with 256. 64 x 4k, 512 rows: 7.6 us with one head a program, 3 us
    with all. Everything that varies with the batch has few values, so that few variants are compiled.
    """
    block = max(16, next_power_of_2(v_head_dim))
    if num_rows > num_programs:
        heads = min(next_power_of_2(q_rows), max(1, 2048 // block))
        return MergeShape(False, heads, block, 8 if heads * block <= 1024 else 4, 2)
    if num_rows > 16:
        return MergeShape(True, 1, min(block, 64), 16, 2)
    if num_rows >= 4:
        return MergeShape(True, 1, min(block, 32), 64, 1)
    parts = min(max(next_power_of_2(num_programs // max(num_rows, 1) + 1), 64), 512)
    return MergeShape(True, 1, min(block, 32), parts, 8 if parts >= 256 else 1)


def launch_merge(
    q_indptr: Tensor,
    schedule: Tensor,
    partials: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    *,
    window_left: int,
    num_seqs: int,
    num_kv_heads: int,
    num_programs: int,
    tiles: DecodeTiles,
) -> None:
    """out and lse of every row of which several programs hold parts; see launch_paged_decode for the arguments."""
    _, num_q_heads, v_head_dim = out.shape
    gqa_ratio, rows_per_seq = num_q_heads // num_kv_heads, tiles.rows_per_seq(num_kv_heads)
    q_rows = tiles.q_rows(gqa_ratio)
    shape = merge_shape(num_seqs * rows_per_seq, num_programs, q_rows, v_head_dim)
    lse_token, lse_head = (0, 0) if lse is None else lse.stride()
    launch(
        _merge_kernel,
        (
            num_seqs * rows_per_seq if shape.by_row else num_programs - 1,
            triton.cdiv(q_rows, shape.heads),
            triton.cdiv(v_head_dim, shape.columns),
        ),
        q_indptr,
        schedule,
        partials,
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
        HEADS_PER_ROW=tiles.heads_per_row,
        HEAD_BLOCKS=tiles.head_blocks,
        V_HEAD_DIM=v_head_dim,
        BLOCK_N=tiles.block_n,
        ROW_COST=tiles.row_cost,
        WINDOWED=window_left != UNLIMITED_WINDOW,
        BY_ROW=shape.by_row,
        HEADS=shape.heads,
        COLUMNS=shape.columns,
        PARTS=shape.parts,
        num_warps=shape.num_warps,
    )
