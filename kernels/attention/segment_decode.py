"""Deterministic decode: paged attention of sequences with one new token, whose bits do not depend on the batch.

The programs of the decode schedule share out segments in place of tiles. Each segment's partial result goes to a slot
of its own, the segment's place on the schedule's axis; segment_merge.py merges a row's slots from left to right. Where
a segment runs varies with the batch; what a segment is, and the order of the merge, do not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.checks import check_paged_tensors
from rocm_attn.kernels.attention.decode_schedule import PROGRAM_WORDS, SEQ_WORDS, decode_schedule_words
from rocm_attn.kernels.attention.scores import Scores, check_head_weights
from rocm_attn.kernels.attention.segment_merge import launch_segment_merge
from rocm_attn.kernels.attention.segments import UNFUSED, attend_segment
from rocm_attn.kernels.attention.softmax import LOG2_E, visible_tiles
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "width", "window_left"])
def _segment_decode_kernel(
    q,
    k_pages,
    v_pages,
    table,
    row_of_seq,
    q_indptr,
    schedule,
    parts,
    sums,
    slopes,
    qk_scale,
    tanh_scale,
    window_left,
    num_seqs,
    num_programs,
    width,
    q_token,
    q_head,
    kp_page,
    kp_token,
    kp_head,
    vp_page,
    vp_token,
    vp_head,
    table_row,
    ROWS: tl.constexpr,
    GQA_RATIO: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT_LEN: tl.constexpr,
    ROW_COST: tl.constexpr,
    SAME_OFFSETS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
):
    Q_ROWS: tl.constexpr = (GQA_RATIO + HEAD_BLOCKS - 1) // HEAD_BLOCKS
    words = schedule + tl.program_id(0) * PROGRAM_WORDS
    seq = tl.load(words)
    row = tl.load(words + 1)
    done = tl.load(words + 2)
    work = tl.load(words + 3)
    row_start = tl.load(words + 5)
    kv_len = tl.load(words + 6)
    q_row = tl.arange(0, BLOCK_M)
    k_column = tl.arange(0, K_BLOCK)
    v_column = tl.arange(0, V_BLOCK)
    while work > 0:
        first_key, window_segment, num_segments = visible_tiles(kv_len, window_left, SEGMENT_LEN, WINDOWED)
        row_cost = tl.where(kv_len < 0, 0, num_segments + ROW_COST)
        take = tl.minimum(work, row_cost - done)
        first = tl.maximum(done - ROW_COST, 0)
        end = done + take - ROW_COST
        if end > first:
            # A row is a KV head, or a block of its query heads.
            head_block = row % HEAD_BLOCKS
            kv_head = (row // HEAD_BLOCKS).to(tl.int64)
            first_head = kv_head * GQA_RATIO + head_block * Q_ROWS
            is_row = q_row < tl.minimum(Q_ROWS, GQA_RATIO - head_block * Q_ROWS)
            is_q = is_row[:, None]
            if K_BLOCK > HEAD_DIM:
                is_q = is_q & (k_column < HEAD_DIM)[None, :]
            is_v = is_row[:, None]
            if V_BLOCK > V_HEAD_DIM:
                is_v = is_v & (v_column < V_HEAD_DIM)[None, :]
            q_line = q + tl.load(q_indptr + seq).to(tl.int64) * q_token + first_head * q_head
            q_tile = tl.load(q_line + q_row.to(tl.int64)[:, None] * q_head + k_column[None, :], mask=is_q, other=0.0)
            slope = tl.zeros([BLOCK_M], tl.float32)
            if slopes is not None:
                slope = tl.load(slopes + first_head + q_row, mask=is_row, other=0.0) * LOG2_E
            pages = table + tl.load(row_of_seq + seq).to(tl.int64) * table_row
            for index in range(first, end):
                acc, maximum, total = attend_segment(
                    window_segment + index,
                    q_tile,
                    k_pages + kv_head * kp_head,
                    v_pages + kv_head * vp_head,
                    pages,
                    kv_len // BLOCK_N,
                    first_key,
                    kv_len,
                    tl.full([1], 0, tl.int32) + (kv_len - 1),
                    window_left,
                    slope,
                    qk_scale,
                    tanh_scale,
                    width,
                    kp_page,
                    kp_token,
                    vp_page,
                    vp_token,
                    HEAD_DIM,
                    V_HEAD_DIM,
                    K_BLOCK,
                    V_BLOCK,
                    PAGE_SIZE,
                    BLOCK_M,
                    BLOCK_N,
                    SEGMENT_LEN,
                    CAUSAL,
                    WINDOWED,
                    CAPPED,
                    slopes is not None,
                    SAME_OFFSETS,
                    STAGES,
                    STAGES,
                )
                line = (row_start + ROW_COST + index).to(tl.int64) * Q_ROWS + q_row
                tl.store(parts + line[:, None] * V_HEAD_DIM + v_column[None, :], acc, mask=is_v)
                tl.store(sums + line * 2, maximum, mask=is_row)
                tl.store(sums + line * 2 + 1, total, mask=is_row)
        work -= take
        done = 0
        row_start += row_cost
        row = tl.where(kv_len < 0, ROWS, row + 1)
        seq = tl.where(row == ROWS, seq + 1, seq)
        row = tl.where(row == ROWS, 0, row)
        seq_words = schedule + num_programs * PROGRAM_WORDS + seq * SEQ_WORDS
        kv_len = tl.load(seq_words + 1, mask=seq < num_seqs, other=-1)


def segment_slots(num_seqs: int, most_segments: int, *, gqa_ratio: int, num_kv_heads: int, tiles: SegmentTiles) -> int:
    """Partial results that a decode of num_seqs padded sequences of at most so many segments may leave."""
    decode = tiles.decode(gqa_ratio)
    return num_seqs * decode.rows_per_seq(num_kv_heads) * (most_segments + decode.row_cost)


def segment_parts_words(num_slots: int, *, gqa_ratio: int, v_head_dim: int, tiles: SegmentTiles) -> tuple[int, int]:
    """float32 words of the maxima and sums of so many slots, in whole 16-byte units, and of their accumulators."""
    q_rows = tiles.decode(gqa_ratio).q_rows(gqa_ratio)
    # Triton compiles a kernel anew when a pointer's alignment changes.
    return -(-num_slots * q_rows * 2 // 4) * 4, num_slots * q_rows * v_head_dim


def launch_segment_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    schedule: Tensor,
    workspace: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scores: Scores,
    most_segments: int,
    num_programs: int,
    tiles: SegmentTiles,
) -> None:
    """launch_paged_decode, bitwise the same for a sequence in any batch, and as launch_segment_extend gives it.

    Arguments as there, but for:
    schedule:      filled by launch_decode_schedule with tiles.decode(gqa_ratio)
    workspace:     float32, the sum of segment_parts_words(segment_slots(...)) or longer, scratch
    most_segments: of a sequence, see SegmentTiles

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    check_paged_tensors("deterministic decode", q, k_pages, v_pages, table, row_of_seq, kv_len, q_indptr, out, lse)
    num_q_heads, head_dim = q.shape[1:]
    check_head_weights(num_q_heads, sinks, slopes)
    page_size, num_kv_heads, v_head_dim = v_pages.shape[1:]
    gqa_ratio, num_seqs = num_q_heads // num_kv_heads, kv_len.shape[0]
    slots = segment_slots(num_seqs, most_segments, gqa_ratio=gqa_ratio, num_kv_heads=num_kv_heads, tiles=tiles)
    sum_words, part_words = segment_parts_words(slots, gqa_ratio=gqa_ratio, v_head_dim=v_head_dim, tiles=tiles)
    assert schedule.dtype == torch.int32
    assert schedule.is_contiguous()
    assert schedule.numel() >= decode_schedule_words(num_programs, num_seqs)
    assert workspace.dtype == torch.float32
    assert workspace.is_contiguous()
    assert workspace.numel() >= sum_words + part_words
    sums, parts = workspace[:sum_words], workspace[sum_words : sum_words + part_words]
    decode = tiles.decode(gqa_ratio)
    launch(
        _segment_decode_kernel,
        (num_programs,),
        q,
        k_pages,
        v_pages,
        table,
        row_of_seq,
        q_indptr,
        schedule,
        parts,
        sums,
        slopes,
        scores.base_2_scale,
        scores.tanh_scale,
        scores.window_left,
        num_seqs,
        num_programs,
        table.shape[1],
        q.stride(0),
        q.stride(1),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        table.stride(0),
        ROWS=decode.rows_per_seq(num_kv_heads),
        GQA_RATIO=gqa_ratio,
        HEAD_BLOCKS=decode.head_blocks,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        K_BLOCK=max(16, next_power_of_2(head_dim)),
        V_BLOCK=max(16, next_power_of_2(v_head_dim)),
        PAGE_SIZE=page_size,
        BLOCK_M=tiles.decode_rows,
        BLOCK_N=tiles.block_n,
        SEGMENT_LEN=tiles.segment_len,
        ROW_COST=decode.row_cost,
        SAME_OFFSETS=head_dim == v_head_dim and k_pages.stride() == v_pages.stride(),
        CAUSAL=scores.causal,
        WINDOWED=scores.windowed,
        CAPPED=scores.soft_cap > 0,
        STAGES=tiles.decode_stages,
        num_warps=tiles.decode_warps,
        **tiles.options(),
        **UNFUSED,
    )
    launch_segment_merge(
        q_indptr,
        schedule,
        parts,
        sums,
        out,
        lse,
        sinks,
        window_left=scores.window_left,
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        num_programs=num_programs,
        tiles=tiles,
    )
