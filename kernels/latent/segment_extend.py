"""Deterministic extend over latent pages, with the bits of deterministic decode for each token.

A program walks its query block over all segments that the block sees and merges them from left to right (segments.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, KeyRange, Logits, TableLine
from rocm_attn.kernels.attention.coded import coded_scales, row_scale
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_FIRST_TOKEN,
    BLOCK_KV_INDEX,
    BLOCK_SEQ,
    BLOCK_TOKENS,
    BLOCK_WORDS,
)
from rocm_attn.kernels.attention.key_loop import SeenKeys
from rocm_attn.kernels.attention.query_block import KeysOfStep, keys_of_block, rows_of_block
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.segments import UNFUSED
from rocm_attn.kernels.attention.visible_keys import VisibleKeys
from rocm_attn.kernels.latent.extend import check_rows, row_arguments
from rocm_attn.kernels.latent.key_loop import (
    LatentQuery,
    LatentRows,
    LatentSoftmax,
    as_loaded,
    latent_block_geometry,
    load_latent_query,
    no_latents_seen,
    scaled_latents,
    store_latent_results,
)
from rocm_attn.kernels.latent.segments import attend_latent_segment, merge_latent_segment
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.latent_tiles import LatentSegmentTiles


@triton.jit(do_not_specialize=["width", "window_left"])
def _latent_segment_extend_kernel(
    q,
    pages,
    table,
    row_of_seq,
    kv_len,
    schedule,
    out,
    lse,
    sinks,
    scale,
    q_indptr,
    mask_words,
    mask_indptr,
    mask_start,
    visible_first,
    visible_end,
    qk_scale,
    tanh_scale,
    window_left,
    width,
    q_token,
    q_head,
    p_page,
    p_token,
    table_row,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: tl.constexpr,
):
    K: tl.constexpr = G.keys
    C: tl.constexpr = K.coding
    pages, p_page, p_token = as_loaded(pages, p_page, p_token, K)
    query_block = tl.program_id(0) // G.HEAD_BLOCKS
    head_block = tl.program_id(0) % G.HEAD_BLOCKS
    words = schedule + query_block * BLOCK_WORDS
    seq = tl.load(words + BLOCK_SEQ)
    first_token = tl.load(words + BLOCK_FIRST_TOKEN)
    num_tokens = tl.load(words + BLOCK_TOKENS)
    first_kv_index = tl.load(words + BLOCK_KV_INDEX)
    if num_tokens > 0:
        # token, head, is_row: [QUERY_ROWS]
        token, head, is_row = rows_of_block(first_token, num_tokens, 0, head_block, G)
        row_kv_index = first_kv_index + tl.arange(0, G.QUERY_ROWS) // G.BLOCK_HEADS
        table_line = table + tl.load(row_of_seq + seq, mask=seq >= 0, other=0).to(tl.int64) * table_row
        # Keys [first_key, end_key) are seen by some row. The padded tail belongs to no sequence and sees no key.
        first_key = 0
        if K.CAUSAL:
            end_key = tl.where(seq >= 0, first_kv_index + num_tokens, 0)
        else:
            end_key = tl.load(kv_len + seq, mask=seq >= 0, other=0)
        if K.WINDOWED:
            first_key = tl.maximum(first_kv_index - window_left, 0)
        scale_value = row_scale(scale, 0, C)
        scaled, tanh_scaled = coded_scales(qk_scale, tanh_scale, scale_value, K.CAPPED, C)
        q_rows = q + (token * q_token + head * q_head)
        q_low, q_high, q_rest, q_rest_high, _ = load_latent_query(q_rows, is_row, K)
        query = LatentQuery(q_low, q_high, q_rest, q_rest_high, row_kv_index, Logits(scaled, tanh_scaled, None))
        rows = LatentRows(pages, p_page, p_token, TableLine(table_line, width), scale)
        seen_rows = None
        if visible_end is not None:
            mask = KeysOfStep(mask_words, mask_indptr, mask_start, visible_first, visible_end, q_indptr)
            seen_rows = keys_of_block(mask, seq, first_token, is_row, end_key, G)
            end_key = seen_rows.end
            if K.WINDOWED:
                first_key = seen_rows.first
        seen = SeenKeys(KeyRange(first_key, end_key), window_left, seen_rows, mask_words)
        low, high, maximum, total = no_latents_seen(G.QUERY_ROWS, K)
        for segment in range(first_key // G.SEGMENT_LEN, tl.cdiv(end_key, G.SEGMENT_LEN)):
            part = attend_latent_segment(segment, query, rows, seen, G)
            left = LatentSoftmax(low, high, maximum, total)
            low, high, maximum, total = merge_latent_segment(left, scaled_latents(part, scale_value, K))
        out_rows, lse_rows = HeadRows(out, out_token, out_head), HeadRows(lse, lse_token, lse_head)
        softmax = LatentSoftmax(low, high, maximum, total)
        store_latent_results(softmax, token, head, is_row, sinks, out_rows, lse_rows, K)


def launch_latent_segment_extend(
    args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: LatentSegmentTiles, mask: VisibleKeys | None = None
) -> None:
    """Does the same as `launch_latent_extend`, with the same bits in any batch and chunk, and in deterministic decode.

    args: with cut's schedule; there is no workspace; pages are latent
    cut:  of latent_extend_cut, for tiles.block
    mask: which keys each token sees, instead of scores.visibility. A token that sees none receives 0 and LSE -inf

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    queries, block = args.queries, tiles.block
    check_rows(args, scores, cut, block, mask, "deterministic latent extend")
    causal = scores.visibility.causal and mask is None
    geometry = latent_block_geometry(
        args, scores, block, causal=causal, segment_len=tiles.segment_len, by_pairs=tiles.by_pairs
    )
    launch(
        _latent_segment_extend_kernel,
        (cut.max_blocks(queries.num_tokens, queries.num_seqs) * geometry.HEAD_BLOCKS,),
        *row_arguments(args, scores, mask),
        G=geometry,
        num_warps=block.num_warps,
        **tiles.options(),
        **UNFUSED,
    )
