"""Paged extend for CDNA, in Gluon: extend.py's results, at the pace of the matrix units (extend_steps.py).

    out[token] = softmax(scores of q[token] . K^T) V        K, V: the keys that the token sees (scores.py)

A program is eight waves with 256 rows: a query block of extend_schedule.py, and query heads of one KV head. Two waves
of a SIMD take turns: one computes a round of products while the other reads LDS and starts loads. Keys that every row
sees go in whole blocks from memory into LDS, up to three blocks ahead; page numbers are loaded a block before that. The
others follow under masks, block by block. Elements that no row sees may be NaN. The features of an arch are values
(cdna_tiles.ExtendUnits).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import slice as columns
from triton.experimental.gluon.language.amd import warp_pipeline_stage
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import PagePointers
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_FIRST_TOKEN,
    BLOCK_KV_INDEX,
    BLOCK_SEQ,
    BLOCK_TOKENS,
    BLOCK_WORDS,
)
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.softmax import LN_2
from rocm_attn.kernels.cdna.extend_layouts import DIM, KEYS, ROW, ROWS, operand, product, rows_in, rows_in_lds
from rocm_attn.kernels.cdna.extend_steps import (
    all_lanes,
    eighths_of,
    joined,
    registers,
    rescaled,
    round_1,
    round_2,
    weights_of,
)
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_TILES, EXTEND_UNITS, ExtendUnits

# Products stay in VGPRs: copies to and from AGPRs would take issue slots of the vector unit.
_NO_AGPRS = (("amdgpu-agpr-alloc", "0,0"),)


class ExtendGeometry(NamedTuple):
    """The values that the kernel is compiled for: of query_block.BlockGeometry and of key_loop.KeyGeometry."""

    HEAD_ROWS: int
    GQA_RATIO: int
    BLOCK_HEADS: int
    HEAD_BLOCKS: int
    PAGE_SIZE: int
    SAME_OFFSETS: bool
    CAUSAL: bool
    STRIDE_UNIT: int
    UNITS: ExtendUnits


@gluon.jit
def _pages(line, block, G: gl.constexpr):
    """The numbers of the pages of a block's keys, [KEYS]."""
    L: gl.constexpr = gl.SliceLayout(1, rows_in(G.UNITS))
    if G.PAGE_SIZE >= KEYS:
        page = gl.full([KEYS], gl.load(line + block * KEYS // G.PAGE_SIZE), gl.int32, layout=L)
    else:
        page = gl.arange(0, KEYS, layout=L) // G.PAGE_SIZE + block * (KEYS // G.PAGE_SIZE)
        # A wave that loads keys of one page has its number in a scalar register.
        page = buffer_load(line, page) if G.UNITS.LOADS_INTO_LDS else gl.load(line + page)
    return page


@gluon.jit
def _rows_at(side, pages, block, G: gl.constexpr):
    """The places of a block's rows of K or V, [KEYS, DIM]."""
    L: gl.constexpr = rows_in(G.UNITS)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, L))
    place = key % G.PAGE_SIZE
    if G.PAGE_SIZE > KEYS:
        place = key + block * KEYS % G.PAGE_SIZE
    row = pages.to(gl.int64) * side.page
    if not G.UNITS.LOADS_INTO_LDS:
        # A lane's four keys are apart by scalar numbers, and have one offset.
        row += (place % 4).to(gl.int64) * side.token
        place -= place % 4
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, L))
    return side.at + row[:, None] + (place[:, None] * side.token + column[None, :])


@gluon.jit
def _copy(to, side, pages, block, G: gl.constexpr):
    async_copy.global_load_to_shared(to, _rows_at(side, pages, block, G))
    async_copy.commit_group()


@gluon.jit
def _times_values(acc, weights, values, UNITS: gl.constexpr):
    DEPTH: gl.constexpr = UNITS.DEPTH
    for i in gl.static_range(KEYS // DEPTH):
        part = columns(values, [DEPTH, DIM], [DEPTH * i, 0])
        own = weights_of(weights, i, UNITS)
        acc = (
            mfma(own, columns(part, [DEPTH, 32], [0, 0]), acc[0]),
            mfma(own, columns(part, [DEPTH, 32], [0, 32]), acc[1]),
            mfma(own, columns(part, [DEPTH, 32], [0, 64]), acc[2]),
            mfma(own, columns(part, [DEPTH, 32], [0, 96]), acc[3]),
        )
    return acc


@gluon.jit
def _first_block(query, keys, acc, maximum, total, scale, G: gl.constexpr):
    """round_2 of the first block, without values."""
    UNITS: gl.constexpr = G.UNITS
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout=product(UNITS))
    scores = mfma(query, keys, zeros)
    tiles = (columns(scores, [ROWS, 32], [0, 0]), columns(scores, [ROWS, 32], [0, 32]))
    nothing = gl.zeros([ROWS, 8], query.dtype, layout=product(UNITS))
    nothings = (nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    no_values = gl.zeros([KEYS, DIM], query.dtype, layout=operand(UNITS, 1, False))
    acc, done, raw, new, part = round_2(acc, nothings, no_values, tiles, maximum, scale, UNITS)
    acc, total = _to_maximum(acc, total, part, maximum, new)
    return acc, done, raw, new, total


@gluon.jit
def _to_maximum(acc, total, part, old, new):
    """acc and total of a maximum that rose from old to new; part: a sum with the new one."""
    decay = gl.exp2(old - new)
    return rescaled(acc, decay), total * decay + part


@gluon.jit
def _whole_blocks(query, k, v, line, num, scale, ks, vs, acc, maximum, total, G: gl.constexpr):
    """Adds blocks [0, num) that every row sees, or all but the last of them; returns the number of them too.

    While a block's values are read, the next one's keys are in registers, and those of the one after it go into LDS; so
    do values, one block later. Loads past the registers begin a block earlier and have two places in LDS each.

    num: at least 1
    """
    UNITS: gl.constexpr = G.UNITS
    INTO_LDS: gl.constexpr = UNITS.LOADS_INTO_LDS
    KEY: gl.constexpr = operand(UNITS, 1, True)
    VALUE: gl.constexpr = operand(UNITS, 1, False)
    last = num - 1
    first = _pages(line, 0, G)
    pages = (
        _pages(line, gl.minimum(1, last), G),
        _pages(line, gl.minimum(2, last), G),
        _pages(line, gl.minimum(3, last), G),
    )
    if INTO_LDS:
        _copy(ks.index(0), k, first, 0, G)
        _copy(vs.index(0), v, first, 0, G)
        _copy(ks.index(1), k, pages[0], 1, G)
        async_copy.wait_group(2)
        keys = async_copy.load_shared_relaxed(ks.index(0).permute((1, 0)), KEY)
    else:
        ks.index(0).store(gl.load(_rows_at(k, first, 0, G)))
        vs.index(0).store(gl.load(_rows_at(v, first, 0, G)))
        next_keys = gl.load(_rows_at(k, pages[0], 1, G))
        gl.barrier()
        keys = ks.index(0).permute((1, 0)).load(KEY)
    acc, done, raw, maximum, total = _first_block(query, keys, acc, maximum, total, scale, G)
    gl.barrier()
    if INTO_LDS:
        _copy(ks.index(0), k, pages[1], 2, G)
        async_copy.wait_group(1)
        keys = async_copy.load_shared_relaxed(ks.index(1).permute((1, 0)), KEY)
        _copy(vs.index(1), v, pages[0], 1, G)
    else:
        ks.index(0).store(next_keys)
        next_keys = gl.load(_rows_at(k, pages[1], 2, G))
        gl.barrier()
        keys = ks.index(0).permute((1, 0)).load(KEY)
    pairs = last // 2
    for pair in tl.range(0, pairs):
        for i in gl.static_range(2):
            block = pair * 2 + i
            with warp_pipeline_stage("products"):
                tiles, weights, total = round_1(query, keys, done, raw, maximum, total, scale, UNITS)
            if INTO_LDS:
                async_copy.wait_group(1)
            with warp_pipeline_stage("loads"):
                if INTO_LDS:
                    values = async_copy.load_shared_relaxed(vs.index(i), VALUE)
                    _copy(ks.index(1 - i), k, pages[2], block + 3, G)
                else:
                    ks.index(0).store(next_keys)
                    values = vs.index(0).load(VALUE)
                    next_values = gl.load(_rows_at(v, pages[0], block + 1, G))
                later = _pages(line, gl.minimum(block + 4, last), G)
            with warp_pipeline_stage("products"):
                old = maximum
                acc, done, raw, maximum, part = round_2(acc, weights, values, tiles, maximum, scale, UNITS)
            if INTO_LDS:
                async_copy.wait_group(1)
            with warp_pipeline_stage("loads"):
                if INTO_LDS:
                    keys = async_copy.load_shared_relaxed(ks.index(i).permute((1, 0)), KEY)
                    _copy(vs.index(i), v, pages[1], block + 2, G)
                else:
                    vs.index(0).store(next_values)
                    keys = ks.index(0).permute((1, 0)).load(KEY)
                    next_keys = gl.load(_rows_at(k, pages[2], block + 3, G))
                acc, total = _to_maximum(acc, total, part, old, maximum)
            pages = (pages[1], pages[2], later)
    _, weights, total = round_1(query, keys, done, raw, maximum, total, scale, UNITS)
    if INTO_LDS:
        async_copy.wait_group(0)
    return _times_values(acc, weights, vs.index(0).load(VALUE), UNITS), maximum, total, 2 * pairs + 1


@gluon.jit
def _masked_block(query, k, v, line, block, end_key, last_key, scale, ks, vs, acc, maximum, total, G: gl.constexpr):
    """Adds one block, of whose keys a row sees those up to last_key, and none from end_key on."""
    UNITS: gl.constexpr = G.UNITS
    P: gl.constexpr = product(UNITS)
    ROWS_IN: gl.constexpr = rows_in(UNITS)
    L: gl.constexpr = gl.SliceLayout(1, ROWS_IN)
    key = block * KEYS + gl.arange(0, KEYS, layout=L)
    page = gl.load(line + key // G.PAGE_SIZE, mask=key < end_key, other=0).to(gl.int64)
    live = (key < end_key)[:, None]
    place = (key % G.PAGE_SIZE).to(gl.int64)
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROWS_IN))[None, :]
    # Scores of keys that are not seen are replaced; a weight of zero times a value that is NaN would be NaN.
    k_rows = gl.load(k.at + (page * k.page + place * k.token)[:, None] + column)
    v_rows = gl.load(v.at + (page * v.page + place * v.token)[:, None] + column, mask=live, other=0.0)
    gl.barrier()
    ks.index(0).store(k_rows)
    vs.index(0).store(v_rows)
    gl.barrier()
    zeros = gl.zeros([ROWS, KEYS], gl.float32, layout=P)
    scores = mfma(query, ks.index(0).permute((1, 0)).load(operand(UNITS, 1, True)), zeros)
    key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, P))
    scores = gl.where(key[None, :] <= last_key[:, None], scores, float("-inf"))
    LANES: gl.constexpr = maximum.type.layout
    maximum = gl.convert_layout(gl.max(maximum, 1), gl.SliceLayout(1, P))
    new = gl.maximum(maximum, gl.max(scores, 1) * scale)
    # A row may have seen no key yet: the subtractions must not be inf - inf.
    base = gl.where(new == float("-inf"), 0.0, new)
    decay = gl.exp2(maximum - base)
    weights = gl.exp2(scores * scale - base[:, None])
    d = decay[:, None]
    eighths = eighths_of((columns(weights, [ROWS, 32], [0, 0]), columns(weights, [ROWS, 32], [0, 32])))
    total = total * all_lanes(decay, LANES)
    rounded = ()
    for i in gl.static_range(8):
        r = registers(eighths[i])
        total = total + (r[0] + r[1] + r[2] + r[3])
        rounded += (eighths[i].to(query.dtype),)  # type: ignore[assignment]
    acc = (acc[0] * d, acc[1] * d, acc[2] * d, acc[3] * d)
    acc = _times_values(acc, rounded, vs.index(0).load(operand(UNITS, 1, False)), UNITS)
    return acc, all_lanes(new, LANES), total


@gluon.jit
def _places(first_token, num_tokens, row, L: gl.constexpr, G: gl.constexpr):
    """Token and query head (int64) of each row of a block, and whether the row has one."""
    line = gl.arange(0, ROWS, layout=L)
    block_token = line // G.BLOCK_HEADS
    ratio_head = row % G.HEAD_BLOCKS * G.BLOCK_HEADS + line % G.BLOCK_HEADS
    is_row = (block_token < num_tokens) & (ratio_head < G.GQA_RATIO)
    return (
        (first_token + block_token).to(gl.int64),
        (row // G.HEAD_BLOCKS * G.GQA_RATIO + ratio_head).to(gl.int64),
        is_row,
    )


@gluon.jit
def _cdna_extend_kernel(
    q,
    k_pages,
    v_pages,
    table: tl.const,
    row_of_seq: tl.const,
    kv_len: tl.const,
    schedule: tl.const,
    out,
    lse,
    qk_scale,
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
    G: gl.constexpr,
):
    if G.STRIDE_UNIT > 1:
        q_token, q_head = q_token * G.STRIDE_UNIT, q_head * G.STRIDE_UNIT
        kp_page, kp_token, kp_head = kp_page * G.STRIDE_UNIT, kp_token * G.STRIDE_UNIT, kp_head * G.STRIDE_UNIT
        vp_page, vp_token, vp_head = vp_page * G.STRIDE_UNIT, vp_token * G.STRIDE_UNIT, vp_head * G.STRIDE_UNIT
        out_token, out_head = out_token * G.STRIDE_UNIT, out_head * G.STRIDE_UNIT
    if G.SAME_OFFSETS:
        vp_page, vp_token, vp_head = kp_page, kp_token, kp_head
    program = gl.program_id(0)
    row = program % G.HEAD_ROWS
    words = schedule + program // G.HEAD_ROWS * BLOCK_WORDS
    seq = gl.load(words + BLOCK_SEQ)
    first_token = gl.load(words + BLOCK_FIRST_TOKEN)
    num_tokens = gl.load(words + BLOCK_TOKENS)
    first_key = gl.load(words + BLOCK_KV_INDEX)
    if num_tokens > 0:
        kv_head = (row // G.HEAD_BLOCKS).to(gl.int64)
        token, head, is_row = _places(first_token, num_tokens, row, gl.SliceLayout(1, ROW), G)
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, ROW))[None, :]
        q_rows = gl.load(q + (token * q_token + head * q_head)[:, None] + column, mask=is_row[:, None], other=0.0)
        LDS_Q: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=16, order=[1, 0])
        Q: gl.constexpr = operand(G.UNITS, 0, True)
        query = gl.allocate_shared_memory(q.dtype.element_ty, [ROWS, DIM], LDS_Q, q_rows).load(Q)
        line = table + gl.load(row_of_seq + gl.maximum(seq, 0)).to(gl.int64) * table_row
        k = PagePointers(k_pages + kv_head * kp_head, kp_page, kp_token, kp_head)
        v = PagePointers(v_pages + kv_head * vp_head, vp_page, vp_token, vp_head)
        if G.CAUSAL:
            end_key = gl.where(seq >= 0, first_key + num_tokens, 0)
            num_whole = gl.where(seq >= 0, first_key + 1, 0) // KEYS
        else:
            end_key = gl.load(kv_len + gl.maximum(seq, 0))
            end_key = gl.where(seq >= 0, end_key, 0)
            num_whole = end_key // KEYS
        P: gl.constexpr = product(G.UNITS)
        M: gl.constexpr = gl.SliceLayout(1, P)
        zeros = gl.zeros([ROWS, 32], gl.float32, layout=P)
        acc = (zeros, zeros, zeros, zeros)
        # A row's sum is that of two lanes, which have a register each, and so is its maximum.
        total = registers(columns(zeros, [ROWS, 8], [0, 0]))[0]
        maximum = total - float("inf")
        BUFFERS: gl.constexpr = 2 if G.UNITS.LOADS_INTO_LDS else 1
        ks = gl.allocate_shared_memory(q.dtype.element_ty, [BUFFERS, KEYS, DIM], rows_in_lds(G.UNITS, True))
        vs = gl.allocate_shared_memory(q.dtype.element_ty, [BUFFERS, KEYS, DIM], rows_in_lds(G.UNITS, False))
        done = 0
        if num_whole > 0:
            acc, maximum, total, done = _whole_blocks(
                query, k, v, line, num_whole, qk_scale, ks, vs, acc, maximum, total, G
            )
        last_key = gl.full([ROWS], end_key - 1, gl.int32, layout=M)
        if G.CAUSAL:
            last_key = gl.minimum(last_key, first_key + gl.arange(0, ROWS, layout=M) // G.BLOCK_HEADS)
        for block in range(done, gl.cdiv(end_key, KEYS)):
            acc, maximum, total = _masked_block(
                query, k, v, line, block, end_key, last_key, qk_scale, ks, vs, acc, maximum, total, G
            )
        total, maximum = gl.convert_layout(gl.sum(total, 1), M), gl.convert_layout(gl.max(maximum, 1), M)
        # Tokens of no sequence have seen no key: 0 / 1, and LSE -inf + log2(1).
        total = gl.where(total == 0.0, 1.0, total)
        share = (1.0 / total)[:, None]
        value = joined(joined(acc[0] * share, acc[1] * share), joined(acc[2] * share, acc[3] * share))
        value = gl.convert_layout(value.to(out.dtype.element_ty), ROW)
        token, head, is_row = _places(first_token, num_tokens, row, gl.SliceLayout(1, ROW), G)
        gl.store(out + (token * out_token + head * out_head)[:, None] + column, value, mask=is_row[:, None])
        if lse is not None:
            token, head, is_row = _places(first_token, num_tokens, row, M, G)
            gl.store(lse + token * lse_token + head * lse_head, (maximum + gl.log2(total)) * LN_2, mask=is_row)


def launch_cdna_extend(args: AttendArgs, *, arch: str, scores: Scores, cut: ExtendCut) -> None:
    """Does the same as `launch_paged_extend`, without windows, caps, sinks, slopes and shares.

    arch: one of EXTEND_ARCHS
    args: with K and V at multiples of 16 bytes, whose strides are multiples of 16, or of stride_unit if that is eight
    cut:  of EXTEND_TILES
    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("extend on CDNA")
    queries, pages, table = args.queries, args.pages, args.table
    num_kv_heads, gqa_ratio = args.heads
    cut.check(args.schedule, queries.num_tokens, queries.num_seqs)
    assert cut == ExtendCut.of(EXTEND_TILES, gqa_ratio=gqa_ratio, min_q_len=cut.min_q_len), (
        "the schedule was cut for others"
    )
    assert not scores.visibility.windowed, "no window is served"
    assert not scores.visibility.by_ranges, "tokens see all keys, or those up to their own"
    assert not scores.soft_cap, "no cap is served"
    assert args.sinks is None, "no sinks are served"
    assert args.slopes is None, "no slopes are served"
    assert args.q.dtype in (torch.bfloat16, torch.float16)
    assert pages.format.encoding.dtype == args.q.dtype, "pages in q's dtype are served"
    assert args.q.shape[2] == args.out.shape[2] == DIM.value
    size = pages.format.page_size
    assert KEYS.value % size == 0 or size % KEYS.value == 0, "a block lies in whole pages, or in one"
    assert pages.is_near
    unit = args.stride_unit
    assert pages.has_aligned_sides, "the limits refuse pages that begin elsewhere"
    # Triton must know it of K and V, which go into LDS; rows of q may begin anywhere.
    assert not any(stride % (8 if unit == 8 else 16) for stride in args.read_strides[2:8]), "a lane loads 16 bytes"
    geometry = ExtendGeometry(
        HEAD_ROWS=num_kv_heads * EXTEND_TILES.head_blocks(gqa_ratio),
        GQA_RATIO=gqa_ratio,
        BLOCK_HEADS=EXTEND_TILES.heads_per_block(gqa_ratio),
        HEAD_BLOCKS=EXTEND_TILES.head_blocks(gqa_ratio),
        PAGE_SIZE=pages.format.page_size,
        SAME_OFFSETS=args.same_offsets,
        CAUSAL=scores.visibility.causal,
        STRIDE_UNIT=unit,
        UNITS=EXTEND_UNITS[arch],
    )
    launch(
        _cdna_extend_kernel,
        (cut.max_blocks(queries.num_tokens, queries.num_seqs) * geometry.HEAD_ROWS,),
        args.q,
        pages.raw_k,
        pages.raw_v,
        table,
        queries.row_of_seq,
        queries.kv_len,
        args.schedule,
        args.out,
        args.lse,
        scores.base_2_scale,
        *args.strides_in(geometry.STRIDE_UNIT),
        G=geometry,
        num_warps=EXTEND_TILES.num_warps,
        waves_per_eu=EXTEND_TILES.waves_per_eu,
        llvm_fn_attrs=_NO_AGPRS,
    )
