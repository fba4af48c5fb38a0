"""The arithmetic of deterministic attention: what a segment gives, and how segments add up. Decode and extend share it.

A segment is KV [m, m + 1) * segment_len, at absolute places. From nothing, an online softmax over its steps of BLOCK_N
keys, at absolute places too, gives a partial result: accumulator a, maximum m, sum l (base 2). Partial results are
merged from left to right:

    m' = max(m, m_i)    l' = 2^(m - m') l + 2^(m_i - m') l_i    a' = 2^(m - m') a + 2^(m_i - m') a_i

Why a row's bits depend on nothing else:
  - every sum of products is an explicit fma, and kernels are launched without fusion, so that no compiler chooses;
  - a step that a row does not see at all adds 0 and scales by 1 (or scales the 0 that is there by 0): with masks or
    without, with other rows in the tile or without, the row's numbers stay as they are;
  - a matrix instruction computes a row from that row and from K, V alone, in one order of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_attn.kernels.attention.softmax import capped, in_range

# Whether a product and a sum become one rounding or two is the source's choice here, not the compiler's.
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def _add_steps(
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
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    SAME_OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Steps [first_step, end_step) added to acc, maximum and total; if not MASKED, every row sees all their keys."""
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
            distance = (kv_index[None, :] - row_kv_index[:, None]).to(tl.float32)
            scores = tl.fma(slope[:, None], distance, scores * qk_scale)
        if MASKED:
            if WINDOWED:
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
        weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        if V_BLOCK > V_HEAD_DIM:
            v = tl.load(v_block, mask=live & (v_column < V_HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            v = tl.load(v_block, mask=live, other=0.0)
        else:
            v = tl.load(v_block)
        total = tl.fma(total, decay, tl.sum(weights, 1))
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    return acc, maximum, total


@triton.jit
def attend_segment(
    segment,
    q,
    k_pages,
    v_pages,
    pages,
    edge_step,
    first_key,
    end_key,
    row_kv_index,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENT_LEN: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SLOPED: tl.constexpr,
    SAME_OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
    EDGE_STAGES: tl.constexpr,
):
    """The partial result of a segment: accumulator [BLOCK_M, V_BLOCK], maximum and sum [BLOCK_M].

    Keys [first_key, end_key) are seen by some row, those of steps before edge_step by all. row_kv_index: [BLOCK_M], or
    [1] where all rows have the same; slope: likewise [BLOCK_M].
    """
    STEPS: tl.constexpr = SEGMENT_LEN // BLOCK_N
    first_step = tl.maximum(segment * STEPS, first_key // BLOCK_N)
    end_step = tl.minimum((segment + 1) * STEPS, tl.cdiv(end_key, BLOCK_N))
    acc = tl.zeros([BLOCK_M, V_BLOCK], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if WINDOWED:
        # Masks all the way: a loop of its own for what lies between the edges spills.
        masked_step = first_step
    else:
        masked_step = tl.maximum(tl.minimum(edge_step, end_step), first_step)
        acc, maximum, total = _add_steps(
            acc,
            maximum,
            total,
            q,
            k_pages,
            v_pages,
            pages,
            first_step,
            masked_step,
            first_key,
            end_key,
            row_kv_index,
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
            CAPPED,
            SLOPED,
            SAME_OFFSETS,
            STAGES,
        )
    return _add_steps(
        acc,
        maximum,
        total,
        q,
        k_pages,
        v_pages,
        pages,
        masked_step,
        end_step,
        first_key,
        end_key,
        row_kv_index,
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
        CAPPED,
        SLOPED,
        SAME_OFFSETS,
        STAGES if WINDOWED else EDGE_STAGES,
    )


@triton.jit
def merge_segment(acc, maximum, total, part_acc, part_maximum, part_total):
    """What lies left of a segment, merged with the segment. A side that saw no key (0, -inf, 0) changes no bit.

    acc: [rows, columns]; maximum, total: [rows]
    """
    new_maximum = tl.maximum(maximum, part_maximum)
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    decay = tl.exp2(maximum - base)
    weight = tl.exp2(part_maximum - base)
    total = tl.fma(total, decay, part_total * weight)
    acc = tl.fma(acc, decay[:, None], part_acc * weight[:, None])
    return acc, new_maximum, total
