"""Deterministic extend: paged attention of sequences with several new tokens, bitwise what decode would give for each.

A program walks its tile over all segments that the tile sees and merges them from left to right (segments.py). So it
holds two accumulators: of the segment, and of what lies left of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.checks import check_paged_tensors
from rocm_attn.kernels.attention.extend_schedule import TILE_WORDS, extend_schedule_words, max_extend_tiles
from rocm_attn.kernels.attention.scores import Scores, check_head_weights
from rocm_attn.kernels.attention.segments import UNFUSED, attend_segment, merge_segment
from rocm_attn.kernels.attention.softmax import LN_2, LOG2_E, add_sink
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2


@triton.jit
def _rows_of_tile(
    first_token,
    num_tokens,
    kv_head,
    head_block,
    GQA_RATIO: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Token and query head of each row of a tile, and whether the row has one."""
    row = tl.arange(0, BLOCK_M)
    tile_token = row // TILE_HEADS
    ratio_head = head_block * TILE_HEADS + row % TILE_HEADS
    is_row = tile_token < num_tokens
    if HEAD_BLOCKS * TILE_HEADS > GQA_RATIO:
        is_row = is_row & (ratio_head < GQA_RATIO)
    return (first_token + tile_token).to(tl.int64), (kv_head * GQA_RATIO + ratio_head).to(tl.int64), is_row


@triton.jit(do_not_specialize=["width", "window_left"])
def _segment_extend_kernel(
    q,
    k_pages,
    v_pages,
    table,
    row_of_seq,
    kv_len,
    schedule,
    out,
    lse,
    sinks,
    slopes,
    qk_scale,
    tanh_scale,
    window_left,
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
    out_token,
    out_head,
    lse_token,
    lse_head,
    KV_HEADS: tl.constexpr,
    GQA_RATIO: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT_LEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SAME_OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
):
    # Programs of the same tile are neighbours: KV heads, and blocks of TILE_HEADS query heads of each.
    HEAD_BLOCKS: tl.constexpr = (GQA_RATIO + TILE_HEADS - 1) // TILE_HEADS
    words = schedule + tl.program_id(0) // (KV_HEADS * HEAD_BLOCKS) * TILE_WORDS
    kv_head = tl.program_id(0) // HEAD_BLOCKS % KV_HEADS
    head_block = tl.program_id(0) % HEAD_BLOCKS
    seq = tl.load(words)
    first_token = tl.load(words + 1)
    num_tokens = tl.load(words + 2)
    first_kv_index = tl.load(words + 3)
    if num_tokens > 0:
        token, head, is_row = _rows_of_tile(
            first_token, num_tokens, kv_head, head_block, GQA_RATIO, TILE_HEADS, HEAD_BLOCKS, BLOCK_M
        )
        is_q = is_row[:, None]
        k_column = tl.arange(0, K_BLOCK)
        if K_BLOCK > HEAD_DIM:
            is_q = is_q & (k_column < HEAD_DIM)[None, :]
        q_tile = tl.load(q + (token * q_token + head * q_head)[:, None] + k_column[None, :], mask=is_q, other=0.0)
        k_head = k_pages + kv_head.to(tl.int64) * kp_head
        v_head = v_pages + kv_head.to(tl.int64) * vp_head
        pages = table + tl.load(row_of_seq + seq, mask=seq >= 0, other=0).to(tl.int64) * table_row
        row_kv_index = first_kv_index + tl.arange(0, BLOCK_M) // TILE_HEADS
        slope = tl.zeros([BLOCK_M], tl.float32)
        if slopes is not None:
            slope = tl.load(slopes + head, mask=is_row, other=0.0) * LOG2_E
        # Keys [first_key, end_key) are seen by some row, those before edge_step by all. The padded tail belongs to no
        # sequence and sees no key.
        first_key = 0
        if CAUSAL:
            end_key = tl.where(seq >= 0, first_kv_index + num_tokens, 0)
            edge_step = (first_kv_index + 1) // BLOCK_N
        else:
            end_key = tl.load(kv_len + seq, mask=seq >= 0, other=0)
            edge_step = end_key // BLOCK_N
        if WINDOWED:
            first_key = tl.maximum(first_kv_index - window_left, 0)
        first_segment = first_key // SEGMENT_LEN
        end_segment = tl.cdiv(end_key, SEGMENT_LEN)
        acc = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        for segment in range(first_segment, end_segment):
            part_acc, part_maximum, part_total = attend_segment(
                segment,
                q_tile,
                k_head,
                v_head,
                pages,
                edge_step,
                first_key,
                end_key,
                row_kv_index,
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
                EDGE_STAGES,
            )
            acc, maximum, total = merge_segment(acc, maximum, total, part_acc, part_maximum, part_total)
        # Read again, not kept: both accumulators leave no register to keep it in.
        first_token = tl.load(words + 1, volatile=True)
        num_tokens = tl.load(words + 2, volatile=True)
        token, head, is_row = _rows_of_tile(
            first_token, num_tokens, kv_head, head_block, GQA_RATIO, TILE_HEADS, HEAD_BLOCKS, BLOCK_M
        )
        v_column = tl.arange(0, V_BLOCK)
        is_out = is_row[:, None]
        if V_BLOCK > V_HEAD_DIM:
            is_out = is_out & (v_column < V_HEAD_DIM)[None, :]
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
            maximum, total, decay = add_sink(maximum, total, sink)
            acc = acc * decay[:, None]
        # Tokens of no sequence have seen no key: 0 / 1, and LSE -inf + log2(1).
        total = tl.where(total == 0.0, 1.0, total)
        out_block = out + (token * out_token + head * out_head)[:, None] + v_column[None, :]
        tl.store(out_block, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_out)
        if lse is not None:
            tl.store(lse + token * lse_token + head * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)


def launch_segment_extend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    schedule: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scores: Scores,
    max_q_len: int,
    tiles: SegmentTiles,
) -> None:
    """launch_paged_extend, bitwise the same for a token in any batch and chunk, and as launch_segment_decode gives it.

    Arguments as there; the schedule is filled by launch_extend_schedule with tiles.extend.

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    check_paged_tensors("deterministic extend", q, k_pages, v_pages, table, row_of_seq, kv_len, q_indptr, out, lse)
    num_tokens, num_q_heads, head_dim = q.shape
    page_size, num_kv_heads, v_head_dim = v_pages.shape[1:]
    num_seqs, gqa_ratio = kv_len.shape[0], num_q_heads // num_kv_heads
    check_head_weights(num_q_heads, sinks, slopes)
    extend = tiles.extend
    assert schedule.dtype == torch.int32
    assert schedule.is_contiguous()
    assert schedule.numel() >= extend_schedule_words(num_tokens, num_seqs, gqa_ratio=gqa_ratio, tiles=extend)
    tile_heads = extend.heads_per_tile(gqa_ratio)
    max_tiles = max_extend_tiles(num_tokens, num_seqs, gqa_ratio=gqa_ratio, tiles=extend)
    lse_token, lse_head = (0, 0) if lse is None else lse.stride()
    launch(
        _segment_extend_kernel,
        (max_tiles * num_kv_heads * triton.cdiv(gqa_ratio, tile_heads),),
        q,
        k_pages,
        v_pages,
        table,
        row_of_seq,
        kv_len,
        schedule,
        out,
        lse,
        sinks,
        slopes,
        scores.base_2_scale,
        scores.tanh_scale,
        scores.window_left,
        table.shape[1],
        q.stride(0),
        q.stride(1),
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        table.stride(0),
        out.stride(0),
        out.stride(1),
        lse_token,
        lse_head,
        KV_HEADS=num_kv_heads,
        GQA_RATIO=gqa_ratio,
        TILE_HEADS=tile_heads,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        K_BLOCK=max(16, next_power_of_2(head_dim)),
        V_BLOCK=max(16, next_power_of_2(v_head_dim)),
        PAGE_SIZE=page_size,
        BLOCK_M=extend.block_m,
        BLOCK_N=extend.block_n,
        SEGMENT_LEN=tiles.segment_len,
        CAUSAL=scores.causal,
        WINDOWED=scores.windowed,
        CAPPED=scores.soft_cap > 0,
        SAME_OFFSETS=head_dim == v_head_dim and k_pages.stride() == v_pages.stride(),
        STAGES=extend.num_stages,
        EDGE_STAGES=extend.diagonal_stages,
        num_warps=extend.num_warps,
        **({"waves_per_eu": extend.waves_per_eu} if extend.waves_per_eu else {}),
        **tiles.options(),
        **UNFUSED,
    )
