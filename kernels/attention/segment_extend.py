"""Deterministic extend: paged attention of sequences with several new tokens, each with the bits that decode gives it.

A program walks its query block over all segments that the block sees and merges them from left to right (segments.py).
So it holds two accumulators: the segment's, and that of everything left of it. The longest rows may be shared out by
whole segments (extend_schedule.py): programs take the shares by a launch of their own, and segment_parts.py merges the
parts that they keep.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, KeyRange, KeyValues, Logits, PagePointers, Softmax, TableLine
from rocm_attn.kernels.attention.coded import ScalePointers, coded_scales, row_scale
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend import Operands, row_arguments
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_FIRST_TOKEN,
    BLOCK_KEYS,
    BLOCK_KV_INDEX,
    BLOCK_SEQ,
    BLOCK_TOKENS,
    BLOCK_WORDS,
    SHARE_CUT,
    SHARE_WORDS,
    row_after,
    work_of_share,
)
from rocm_attn.kernels.attention.key_loop import Query, SeenKeys, key_geometry, nothing_seen
from rocm_attn.kernels.attention.mask_bits import TWO_WORDS
from rocm_attn.kernels.attention.packed_mask import PackedMask
from rocm_attn.kernels.attention.query_block import (
    BlockGeometry,
    MaskOfStep,
    bits_of_block,
    load_queries,
    rows_again,
    rows_of_block,
    store_columns,
    store_results,
)
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.segment_parts import launch_merge_of_segments
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


@triton.jit
def segments_of_share(words, seen, done, take, G: tl.constexpr):
    """The segments of a row, [first, end), that end in a share with [done, done + take) of its cost; whether the row
    ends there too.
    """
    num_keys = tl.load(words + BLOCK_KEYS)
    ends = done + take == num_keys + G.ROW_KEYS
    row_key = seen.keys.end - num_keys
    first_key = row_key + tl.maximum(done - G.ROW_KEYS, 0)
    end_key = row_key + tl.maximum(done + take - G.ROW_KEYS, 0)
    first = tl.maximum(first_key, seen.keys.first) // G.SEGMENT_LEN
    end = tl.where(ends, tl.cdiv(seen.keys.end, G.SEGMENT_LEN), end_key // G.SEGMENT_LEN)
    return first, end, ends


@triton.jit
def _store_part(softmax, to, slot, is_row, G: tl.constexpr):
    """Stores the program's part of a row that it shares, to one of its slots."""
    K: tl.constexpr = G.keys
    acc, maximum, total = softmax
    place = tl.arange(0, G.QUERY_ROWS)
    line = ((tl.program_id(0) * G.SLOTS + slot) * G.QUERY_ROWS + place).to(tl.int64)
    store_columns(to.workspace + (line * K.V_HEAD_DIM)[:, None], acc, place, is_row, K)
    sums = to.workspace + to.num_programs.to(tl.int64) * (G.SLOTS * G.QUERY_ROWS * K.V_HEAD_DIM)
    tl.store(sums + line * 2, maximum)
    tl.store(sums + line * 2 + 1, total)


class SegmentOutputs(NamedTuple):
    """The destinations of results: rows of out and LSE, sinks or None; workspace: of shares for parts, of num_programs
    programs; of whole rows for everything left of a segment (segments.left_of_program), or None.
    """

    out: HeadRows
    lse: HeadRows
    sinks: Any
    workspace: Any
    num_programs: Any


@triton.jit
def _attend_row(x, to, query_block, row, done, take, G: tl.constexpr):
    """Attends over all keys of a row, or if G.SHARES over [done, done + take) of its cost, and stores the results.

    row: KV head and block of its query heads
    """
    K: tl.constexpr = G.keys
    C: tl.constexpr = K.coding
    words = x.schedule + query_block * BLOCK_WORDS
    seq = tl.load(words + BLOCK_SEQ)
    first_token = tl.load(words + BLOCK_FIRST_TOKEN)
    num_tokens = tl.load(words + BLOCK_TOKENS)
    first_kv_index = tl.load(words + BLOCK_KV_INDEX)
    kv_head = (row // G.HEAD_BLOCKS).to(tl.int64)
    # token, head, is_row, row_kv_index, slope: [QUERY_ROWS]
    token, head, is_row = rows_of_block(first_token, num_tokens, row // G.HEAD_BLOCKS, row % G.HEAD_BLOCKS, G)
    queries = load_queries(x.q, token, head, is_row, K)
    k_side = PagePointers(x.k.at + kv_head * x.k.head, x.k.page, x.k.token, x.k.head)
    v_side = PagePointers(x.v.at + kv_head * x.v.head, x.v.page, x.v.token, x.v.head)
    pages = x.line.at + tl.load(x.row_of_seq + seq, mask=seq >= 0, other=0).to(tl.int64) * x.table_row
    row_kv_index = first_kv_index + tl.arange(0, G.QUERY_ROWS) // G.BLOCK_HEADS
    slope = None
    if x.logits.slope is not None:
        slope = tl.load(x.logits.slope + head, mask=is_row, other=0.0) * LOG2_E
    # Keys [first_key, end_key) are seen by some row, those before edge_block by all. The padded tail belongs to no
    # sequence and sees no key.
    first_key = 0
    if K.CAUSAL:
        end_key = tl.where(seq >= 0, first_kv_index + num_tokens, 0)
        edge_block = (first_kv_index + 1) // K.KEY_BLOCK
    else:
        end_key = tl.load(x.kv_len + seq, mask=seq >= 0, other=0)
        edge_block = end_key // K.KEY_BLOCK
    if K.WINDOWED:
        first_key = tl.maximum(first_kv_index - x.window_left, 0)
    k_scale_value = row_scale(x.scale_values.k, kv_head, C)
    k_scaled, tanh_scaled = coded_scales(x.logits.qk_scale, x.logits.tanh_scale, k_scale_value, K.CAPPED, C)
    query = Query(queries, row_kv_index, Logits(k_scaled, tanh_scaled, slope))
    kv = KeyValues(
        k_side, v_side, TableLine(pages, x.line.width), ScalePointers(x.scale_values.k, x.scale_values.v, kv_head)
    )
    bits = None
    if x.mask is not None:
        first_masked, bits = bits_of_block(x.mask, seq, first_token, is_row, end_key, G)
        edge_block = first_masked // K.KEY_BLOCK
        if K.WINDOWED:
            first_key = first_masked
    seen = SeenKeys(KeyRange(first_key, end_key), x.window_left, bits)
    acc, maximum, total = nothing_seen(G.QUERY_ROWS, K)
    if G.SHARES:
        # The program that begins a row merges its segments from left to right, and writes the results if it ends the
        # row too. If an earlier program began it, each segment is stored for itself, as a part (segment_parts.py).
        first, end, ends = segments_of_share(words, seen, done, take, G)
        for segment in range(first, end):
            part = attend_segment(segment, query, kv, seen, edge_block, G)
            if done == 0:
                acc, maximum, total = merge_segment(Softmax(acc, maximum, total), part)
            else:
                _, _, is_row = rows_again(x.schedule, query_block, row, G)
                _store_part(part, to, 1 + segment - first, is_row, G)
        if done == 0:
            token, head, is_row = rows_again(x.schedule, query_block, row, G)
            if ends:
                store_results(Softmax(acc, maximum, total), token, head, is_row, to.sinks, to.out, to.lse, K)
            else:
                _store_part(Softmax(acc, maximum, total), to, 0, is_row, G)
    else:
        first_segment = first_key // G.SEGMENT_LEN
        end_segment = tl.cdiv(end_key, G.SEGMENT_LEN)
        if to.workspace is None:
            for segment in range(first_segment, end_segment):
                part = attend_segment(segment, query, kv, seen, edge_block, G)
                acc, maximum, total = merge_segment(Softmax(acc, maximum, total), part)
        else:
            rows_left = left_of_program(to.workspace, G)
            for segment in range(first_segment, end_segment):
                part = attend_segment(segment, query, kv, seen, edge_block, G)
                maximum, total = merge_in_memory(rows_left, maximum, total, part, segment - first_segment, K)
            acc = load_left(rows_left, end_segment - first_segment, K)
        token, head, is_row = rows_again(x.schedule, query_block, row, G)
        store_results(Softmax(acc, maximum, total), token, head, is_row, to.sinks, to.out, to.lse, K)


@triton.jit(do_not_specialize=["num_programs", "max_blocks", "width", "window_left"])
def _segment_extend_kernel(
    q,
    k_pages,
    v_pages,
    table,
    row_of_seq,
    kv_len,
    schedule,
    workspace,
    out,
    lse,
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
    num_programs,
    max_blocks,
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
    mask = None
    if mask_words is not None:
        mask = MaskOfStep(mask_words, mask_indptr, mask_start, window_start, q_indptr)
    x = Operands(
        schedule,
        HeadRows(q, q_token, q_head),
        PagePointers(k_pages, kp_page, kp_token, kp_head),
        PagePointers(v_pages, vp_page, vp_token, vp_head),
        TableLine(table, width),
        table_row,
        row_of_seq,
        kv_len,
        ScalePointers(k_scale, v_scale, 0),
        mask,
        Logits(qk_scale, tanh_scale, slopes),
        window_left,
    )
    out_rows, lse_rows = HeadRows(out, out_token, out_head), HeadRows(lse, lse_token, lse_head)
    to = SegmentOutputs(out_rows, lse_rows, sinks, workspace, num_programs)
    ROWS: tl.constexpr = G.KV_HEADS * G.HEAD_BLOCKS
    program = tl.program_id(0)
    shares = schedule + max_blocks * BLOCK_WORDS
    if G.SHARES:
        share = shares + program * SHARE_WORDS
        query_block, row, done, work = work_of_share(share)
        while work > 0:
            row_cost = tl.load(schedule + query_block * BLOCK_WORDS + BLOCK_KEYS) + G.ROW_KEYS
            take = tl.minimum(work, row_cost - done)
            _attend_row(x, to, query_block, row, done, take, G)
            work -= take
            done = 0
            query_block, row = row_after(query_block, row, ROWS)
    else:
        query_block = program // ROWS
        row = program % ROWS
        is_whole = tl.load(schedule + query_block * BLOCK_WORDS + BLOCK_TOKENS) > 0
        if G.ROW_KEYS > 0:
            is_whole = is_whole & (query_block >= tl.load(shares + SHARE_CUT))
        if is_whole:
            _attend_row(x, to, query_block, row, 0, 0, G)


def launch_segment_extend(
    args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: SegmentTiles, mask: PackedMask | None = None
) -> None:
    """Like `launch_paged_extend`, but with the same bits in any batch and chunk, and in launch_segment_decode.

    args: with cut's schedule, and a workspace of tiles.extend_words(...) or longer
    cut:  of tiles.extend. If rows are shared out, it is by whole segments, and blocks of query heads are equal
    mask: which keys each token sees, instead of scores.causal. A token that sees none receives 0 and LSE -inf

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("deterministic extend")
    geometry = _geometry(args, scores, cut, tiles, mask)
    programs = cut.sharing.programs
    if programs:
        sharing = geometry._replace(SHARES=True, WHOLE_ROWS=False)
        _launch_rows(args, scores, cut, mask, programs, sharing, tiles)
        launch_merge_of_segments(args, cut, extend=tiles.extend, segment_len=tiles.segment_len, slots=geometry.SLOTS)
    rows = cut.max_blocks(args.queries.num_tokens, args.queries.num_seqs) * geometry.KV_HEADS * geometry.HEAD_BLOCKS
    _launch_rows(args, scores, cut, mask, rows, geometry, tiles)


def _launch_rows(
    args: AttendArgs,
    scores: Scores,
    cut: ExtendCut,
    mask: PackedMask | None,
    grid: int,
    geometry: BlockGeometry,
    tiles: SegmentTiles,
) -> None:
    """Launches the shares or the whole rows, as the geometry says."""
    has_workspace = geometry.SHARES or tiles.left_in_memory
    # The compiler options in addition to the warps are for whole rows.
    options = {} if geometry.SHARES else tiles.extend.options()
    launch(
        _segment_extend_kernel,
        (grid,),
        *row_arguments(args, args.workspace if has_workspace else None, scores, cut, mask),
        *args.read_strides,
        *args.written_strides,
        G=geometry,
        num_warps=tiles.extend.num_warps,
        **options,
        **tiles.options(),
        **UNFUSED,
    )


def _geometry(
    args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: SegmentTiles, mask: PackedMask | None
) -> BlockGeometry:
    """Checks the schedule and returns the values that the launch is compiled for."""
    extend = tiles.extend
    num_kv_heads, gqa_ratio = args.heads
    cut.check(args.schedule, args.queries.num_tokens, args.queries.num_seqs)
    assert cut.query_tokens == extend.tokens_per_block(gqa_ratio), "the schedule was cut for other tiles"
    if mask is not None:
        mask.check(args.queries.num_seqs, args.queries.num_tokens, windowed=scores.windowed)
        assert extend.key_block <= TWO_WORDS
    block_heads, head_blocks = extend.heads_per_block(gqa_ratio), extend.head_blocks(gqa_ratio)
    causal, sharing = scores.causal and mask is None, cut.sharing
    if sharing.programs:
        cut.check_layer(num_kv_heads * head_blocks, causal=causal, window_left=scores.window_left)
        assert sharing.segment_len == tiles.segment_len, "the schedule was cut for other segments"
        assert not tiles.left_in_memory, "programs that share merge in registers"
        assert mask is None, "a window that is counted from a draft's depth begins before what a row costs"
        assert extend.has_equal_blocks(gqa_ratio), "the merge finds heads by the place of a block"
        assert sharing.most_keys <= tiles.shared_segments * tiles.segment_len, "there is no room for so many segments"
    args.check_workspace(
        tiles.extend_words(
            cut.max_blocks(args.queries.num_tokens, args.queries.num_seqs),
            programs=sharing.programs,
            num_kv_heads=num_kv_heads,
            gqa_ratio=gqa_ratio,
            v_head_dim=args.out.shape[2],
        )
    )
    return BlockGeometry(
        keys=key_geometry(args, scores, tiles=extend, causal=causal, exact=True),
        KV_HEADS=num_kv_heads,
        GQA_RATIO=gqa_ratio,
        BLOCK_HEADS=block_heads,
        HEAD_BLOCKS=head_blocks,
        QUERY_ROWS=extend.query_rows,
        ROW_KEYS=sharing.row_keys if sharing.programs else 0,
        SHARES=False,
        WHOLE_ROWS=True,
        SEGMENT_LEN=tiles.segment_len,
        STAGES=extend.num_stages,
        EDGE_STAGES=extend.diagonal_stages,
        SLOTS=tiles.segment_slots,
    )
