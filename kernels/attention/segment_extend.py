"""Deterministic extend: paged attention of sequences with several new tokens, bitwise what decode would give for each.

A program walks its query block over all segments that the block sees and merges them from left to right (segments.py).
So it holds two accumulators: of the segment, and of what lies left of it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import KeyValues, Line, Logits, Pages, Rows, Softmax, Span
from rocm_attn.kernels.attention.coded import Factors, coded_scales, row_factor
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_FIRST_TOKEN,
    BLOCK_KV_INDEX,
    BLOCK_SEQ,
    BLOCK_TOKENS,
    BLOCK_WORDS,
)
from rocm_attn.kernels.attention.key_loop import Query, Seen, key_geometry, nothing_seen
from rocm_attn.kernels.attention.mask_bits import TWO_WORDS
from rocm_attn.kernels.attention.packed_mask import PackedMask
from rocm_attn.kernels.attention.query_block import (
    BlockGeometry,
    MaskOfStep,
    bits_of_block,
    load_queries,
    place_of_program,
    rows_of_block,
    store_results,
)
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.segments import (
    UNFUSED,
    attend_segment,
    left_of_program,
    load_left,
    merge_in_memory,
    merge_segment,
)
from rocm_attn.kernels.attention.softmax import LOG2_E
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles


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
    left,
    sinks,
    slopes,
    k_scale,
    v_scale,
    q_indptr,
    mask_words,
    mask_indptr,
    mask_start,
    window_start,
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
    G: tl.constexpr,
):
    K: tl.constexpr = G.keys
    C: tl.constexpr = K.coding
    QUERY_ROWS: tl.constexpr = G.QUERY_ROWS
    query_block, kv_head, head_block = place_of_program(G)
    words = schedule + query_block * BLOCK_WORDS
    seq = tl.load(words + BLOCK_SEQ)
    first_token = tl.load(words + BLOCK_FIRST_TOKEN)
    num_tokens = tl.load(words + BLOCK_TOKENS)
    first_kv_index = tl.load(words + BLOCK_KV_INDEX)
    if num_tokens > 0:
        # token, head, is_row, row_kv_index, slope: [QUERY_ROWS]
        token, head, is_row = rows_of_block(first_token, num_tokens, kv_head, head_block, G)
        queries = load_queries(Rows(q, q_token, q_head), token, head, is_row, K)
        k_side = Pages(k_pages + kv_head.to(tl.int64) * kp_head, kp_page, kp_token, kp_head)
        v_side = Pages(v_pages + kv_head.to(tl.int64) * vp_head, vp_page, vp_token, vp_head)
        pages = table + tl.load(row_of_seq + seq, mask=seq >= 0, other=0).to(tl.int64) * table_row
        row_kv_index = first_kv_index + tl.arange(0, QUERY_ROWS) // G.BLOCK_HEADS
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head, mask=is_row, other=0.0) * LOG2_E
        # Keys [first_key, end_key) are seen by some row, those before edge_block by all. The padded tail belongs to no
        # sequence and sees no key.
        first_key = 0
        if K.CAUSAL:
            end_key = tl.where(seq >= 0, first_kv_index + num_tokens, 0)
            edge_block = (first_kv_index + 1) // K.KEY_BLOCK
        else:
            end_key = tl.load(kv_len + seq, mask=seq >= 0, other=0)
            edge_block = end_key // K.KEY_BLOCK
        if K.WINDOWED:
            first_key = tl.maximum(first_kv_index - window_left, 0)
        factors = Factors(k_scale, v_scale, kv_head.to(tl.int64))
        k_factor = row_factor(k_scale, factors.head, C)
        k_scaled, tanh_scaled = coded_scales(qk_scale, tanh_scale, k_factor, K.CAPPED, C)
        query = Query(queries, row_kv_index, Logits(k_scaled, tanh_scaled, slope))
        kv = KeyValues(k_side, v_side, Line(pages, width), factors)
        bits = None
        if mask_words is not None:
            mask = MaskOfStep(mask_words, mask_indptr, mask_start, window_start, q_indptr)
            first_masked, bits = bits_of_block(mask, seq, first_token, is_row, end_key, G)
            edge_block = first_masked // K.KEY_BLOCK
            if K.WINDOWED:
                first_key = first_masked
        seen = Seen(Span(first_key, end_key), window_left, bits)
        first_segment = first_key // G.SEGMENT_LEN
        end_segment = tl.cdiv(end_key, G.SEGMENT_LEN)
        acc, maximum, total = nothing_seen(QUERY_ROWS, K)
        if left is None:
            for segment in range(first_segment, end_segment):
                part = attend_segment(segment, query, kv, seen, edge_block, G)
                acc, maximum, total = merge_segment(Softmax(acc, maximum, total), part)
        else:
            rows_left = left_of_program(left, G)
            for segment in range(first_segment, end_segment):
                part = attend_segment(segment, query, kv, seen, edge_block, G)
                maximum, total = merge_in_memory(rows_left, maximum, total, part, segment - first_segment, K)
            acc = load_left(rows_left, end_segment - first_segment, K)
        # Read again, not kept: both accumulators leave no register to keep it in.
        first_token = tl.load(words + BLOCK_FIRST_TOKEN, volatile=True)
        num_tokens = tl.load(words + BLOCK_TOKENS, volatile=True)
        token, head, is_row = rows_of_block(first_token, num_tokens, kv_head, head_block, G)
        out_rows, lse_rows = Rows(out, out_token, out_head), Rows(lse, lse_token, lse_head)
        store_results(Softmax(acc, maximum, total), token, head, is_row, sinks, out_rows, lse_rows, K)


def launch_segment_extend(
    args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: SegmentTiles, mask: PackedMask | None = None
) -> None:
    """launch_paged_extend, bitwise the same for a token in any batch and chunk, and as launch_segment_decode gives it.

    args: with cut's schedule, and a workspace of tiles.left_words(...) or longer
    cut:  of tiles.extend
    mask: which keys each token sees, in place of scores.causal. A token that sees none receives 0 and LSE -inf

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("deterministic extend")
    queries, pages, table = args.queries, args.pages, args.table
    geometry = _geometry(args, scores, cut, tiles, mask)
    max_blocks = cut.max_blocks(queries.num_tokens, queries.num_seqs)
    num_programs = max_blocks * geometry.KV_HEADS * geometry.HEAD_BLOCKS
    launch(
        _segment_extend_kernel,
        (num_programs,),
        args.q,
        pages.raw_k,
        pages.raw_v,
        table,
        queries.row_of_seq,
        queries.kv_len,
        args.schedule,
        args.out,
        args.lse,
        _left(args, geometry, num_programs) if tiles.left_in_memory else None,
        args.sinks,
        args.slopes,
        pages.k_scale,
        pages.v_scale,
        None if mask is None else queries.q_indptr,
        None if mask is None else mask.words,
        None if mask is None else mask.indptr,
        None if mask is None else mask.start,
        None if mask is None else mask.window_start,
        scores.base_2_scale,
        scores.tanh_scale,
        scores.window_left,
        table.shape[1],
        *args.read_strides,
        *args.written_strides,
        G=geometry,
        num_warps=tiles.extend.num_warps,
        **tiles.extend.options(),
        **tiles.options(),
        **UNFUSED,
    )


def _geometry(
    args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: SegmentTiles, mask: PackedMask | None
) -> BlockGeometry:
    """What the launch is compiled for; the schedule is checked."""
    extend = tiles.extend
    num_kv_heads, gqa_ratio = args.heads
    cut.check(args.schedule, args.queries.num_tokens, args.queries.num_seqs)
    assert cut.query_tokens == extend.tokens_per_block(gqa_ratio), "the schedule was cut for other tiles"
    if mask is not None:
        mask.check(args.queries.num_seqs, args.queries.num_tokens, windowed=scores.windowed)
        assert extend.key_block <= TWO_WORDS
    block_heads = extend.heads_per_block(gqa_ratio)
    return BlockGeometry(
        keys=key_geometry(args, scores, tiles=extend, causal=scores.causal and mask is None, exact=True),
        KV_HEADS=num_kv_heads,
        GQA_RATIO=gqa_ratio,
        BLOCK_HEADS=block_heads,
        HEAD_BLOCKS=-(-gqa_ratio // block_heads),
        QUERY_ROWS=extend.query_rows,
        ROW_KEYS=0,
        SHARES=False,
        WHOLE_ROWS=True,
        SEGMENT_LEN=tiles.segment_len,
        STAGES=extend.num_stages,
        EDGE_STAGES=extend.diagonal_stages,
    )


def _left(args: AttendArgs, geometry: BlockGeometry, num_programs: int) -> Tensor:
    """Where programs keep what lies left of a segment."""
    keys = geometry.keys
    args.check_workspace(num_programs * geometry.QUERY_ROWS * keys.V_PARTS * keys.V_COLUMNS)
    return args.workspace
