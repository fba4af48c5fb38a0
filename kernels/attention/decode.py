"""Paged attention of sequences with one new token, split over KV.

    out[token] = softmax(scores of q[token] . K^T) V      K, V: the keys that the sequence's last token sees (scores.py)

A fixed number of programs walks the rows that the schedule gives them. A row that one program finishes alone is written
to out; of the others each program leaves a partial result (accumulator, maximum and sum in base 2), which merge.py adds
up. Rows of a window may have a program each instead, which leaves nothing to merge. K and V are loaded under a mask
with other=0.0: what lies beyond a length may be NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.checks import check_paged_tensors
from rocm_attn.kernels.attention.decode_schedule import PROGRAM_WORDS, SEQ_WORDS, decode_schedule_words
from rocm_attn.kernels.attention.merge import launch_merge
from rocm_attn.kernels.attention.scores import UNLIMITED_WINDOW, Scores, check_head_weights
from rocm_attn.kernels.attention.softmax import LN_2, LOG2_E, add_sink, capped, in_range, visible_tiles
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import DecodeTiles, next_power_of_2

# Keys of a window that are not handed out and merged: that would cost as much as reading them.
_FEW_KEYS = 256
# Of heads whose windows are read so: of larger ones gfx950 spills scalar registers with a cap.
_LARGEST_DIM = 128
# The share of the programs, over all rounds that the rows take, that must have a row.
_EVENLY = 0.9


@triton.jit
def _attend_tiles(
    q,
    k_pages,
    v_pages,
    pages,
    first_tile,
    end_tile,
    first_key,
    kv_len,
    slope,
    qk_scale,
    tanh_scale,
    width,
    kp_page,
    kp_token,
    vp_page,
    vp_token,
    k_column,
    v_column,
    k_inside,
    v_inside,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    V_BLOCK: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    SAME_OFFSETS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles [first_tile, end_tile) of one row: accumulator, maximum and sum (base 2) of each q row.

    q and the accumulator are [BLOCK_M, .], or [., BLOCK_M] if TRANSPOSED; pages is the sequence's line of the table.
    """
    lane = tl.arange(0, BLOCK_N)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([V_BLOCK, BLOCK_M] if TRANSPOSED else [BLOCK_M, V_BLOCK], tl.float32)
    # The next tile's page ids travel one iteration ahead: a load inside the loop that other loads depend on makes the
    # pipeliner spend its stages on it (H200, llama8b 64 x 4k: 329 -> 267 us). Hence clamped to the table, not masked.
    next_page = tl.load(pages + tl.minimum((first_tile * BLOCK_N + lane) // PAGE_SIZE, width - 1))
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        kv_index = tile * BLOCK_N + lane
        live = in_range(kv_index, first_key, kv_len) if WINDOWED else kv_index < kv_len
        page = next_page.to(tl.int64)
        next_page = tl.load(pages + tl.minimum((kv_index + BLOCK_N) // PAGE_SIZE, width - 1))
        offset = (kv_index % PAGE_SIZE).to(tl.int64)
        k_row = page * kp_page + offset * kp_token
        v_row = k_row if SAME_OFFSETS else page * vp_page + offset * vp_token
        k_mask = live[:, None]
        if K_PADDED:
            k_mask = k_mask & k_inside[None, :]
        v_mask = live[:, None]
        if V_PADDED:
            v_mask = v_mask & v_inside[None, :]
        k = tl.load(k_pages + k_row[:, None] + k_column[None, :], mask=k_mask, other=0.0)
        if TRANSPOSED:
            products = tl.dot(k, q, input_precision="ieee")
            scores = (capped(products, tanh_scale) if CAPPED else products) * qk_scale
            if SLOPED:
                scores += slope[None, :] * (kv_index - (kv_len - 1))[:, None]
            scores = tl.where(live[:, None], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 0))
            weights = tl.exp2(scores - new_maximum[None, :])
        else:
            products = tl.dot(q, tl.trans(k), input_precision="ieee")
            scores = (capped(products, tanh_scale) if CAPPED else products) * qk_scale
            if SLOPED:
                scores += slope[:, None] * (kv_index - (kv_len - 1))[None, :]
            scores = tl.where(live[None, :], scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2(scores - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        maximum = new_maximum
        v = tl.load(v_pages + v_row[:, None] + v_column[None, :], mask=v_mask, other=0.0)
        if TRANSPOSED:
            acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * decay[None, :], input_precision="ieee")
            total = total * decay + tl.sum(weights, 0)
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            total = total * decay + tl.sum(weights, 1)
    return acc, maximum, total


@triton.jit(do_not_specialize=["num_seqs", "num_programs", "width"])
def _decode_kernel(
    q,
    k_pages,
    v_pages,
    table,
    row_of_seq,
    q_indptr,
    schedule,
    partials,
    out,
    lse,
    sinks,
    slopes,
    first_page,
    qk_scale,
    tanh_scale,
    window_left: tl.constexpr,
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
    out_token,
    out_head,
    lse_token,
    lse_head,
    ROWS: tl.constexpr,
    GQA_RATIO: tl.constexpr,
    HEADS_PER_ROW: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROW_COST: tl.constexpr,
    SAME_OFFSETS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WINDOWED: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCK_HEADS: tl.constexpr = (GQA_RATIO + HEAD_BLOCKS - 1) // HEAD_BLOCKS
    Q_ROWS: tl.constexpr = BLOCK_HEADS * HEADS_PER_ROW
    program = tl.program_id(0)
    if WHOLE_ROWS:
        seq = program // ROWS
        row = program % ROWS
        done = 0
        kv_len = tl.load(schedule + num_programs * PROGRAM_WORDS + seq * SEQ_WORDS + 1)
        _, _, tiles_of_row = visible_tiles(kv_len, window_left, BLOCK_N, WINDOWED)
        work = tl.where(kv_len < 0, 0, tiles_of_row + ROW_COST)
    else:
        words = schedule + program * PROGRAM_WORDS
        seq = tl.load(words)
        row = tl.load(words + 1)
        done = tl.load(words + 2)
        work = tl.load(words + 3)
        kv_len = tl.load(words + 6)

    # Indices along the two sides of the q and the output tile, which TRANSPOSED swaps.
    q_row = tl.arange(0, BLOCK_M)
    k_lane = tl.arange(0, K_BLOCK)
    v_lane = tl.arange(0, V_BLOCK)
    if TRANSPOSED:
        m, k_wide, v_wide = q_row[None, :], k_lane[:, None], v_lane[:, None]
    else:
        m, k_wide, v_wide = q_row[:, None], k_lane[None, :], v_lane[None, :]
    is_k = k_wide < HEAD_DIM * HEADS_PER_ROW
    is_v = v_wide < V_HEAD_DIM * HEADS_PER_ROW
    if HEADS_PER_ROW > 1:
        # Columns are [KV head, dim] and q is block-diagonal, zero in the columns of the other head: one product over
        # both heads then gives each q row the scores of its own, and its result is in its own head's columns.
        is_k = is_k & (m // GQA_RATIO == k_wide // HEAD_DIM)
        is_v = is_v & (m // GQA_RATIO == v_wide // V_HEAD_DIM)
        k_wide = k_wide % HEAD_DIM
        v_wide = v_wide % V_HEAD_DIM
        k_column = (k_lane // HEAD_DIM).to(tl.int64) * kp_head + k_lane % HEAD_DIM
        v_column = (v_lane // V_HEAD_DIM).to(tl.int64) * vp_head + v_lane % V_HEAD_DIM
    else:
        k_column = k_lane
        v_column = v_lane
    sums = partials + num_programs * (2 * Q_ROWS * V_HEAD_DIM)

    while work > 0:
        first_key, window_tile, num_tiles = visible_tiles(kv_len, window_left, BLOCK_N, WINDOWED)
        row_cost = tl.where(kv_len < 0, 0, num_tiles + ROW_COST)
        take = tl.minimum(work, row_cost - done)
        first_tile = tl.maximum(done - ROW_COST, 0)
        end_tile = done + take - ROW_COST
        # A row is HEADS_PER_ROW KV heads, or a block of one KV head's query heads.
        head_block = row % HEAD_BLOCKS
        first_kv_head = (row // HEAD_BLOCKS * HEADS_PER_ROW).to(tl.int64)
        first_head = first_kv_head * GQA_RATIO + head_block * BLOCK_HEADS
        num_q_rows = tl.minimum(Q_ROWS, GQA_RATIO * HEADS_PER_ROW - head_block * BLOCK_HEADS)
        is_row = q_row < num_q_rows
        is_out = (m < num_q_rows) & is_v
        if (kv_len == 0) & (done == 0):
            token = tl.load(q_indptr + seq).to(tl.int64)
            out_row = out + token * out_token + first_head * out_head
            tl.store(
                out_row + m.to(tl.int64) * out_head + v_wide, tl.zeros(is_out.shape, out.dtype.element_ty), mask=is_out
            )
            if lse is not None:
                lse_row = lse + token * lse_token + first_head * lse_head
                tl.store(
                    lse_row + q_row.to(tl.int64) * lse_head, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_row
                )
        if end_tile > first_tile:
            token = tl.load(q_indptr + seq).to(tl.int64)
            table_line = table + tl.load(row_of_seq + seq).to(tl.int64) * table_row
            line_width = width
            if first_page is not None:
                skipped = tl.load(first_page + seq)
                table_line += skipped
                line_width = width - skipped
            q_line = q + token * q_token + first_head * q_head
            slope = tl.zeros([BLOCK_M], tl.float32)
            if slopes is not None:
                slope = tl.load(slopes + first_head + q_row, mask=is_row, other=0.0) * LOG2_E
            acc, maximum, total = _attend_tiles(
                tl.load(q_line + m.to(tl.int64) * q_head + k_wide, mask=(m < num_q_rows) & is_k, other=0.0),
                k_pages + first_kv_head * kp_head,
                v_pages + first_kv_head * vp_head,
                table_line,
                window_tile + first_tile,
                window_tile + end_tile,
                first_key,
                kv_len,
                slope,
                qk_scale,
                tanh_scale,
                line_width,
                kp_page,
                kp_token,
                vp_page,
                vp_token,
                k_column,
                v_column,
                k_lane < HEAD_DIM,
                v_lane < V_HEAD_DIM,
                PAGE_SIZE,
                BLOCK_M,
                BLOCK_N,
                V_BLOCK,
                K_BLOCK > HEAD_DIM * HEADS_PER_ROW,
                V_BLOCK > V_HEAD_DIM * HEADS_PER_ROW,
                SAME_OFFSETS,
                TRANSPOSED,
                WINDOWED,
                CAPPED,
                slopes is not None,
                STAGES,
            )
            if WHOLE_ROWS or end_tile - first_tile == num_tiles:
                if sinks is not None:
                    sink = tl.load(sinks + first_head + q_row, mask=is_row, other=float("-inf"))
                    maximum, total, decay = add_sink(maximum, total, sink)
                    acc = acc * (decay[None, :] if TRANSPOSED else decay[:, None])
                value = acc / (total[None, :] if TRANSPOSED else total[:, None])
                out_row = out + token * out_token + first_head * out_head
                tl.store(out_row + m.to(tl.int64) * out_head + v_wide, value.to(out.dtype.element_ty), mask=is_out)
                if lse is not None:
                    lse_row = lse + token * lse_token + first_head * lse_head
                    tl.store(lse_row + q_row.to(tl.int64) * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)
            else:
                # Part 2p of program p goes to a row begun by an earlier program, 2p + 1 to one that goes on.
                part = 2 * program + (first_tile == 0).to(tl.int32)
                tl.store(partials + (part * Q_ROWS + m) * V_HEAD_DIM + v_wide, acc, mask=is_out)
                tl.store(sums + (part * Q_ROWS + q_row) * 2, maximum, mask=is_row)
                tl.store(sums + (part * Q_ROWS + q_row) * 2 + 1, total, mask=is_row)
        work -= take
        if not WHOLE_ROWS:
            done = 0
            row = tl.where(kv_len < 0, ROWS, row + 1)
            seq = tl.where(row == ROWS, seq + 1, seq)
            row = tl.where(row == ROWS, 0, row)
            seq_words = schedule + num_programs * PROGRAM_WORDS + seq * SEQ_WORDS
            kv_len = tl.load(seq_words + 1, mask=seq < num_seqs, other=-1)


def has_whole_rows(num_rows: int, *, num_programs: int, window_left: int, head_dim: int) -> bool:
    """Whether every row of a window has a program of its own.

    Rows of a window are equally long. So there is nothing to balance where they are short, or where they fill the
    num_programs that run at a time evenly, and merging would cost more than it gains. On an H200 gptoss 64 x 32k takes
    10.0 us so and 14.9 shared out with a window of 128, and 38.4 and 41.4 with one of 1024; but 1 x 32k 18.1 and 7.1.
    """
    if window_left == UNLIMITED_WINDOW or head_dim > _LARGEST_DIM:
        return False
    places = -(-num_rows // num_programs) * num_programs
    return window_left < _FEW_KEYS or num_rows >= _EVENLY * places


def decode_partials_words(
    num_programs: int, *, num_q_heads: int, num_kv_heads: int, v_head_dim: int, tiles: DecodeTiles
) -> int:
    """float32 words of the workspace for rows that several programs share: two parts a program."""
    return 2 * num_programs * tiles.q_rows(num_q_heads // num_kv_heads) * (v_head_dim + 2)


def launch_paged_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    row_of_seq: Tensor,
    kv_len: Tensor,
    q_indptr: Tensor,
    schedule: Tensor,
    partials: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *,
    scores: Scores,
    num_programs: int,
    tiles: DecodeTiles,
    first_page: Tensor | None = None,
) -> None:
    """Attention of every sequence with exactly one new token; all other tokens of out and lse stay as they are.

    q, out:            [T, q_heads, head_dim | v_head_dim], any strides but the last
    k_pages, v_pages:  [pages, page_size, kv_heads, head_dim | v_head_dim], any strides but the last
    table:             int32 [rows, width]: row, page_no -> page; page numbers beyond the width are not read
    row_of_seq:        int32 [S]      seq -> row of the table
    kv_len:            int32 [S]      tokens, the new one included; 0 gives output 0 and LSE -inf
    q_indptr:          int32 [S + 1]  sequence -> first token
    schedule:          int32, filled by launch_decode_schedule from kv_len with the same window, num_programs and tiles
    partials:          float32 [decode_partials_words(...)] or longer, scratch
    lse:               float32 [T, q_heads], natural logarithm with the sink in it, any strides; or None
    sinks, slopes:     float32 [q_heads], or None; see scores.py
    num_programs:      programs of the grid
    first_page:        int32 [S], seq -> page_no in its row where the kv_len keys begin, below the width; None: 0

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    check_paged_tensors("paged decode", q, k_pages, v_pages, table, row_of_seq, kv_len, q_indptr, out, lse)
    num_q_heads, head_dim = q.shape[1:]
    check_head_weights(num_q_heads, sinks, slopes)
    page_size, num_kv_heads, v_head_dim = v_pages.shape[1:]
    gqa_ratio, heads_per_row = num_q_heads // num_kv_heads, tiles.heads_per_row
    num_seqs, q_rows = kv_len.shape[0], tiles.q_rows(gqa_ratio)
    partials_words = decode_partials_words(
        num_programs, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, v_head_dim=v_head_dim, tiles=tiles
    )
    assert schedule.dtype == torch.int32
    assert schedule.numel() >= decode_schedule_words(num_programs, num_seqs)
    assert partials.dtype == torch.float32
    assert partials.numel() >= partials_words
    assert schedule.is_contiguous()
    assert partials.is_contiguous()
    assert heads_per_row == 1 or (head_dim == v_head_dim == next_power_of_2(head_dim) and tiles.head_blocks == 1)
    assert first_page is None or (first_page.dtype == torch.int32 and first_page.shape == (num_seqs,))
    lse_token, lse_head = (0, 0) if lse is None else lse.stride()
    num_rows = num_seqs * tiles.rows_per_seq(num_kv_heads)
    whole_rows = has_whole_rows(
        num_rows, num_programs=num_programs, window_left=scores.window_left, head_dim=max(head_dim, v_head_dim)
    )
    launch(
        _decode_kernel,
        (num_rows if whole_rows else num_programs,),
        q,
        k_pages,
        v_pages,
        table,
        row_of_seq,
        q_indptr,
        schedule,
        partials,
        out,
        lse,
        sinks,
        slopes,
        first_page,
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
        out.stride(0),
        out.stride(1),
        lse_token,
        lse_head,
        ROWS=tiles.rows_per_seq(num_kv_heads),
        GQA_RATIO=gqa_ratio,
        HEADS_PER_ROW=heads_per_row,
        HEAD_BLOCKS=tiles.head_blocks,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        K_BLOCK=max(16, next_power_of_2(head_dim * heads_per_row)),
        V_BLOCK=max(16, next_power_of_2(v_head_dim * heads_per_row)),
        PAGE_SIZE=page_size,
        BLOCK_M=max(16, next_power_of_2(q_rows)),
        BLOCK_N=tiles.block_n,
        ROW_COST=tiles.row_cost,
        SAME_OFFSETS=head_dim == v_head_dim and k_pages.stride() == v_pages.stride(),
        TRANSPOSED=tiles.transposed,
        WINDOWED=scores.windowed,
        WHOLE_ROWS=whole_rows,
        CAPPED=scores.soft_cap > 0,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
    )
    if whole_rows:
        return
    launch_merge(
        q_indptr,
        schedule,
        partials,
        out,
        lse,
        sinks,
        window_left=scores.window_left,
        num_seqs=num_seqs,
        num_kv_heads=num_kv_heads,
        num_programs=num_programs,
        tiles=tiles,
    )
