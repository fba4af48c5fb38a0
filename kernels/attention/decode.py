"""Paged attention of sequences with one new token, split over KV.

    out[token] = softmax(scores of q[token] . K^T) V      K, V: the keys that the sequence's last token sees (scores.py)

A fixed number of programs walks the rows that the schedule gives them. A row that one program finishes alone is written
to out; for other rows each program leaves a partial result. The program that ends last with a row adds them up
(merge_within.py: accumulator / sum, and maximum + log2(sum)), or a launch of its own does (merge.py: accumulator,
maximum and sum, in base 2). Rows of a window may have a program each instead, which leaves nothing to merge. K and V
are loaded under a mask with other=0.0: memory beyond a length may hold NaN.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import constexpr_function

from rocm_attn.kernels.attention.arguments import AttendArgs, NewRows
from rocm_attn.kernels.attention.bundles import HeadRows, KeyRange, Logits, PagePointers, Softmax, TableLine
from rocm_attn.kernels.attention.coded import (
    ScalePointers,
    add_value_pairs,
    add_values,
    amount_of,
    coded_scales,
    half_query,
    no_amount,
    row_scale,
    scaled_parts,
    scaled_value_parts,
    scales_of_two,
    shared_scale,
    times_scales,
    token_scale,
)
from rocm_attn.kernels.attention.cuts import DecodeCut, group_shape
from rocm_attn.kernels.attention.decode_columns import (
    KeyRows,
    alone,
    blocks_of_q,
    by_key,
    by_row,
    column_offsets,
    elements,
    even_and_odd,
    own_places,
    tail_of,
    tail_offsets,
    tails_of_keys,
    zeros_of_values,
)
from rocm_attn.kernels.attention.decode_geometry import DecodeGeometry, has_whole_rows
from rocm_attn.kernels.attention.decode_schedule import (
    PROGRAM_SHARE,
    SEQ_KV_LEN,
    heads_of_row,
    next_row,
    number_of_program,
    words_of_program,
    words_of_seq,
    work_at,
)
from rocm_attn.kernels.attention.key_rows import (
    are_read_by_page,
    lie_in_one_page,
    offsets_in_page,
    pages_at_once,
    pages_of_block,
)
from rocm_attn.kernels.attention.merge import Parts, launch_merge
from rocm_attn.kernels.attention.merge_within import RowOutput, SharedRow, merge_if_last
from rocm_attn.kernels.attention.new_rows import NewToken, store_new_rows
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.softmax import LN_2, LOG2_E, add_sink, capped, in_range, visible_blocks
from rocm_attn.kernels.cache.codes import TOKEN_SCALES, decoded, decoded_pairs
from rocm_attn.kernels.early import early_options, wait_for_launch
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import DecodeTiles, next_power_of_2


class PageSide(NamedTuple):
    """K or V of a row: pointer, strides between pages and between tokens; the offset in a token of each column of the
    first block, and of the last block if it has offsets of its own."""

    at: Any
    page: Any
    token: Any
    column: Any
    tail: Any


class KeyBlocks(NamedTuple):
    """Key blocks of a sequence: its line of the table, which ones, the keys that a row sees, the first one's pages."""

    line: TableLine
    blocks: KeyRange
    keys: KeyRange
    first_pages: Any


@triton.jit
def _products(q, k_rows, live, G: tl.constexpr):
    """q . k of a key block, [QUERY_ROWS, KEY_BLOCK] or swapped."""
    DIM: tl.constexpr = G.HEAD_DIM * G.rows.HEADS_PER_ROW
    PARTS: tl.constexpr = G.K_PARTS
    if G.PAIRED:
        pairs = elements(k_rows, live, 0, G.K_COLUMNS // 2, 0, DIM // 2)
        k_even, k_odd = decoded_pairs(pairs, G.coding.ENCODING)
        products = tl.dot(q[0], tl.trans(k_even))
        products = tl.dot(q[1], tl.trans(k_odd), products)
    else:
        for i in tl.static_range(PARTS):
            block = elements(k_rows, live, i, G.K_COLUMNS, G.K_TAIL, DIM)
            k = decoded(block, G.coding.ENCODING, q[i].dtype)
            if G.TRANSPOSED:
                left, right = k, q[i]
            else:
                left, right = q[i], tl.trans(k)
            if i == 0:
                products = tl.dot(left, right, input_precision="ieee")
            else:
                products = tl.dot(left, right, products, input_precision="ieee")
    return products


@triton.jit
def _with_values(acc, decay, weights, v_rows, live, scale_value, DTYPE: tl.constexpr, G: tl.constexpr):
    """acc * decay + weights * V, block by block; see add_values."""
    blocks = ()
    C: tl.constexpr = G.coding
    PARTS: tl.constexpr = G.V_PARTS
    COLUMNS: tl.constexpr = G.V_COLUMNS
    TAIL: tl.constexpr = G.V_TAIL
    DIM: tl.constexpr = G.V_HEAD_DIM * G.rows.HEADS_PER_ROW
    TRANSPOSED: tl.constexpr = G.TRANSPOSED
    for i in tl.static_range(PARTS):
        v = elements(v_rows, live, i, COLUMNS, TAIL, DIM)
        more = add_values(acc[i], decay, weights, v, scale_value, DTYPE, TRANSPOSED, C)
        blocks += (more,)  # type: ignore[assignment]
    return blocks


@constexpr_function
def _pages_at_once(G: DecodeGeometry) -> int:
    """Page numbers that are loaded for a block."""
    return pages_at_once(G.PAGE_SIZE, G.rows.KEY_BLOCK) if G.PAIRED else G.rows.KEY_BLOCK


@triton.jit
def _pages_of_block(pages, block, G: tl.constexpr):
    """Does the same as `pages_of_block`, for one block."""
    KEY_BLOCK: tl.constexpr = G.rows.KEY_BLOCK
    PAGES: tl.constexpr = _pages_at_once(G)
    BY_PAGE: tl.constexpr = are_read_by_page(G.IN_ONE_PAGE)
    lane = tl.arange(0, PAGES) * (KEY_BLOCK // PAGES)
    return pages_of_block(pages, block, lane, G.PAGE_SIZE, KEY_BLOCK, BY_PAGE)


@triton.jit
def _attend_key_blocks(q, k_side, v_side, read, logits, scale_values, G: tl.constexpr):
    """Returns the softmax state of some key blocks for each q row.

    q: a tuple of blocks of columns, [QUERY_ROWS, K_COLUMNS]; the accumulator is one too, [QUERY_ROWS, V_COLUMNS]; both
    are swapped if TRANSPOSED
    """
    pages, blocks, keys, next_page = read
    C: tl.constexpr = G.coding
    KEY_BLOCK: tl.constexpr = G.rows.KEY_BLOCK
    QUERY_ROWS: tl.constexpr = G.QUERY_ROWS
    PAGE_SIZE: tl.constexpr = G.PAGE_SIZE
    BY_PAGE: tl.constexpr = are_read_by_page(G.IN_ONE_PAGE)
    KEY_AXIS: tl.constexpr = 0 if G.TRANSPOSED else 1
    # True if each half of the rows has a scale of its own for a key: with two heads; or with one, so that each thread
    # of a warp loads one scale. With 16 scales Triton 3.6 has a thread load the four that it needs.
    HEADS: tl.constexpr = G.rows.HEADS_PER_ROW
    TWO_FACTORS: tl.constexpr = C.SCALES == TOKEN_SCALES and (HEADS == 2 or (G.PAIRED and KEY_BLOCK == 16))
    lane = tl.arange(0, KEY_BLOCK)
    maximum = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    DTYPE: tl.constexpr = q[0].dtype
    LOADED: tl.constexpr = G.V_COLUMNS // 2 if G.PAIRED else G.V_COLUMNS
    V_READ: tl.constexpr = (G.V_HEAD_DIM // 2 if G.PAIRED else G.V_HEAD_DIM) * G.rows.HEADS_PER_ROW
    acc = zeros_of_values(LOADED, G)
    odd = acc[0]
    amount = no_amount()
    # Scales of tokens take many operations: scores are scaled in the operation that subtracts the maximum, and weights
    # come out as fractions of the amount that multiplies them.
    SCALED_LATE: tl.constexpr = C.SCALES == TOKEN_SCALES and not G.CAPPED and logits.slope is None
    BY_AMOUNT: tl.constexpr = C.SCALES == TOKEN_SCALES and G.PAIRED
    early = 1.0 if SCALED_LATE else logits.qk_scale
    late = logits.qk_scale if SCALED_LATE else 1.0
    if BY_PAGE:
        k_offsets = offsets_in_page(lane, k_side.token, k_side.column)
        v_offsets = offsets_in_page(lane, v_side.token, v_side.column)
    # The next block's page ids travel one iteration ahead: a load inside the loop that other loads depend on makes the
    # pipeliner spend its stages on it (H200, llama8b 64 x 4k: 329 -> 267 us). Hence clamped to the table, not masked.
    PAGES: tl.constexpr = _pages_at_once(G)
    BY_NUMBER: tl.constexpr = PAGES < KEY_BLOCK and not BY_PAGE
    page_lane = tl.arange(0, PAGES) * (KEY_BLOCK // PAGES) if BY_NUMBER else lane
    for block in tl.range(blocks.first, blocks.end, num_stages=G.STAGES):
        # kv_index, live, offset: [KEY_BLOCK]; page: [KEY_BLOCK], or one
        kv_index = block * KEY_BLOCK + lane
        live = in_range(kv_index, keys.first, keys.end) if G.rows.WINDOWED else kv_index < keys.end
        # No page is negative. The cast says so, because ptxas moves a sign extension far ahead, and so waits for the
        # load of the number at once (H200, llama70b 64 x 4k: 271 us instead of 258, with pages of 8 300 and 270).
        page = next_page.to(tl.uint32, bitcast=True).to(tl.int64)
        next_page = pages_of_block(pages, block + 1, page_lane, PAGE_SIZE, KEY_BLOCK, BY_PAGE)
        if BY_NUMBER:
            page = tl.reshape(tl.broadcast_to(page[:, None], [PAGES, KEY_BLOCK // PAGES]), [KEY_BLOCK])
        if BY_NUMBER and PAGES * PAGE_SIZE == KEY_BLOCK:
            offset = (lane % PAGE_SIZE).to(tl.int64)
        else:
            offset = (kv_index % PAGE_SIZE).to(tl.int64)
        first = tl.cast(block * KEY_BLOCK % PAGE_SIZE, tl.int64) if BY_PAGE else offset
        k_row = page * k_side.page + first * k_side.token
        v_row = k_row if G.SAME_OFFSETS else page * v_side.page + first * v_side.token
        if BY_PAGE:
            k_rows = k_side.at + k_row + k_offsets
            v_rows = v_side.at + v_row + v_offsets
        else:
            k_rows = k_side.at + k_row[:, None] + k_side.column[None, :]
            v_rows = v_side.at + v_row[:, None] + v_side.column[None, :]
        k_tails, v_tails = k_rows, v_rows
        if G.K_TAIL > 0:
            k_tails = tails_of_keys(k_side, k_row, lane, BY_PAGE)
        if G.V_TAIL > 0:
            v_tails = tails_of_keys(v_side, v_row, lane, BY_PAGE)
        if TWO_FACTORS:
            # [2, KEY_BLOCK]
            k_scale_value = scales_of_two(scale_values.k, page, offset, scale_values.head, live, HEADS, C)
            v_scale_value = scales_of_two(scale_values.v, page, offset, scale_values.head, live, HEADS, C)
        else:
            k_scale_value = token_scale(scale_values.k, page, offset, scale_values.head, live, True, C)
            v_scale_value = token_scale(scale_values.v, page, offset, scale_values.head, live, True, C)
        k_rows, v_rows = KeyRows(k_rows, k_tails), KeyRows(v_rows, v_tails)
        # scores, weights: [QUERY_ROWS, KEY_BLOCK], or swapped
        products = _products(q, k_rows, live, G)
        if C.SCALES == TOKEN_SCALES:
            products = times_scales(products, k_scale_value, G.TRANSPOSED)
        scores = (capped(products, logits.tanh_scale) if G.CAPPED else products) * early
        if logits.slope is not None:
            scores += by_row(logits.slope, G) * by_key(kv_index - (keys.end - 1), G)
        scores = tl.where(by_key(live, G), scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, KEY_AXIS) * late)
        base = new_maximum
        if BY_AMOUNT:
            before = amount.exponent
            amount = amount_of(v_scale_value, amount)
            base = new_maximum + amount.exponent
        weights = tl.exp2(scores * late - by_row(base, G))
        decay = tl.exp2(maximum - new_maximum)
        maximum = new_maximum
        wide = by_row(decay, G)
        if G.PAIRED:
            # pairs: [KEY_BLOCK, V_COLUMNS / 2]
            pairs = elements(v_rows, live, 0, LOADED, 0, V_READ)
            shares = weights
            if BY_AMOUNT:
                shares = times_scales(weights, v_scale_value, False)
                wide = wide * tl.exp2(before - amount.exponent)
            even, odd = add_value_pairs(acc[0], odd, wide, shares.to(tl.float16), pairs, C)
            acc = alone(even)
        else:
            parts = weights
            if TWO_FACTORS:
                v_scale_value, part = shared_scale(v_scale_value)
                parts = times_scales(weights, part, G.TRANSPOSED)
            acc = _with_values(acc, wide, parts, v_rows, live, v_scale_value, DTYPE, G)
        # After the product: before it, gfx942's compiler takes a register more, and a fourth wave has no room.
        more = tl.sum(weights, KEY_AXIS)
        total = total * decay + (more * tl.exp2(amount.exponent) if BY_AMOUNT else more)
    if G.PAIRED:
        if BY_AMOUNT:
            acc, odd = scaled_parts(acc, tl.exp2(amount.exponent)), odd * tl.exp2(amount.exponent)
        acc = alone(tl.reshape(tl.join(acc[0], odd), [QUERY_ROWS, G.V_COLUMNS]))
    return scaled_value_parts(Softmax(acc, maximum, total), row_scale(scale_values.v, scale_values.head, C), C)


@triton.jit(do_not_specialize=["num_programs", "width"])
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
    k_scale,
    v_scale,
    first_page,
    counters,
    qk_scale,
    tanh_scale,
    window_left: tl.constexpr,
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
    k_new,
    v_new,
    slot_of_token,
    counts,
    k_new_token,
    k_new_head,
    v_new_token,
    v_new_head,
    G: tl.constexpr,
):
    R: tl.constexpr = G.rows
    C: tl.constexpr = G.coding
    M: tl.constexpr = G.merge
    QUERY_ROWS: tl.constexpr = G.QUERY_ROWS
    if G.STRIDE_UNIT > 1:
        q_token, q_head = q_token * G.STRIDE_UNIT, q_head * G.STRIDE_UNIT
        kp_page, kp_token, kp_head = kp_page * G.STRIDE_UNIT, kp_token * G.STRIDE_UNIT, kp_head * G.STRIDE_UNIT
        vp_page, vp_token, vp_head = vp_page * G.STRIDE_UNIT, vp_token * G.STRIDE_UNIT, vp_head * G.STRIDE_UNIT
        out_token, out_head = out_token * G.STRIDE_UNIT, out_head * G.STRIDE_UNIT
    program = tl.program_id(0)
    # The launch before this one may write anything that is read here. The merge may start when every program is
    # past this point, and so finds the schedule.
    wait_for_launch(G.EARLY)
    if G.WHOLE_ROWS:
        seq = program // R.ROWS
        row = program % R.ROWS
        done = 0
        kv_len = tl.load(words_of_seq(schedule, num_programs, seq) + SEQ_KV_LEN)
        _, _, blocks_of_row = visible_blocks(kv_len, window_left, R.KEY_BLOCK, R.WINDOWED)
        work = tl.where(kv_len < 0, 0, blocks_of_row + (R.ROW_COST + R.ROW_END))
    else:
        if R.SIDE_BY_SIDE:
            program = number_of_program(program, num_programs, R)
        words = words_of_program(schedule, program)
        seq, row, done, work, kv_len = work_at(words)
        if M.GROUP > 0:
            share = tl.load(words + PROGRAM_SHARE)
            position = 0  # from the program's start

    # q heads of a row, padding included. If rows read two KV heads, each has half of them; QUERY_ROWS is no head.
    HALF: tl.constexpr = QUERY_ROWS // R.HEADS_PER_ROW
    q_row = tl.arange(0, QUERY_ROWS)
    half = q_row // HALF
    if HALF > R.GQA_RATIO and R.HEADS_PER_ROW > 1:
        q_row = tl.where(q_row % HALF < R.GQA_RATIO, half * R.GQA_RATIO + q_row % HALF, QUERY_ROWS)
    # Columns of a block are [KV head, dim], and q is zero in those of the other head: one product over both heads gives
    # each q row the scores of its own, and its result is in its own head's columns.
    V_PARTS: tl.constexpr = G.V_PARTS
    V_READ: tl.constexpr = G.V_HEAD_DIM // 2 if G.PAIRED else G.V_HEAD_DIM
    K_READ: tl.constexpr = G.HEAD_DIM // 2 if G.PAIRED else G.HEAD_DIM
    if G.PAIRED:
        # Rows, strides and dims of pages are counted in pairs.
        k_pages, v_pages = k_pages.to(tl.pointer_type(tl.uint16)), v_pages.to(tl.pointer_type(tl.uint16))
        kp_page, kp_token, kp_head = kp_page // 2, kp_token // 2, kp_head // 2
        vp_page, vp_token, vp_head = vp_page // 2, vp_token // 2, vp_head // 2
        k_read, v_read = tl.arange(0, G.K_COLUMNS // 2), tl.arange(0, G.V_COLUMNS // 2)
    else:
        k_read, v_read = tl.arange(0, G.K_COLUMNS), tl.arange(0, G.V_COLUMNS)
    k_column = column_offsets(k_read, K_READ, kp_head, G)
    v_column = column_offsets(v_read, V_READ, vp_head, G)
    k_tail, v_tail = k_column, v_column
    if G.K_TAIL > 0:
        k_tail = tail_offsets(G.K_PARTS, G.K_COLUMNS, G.K_TAIL, G.HEAD_DIM, kp_head, G)
    if G.V_TAIL > 0:
        v_tail = tail_offsets(G.V_PARTS, G.V_COLUMNS, G.V_TAIL, G.V_HEAD_DIM, vp_head, G)
    # Along the side of the q and the output block that TRANSPOSED chooses.
    m = by_row(q_row, G)
    sums = partials + num_programs * (2 * R.Q_ROWS * G.V_HEAD_DIM)

    while work > 0:
        first_key, window_block, num_blocks = visible_blocks(kv_len, window_left, R.KEY_BLOCK, R.WINDOWED)
        row_cost = tl.where(kv_len < 0, 0, num_blocks + (R.ROW_COST + R.ROW_END))
        take = tl.minimum(work, row_cost - done)
        first_block = tl.maximum(done - R.ROW_COST, 0)
        end_block = done + take - R.ROW_COST
        if R.ROW_END > 0:
            end_block = tl.minimum(end_block, num_blocks)
        # A row is HEADS_PER_ROW KV heads, or a block of one KV head's query heads.
        first_kv_head, first_head, num_q_rows = heads_of_row(row, R)
        is_row = q_row < num_q_rows
        # Here, not where it is used: there gfx942's compiler takes two registers more, and a fourth wave has no room.
        v_own, is_out = own_places(half, m < num_q_rows, G)
        if (kv_len == 0) & (done == 0):
            token = tl.load(q_indptr + seq).to(tl.int64)
            out_row = out + token * out_token + first_head * out_head + m.to(tl.int64) * out_head
            for i in tl.static_range(V_PARTS):
                tl.store(out_row + v_own[i], tl.zeros(is_out[i].shape, out.dtype.element_ty), mask=is_out[i])
            if lse is not None:
                lse_row = lse + token * lse_token + first_head * lse_head
                nothing = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
                tl.store(lse_row + q_row.to(tl.int64) * lse_head, nothing, mask=is_row)
        if end_block > first_block:
            token = tl.load(q_indptr + seq).to(tl.int64)
            table_line = table + tl.load(row_of_seq + seq).to(tl.int64) * table_row
            line_width = width
            if first_page is not None:
                skipped = tl.load(first_page + seq)
                table_line += skipped
                line_width = width - skipped
            line = TableLine(table_line, line_width)
            if G.EARLY:
                # Before q is loaded and waited for, so that one latency hides the other. Elsewhere it takes registers.
                first_pages = _pages_of_block(line, window_block + first_block, G)
            slope = None
            if slopes is not None:
                slope = tl.load(slopes + first_head + q_row, mask=is_row, other=0.0) * LOG2_E
            # The KV head of each q row if rows read several heads, along its side of the accumulator. If tokens have
            # scales, the first one.
            head = first_kv_head
            if R.HEADS_PER_ROW > 1 and C.SCALES != TOKEN_SCALES:
                head = first_kv_head + by_row(half, G)
            q_line = q + token * q_token + first_head * q_head + m.to(tl.int64) * q_head
            q_blocks = blocks_of_q(q_line, half, m < num_q_rows, G)
            if k_new is not None:
                store_new_rows(
                    HeadRows(k_new, k_new_token, k_new_head),
                    HeadRows(v_new, v_new_token, v_new_head),
                    PagePointers(k_pages, kp_page, kp_token, kp_head),
                    PagePointers(v_pages, vp_page, vp_token, vp_head),
                    NewToken(slot_of_token, counts, token, end_block == num_blocks),
                    first_kv_head,
                    G,
                )
            k_scale_value = row_scale(k_scale, head, C)
            if G.PAIRED:
                q_block, q_scale_value = half_query(q_blocks[0])
                q_blocks = even_and_odd(q_block)
                k_scale_value *= q_scale_value
            k_scaled, tanh_scaled = coded_scales(qk_scale, tanh_scale, k_scale_value, G.CAPPED, C)
            if not G.EARLY:
                first_pages = _pages_of_block(line, window_block + first_block, G)
            acc, maximum, total = _attend_key_blocks(
                q_blocks,
                PageSide(k_pages + first_kv_head * kp_head, kp_page, kp_token, k_column, k_tail),
                PageSide(v_pages + first_kv_head * vp_head, vp_page, vp_token, v_column, v_tail),
                KeyBlocks(
                    line,
                    KeyRange(window_block + first_block, window_block + end_block),
                    KeyRange(first_key, kv_len),
                    first_pages,
                ),
                Logits(k_scaled, tanh_scaled, slope),
                ScalePointers(k_scale, v_scale, head),
                G,
            )
            if G.WHOLE_ROWS or end_block - first_block == num_blocks:
                if sinks is not None:
                    sink = tl.load(sinks + first_head + q_row, mask=is_row, other=float("-inf"))
                    maximum, total, decay = add_sink(maximum, total, sink)
                    acc = scaled_parts(acc, by_row(decay, G))
                out_row = out + token * out_token + first_head * out_head + m.to(tl.int64) * out_head
                for i in tl.static_range(V_PARTS):
                    value = acc[i] / by_row(total, G)
                    tl.store(out_row + v_own[i], value.to(out.dtype.element_ty), mask=is_out[i])
                if lse is not None:
                    lse_row = lse + token * lse_token + first_head * lse_head
                    tl.store(lse_row + q_row.to(tl.int64) * lse_head, (maximum + tl.log2(total)) * LN_2, mask=is_row)
            else:
                # Part 2p of program p goes to a row begun by an earlier program, 2p + 1 to one that goes on.
                part = 2 * program + (first_block == 0).to(tl.int32)
                part_row = partials + (part * R.Q_ROWS + m) * G.V_HEAD_DIM
                if M.GROUP > 0:
                    log_sum = maximum + tl.log2(total)
                    sum_row = sums + (part * R.Q_ROWS + m) * G.V_HEAD_DIM
                    for i in tl.static_range(V_PARTS):
                        wide, wide_sum = by_row(total, G), by_row(log_sum, G)
                        tl.store(part_row + v_own[i], acc[i] / wide, mask=is_out[i])
                        tl.store(sum_row + v_own[i], tl.broadcast_to(wide_sum, acc[i].shape), mask=is_out[i])
                else:
                    for i in tl.static_range(V_PARTS):
                        tl.store(part_row + v_own[i], acc[i], mask=is_out[i])
                    tl.store(sums + (part * R.Q_ROWS + q_row) * 2, maximum, mask=is_row)
                    tl.store(sums + (part * R.Q_ROWS + q_row) * 2 + 1, total, mask=is_row)
                if M.GROUP > 0:
                    first_position = position - done + R.ROW_COST
                    programs_before = tl.cdiv(tl.maximum(-first_position, 0), share)
                    num_parts = (first_position + num_blocks - 1) // share + programs_before + 1
                    merge_if_last(
                        Parts(partials, sums),
                        counters,
                        SharedRow(program - programs_before, programs_before, num_parts),
                        RowOutput(
                            out,
                            lse,
                            sinks,
                            out_token,
                            out_head,
                            lse_token,
                            lse_head,
                            token,
                            first_head,
                            num_q_rows,
                        ),
                        M,
                    )
        if G.WHOLE_ROWS:
            work = 0
        else:
            work -= take
            if M.GROUP > 0:
                position += take
            done = 0
            # Side by side, a sequence has one row on the program's axis.
            of_axis: tl.constexpr = 1 if R.SIDE_BY_SIDE else R.ROWS
            seq, next_of_axis, kv_len = next_row(schedule, num_programs, work, seq, row, of_axis, kv_len)
            if not R.SIDE_BY_SIDE:
                row = next_of_axis


def launch_paged_decode(args: AttendArgs, *, scores: Scores, cut: DecodeCut, tiles: DecodeTiles) -> None:
    """Attends for every sequence with exactly one new token; all other tokens of out and lse stay unchanged.

    A sequence with kv_len 0 receives 0 and LSE -inf.
    args: with cut's schedule, and a workspace of cut.partials_words(...) or longer
    cut:  of these tiles and the scores' window; its programs are the grid

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    _launch(args, _NOTHING_NEW, _geometry(args, scores, cut, tiles), scores, cut, tiles)


def launch_storing_decode(
    args: AttendArgs, new: NewRows, *, scores: Scores, cut: DecodeCut, tiles: DecodeTiles
) -> None:
    """Does the same as `launch_store_kv` of the new rows and then `launch_paged_decode`. On NVIDIA: see new_rows.py.

    args: over linear pages of q's dtype
    new:  of the queries' sequences. Each sequence that it stores rows of has one new token, the last of its keys
    """
    args.check_new(new)
    first_slot = args.pages.format.page_size if new.null_page else 0
    geometry = _geometry(args, scores, cut, tiles)._replace(FIRST_SLOT=first_slot)
    k, v = new.k, new.v
    tensors = k, v, new.slot_of_token, new.counts
    _launch(args, (*tensors, k.stride(0), k.stride(1), v.stride(0), v.stride(1)), geometry, scores, cut, tiles)


# The kernel's arguments of new rows if it stores none.
_NOTHING_NEW = (None,) * 8


def _launch(
    args: AttendArgs,
    new: tuple[Tensor | int | None, ...],
    geometry: DecodeGeometry,
    scores: Scores,
    cut: DecodeCut,
    tiles: DecodeTiles,
) -> None:
    """Launches decode, and then the merge if decode does not merge. new: the kernel's arguments of new rows"""
    queries, pages, table = args.queries, args.pages, args.table
    launch(
        _decode_kernel,
        (queries.num_seqs * cut.rows if geometry.WHOLE_ROWS else cut.programs,),
        args.q,
        pages.raw_k,
        pages.raw_v,
        table,
        queries.row_of_seq,
        queries.q_indptr,
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        args.sinks,
        args.slopes,
        pages.k_scale,
        pages.v_scale,
        queries.first_page,
        args.schedule[cut.first_counter(queries.num_seqs) :] if geometry.merge.GROUP else None,
        scores.base_2_scale,
        scores.tanh_scale,
        scores.visibility.window_left,
        cut.programs,
        table.shape[1],
        *args.strides_in(geometry.STRIDE_UNIT),
        *new,
        G=geometry,
        num_warps=tiles.num_warps,
        **tiles.options(),
        **early_options(tiles.early),
    )
    if not geometry.WHOLE_ROWS and not geometry.merge.GROUP:
        launch_merge(args, cut, geometry.rows, early=tiles.early)


def _geometry(args: AttendArgs, scores: Scores, cut: DecodeCut, tiles: DecodeTiles) -> DecodeGeometry:
    """Checks the arguments and returns the values that the launch is compiled for."""
    args.check("paged decode")
    head_dim, v_head_dim = args.q.shape[2], args.out.shape[2]
    num_kv_heads, gqa_ratio = args.heads
    num_seqs, heads = args.queries.num_seqs, tiles.heads_per_row
    cut.check(args.schedule, num_seqs)
    of_tiles = DecodeCut.of(
        tiles, num_kv_heads=num_kv_heads, programs=cut.programs, window_left=scores.visibility.window_left
    )
    same_step = replace(of_tiles, merge_group=cut.merge_group, merge_rows=cut.merge_rows)
    assert cut == same_step, "the schedule was cut for another launch"
    args.check_workspace(cut.partials_words(gqa_ratio=gqa_ratio, v_head_dim=v_head_dim, tiles=tiles))
    assert cut.row_cost + cut.row_end >= 1, "some program must write the zeros of a row without keys"
    assert heads <= 2 or args.pages.k_scale is None
    assert not tiles.dim_block or not tiles.paired
    assert heads == 1 or (head_dim == v_head_dim and tiles.head_blocks == 1)
    assert not tiles.paired or heads == 1 or head_dim == next_power_of_2(head_dim)
    k_columns, v_columns = tiles.columns(head_dim), tiles.columns(v_head_dim)
    k_parts, v_parts = -(-head_dim * heads // k_columns), -(-v_head_dim * heads // v_columns)
    assert heads == 1 or max(k_parts, v_parts) <= 2, "of a block between the first and the last no offsets are known"
    whole_rows = has_whole_rows(
        num_seqs * cut.rows,
        num_programs=cut.programs,
        window_left=scores.visibility.window_left,
        head_dim=max(head_dim, v_head_dim),
    )
    return DecodeGeometry(
        rows=cut.row_cut(tiles, gqa_ratio),
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        K_COLUMNS=k_columns,
        V_COLUMNS=v_columns,
        K_PARTS=k_parts,
        V_PARTS=v_parts,
        K_TAIL=tail_of(head_dim, heads, k_columns),
        V_TAIL=tail_of(v_head_dim, heads, v_columns),
        QUERY_ROWS=max(16, next_power_of_2(tiles.q_rows(gqa_ratio))),
        PAGE_SIZE=args.pages.format.page_size,
        SAME_OFFSETS=args.same_offsets,
        IN_ONE_PAGE=lie_in_one_page(args, cut.key_block),
        TRANSPOSED=tiles.transposed,
        PAIRED=tiles.paired and args.has_pairs and args.q.dtype.itemsize == 2,
        WHOLE_ROWS=whole_rows,
        EARLY=tiles.early,
        CAPPED=scores.soft_cap > 0,
        STAGES=tiles.num_stages,
        coding=args.pages.coding,
        STRIDE_UNIT=args.stride_unit,
        FIRST_SLOT=0,
        merge=group_shape(0 if whole_rows else cut.merge_group, tiles.q_rows(gqa_ratio), v_head_dim, tiles.num_warps),
    )
