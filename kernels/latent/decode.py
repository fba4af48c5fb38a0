"""Attention over latent pages of sequences with few new tokens, split over KV.

    out[token, head] = softmax(scores of q[token, head] . (c | r)^T) c       c | r: rows that it sees (key_loop.py)

A row of the schedule is all query heads of some new tokens of a sequence. If they are more than a program holds,
neighbouring programs take a block of the heads each and walk the same keys side by side: the others find in the L2
cache the latents that the first one reads. Rows that several programs share are merged as in attention/decode.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, KeyRange, Logits, TableLine
from rocm_attn.kernels.attention.coded import coded_scales, row_scale
from rocm_attn.kernels.attention.cuts import DecodeCut, RowCut
from rocm_attn.kernels.attention.decode_schedule import (
    PROGRAM_PAD,
    first_of_row,
    new_tokens,
    next_row,
    rows_of_tokens,
    words_of_program,
    work_at,
)
from rocm_attn.kernels.attention.key_loop import SeenKeys
from rocm_attn.kernels.attention.mask_bits import TWO_WORDS
from rocm_attn.kernels.attention.merge import launch_merge
from rocm_attn.kernels.attention.query_block import KeysOfStep, keys_of_block, rows_of_block
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.softmax import visible_blocks
from rocm_attn.kernels.attention.visible_keys import VisibleKeys, key_arguments
from rocm_attn.kernels.early import early_options, wait_for_launch
from rocm_attn.kernels.latent.cuts import latent_partials_words, latent_row_cut
from rocm_attn.kernels.latent.key_loop import (
    LatentGeometry,
    LatentQuery,
    LatentRows,
    as_loaded,
    attend_latents,
    latent_geometry,
    load_latent_query,
    no_latents_seen,
    read_strides,
    scaled_latents,
    store_latent_results,
    store_parts,
)
from rocm_attn.kernels.latent.limits import check_latent
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.latent_tiles import LatentTiles


class LatentDecodeGeometry(NamedTuple):
    """The values that latent decode is compiled for, and deterministic latent decode (segment_decode.py).

    rows:        how a sequence is cut into rows
    keys:        of the loop over keys
    GQA_RATIO:   query heads
    BLOCK_HEADS: query heads of a block
    HEAD_BLOCKS: blocks of query heads, which neighbouring programs take
    QUERY_ROWS:  rows of a query block, a new token and a query head each, then padding
    STAGES:      key blocks whose loads are in flight
    EARLY:       whether launches may begin while the one before still runs
    EVEN:        whether rows that are alike are cut alike, with padding after each
    SEGMENT_LEN: keys of a segment of deterministic attention; 0: keys are not cut
    """

    rows: RowCut
    keys: LatentGeometry
    GQA_RATIO: int
    BLOCK_HEADS: int
    HEAD_BLOCKS: int
    QUERY_ROWS: int
    STAGES: int
    EARLY: bool
    EVEN: bool
    SEGMENT_LEN: int = 0


@triton.jit
def zero(words, EVEN: tl.constexpr):
    """0, computed from a program's padding (decode_schedule.py), which is never negative, and 0 if rows are not cut
    alike: the compiler cannot know.

    Values computed from it are computed where they are used. Otherwise the compiler keeps offsets of rows that do not
    change from one sequence to the next in 64 registers over the loop over keys, and spills others.
    """
    padding = tl.load(words + PROGRAM_PAD, volatile=True)
    return tl.minimum(padding, 0) if EVEN else padding


@triton.jit(do_not_specialize=["num_programs", "width", "window_left"])
def _latent_decode_kernel(
    q,
    pages,
    table,
    row_of_seq,
    q_indptr,
    mask_words,
    mask_indptr,
    mask_start,
    visible_first,
    visible_end,
    schedule,
    partials,
    out,
    lse,
    sinks,
    scale,
    first_page,
    qk_scale,
    tanh_scale,
    window_left,
    num_programs,
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
    R: tl.constexpr = G.rows
    K: tl.constexpr = G.keys
    C: tl.constexpr = K.coding
    pages, p_page, p_token = as_loaded(pages, p_page, p_token, K)
    T: tl.constexpr = R.TOKENS
    program = tl.program_id(0) // G.HEAD_BLOCKS
    head_block = tl.program_id(0) % G.HEAD_BLOCKS
    # The launch before this one may write anything that is read here. The merge may start when every program is
    # past this point, and so finds the schedule.
    wait_for_launch(G.EARLY)
    words = words_of_program(schedule, program)
    seq, row, done, work, kv_len = work_at(words)
    scale_value = row_scale(scale, 0, C)
    sums = partials + num_programs * (2 * R.Q_ROWS * K.V_HEAD_DIM)
    while work > 0:
        _, window_block, num_blocks = visible_blocks(kv_len, window_left + (T.MOST - 1), R.KEY_BLOCK, R.WINDOWED)
        row_cost = tl.where(kv_len < 0, 0, num_blocks + R.ROW_COST)
        take = tl.minimum(work, row_cost - done)
        first_block = tl.maximum(done - R.ROW_COST, 0)
        end_block = done + take - R.ROW_COST
        q_len = new_tokens(q_indptr, seq, T)
        # The program that begins a sequence without keys writes its zeros.
        is_empty = (kv_len == 0) & (done == 0)
        if is_empty | (end_block > first_block):
            # token, head, is_row: [QUERY_ROWS]
            row_token = first_of_row(row, q_len, T)
            num_tokens = tl.minimum(q_len - row_token, T.OF_ROW)
            first_token = tl.load(q_indptr + seq) + row_token
            token, head, is_row = rows_of_block(first_token, num_tokens, 0, head_block + zero(words, G.EVEN), G)
            table_line = table + tl.load(row_of_seq + seq).to(tl.int64) * table_row
            line_width = width
            if first_page is not None:
                skipped = tl.load(first_page + seq)
                table_line += skipped
                line_width = width - skipped
            first_kv_index = kv_len - q_len + row_token
            block_token = tl.arange(0, G.QUERY_ROWS) // G.BLOCK_HEADS
            end_key = first_kv_index + num_tokens if K.CAUSAL else kv_len
            first_key = tl.maximum(first_kv_index - window_left, 0) if K.WINDOWED else 0
            q_rows = q + (token * q_token + head * q_head)
            q_low, q_high, q_rest, q_rest_high, q_scale_value = load_latent_query(q_rows, is_row, K)
            scaled, tanh_scaled = coded_scales(qk_scale, tanh_scale, scale_value * q_scale_value, K.CAPPED, C)
            logits = Logits(scaled, tanh_scaled, None)
            query = LatentQuery(q_low, q_high, q_rest, q_rest_high, first_kv_index + block_token, logits)
            rows = LatentRows(pages, p_page, p_token, TableLine(table_line, line_width), scale)
            softmax = no_latents_seen(G.QUERY_ROWS, K)
            first = window_block + first_block
            end = window_block + end_block
            seen_rows = None
            if visible_end is not None:
                mask = KeysOfStep(mask_words, mask_indptr, mask_start, visible_first, visible_end, q_indptr)
                seen_rows = keys_of_block(mask, seq, first_token, is_row, end_key, G)
                # Every row sees the keys before the edge, in a loop like that of steps without a mask.
                edge = tl.minimum(tl.maximum(seen_rows.edge // K.KEY_BLOCK, first), end)
                seen = SeenKeys(KeyRange(first_key, end_key), window_left, None, None)
                softmax = attend_latents(softmax, query, rows, seen, KeyRange(first, edge), K, True, G.STAGES)
                first = edge
            seen = SeenKeys(KeyRange(first_key, end_key), window_left, seen_rows, mask_words)
            softmax = attend_latents(softmax, query, rows, seen, KeyRange(first, end), K, True, G.STAGES)
            softmax = scaled_latents(softmax, scale_value, K)
            # Computed again, not kept: the accumulators leave no registers to keep them in.
            token, head, is_row = rows_of_block(first_token, num_tokens, 0, head_block + zero(words, G.EVEN), G)
            # A sequence without blocks is empty; a mask of that would be kept over the loop, too.
            if (num_blocks == 0) | (end_block - first_block == num_blocks):
                out_rows, lse_rows = HeadRows(out, out_token, out_head), HeadRows(lse, lse_token, lse_head)
                store_latent_results(softmax, token, head, is_row, sinks, out_rows, lse_rows, K)
            else:
                # Part 2p of program p goes to a row begun by an earlier program, 2p + 1 to one that goes on.
                part = 2 * program + (first_block == 0).to(tl.int32)
                line = part * R.Q_ROWS + (block_token * G.GQA_RATIO + head.to(tl.int32))
                low, high, maximum, total = softmax
                store_parts(partials + line * K.V_HEAD_DIM, low, high, is_row, K)
                tl.store(sums + line * 2, maximum, mask=is_row)
                tl.store(sums + line * 2 + 1, total, mask=is_row)
        work -= take
        done = 0
        num_rows = rows_of_tokens(q_len, R.ROWS, T)
        seq, row, kv_len = next_row(schedule, num_programs, work, seq, row, num_rows, kv_len)


def launch_latent_decode(
    args: AttendArgs, *, scores: Scores, cut: DecodeCut, tiles: LatentTiles, mask: VisibleKeys | None = None
) -> None:
    """Attends for sequences with as many new tokens as the cut says; all other tokens of out and lse stay unchanged.

    A sequence with kv_len 0 receives 0 and LSE -inf.
    args: with cut's schedule, and a workspace of latent_partials_words(...) or longer; pages are latent
    cut:  of latent_decode_cut, for these tiles and the scores' window; the grid is its programs times head blocks
    mask: which keys each token sees, instead of scores.visibility. A token that sees none receives 0 and LSE -inf

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    queries, table = args.queries, args.table
    geometry = _geometry(args, scores, cut, tiles, mask)
    launch(
        _latent_decode_kernel,
        (cut.programs * geometry.HEAD_BLOCKS,),
        args.q,
        args.pages.raw_k,
        table,
        queries.row_of_seq,
        queries.q_indptr,
        *key_arguments(mask),
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        args.sinks,
        args.pages.k_scale,
        queries.first_page,
        scores.base_2_scale,
        scores.tanh_scale,
        scores.visibility.window_left,
        cut.programs,
        table.shape[1],
        *read_strides(args),
        *args.written_strides,
        G=geometry,
        num_warps=tiles.num_warps,
        **tiles.options(),
        **early_options(tiles.early),
    )
    launch_merge(args, cut, geometry.rows, early=tiles.early)


def _geometry(
    args: AttendArgs, scores: Scores, cut: DecodeCut, tiles: LatentTiles, mask: VisibleKeys | None
) -> LatentDecodeGeometry:
    """Checks the arguments and returns the values that the launch is compiled for."""
    check_latent(args, "latent decode")
    num_heads, v_head_dim = args.q.shape[1], args.out.shape[2]
    cut.check(args.schedule, args.queries.num_seqs)
    assert cut.key_block == tiles.key_block, "the schedule was cut for other tiles"
    assert tiles.tokens_per_block(num_heads) >= cut.tokens.OF_ROW, "the schedule was cut for other tiles"
    assert (cut.window_left < 0) == (scores.visibility.window_left < 0), "the schedule was cut for another window"
    if mask is not None:
        mask.check(args.queries.num_seqs, args.queries.num_tokens)
        assert not scores.visibility.windowed, "windows under a mask are for launch_latent_extend"
        assert tiles.key_block <= TWO_WORDS
    args.check_workspace(latent_partials_words(cut, num_heads=num_heads, v_head_dim=v_head_dim))
    return LatentDecodeGeometry(
        rows=latent_row_cut(cut, num_heads),
        keys=latent_geometry(args, scores, tiles, causal=scores.visibility.causal and mask is None, exact=False),
        GQA_RATIO=num_heads,
        BLOCK_HEADS=tiles.block_heads(num_heads),
        HEAD_BLOCKS=tiles.head_blocks(num_heads),
        QUERY_ROWS=tiles.query_rows,
        STAGES=tiles.num_stages,
        EARLY=tiles.early,
        EVEN=cut.is_even,
    )
