"""Deterministic decode over latent pages of sequences with one new token, whose bits do not depend on the batch.

It works like attention/segment_decode.py: the programs of the decode schedule share out segments instead of key blocks,
each segment's partial result goes to a slot of its own, and segment_merge.py merges a row's slots from left to right.
Blocks of query heads run side by side as in decode.py.
"""

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import KeyRange, Logits, TableLine
from rocm_attn.kernels.attention.coded import coded_scales, row_scale
from rocm_attn.kernels.attention.cuts import DecodeCut
from rocm_attn.kernels.attention.decode_schedule import (
    PROGRAM_DONE,
    PROGRAM_KV_LEN,
    PROGRAM_ROW,
    PROGRAM_ROW_START,
    PROGRAM_SEQ,
    PROGRAM_WORK,
    next_row,
    words_of_program,
)
from rocm_attn.kernels.attention.key_loop import SeenKeys
from rocm_attn.kernels.attention.query_block import rows_of_block
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.segment_merge import launch_segment_merge, segment_memory
from rocm_attn.kernels.attention.segments import UNFUSED
from rocm_attn.kernels.attention.softmax import visible_blocks
from rocm_attn.kernels.early import early_options, wait_for_launch
from rocm_attn.kernels.latent.cuts import latent_row_cut
from rocm_attn.kernels.latent.decode import LatentDecodeGeometry
from rocm_attn.kernels.latent.key_loop import (
    LatentQuery,
    LatentRows,
    as_loaded,
    latent_geometry,
    load_latent_query,
    read_strides,
    scaled_latents,
    store_parts,
)
from rocm_attn.kernels.latent.limits import check_latent
from rocm_attn.kernels.latent.segments import attend_latent_segment
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.latent_tiles import LatentSegmentTiles


@triton.jit(do_not_specialize=["num_programs", "width", "window_left"])
def _latent_segment_decode_kernel(
    q,
    pages,
    table,
    row_of_seq,
    q_indptr,
    schedule,
    parts,
    sums,
    scale,
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
    G: tl.constexpr,
):
    R: tl.constexpr = G.rows
    K: tl.constexpr = G.keys
    C: tl.constexpr = K.coding
    pages, p_page, p_token = as_loaded(pages, p_page, p_token, K)
    # Like in attention/decode.py: the launch before this one may write what is read.
    wait_for_launch(G.EARLY)
    words = words_of_program(schedule, tl.program_id(0) // G.HEAD_BLOCKS)
    head_block = tl.program_id(0) % G.HEAD_BLOCKS
    seq = tl.load(words + PROGRAM_SEQ)
    row = tl.load(words + PROGRAM_ROW)
    done = tl.load(words + PROGRAM_DONE)
    work = tl.load(words + PROGRAM_WORK)
    row_start = tl.load(words + PROGRAM_ROW_START)
    kv_len = tl.load(words + PROGRAM_KV_LEN)
    scale_value = row_scale(scale, 0, C)
    scaled, tanh_scaled = coded_scales(qk_scale, tanh_scale, scale_value, K.CAPPED, C)
    while work > 0:
        first_key, window_segment, num_segments = visible_blocks(kv_len, window_left, R.KEY_BLOCK, R.WINDOWED)
        row_cost = tl.where(kv_len < 0, 0, num_segments + R.ROW_COST)
        take = tl.minimum(work, row_cost - done)
        first = tl.maximum(done - R.ROW_COST, 0)
        end = done + take - R.ROW_COST
        if end > first:
            # token, head, is_row: [QUERY_ROWS]
            token, head, is_row = rows_of_block(tl.load(q_indptr + seq), 1, 0, head_block, G)
            table_line = table + tl.load(row_of_seq + seq).to(tl.int64) * table_row
            q_rows = q + (token * q_token + head * q_head)
            kv_index = tl.full([1], 0, tl.int32) + (kv_len - 1)
            q_low, q_high, q_rest, q_rest_high, _ = load_latent_query(q_rows, is_row, K)
            query = LatentQuery(q_low, q_high, q_rest, q_rest_high, kv_index, Logits(scaled, tanh_scaled, None))
            rows = LatentRows(pages, p_page, p_token, TableLine(table_line, width), scale)
            seen = SeenKeys(KeyRange(first_key, kv_len), window_left, None, None)
            for index in range(first, end):
                part = attend_latent_segment(window_segment + index, query, rows, seen, G)
                low, high, maximum, total = scaled_latents(part, scale_value, K)
                line = (row_start + R.ROW_COST + index).to(tl.int64) * R.Q_ROWS + head
                store_parts(parts + line * K.V_HEAD_DIM, low, high, is_row, K)
                tl.store(sums + line * 2, maximum, mask=is_row)
                tl.store(sums + line * 2 + 1, total, mask=is_row)
        work -= take
        done = 0
        row_start += row_cost
        seq, row, kv_len = next_row(schedule, num_programs, work, seq, row, R.ROWS, kv_len)


def launch_latent_segment_decode(
    args: AttendArgs, *, scores: Scores, most_segments: int, cut: DecodeCut, tiles: LatentSegmentTiles
) -> None:
    """Does the same as `launch_latent_decode` for one new token, with the same bits in any batch and from extend.

    args:          with cut's schedule, and a workspace of the sum of cut.segment_words(...) or longer
    most_segments: of a sequence, see LatentSegmentTiles
    cut:           of latent_decode_cut for tiles.decode(num_heads) and the scores' window

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    queries, table = args.queries, args.table
    geometry = _geometry(args, scores, cut, tiles)
    memory = segment_memory(args, cut, geometry.rows, most_segments)
    launch(
        _latent_segment_decode_kernel,
        (cut.programs * geometry.HEAD_BLOCKS,),
        args.q,
        args.pages.raw_k,
        table,
        queries.row_of_seq,
        queries.q_indptr,
        args.schedule,
        *memory,
        args.pages.k_scale,
        scores.base_2_scale,
        scores.tanh_scale,
        scores.visibility.window_left,
        cut.programs,
        table.shape[1],
        *read_strides(args),
        G=geometry,
        num_warps=tiles.of_decode(args.q.shape[1]).num_warps,
        **tiles.options(),
        **early_options(geometry.EARLY),
        **UNFUSED,
    )
    launch_segment_merge(args, memory, cut=cut, rows=geometry.rows, early=geometry.EARLY)


def _geometry(args: AttendArgs, scores: Scores, cut: DecodeCut, tiles: LatentSegmentTiles) -> LatentDecodeGeometry:
    """Checks the arguments and returns the values that the launch is compiled for."""
    check_latent(args, "deterministic latent decode")
    num_heads = args.q.shape[1]
    block = tiles.of_decode(num_heads)
    cut.check(args.schedule, args.queries.num_seqs)
    assert cut.key_block == tiles.segment_len, "the schedule was cut for other tiles"
    assert cut.window_left == scores.visibility.window_left, "the schedule was cut for another window"
    assert not cut.is_even, "partial results have slots, which follow rows without a gap"
    return LatentDecodeGeometry(
        rows=latent_row_cut(cut, num_heads),
        keys=latent_geometry(args, scores, block, causal=scores.visibility.causal, exact=True, by_pairs=tiles.by_pairs),
        GQA_RATIO=num_heads,
        BLOCK_HEADS=block.block_heads(num_heads),
        HEAD_BLOCKS=block.head_blocks(num_heads),
        QUERY_ROWS=block.query_rows,
        STAGES=block.num_stages,
        EARLY=block.early,
        EVEN=False,
        SEGMENT_LEN=tiles.segment_len,
    )
