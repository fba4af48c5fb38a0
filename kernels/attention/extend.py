"""Paged attention of sequences with several new tokens over their cached prefix.

    out[token] = softmax(scores of q[token] . K^T) V        K, V: the keys that the token sees (scores.py)

A program takes one tile of the schedule and the query heads of one KV head (or as many as fit): rows of a tile are
[token, head], so K and V are loaded once for all of them. Keys that every row sees come first, without masks; then the
diagonal, under masks with other=0.0: what no row sees may be NaN. With a window every step is masked; with a packed
mask (packed_mask.py) too, and its bits from the window's first key on say what a row sees.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.checks import check_paged_tensors
from rocm_attn.kernels.attention.extend_schedule import TILE_WORDS, extend_schedule_words, max_extend_tiles
from rocm_attn.kernels.attention.mask_bits import MAX_MASK_BLOCK, bit_is_set, bits_from, row_bits, seen_by_some
from rocm_attn.kernels.attention.packed_mask import PackedMask
from rocm_attn.kernels.attention.scores import Scores, check_head_weights
from rocm_attn.kernels.attention.softmax import LN_2, LOG2_E, add_sink, capped, in_range
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import ExtendTiles, next_power_of_2


@triton.jit
def _attend_steps(
    acc,
    maximum,
    total,
    q,
    k_pages,
    v_pages,
    pages,
    first_step,
    end_step,
    first_key,
    end_key,
    row_kv_index,
    tile_words,
    row_cell,
    row_end,
    row_first_key,
    window_left,
    slope,
    qk_scale,
    tanh_scale,
    width,
    kp_page,
    kp_token,
    vp_page,
    vp_token,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    PACKED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    SAME_OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Steps [first_step, end_step) of BLOCK_N keys added to acc, maximum and total (base 2).

    If MASKED, a row sees the keys of its window, and only keys in [first_key, end_key) are loaded; if PACKED as well, a
    row sees the keys before end_key whose bits are set, of a window from row_first_key on, and only keys that some row
    sees are loaded.
    """
    lane = tl.arange(0, BLOCK_N)
    k_column = tl.arange(0, K_BLOCK)
    v_column = tl.arange(0, V_BLOCK)
    # Page ids travel one step ahead of the loads that need them, clamped to the table (see decode.py).
    next_page = tl.load(pages + tl.minimum((first_step * BLOCK_N + lane) // PAGE_SIZE, width - 1))
    for step in tl.range(first_step, end_step, num_stages=STAGES):
        kv_index = step * BLOCK_N + lane
        page = next_page.to(tl.int64)
        next_page = tl.load(pages + tl.minimum((kv_index + BLOCK_N) // PAGE_SIZE, width - 1))
        offset = (kv_index % PAGE_SIZE).to(tl.int64)
        k_row = page * kp_page + offset * kp_token
        v_row = k_row if SAME_OFFSETS else page * vp_page + offset * vp_token
        k_block = k_pages + k_row[:, None] + k_column[None, :]
        v_block = v_pages + v_row[:, None] + v_column[None, :]
        if PACKED:
            bits = row_bits(tile_words, row_cell, row_end, step * BLOCK_N, end_key)
            if WINDOWED:
                bits = bits & bits_from(row_first_key - step * BLOCK_N)
            live = bit_is_set(seen_by_some(bits), lane)[:, None]
        else:
            live = (in_range(kv_index, first_key, end_key) if WINDOWED else kv_index < end_key)[:, None]
        if K_BLOCK > HEAD_DIM:
            k = tl.load(k_block, mask=live & (k_column < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            k = tl.load(k_block, mask=live, other=0.0)
        else:
            k = tl.load(k_block)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAPPED:
            scores = capped(scores, tanh_scale)
        if SLOPED:
            # Scaled here already: the slope is not.
            scores = scores * qk_scale + slope[:, None] * (kv_index[None, :] - row_kv_index[:, None])
        if MASKED:
            if PACKED:
                visible = bit_is_set(bits[:, None], lane[None, :])
            elif WINDOWED:
                visible = in_range(row_kv_index[:, None] - kv_index[None, :], 0, window_left + 1)
            elif CAUSAL:
                visible = kv_index[None, :] <= row_kv_index[:, None]
            else:
                visible = (kv_index < end_key)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        factor = 1.0 if SLOPED else qk_scale
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
        # A row of a masked step may have seen no key yet; the subtractions below must not be inf - inf.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MASKED else new_maximum
        decay = tl.exp2(maximum - base)
        weights = tl.exp2(scores * factor - base[:, None])
        if V_BLOCK > V_HEAD_DIM:
            v = tl.load(v_block, mask=live & (v_column < V_HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            v = tl.load(v_block, mask=live, other=0.0)
        else:
            v = tl.load(v_block)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    return acc, maximum, total


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
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SAME_OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
    DIAGONAL_STAGES: tl.constexpr,
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
        row = tl.arange(0, BLOCK_M)
        tile_token = row // TILE_HEADS
        ratio_head = head_block * TILE_HEADS + row % TILE_HEADS
        is_row = tile_token < num_tokens
        if HEAD_BLOCKS * TILE_HEADS > GQA_RATIO:
            is_row = is_row & (ratio_head < GQA_RATIO)
        token = (first_token + tile_token).to(tl.int64)
        head = (kv_head * GQA_RATIO + ratio_head).to(tl.int64)
        is_q = is_row[:, None]
        k_column = tl.arange(0, K_BLOCK)
        v_column = tl.arange(0, V_BLOCK)
        if K_BLOCK > HEAD_DIM:
            is_q = is_q & (k_column < HEAD_DIM)[None, :]
        q_tile = tl.load(q + (token * q_token + head * q_head)[:, None] + k_column[None, :], mask=is_q, other=0.0)
        k_head = k_pages + kv_head.to(tl.int64) * kp_head
        v_head = v_pages + kv_head.to(tl.int64) * vp_head
        pages = table + tl.load(row_of_seq + seq, mask=seq >= 0, other=0).to(tl.int64) * table_row
        row_kv_index = first_kv_index + tile_token
        slope = tl.zeros([BLOCK_M], tl.float32)
        if slopes is not None:
            slope = tl.load(slopes + head, mask=is_row, other=0.0) * LOG2_E
        # Keys [first_key, end_key) are seen by some row, those before edge_step by all. The padded tail belongs to no
        # sequence and sees no key. Not a branch: accumulators across one cost registers.
        first_key = 0
        # Of a packed mask; meaningless without.
        tile_words = schedule
        row_cell = tile_token
        row_end = tile_token
        row_first_key = tile_token
        if CAUSAL:
            end_key = tl.where(seq >= 0, first_kv_index + num_tokens, 0)
            edge_step = tl.where(seq >= 0, (first_kv_index + 1) // BLOCK_N, 0)
        else:
            end_key = tl.load(kv_len + seq, mask=seq >= 0, other=0)
            edge_step = end_key // BLOCK_N
        if WINDOWED:
            # Masks all the way: a loop of its own for what lies between the edges spills.
            first_key = tl.maximum(first_kv_index - window_left, 0)
            edge_step = first_key // BLOCK_N
        PACKED: tl.constexpr = mask_words is not None
        if PACKED:
            edge_step = 0
            # Of the padded tail, which sees no key, those of the first sequence.
            seq_cell = tl.load(mask_indptr + tl.maximum(seq, 0))
            seq_token = tl.load(q_indptr + tl.maximum(seq, 0))
            tile_cell = seq_cell + (first_token - seq_token).to(tl.int64) * end_key
            # From here on cells are counted from the tile's first word, and fit 32 bits.
            tile_words = mask_words + tile_cell // 32
            row_cell = (tile_cell % 32).to(tl.int32) + tile_token * end_key
            row_end = tl.where(is_row, row_cell + end_key, 0)
            if WINDOWED:
                first_new_key = end_key - (tl.load(q_indptr + tl.maximum(seq, 0) + 1) - seq_token)
                position = tl.load(position_of_token + token, mask=is_row, other=0x7FFFFFFF)
                row_first_key = tl.maximum(position, first_new_key) - window_left
                # Tokens of a tree lie at any depth of it: the first key of all rows need not be the first row's.
                edge_step = tl.minimum(tl.maximum(tl.min(row_first_key, 0), 0), end_key) // BLOCK_N
        acc = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        if not WINDOWED and not PACKED:
            acc, maximum, total = _attend_steps(
                acc,
                maximum,
                total,
                q_tile,
                k_head,
                v_head,
                pages,
                0,
                edge_step,
                first_key,
                end_key,
                row_kv_index,
                tile_words,
                row_cell,
                row_end,
                row_first_key,
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
                BLOCK_N,
                False,
                CAUSAL,
                WINDOWED,
                PACKED,
                CAPPED,
                slopes is not None,
                SAME_OFFSETS,
                STAGES,
            )
        acc, maximum, total = _attend_steps(
            acc,
            maximum,
            total,
            q_tile,
            k_head,
            v_head,
            pages,
            edge_step,
            tl.cdiv(end_key, BLOCK_N),
            first_key,
            end_key,
            row_kv_index,
            tile_words,
            row_cell,
            row_end,
            row_first_key,
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
            BLOCK_N,
            True,
            CAUSAL,
            WINDOWED,
            PACKED,
            CAPPED,
            slopes is not None,
            SAME_OFFSETS,
            STAGES if PACKED else DIAGONAL_STAGES,
        )
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_row, other=float("-inf"))
            maximum, total, decay = add_sink(maximum, total, sink)
            acc = acc * decay[:, None]
        # Tokens of no sequence have seen no key: 0 / 1, and LSE -inf + log2(1).
        total = tl.where(total == 0.0, 1.0, total)
        is_out = is_row[:, None]
        if V_BLOCK > V_HEAD_DIM:
            is_out = is_out & (v_column < V_HEAD_DIM)[None, :]
        out_block = out + (token * out_token + head * out_head)[:, None] + v_column[None, :]
        tl.store(out_block, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_out)
        if lse is not None:
            tl.store(lse + token * lse_token + head * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)


def launch_paged_extend(
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
    tiles: ExtendTiles,
    mask: PackedMask | None = None,
) -> None:
    """Attention of every new token of the sequences in the schedule.

    Tokens at or past q_indptr[S] receive 0 and LSE -inf; tokens of sequences below min_q_len stay as they are.

    q, out:            [T, q_heads, head_dim | v_head_dim], any strides but the last
    k_pages, v_pages:  [pages, page_size, kv_heads, head_dim | v_head_dim], any strides but the last
    table:             int32 [rows, width]: row, page_no -> page; page numbers beyond the width are not read
    row_of_seq:        int32 [S]      seq -> row of the table
    kv_len:            int32 [S]      tokens, the new ones included
    q_indptr:          int32 [S + 1]  sequence -> first token
    schedule:          int32, filled by launch_extend_schedule from kv_len and q_indptr with the same T and tiles
    lse:               float32 [T, q_heads], natural logarithm with the sink in it, any strides; or None
    sinks, slopes:     float32 [q_heads], or None; see scores.py
    max_q_len:         no sequence has more new tokens (the grid needs only T; the torch twin cuts its tiles by it)
    mask:              which keys each token sees, in place of scores.causal. A token that sees none receives 0 and LSE
                       -inf

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    check_paged_tensors("paged extend", q, k_pages, v_pages, table, row_of_seq, kv_len, q_indptr, out, lse)
    num_tokens, num_q_heads, head_dim = q.shape
    page_size, num_kv_heads, v_head_dim = v_pages.shape[1:]
    num_seqs, gqa_ratio = kv_len.shape[0], num_q_heads // num_kv_heads
    check_head_weights(num_q_heads, sinks, slopes)
    assert schedule.dtype == torch.int32
    assert schedule.is_contiguous()
    assert schedule.numel() >= extend_schedule_words(num_tokens, num_seqs, gqa_ratio=gqa_ratio, tiles=tiles)
    tile_heads = tiles.heads_per_tile(gqa_ratio)
    max_tiles = max_extend_tiles(num_tokens, num_seqs, gqa_ratio=gqa_ratio, tiles=tiles)
    if mask is not None:
        mask.check(num_seqs, num_tokens)
        assert tiles.block_n <= MAX_MASK_BLOCK
    lse_token, lse_head = (0, 0) if lse is None else lse.stride()
    launch(
        _extend_kernel,
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
        None if mask is None else q_indptr,
        None if mask is None else mask.words,
        None if mask is None else mask.indptr,
        None if mask is None else mask.positions,
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
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        CAUSAL=scores.causal and mask is None,
        WINDOWED=scores.windowed,
        CAPPED=scores.soft_cap > 0,
        SAME_OFFSETS=head_dim == v_head_dim and k_pages.stride() == v_pages.stride(),
        STAGES=tiles.num_stages,
        DIAGONAL_STAGES=tiles.diagonal_stages,
        num_warps=tiles.num_warps,
        **({"waves_per_eu": tiles.waves_per_eu} if tiles.waves_per_eu else {}),
    )
