"""Deterministic decode: paged attention of sequences with one new token, whose bits do not depend on the batch.

The programs of the decode schedule share out segments instead of key blocks. Each segment's partial result goes to a
slot of its own, the segment's place on the schedule's axis; segment_merge.py merges a row's slots from left to right.
The program that computes a segment varies with the batch; the segment and the order of the merge do not.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, KeyRange, KeyValues, Logits, PagePointers, TableLine
from rocm_attn.kernels.attention.coded import ScalePointers, coded_scales, row_scale
from rocm_attn.kernels.attention.cuts import DecodeCut, RowCut
from rocm_attn.kernels.attention.decode_schedule import (
    PROGRAM_DONE,
    PROGRAM_KV_LEN,
    PROGRAM_ROW,
    PROGRAM_ROW_START,
    PROGRAM_SEQ,
    PROGRAM_WORK,
    heads_of_row,
    next_row,
    words_of_program,
)
from rocm_attn.kernels.attention.key_loop import KeyGeometry, Query, SeenKeys, key_geometry
from rocm_attn.kernels.attention.query_block import load_queries, store_columns
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.segment_merge import launch_segment_merge, segment_memory
from rocm_attn.kernels.attention.segments import UNFUSED, attend_segment
from rocm_attn.kernels.attention.softmax import LOG2_E, visible_blocks
from rocm_attn.kernels.early import early_options, wait_for_launch
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles


class SegmentDecodeGeometry(NamedTuple):
    """The values that deterministic decode is compiled for.

    rows:        how a sequence is cut into rows; their key blocks are segments
    keys:        of the loop over keys
    QUERY_ROWS:  rows of the q block, a query head each, then padding
    SEGMENT_LEN: keys of a segment
    STAGES, EDGE_STAGES: key blocks whose loads are in flight, if the row sees all keys and if keys are masked
    EARLY:       whether launches may begin while the one before still runs
    """

    rows: RowCut
    keys: KeyGeometry
    QUERY_ROWS: int
    SEGMENT_LEN: int
    STAGES: int
    EDGE_STAGES: int
    EARLY: bool


@triton.jit(do_not_specialize=["num_programs", "width", "window_left"])
def _segment_decode_kernel(
    q,
    k_pages,
    v_pages,
    table,
    row_of_seq,
    first_page,
    q_indptr,
    schedule,
    parts,
    sums,
    slopes,
    k_scale,
    v_scale,
    qk_scale,
    tanh_scale,
    window_left,
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
    G: tl.constexpr,
):
    R: tl.constexpr = G.rows
    K: tl.constexpr = G.keys
    C: tl.constexpr = K.coding
    # The launch before this one may write what is read, as in decode.py.
    wait_for_launch(G.EARLY)
    words = words_of_program(schedule, tl.program_id(0))
    seq = tl.load(words + PROGRAM_SEQ)
    row = tl.load(words + PROGRAM_ROW)
    done = tl.load(words + PROGRAM_DONE)
    work = tl.load(words + PROGRAM_WORK)
    row_start = tl.load(words + PROGRAM_ROW_START)
    kv_len = tl.load(words + PROGRAM_KV_LEN)
    q_row = tl.arange(0, G.QUERY_ROWS)
    while work > 0:
        first_key, window_segment, num_segments = visible_blocks(kv_len, window_left, R.KEY_BLOCK, R.WINDOWED)
        row_cost = tl.where(kv_len < 0, 0, num_segments + R.ROW_COST)
        take = tl.minimum(work, row_cost - done)
        first = tl.maximum(done - R.ROW_COST, 0)
        end = done + take - R.ROW_COST
        if end > first:
            # A row is a KV head, or a block of its query heads. is_row, slope: [QUERY_ROWS]
            kv_head, first_head, num_q_rows = heads_of_row(row, R)
            is_row = q_row < num_q_rows
            token = tl.load(q_indptr + seq).to(tl.int64)
            queries = load_queries(HeadRows(q, q_token, q_head), token, first_head + q_row, is_row, K)
            slope = None
            if slopes is not None:
                slope = tl.load(slopes + first_head + q_row, mask=is_row, other=0.0) * LOG2_E
            pages = table + tl.load(row_of_seq + seq).to(tl.int64) * table_row
            line_width = width
            if first_page is not None:
                skipped = tl.load(first_page + seq)
                pages += skipped
                line_width = width - skipped
            k_side = PagePointers(k_pages + kv_head * kp_head, kp_page, kp_token, kp_head)
            v_side = PagePointers(v_pages + kv_head * vp_head, vp_page, vp_token, vp_head)
            scale_values = ScalePointers(k_scale, v_scale, kv_head)
            k_scale_value = row_scale(k_scale, kv_head, C)
            k_scaled, tanh_scaled = coded_scales(qk_scale, tanh_scale, k_scale_value, K.CAPPED, C)
            logits = Logits(k_scaled, tanh_scaled, slope)
            kv = KeyValues(k_side, v_side, TableLine(pages, line_width), scale_values)
            kv_index = tl.full([1], 0, tl.int32) + (kv_len - 1)
            query = Query(queries, kv_index, logits)
            seen = SeenKeys(KeyRange(first_key, kv_len), window_left, None, None)
            for index in range(first, end):
                acc, maximum, total = attend_segment(window_segment + index, query, kv, seen, kv_len // K.KEY_BLOCK, G)
                line = (row_start + R.ROW_COST + index).to(tl.int64) * R.Q_ROWS + q_row
                store_columns(parts + (line * K.V_HEAD_DIM)[:, None], acc, first_head + q_row, is_row, K)
                tl.store(sums + line * 2, maximum, mask=is_row)
                tl.store(sums + line * 2 + 1, total, mask=is_row)
        work -= take
        done = 0
        row_start += row_cost
        seq, row, kv_len = next_row(schedule, num_programs, work, seq, row, R.ROWS, kv_len)


def launch_segment_decode(
    args: AttendArgs, *, scores: Scores, most_segments: int, cut: DecodeCut, tiles: SegmentTiles
) -> None:
    """Like `launch_paged_decode`, but with the same bits for a sequence in any batch, and in launch_segment_extend.

    args:          with cut's schedule, and a workspace of the sum of cut.segment_words(...) or longer
    most_segments: of a sequence, see SegmentTiles
    cut:           of tiles.decode(gqa_ratio) and the scores' window; its programs are the grid

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("deterministic decode")
    queries, pages, table = args.queries, args.pages, args.table
    geometry = _geometry(args, scores, cut, tiles)
    memory = segment_memory(args, cut, geometry.rows, most_segments)
    launch(
        _segment_decode_kernel,
        (cut.programs,),
        args.q,
        pages.raw_k,
        pages.raw_v,
        table,
        queries.row_of_seq,
        queries.first_page,
        queries.q_indptr,
        args.schedule,
        *memory,
        args.slopes,
        pages.k_scale,
        pages.v_scale,
        scores.base_2_scale,
        scores.tanh_scale,
        scores.visibility.window_left,
        cut.programs,
        table.shape[1],
        *args.read_strides,
        G=geometry,
        num_warps=tiles.decode_warps,
        **tiles.options(),
        **early_options(tiles.early),
        **UNFUSED,
    )
    launch_segment_merge(args, memory, cut=cut, rows=geometry.rows, early=tiles.early)


def _geometry(args: AttendArgs, scores: Scores, cut: DecodeCut, tiles: SegmentTiles) -> SegmentDecodeGeometry:
    """Checks the schedule and returns the values that the launch is compiled for."""
    num_kv_heads, gqa_ratio = args.heads
    decode = tiles.decode(gqa_ratio)
    cut.check(args.schedule, args.queries.num_seqs)
    assert cut == DecodeCut.of(
        decode,
        num_kv_heads=num_kv_heads,
        programs=cut.programs,
        window_left=scores.visibility.window_left,
        has_slots=True,
    ), "the schedule was cut for another launch"
    return SegmentDecodeGeometry(
        rows=cut.row_cut(decode, gqa_ratio),
        keys=key_geometry(args, scores, tiles=tiles.extend, causal=scores.visibility.causal, exact=True),
        QUERY_ROWS=tiles.decode_rows,
        SEGMENT_LEN=tiles.segment_len,
        STAGES=tiles.decode_stages,
        EDGE_STAGES=tiles.decode_stages,
        EARLY=tiles.early,
    )
