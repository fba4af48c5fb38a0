"""Paged extend for CDNA, in Gluon: extend.py's results, at the pace of the matrix units (extend_steps.py).

    out[token] = softmax(scores of q[token] . K^T) V        K, V: the keys that the token sees (scores.py)

A program is eight waves with 256 rows: a query block of extend_schedule.py, and query heads of one KV head. Two waves
of a SIMD take turns: one computes a round of products while the other reads LDS and starts loads. Keys that every row
sees go in whole blocks from memory into LDS, up to three blocks ahead; page numbers are loaded a block before that. The
others follow under masks, block by block. Elements that no row sees may be NaN. Codes of eight bits become numbers as
they are stored into LDS. The features of an arch and of heads are values (cdna_tiles.ExtendUnits, ExtendHeads).
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import slice as columns
from triton.experimental.gluon.language.amd import warp_pipeline_stage
from triton.experimental.gluon.language.amd.cdna3 import buffer_load, mfma
from triton.experimental.gluon.language.amd.cdna4 import async_copy

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import KeyRange, PagePointers
from rocm_attn.kernels.attention.coded import coded_scales, row_scale
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_FIRST_TOKEN,
    BLOCK_KV_INDEX,
    BLOCK_SEQ,
    BLOCK_TOKENS,
    BLOCK_WORDS,
)
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.softmax import LN_2, in_range
from rocm_attn.kernels.cache.codes import is_coded
from rocm_attn.kernels.cache.page_format import Scales
from rocm_attn.kernels.cdna.codes import numbers_of
from rocm_attn.kernels.cdna.extend_layouts import (
    KEYS,
    ROWS,
    ExtendGeometry,
    operand,
    product,
    row_of,
    rows_in,
    rows_in_lds,
    sum_tiles,
)
from rocm_attn.kernels.cdna.extend_steps import (
    after_round_1,
    after_round_2,
    all_lanes,
    eighths_of,
    joined,
    registers,
    rescaled,
    round_1,
    round_2,
    value_of,
    weights_of,
)
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.cdna_tiles import EXTEND_TILES, EXTEND_UNITS, extend_heads

# Products stay in VGPRs: copies to and from AGPRs would take issue slots of the vector unit.
_NO_AGPRS = (("amdgpu-agpr-alloc", "0,0"),)


@gluon.jit
def _pages(line, block, G: gl.constexpr):
    """The numbers of the pages of a block's keys, [KEYS]."""
    L: gl.constexpr = gl.SliceLayout(1, rows_in(G))
    if G.PAGE_SIZE >= KEYS:
        page = gl.full([KEYS], gl.load(line + block * KEYS // G.PAGE_SIZE), gl.int32, layout=L)
    else:
        page = gl.arange(0, KEYS, layout=L) // G.PAGE_SIZE + block * (KEYS // G.PAGE_SIZE)
        # A wave that loads keys of one page has its number in a scalar register.
        page = buffer_load(line, page) if G.UNITS.TRANSPOSES else gl.load(line + page)
    return page


@gluon.jit
def _rows_at(side, pages, block, G: gl.constexpr):
    """The places of the first part of a block's rows of K or V, [KEYS, PART]."""
    L: gl.constexpr = rows_in(G)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, L))
    place = key % G.PAGE_SIZE
    at = side.at
    if G.PAGE_SIZE > KEYS:
        at += block * KEYS % G.PAGE_SIZE * side.token
    row = pages.to(gl.int64) * side.page
    if not G.UNITS.TRANSPOSES:
        # A lane's four keys are apart by scalar numbers, and have one offset.
        row += (place % 4).to(gl.int64) * side.token
        place -= place % 4
    column = gl.arange(0, G.HEADS.PART, layout=gl.SliceLayout(0, L))
    return at + row[:, None] + (place[:, None] * side.token + column[None, :])


@gluon.jit
def _copy(to, slot: gl.constexpr, side, pages, block, G: gl.constexpr):
    """Begins to copy a block of K or V into LDS."""
    at = _rows_at(side, pages, block, G)
    for i in gl.static_range(len(to)):
        async_copy.global_load_to_shared(to[i].index(slot), at + i * G.HEADS.PART)
    async_copy.commit_group()


@gluon.jit
def _loaded(PARTS: gl.constexpr, side, pages, block, G: gl.constexpr):
    """A block of K or V in registers, as parts."""
    at = _rows_at(side, pages, block, G)
    found = ()
    for i in gl.static_range(PARTS):
        found += (gl.load(at + i * G.HEADS.PART),)  # type: ignore[assignment]
    return found


@gluon.jit
def _store(to, rows, G: gl.constexpr):
    """Stores the parts of a block's rows into LDS, as numbers."""
    for i in gl.static_range(len(to)):
        numbers = rows[i]
        if is_coded(G.CODING.ENCODING):
            numbers = numbers_of(numbers, to[i].dtype, G.CODING, G.UNITS.CONVERTS)
        to[i].index(0).store(numbers)


@gluon.jit
def _keys(ks, slot: gl.constexpr, first: gl.constexpr, num: gl.constexpr, G: gl.constexpr):
    """K^T of keys of a block, an operand in parts."""
    found = ()
    for i in gl.static_range(len(ks)):
        part = ks[i].index(slot).slice(first, num).permute((1, 0))
        found += (_operand(part, True, G),)  # type: ignore[assignment]
    return found


@gluon.jit
def _values(vs, slot: gl.constexpr, G: gl.constexpr):
    """V of a block, an operand in parts."""
    found = ()
    for i in gl.static_range(len(vs)):
        found += (_operand(vs[i].index(slot), False, G),)  # type: ignore[assignment]
    return found


@gluon.jit
def _operand(part, OF_SCORES: gl.constexpr, G: gl.constexpr):
    L: gl.constexpr = operand(G, 1, OF_SCORES)
    return async_copy.load_shared_relaxed(part, L) if G.UNITS.LOADS_INTO_LDS else part.load(L)


@gluon.jit
def _times_values(acc, weights, values, G: gl.constexpr):
    """acc + P V of a block, at once."""
    for i in gl.static_range(KEYS // G.UNITS.DEPTH):
        own = weights_of(weights, i, G)
        sums = ()
        for tile in gl.static_range(len(acc)):
            sums += (mfma(own, value_of(values, tile, i, G), acc[tile]),)  # type: ignore[assignment]
        acc = sums
    return acc


@gluon.jit
def _scores(query, ks, G: gl.constexpr):
    """Scores of the block of keys in the first places of LDS, two tiles."""
    tiles = ()
    for first in gl.static_range(0, KEYS, 32):
        keys = _keys(ks, 0, first, 32, G)
        tile = gl.zeros([ROWS, 32], gl.float32, layout=product(G))
        for i in gl.static_range(len(keys)):
            tile = mfma(query[i], keys[i], tile)
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@gluon.jit
def _first_block(query, ks, vs, acc, maximum, total, scale, G: gl.constexpr):
    """round_2 of the first block, without values."""
    tiles = _scores(query, ks, G)
    nothing = gl.zeros([ROWS, 8], query[0].dtype, layout=product(G))
    no_values = (gl.zeros([KEYS, G.HEADS.PART], query[0].dtype, layout=operand(G, 1, False)),) * len(vs)
    acc, rise = round_2(acc, (nothing,) * 8, no_values, tiles, maximum, scale, G)
    done, raw, new, part = after_round_2(rise, tiles, maximum, scale, nothing.dtype, G)
    acc, total = _to_maximum(acc, total, part, maximum, new, G)
    return acc, done, raw, new, total


@gluon.jit
def _to_maximum(acc, total, part, old, new, G: gl.constexpr):
    """acc and total of a maximum that rose from old to new; part: a sum with the new one."""
    decay = gl.exp2(old - new)
    if sum_tiles(G) == 0:
        total = total * decay + part
    return rescaled(acc, decay), total


@gluon.jit
def _whole_blocks(query, k, v, line, begin, num, scale, ks, vs, acc, maximum, total, G: gl.constexpr):
    """Adds blocks [begin, begin + num) that every row sees, or all but the last of them; returns their end too.

    While a block's values are read, the next one's keys are in registers, and those of the one after it go into LDS; so
    do values, one block later. Loads past the registers begin a block earlier and have two places in LDS each.

    If scores take two rounds, the second half of the keys is read between these. Values that pass registers go into LDS
    there, for the same block, so that no rows wait in registers during products with values.

    num: at least 1
    """
    INTO_LDS: gl.constexpr = G.UNITS.LOADS_INTO_LDS
    K_ROUNDS: gl.constexpr = G.HEADS.KEY_ROUNDS
    OF_ROUND: gl.constexpr = KEYS // K_ROUNDS
    LATE_VALUES: gl.constexpr = K_ROUNDS > 1 and not INTO_LDS
    PARTS: gl.constexpr = len(ks)
    V_PARTS: gl.constexpr = len(vs)
    DTYPE: gl.constexpr = query[0].dtype
    last = begin + num - 1
    first = _pages(line, begin, G)
    pages = (
        _pages(line, gl.minimum(begin + 1, last), G),
        _pages(line, gl.minimum(begin + 2, last), G),
        _pages(line, gl.minimum(begin + 3, last), G),
    )
    if INTO_LDS:
        _copy(ks, 0, k, first, begin, G)
        _copy(vs, 0, v, first, begin, G)
        _copy(ks, 1, k, pages[0], begin + 1, G)
        async_copy.wait_group(2)
    else:
        _store(ks, _loaded(PARTS, k, first, begin, G), G)
        next_values = _loaded(V_PARTS, v, first, begin, G)
        if not LATE_VALUES:
            _store(vs, next_values, G)
        next_keys = _loaded(PARTS, k, pages[0], begin + 1, G)
        gl.barrier()
    acc, done, raw, maximum, total = _first_block(query, ks, vs, acc, maximum, total, scale, G)
    gl.barrier()
    if INTO_LDS:
        _copy(ks, 0, k, pages[1], begin + 2, G)
        async_copy.wait_group(1)
        keys = _keys(ks, 1, 0, OF_ROUND, G)
        _copy(vs, 1, v, pages[0], begin + 1, G)
    else:
        _store(ks, next_keys, G)
        if not LATE_VALUES:
            next_keys = _loaded(PARTS, k, pages[1], begin + 2, G)
        gl.barrier()
        keys = _keys(ks, 0, 0, OF_ROUND, G)
    pairs = (num - 1) // 2
    for pair in tl.range(0, pairs):
        for i in gl.static_range(2):
            block = begin + pair * 2 + i
            zeros = gl.zeros([ROWS, 32], gl.float32, layout=product(G))
            tiles = (zeros, zeros)
            r = registers(raw[0])
            weights = done
            for at in gl.static_range(K_ROUNDS):
                if at > 0:
                    with warp_pipeline_stage("loads"):
                        if LATE_VALUES:
                            _store(vs, next_values, G)
                            next_keys = _loaded(PARTS, k, pages[1], block + 2, G)
                        keys = _keys(ks, 1 - i if INTO_LDS else 0, at * OF_ROUND, OF_ROUND, G)
                with warp_pipeline_stage("products"):
                    tiles, r, weights, total = round_1(
                        query, keys, at, tiles, r, weights, raw, maximum, total, scale, G
                    )
            if INTO_LDS:
                async_copy.wait_group(1)
            with warp_pipeline_stage("loads"):
                if INTO_LDS:
                    values = _values(vs, i, G)
                    _copy(ks, 1 - i, k, pages[2], block + 3, G)
                else:
                    _store(ks, next_keys, G)
                    values = _values(vs, 0, G)
                    if not LATE_VALUES:
                        next_values = _loaded(V_PARTS, v, pages[0], block + 1, G)
                later = _pages(line, gl.minimum(block + 4, last), G)
                weights, total = after_round_1(r, weights, raw, maximum, total, scale, DTYPE, G)
            with warp_pipeline_stage("products"):
                old = maximum
                acc, rise = round_2(acc, weights, values, tiles, maximum, scale, G)
            if INTO_LDS:
                async_copy.wait_group(1)
            with warp_pipeline_stage("loads"):
                if INTO_LDS:
                    keys = _keys(ks, i, 0, OF_ROUND, G)
                    _copy(vs, i, v, pages[1], block + 2, G)
                elif LATE_VALUES:
                    keys = _keys(ks, 0, 0, OF_ROUND, G)
                    next_values = _loaded(V_PARTS, v, pages[0], block + 1, G)
                else:
                    _store(vs, next_values, G)
                    keys = _keys(ks, 0, 0, OF_ROUND, G)
                    next_keys = _loaded(PARTS, k, pages[2], block + 3, G)
                done, raw, maximum, part = after_round_2(rise, tiles, maximum, scale, DTYPE, G)
                acc, total = _to_maximum(acc, total, part, old, maximum, G)
            pages = (pages[1], pages[2], later)
    zeros = gl.zeros([ROWS, 32], gl.float32, layout=product(G))
    tiles, r, weights = (zeros, zeros), registers(raw[0]), done
    # These scores are of no block; the compiler drops them.
    for at in gl.static_range(K_ROUNDS):
        tiles, r, weights, total = round_1(query, keys, at, tiles, r, weights, raw, maximum, total, scale, G)
    weights, total = after_round_1(r, weights, raw, maximum, total, scale, DTYPE, G)
    if INTO_LDS:
        async_copy.wait_group(0)
    elif LATE_VALUES:
        _store(vs, next_values, G)
        gl.barrier()
    return _times_values(acc, weights, _values(vs, 0, G), G), maximum, total, begin + 2 * pairs + 1


@gluon.jit
def _masked_block(
    query, k, v, line, block, seen, last_key, window_left, scale, ks, vs, acc, maximum, total, G: gl.constexpr
):
    """Adds one block. A row sees keys up to last_key, and in a window some before it. seen: a KeyRange, of all rows"""
    P: gl.constexpr = product(G)
    key = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, rows_in(G)))
    live = in_range(key, seen.first, seen.end) if G.WINDOWED else key < seen.end
    pages = gl.load(line + key // G.PAGE_SIZE, mask=live, other=0)
    k_rows = _loaded(len(ks), k, pages, block, G)
    # Scores of keys that are not seen are replaced; a weight of zero times a value that is NaN would be NaN.
    loaded = _loaded(len(vs), v, pages, block, G)
    v_rows = ()
    for i in gl.static_range(len(vs)):
        v_rows += (gl.where(live[:, None], loaded[i], gl.zeros_like(loaded[i])),)  # type: ignore[assignment]
    gl.barrier()
    _store(ks, k_rows, G)
    _store(vs, v_rows, G)
    gl.barrier()
    key = block * KEYS + gl.arange(0, 32, layout=gl.SliceLayout(0, P))
    tiles = _scores(query, ks, G)
    before = last_key[:, None] - key[None, :]
    if G.WINDOWED:
        is_low, is_high = in_range(before, 0, window_left + 1), in_range(before - 32, 0, window_left + 1)
    else:
        is_low, is_high = before >= 0, before >= 32
    low, high = gl.where(is_low, tiles[0], float("-inf")), gl.where(is_high, tiles[1], float("-inf"))
    LANES: gl.constexpr = maximum.type.layout
    maximum = gl.convert_layout(gl.max(maximum, 1), gl.SliceLayout(1, P))
    new = gl.maximum(maximum, gl.max(gl.maximum(low, high), 1) * scale)
    # A row may have seen no key yet: the subtractions must not be inf - inf.
    base = gl.where(new == float("-inf"), 0.0, new)
    decay = gl.exp2(maximum - base)
    eighths = eighths_of((gl.exp2(low * scale - base[:, None]), gl.exp2(high * scale - base[:, None])))
    total = total * all_lanes(decay, LANES)
    rounded = ()
    for i in gl.static_range(8):
        r = registers(eighths[i])
        total = total + (r[0] + r[1] + r[2] + r[3])
        rounded += (eighths[i].to(query[0].dtype),)  # type: ignore[assignment]
    sums = ()
    for i in gl.static_range(len(acc)):
        sums += (acc[i] * decay[:, None],)  # type: ignore[assignment]
    return _times_values(sums, rounded, _values(vs, 0, G), G), all_lanes(new, LANES), total


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


@gluon.jit(do_not_specialize=["window_left"])
def _cdna_extend_kernel(
    q,
    k_pages,
    v_pages,
    k_scale,
    v_scale,
    table: tl.const,
    row_of_seq: tl.const,
    kv_len: tl.const,
    schedule: tl.const,
    out,
    lse,
    qk_scale,
    window_left,
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
        PART: gl.constexpr = G.HEADS.PART
        ROW: gl.constexpr = row_of(PART)
        token, head, is_row = _places(first_token, num_tokens, row, gl.SliceLayout(1, ROW), G)
        column = gl.arange(0, PART, layout=gl.SliceLayout(0, ROW))
        q_at = q + (token * q_token + head * q_head)[:, None] + column[None, :]
        LDS_Q: gl.constexpr = gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=PART // 8, order=[1, 0])
        query = ()
        for i in gl.static_range(G.HEADS.DIM // PART):
            q_rows = gl.load(q_at + i * PART, mask=is_row[:, None], other=0.0)
            part = gl.allocate_shared_memory(q.dtype.element_ty, [ROWS, PART], LDS_Q, q_rows)
            query += (part.load(operand(G, 0, True)),)  # type: ignore[assignment]
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
        qk_scale, _ = coded_scales(qk_scale, 0.0, row_scale(k_scale, kv_head, G.CODING), False, G.CODING)
        P: gl.constexpr = product(G)
        M: gl.constexpr = gl.SliceLayout(1, P)
        zeros = gl.zeros([ROWS, 32], gl.float32, layout=P)
        acc = (zeros,) * (G.HEADS.V_DIM // 32 + sum_tiles(G))
        # A row's sum is that of two lanes, which have a register each, and so is its maximum.
        total = registers(columns(zeros, [ROWS, 8], [0, 0]))[0]
        maximum = total - float("inf")
        BUFFERS: gl.constexpr = 2 if G.UNITS.LOADS_INTO_LDS else 1
        ks = ()
        for _ in gl.static_range(G.HEADS.DIM // PART):
            ks += (gl.allocate_shared_memory(q.dtype.element_ty, [BUFFERS, KEYS, PART], rows_in_lds(G, True)),)  # type: ignore[assignment]
        vs = ()
        for _ in gl.static_range(G.HEADS.V_DIM // PART):
            vs += (gl.allocate_shared_memory(q.dtype.element_ty, [BUFFERS, KEYS, PART], rows_in_lds(G, False)),)  # type: ignore[assignment]
        # Every row sees the keys of blocks [whole, num_whole).
        first_seen, whole = 0, 0
        if G.WINDOWED:
            first_seen = gl.maximum(first_key - window_left, 0)
            whole = gl.cdiv(gl.maximum(end_key - 1 - window_left, 0), KEYS)
        done = whole
        if num_whole > whole:
            acc, maximum, total, done = _whole_blocks(
                query, k, v, line, whole, num_whole - whole, qk_scale, ks, vs, acc, maximum, total, G
            )
        last_key = gl.full([ROWS], end_key - 1, gl.int32, layout=M)
        if G.CAUSAL:
            last_key = gl.minimum(last_key, first_key + gl.arange(0, ROWS, layout=M) // G.BLOCK_HEADS)
        # Blocks before those that are done, and then blocks after them.
        seen, num_done = KeyRange(first_seen, end_key), done - whole
        for i in range(first_seen // KEYS + num_done, gl.cdiv(end_key, KEYS)):
            block = gl.where(i < done, i - num_done, i) if G.WINDOWED else i
            acc, maximum, total = _masked_block(
                query, k, v, line, block, seen, last_key, window_left, qk_scale, ks, vs, acc, maximum, total, G
            )
        total = gl.max(acc[G.HEADS.V_DIM // 32], 1) if sum_tiles(G) else gl.convert_layout(gl.sum(total, 1), M)
        maximum = gl.convert_layout(gl.max(maximum, 1), M)
        # Tokens of no sequence have seen no key: 0 / 1, and LSE -inf + log2(1).
        total = gl.where(total == 0.0, 1.0, total)
        share = (row_scale(v_scale, kv_head, G.CODING) / total)[:, None]
        value = joined(acc[0] * share, acc[1] * share)
        if G.HEADS.V_DIM == 128:
            value = joined(value, joined(acc[2] * share, acc[3] * share))
        OUT: gl.constexpr = row_of(G.HEADS.V_DIM)
        value = gl.convert_layout(value.to(out.dtype.element_ty), OUT)
        token, head, is_row = _places(first_token, num_tokens, row, gl.SliceLayout(1, OUT), G)
        column = gl.arange(0, G.HEADS.V_DIM, layout=gl.SliceLayout(0, OUT))
        gl.store(out + (token * out_token + head * out_head)[:, None] + column[None, :], value, mask=is_row[:, None])
        if lse is not None:
            token, head, is_row = _places(first_token, num_tokens, row, M, G)
            gl.store(lse + token * lse_token + head * lse_head, (maximum + gl.log2(total)) * LN_2, mask=is_row)


def launch_cdna_extend(args: AttendArgs, *, arch: str, scores: Scores, cut: ExtendCut) -> None:
    """Does the same as `launch_paged_extend`, without caps, sinks, slopes, shares and scales of tokens.

    arch: one of EXTEND_ARCHS
    args: with K and V at multiples of 16 bytes, whose strides are multiples of 16, or of stride_unit if that is eight
    cut:  of EXTEND_TILES
    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("extend on CDNA")
    queries, pages, table = args.queries, args.pages, args.table
    num_kv_heads, gqa_ratio = args.heads
    cut.check(args.schedule, queries.num_tokens, queries.num_seqs)
    assert cut == ExtendCut.of(EXTEND_TILES, gqa_ratio=gqa_ratio, min_q_len=cut.min_q_len, causal=cut.sharing.causal), (
        "the schedule was cut for others"
    )
    assert not scores.visibility.by_ranges, "tokens see all keys, or those up to their own"
    assert not scores.soft_cap, "no cap is served"
    assert args.sinks is None, "no sinks are served"
    assert args.slopes is None, "no slopes are served"
    assert args.q.dtype in (torch.bfloat16, torch.float16)
    coding, is_fp8 = pages.coding, pages.format.encoding.is_fp8
    assert is_fp8 or pages.format.encoding.dtype == args.q.dtype, "pages of codes or in q's dtype are served"
    assert pages.format.scales is not Scales.TOKEN, "scales of a layer or of heads are served"
    heads = extend_heads(arch, head_dim=args.q.shape[2], v_head_dim=args.out.shape[2], encoding=pages.format.encoding)
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
        WINDOWED=scores.visibility.windowed,
        STRIDE_UNIT=unit,
        UNITS=EXTEND_UNITS[arch]._replace(LOADS_INTO_LDS=False) if is_fp8 else EXTEND_UNITS[arch],
        HEADS=heads,
        CODING=coding,
    )
    launch(
        _cdna_extend_kernel,
        (cut.max_blocks(queries.num_tokens, queries.num_seqs) * geometry.HEAD_ROWS,),
        args.q,
        pages.raw_k,
        pages.raw_v,
        pages.k_scale,
        pages.v_scale,
        table,
        queries.row_of_seq,
        queries.kv_len,
        args.schedule,
        args.out,
        args.lse,
        scores.base_2_scale,
        scores.visibility.window_left,
        *args.strides_in(geometry.STRIDE_UNIT),
        G=geometry,
        num_warps=EXTEND_TILES.num_warps,
        waves_per_eu=EXTEND_TILES.waves_per_eu,
        llvm_fn_attrs=_NO_AGPRS,
    )
