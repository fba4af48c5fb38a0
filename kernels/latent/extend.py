"""Attention over latent pages of sequences with many new tokens, over their cached prefix.

    out[token, head] = softmax(scores of q[token, head] . (c | r)^T) c       c | r: rows that it sees (key_loop.py)

A program takes one query block of the schedule (attention/extend_schedule.py) and as many query heads as fit: programs
of the same block are neighbours. Keys that every row sees come first, without masks on scores; then the diagonal, or
the keys that have bits in a packed mask. With a window every key block is masked. Deterministic extend walks segments
and merges them from left to right (segments.py).
"""

import triton
import triton.language as tl
from torch import Tensor

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
from rocm_attn.kernels.attention.mask_bits import TWO_WORDS
from rocm_attn.kernels.attention.query_block import KeysOfStep, keys_of_block, rows_of_block
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.visible_keys import VisibleKeys, key_arguments
from rocm_attn.kernels.latent.key_loop import (
    LatentQuery,
    LatentRows,
    LatentSoftmax,
    as_loaded,
    attend_latents,
    latent_block_geometry,
    load_latent_query,
    no_latents_seen,
    read_strides,
    scaled_latents,
    store_latent_results,
)
from rocm_attn.kernels.latent.limits import check_latent
from rocm_attn.kernels.latent.segments import attend_latent_segment, merge_latent_segment
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.latent_tiles import LatentTiles

_UNSPECIALIZED = ["width", "window_left"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _latent_extend_kernel(
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
    RANGED: tl.constexpr = visible_end is not None
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
        block_token = tl.arange(0, G.QUERY_ROWS) // G.BLOCK_HEADS
        table_line = table + tl.load(row_of_seq + seq, mask=seq >= 0, other=0).to(tl.int64) * table_row
        # Keys [first_key, end_key) are seen by some row, those before edge_block by all. The padded tail belongs to no
        # sequence and sees no key.
        first_key = 0
        if K.CAUSAL:
            end_key = tl.where(seq >= 0, first_kv_index + num_tokens, 0)
            edge_block = tl.where(seq >= 0, (first_kv_index + 1) // K.KEY_BLOCK, 0)
        else:
            end_key = tl.load(kv_len + seq, mask=seq >= 0, other=0)
            edge_block = end_key // K.KEY_BLOCK
        if K.WINDOWED:
            first_key = tl.maximum(first_kv_index - window_left, 0)
            edge_block = first_key // K.KEY_BLOCK
        seen_rows = None
        if RANGED:
            mask = KeysOfStep(mask_words, mask_indptr, mask_start, visible_first, visible_end, q_indptr)
            seen_rows = keys_of_block(mask, seq, first_token, is_row, end_key, G)
            edge_block, end_key = seen_rows.edge // K.KEY_BLOCK, seen_rows.end
            if K.WINDOWED:
                first_key = seen_rows.first
        scale_value = row_scale(scale, 0, C)
        q_rows = q + (token * q_token + head * q_head)
        q_low, q_high, q_rest, q_rest_high, q_scale_value = load_latent_query(q_rows, is_row, K)
        scaled, tanh_scaled = coded_scales(qk_scale, tanh_scale, scale_value * q_scale_value, K.CAPPED, C)
        logits = Logits(scaled, tanh_scaled, None)
        query = LatentQuery(q_low, q_high, q_rest, q_rest_high, first_kv_index + block_token, logits)
        rows = LatentRows(pages, p_page, p_token, TableLine(table_line, width), scale)
        seen = SeenKeys(KeyRange(first_key, end_key), window_left, seen_rows, mask_words)
        softmax = no_latents_seen(G.QUERY_ROWS, K)
        if G.SEGMENT_LEN > 0:
            low, high, maximum, total = softmax
            for segment in range(first_key // G.SEGMENT_LEN, tl.cdiv(end_key, G.SEGMENT_LEN)):
                part = scaled_latents(attend_latent_segment(segment, query, rows, seen, G), scale_value, K)
                low, high, maximum, total = merge_latent_segment(LatentSoftmax(low, high, maximum, total), part)
            softmax = LatentSoftmax(low, high, maximum, total)
        else:
            # In a range whose rows begin at one key there is one edge, as without a window.
            if not K.WINDOWED or (RANGED and mask_words is None):
                open_blocks = KeyRange(first_key // K.KEY_BLOCK, edge_block)
                softmax = attend_latents(softmax, query, rows, seen, open_blocks, K, False, G.STAGES)
            edge = KeyRange(edge_block, tl.cdiv(end_key, K.KEY_BLOCK))
            softmax = attend_latents(softmax, query, rows, seen, edge, K, True, G.EDGE_STAGES)
            softmax = scaled_latents(softmax, scale_value, K)
        # Read again, not kept: the accumulators leave no registers to keep it in.
        first_token = tl.load(words + BLOCK_FIRST_TOKEN, volatile=True)
        num_tokens = tl.load(words + BLOCK_TOKENS, volatile=True)
        token, head, is_row = rows_of_block(first_token, num_tokens, 0, head_block, G)
        out_rows, lse_rows = HeadRows(out, out_token, out_head), HeadRows(lse, lse_token, lse_head)
        store_latent_results(softmax, token, head, is_row, sinks, out_rows, lse_rows, K)


# Deterministic extend (segment_extend.py) is the same kernel, by a name that profiles show.
latent_segment_extend_kernel = triton.jit(
    _latent_extend_kernel.fn, do_not_specialize=_UNSPECIALIZED, repr=lambda _: "_latent_segment_extend_kernel"
)


def launch_latent_extend(
    args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: LatentTiles, mask: VisibleKeys | None = None
) -> None:
    """Attends for every new token of the sequences in the schedule.

    Tokens at or past q_indptr[S] receive 0 and LSE -inf; tokens of sequences below cut.min_q_len stay unchanged.

    args: with cut's schedule; there is no workspace; pages are latent
    cut:  of latent_extend_cut, for these tiles
    mask: which keys each token sees, instead of scores.visibility. A token that sees none receives 0 and LSE -inf

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    check_rows(args, scores, cut, tiles, mask, "latent extend")
    causal = scores.visibility.causal and mask is None
    geometry = latent_block_geometry(args, scores, tiles, causal=causal, segment_len=0)
    launch(
        _latent_extend_kernel,
        (cut.max_blocks(args.queries.num_tokens, args.queries.num_seqs) * geometry.HEAD_BLOCKS,),
        *row_arguments(args, scores, mask),
        G=geometry,
        num_warps=tiles.num_warps,
        **tiles.options(),
    )


def row_arguments(args: AttendArgs, scores: Scores, mask: VisibleKeys | None) -> tuple[Tensor | float | None, ...]:
    """Returns the arguments of kernels that walk rows of a schedule, in their order."""
    queries = args.queries
    return (
        args.q,
        args.pages.raw_k,
        args.table,
        queries.row_of_seq,
        queries.kv_len,
        args.schedule,
        args.out,
        args.lse,
        args.sinks,
        args.pages.k_scale,
        None if mask is None else queries.q_indptr,
        *key_arguments(mask),
        scores.base_2_scale,
        scores.tanh_scale,
        scores.visibility.window_left,
        args.table.shape[1],
        *read_strides(args),
        *args.written_strides,
    )


def check_rows(
    args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: LatentTiles, mask: VisibleKeys | None, kernel: str
) -> None:
    """Checks a launch's schedule and mask. Raises ValueError for what the kernels do not serve."""
    check_latent(args, kernel)
    queries, num_heads = args.queries, args.q.shape[1]
    cut.check(args.schedule, queries.num_tokens, queries.num_seqs)
    assert cut.query_tokens == tiles.tokens_per_block(num_heads), "the schedule was cut for other tiles"
    if mask is not None:
        mask.check(queries.num_seqs, queries.num_tokens)
        assert tiles.key_block <= TWO_WORDS
