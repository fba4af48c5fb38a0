"""Paged attention of sequences with several new tokens over their cached prefix.

    out[token] = softmax(scores of q[token] . K^T) V        K, V: the keys that the token sees (scores.py)

A program takes one query block of the schedule and the query heads of one KV head (or as many as fit). Keys that every
row sees come first, without masks; then the diagonal, under masks with other=0.0: what no row sees may be NaN. With a
window every key block is masked; with a packed mask (packed_mask.py) too, and its bits from the window's first key on
say what a row sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import KeyValues, Line, Logits, Pages, Rows, Span
from rocm_attn.kernels.attention.coded import Factors, coded_query, coded_scales, row_factor, scaled_values
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_FIRST_TOKEN,
    BLOCK_KV_INDEX,
    BLOCK_SEQ,
    BLOCK_TOKENS,
    BLOCK_WORDS,
)
from rocm_attn.kernels.attention.key_loop import Query, Seen, attend_key_blocks, key_geometry, nothing_seen
from rocm_attn.kernels.attention.mask_bits import MAX_MASK_BLOCK
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
from rocm_attn.kernels.attention.softmax import LOG2_E
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import ExtendTiles


@triton.jit(do_not_specialize=["width", "window_left"])
def _extend_kernel(
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
    k_scale,
    v_scale,
    q_indptr,
    mask_words,
    mask_indptr,
    position_of_token,
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
    PACKED: tl.constexpr = mask_words is not None
    query_block, kv_head, head_block = place_of_program(G)
    words = schedule + query_block * BLOCK_WORDS
    seq = tl.load(words + BLOCK_SEQ)
    first_token = tl.load(words + BLOCK_FIRST_TOKEN)
    num_tokens = tl.load(words + BLOCK_TOKENS)
    first_kv_index = tl.load(words + BLOCK_KV_INDEX)
    if num_tokens > 0:
        # token, head, is_row, row_kv_index, slope: [QUERY_ROWS]
        token, head, is_row = rows_of_block(first_token, num_tokens, kv_head, head_block, G)
        block_token = tl.arange(0, G.QUERY_ROWS) // G.BLOCK_HEADS
        queries = load_queries(Rows(q, q_token, q_head), token, head, is_row, K)
        k_side = Pages(k_pages + kv_head.to(tl.int64) * kp_head, kp_page, kp_token)
        v_side = Pages(v_pages + kv_head.to(tl.int64) * vp_head, vp_page, vp_token)
        pages = table + tl.load(row_of_seq + seq, mask=seq >= 0, other=0).to(tl.int64) * table_row
        row_kv_index = first_kv_index + block_token
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head, mask=is_row, other=0.0) * LOG2_E
        # Keys [first_key, end_key) are seen by some row, those before edge_block by all. The padded tail belongs to no
        # sequence and sees no key. Not a branch: accumulators across one cost registers.
        first_key = 0
        if K.CAUSAL:
            end_key = tl.where(seq >= 0, first_kv_index + num_tokens, 0)
            edge_block = tl.where(seq >= 0, (first_kv_index + 1) // K.KEY_BLOCK, 0)
        else:
            end_key = tl.load(kv_len + seq, mask=seq >= 0, other=0)
            edge_block = end_key // K.KEY_BLOCK
        if K.WINDOWED:
            # Masks all the way: a loop of its own for what lies between the edges spills.
            first_key = tl.maximum(first_kv_index - window_left, 0)
            edge_block = first_key // K.KEY_BLOCK
        bits = None
        if PACKED:
            mask = MaskOfStep(mask_words, mask_indptr, position_of_token, q_indptr)
            first_seen, bits = bits_of_block(mask, seq, first_token, is_row, end_key, window_left, G)
            edge_block = first_seen // K.KEY_BLOCK
        C: tl.constexpr = K.coding
        factors = Factors(k_scale, v_scale, kv_head.to(tl.int64))
        queries, q_factor = coded_query(queries, C)
        k_factor = row_factor(k_scale, factors.head, C) * q_factor
        k_scaled, tanh_scaled = coded_scales(qk_scale, tanh_scale, k_factor, K.CAPPED, C)
        query = Query(queries, row_kv_index, Logits(k_scaled, tanh_scaled, slope))
        kv = KeyValues(k_side, v_side, Line(pages, width), factors)
        seen = Seen(Span(first_key, end_key), window_left, bits)
        softmax = nothing_seen(G.QUERY_ROWS, K.V_COLUMNS)
        if not K.WINDOWED and not PACKED:
            softmax = attend_key_blocks(softmax, query, kv, seen, Span(0, edge_block), K, False, G.STAGES)
        edge = Span(edge_block, tl.cdiv(end_key, K.KEY_BLOCK))
        softmax = attend_key_blocks(softmax, query, kv, seen, edge, K, True, G.EDGE_STAGES)
        softmax = scaled_values(softmax, row_factor(v_scale, factors.head, C), C)
        out_rows, lse_rows = Rows(out, out_token, out_head), Rows(lse, lse_token, lse_head)
        store_results(softmax, token, head, is_row, sinks, out_rows, lse_rows, K)


def launch_paged_extend(
    args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: ExtendTiles, mask: PackedMask | None = None
) -> None:
    """Attention of every new token of the sequences in the schedule.

    Tokens at or past q_indptr[S] receive 0 and LSE -inf; tokens of sequences below cut.min_q_len stay as they are.

    args: with cut's schedule; there is no workspace
    cut:  of these tiles
    mask: which keys each token sees, in place of scores.causal. A token that sees none receives 0 and LSE -inf

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("paged extend")
    queries, pages, table = args.queries, args.pages, args.table
    geometry = _geometry(args, scores, cut, tiles, mask)
    max_blocks = cut.max_blocks(queries.num_tokens, queries.num_seqs)
    launch(
        _extend_kernel,
        (max_blocks * geometry.KV_HEADS * geometry.HEAD_BLOCKS,),
        args.q,
        pages.raw_k,
        pages.raw_v,
        table,
        queries.row_of_seq,
        queries.kv_len,
        args.schedule,
        args.out,
        args.lse,
        args.sinks,
        args.slopes,
        pages.k_scale,
        pages.v_scale,
        None if mask is None else queries.q_indptr,
        None if mask is None else mask.words,
        None if mask is None else mask.indptr,
        None if mask is None else mask.positions,
        scores.base_2_scale,
        scores.tanh_scale,
        scores.window_left,
        table.shape[1],
        *args.read_strides,
        *args.written_strides,
        G=geometry,
        num_warps=tiles.num_warps,
        **tiles.options(),
    )


def _geometry(
    args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: ExtendTiles, mask: PackedMask | None
) -> BlockGeometry:
    """What the launch is compiled for; schedule and mask are checked."""
    queries = args.queries
    num_kv_heads, gqa_ratio = args.heads
    cut.check(args.schedule, queries.num_tokens, queries.num_seqs)
    assert cut.query_tokens == tiles.tokens_per_block(gqa_ratio), "the schedule was cut for other tiles"
    if mask is not None:
        mask.check(queries.num_seqs, queries.num_tokens)
        assert tiles.key_block <= MAX_MASK_BLOCK
    block_heads = tiles.heads_per_block(gqa_ratio)
    return BlockGeometry(
        keys=key_geometry(args, scores, key_block=tiles.key_block, causal=scores.causal and mask is None, exact=False),
        KV_HEADS=num_kv_heads,
        GQA_RATIO=gqa_ratio,
        BLOCK_HEADS=block_heads,
        HEAD_BLOCKS=-(-gqa_ratio // block_heads),
        QUERY_ROWS=tiles.query_rows,
        SEGMENT_LEN=0,
        STAGES=tiles.num_stages,
        EDGE_STAGES=tiles.diagonal_stages if mask is None else tiles.num_stages,
    )
