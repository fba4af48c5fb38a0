"""Paged attention of sequences with several new tokens over their cached prefix.

    out[token] = softmax(scores of q[token] . K^T) V        K, V: the keys that the token sees (scores.py)

A row is a query block of the schedule and the query heads of one KV head (or as many as fit). The longest rows may be
shared out (extend_schedule.py): programs take the shares, extend_merge.py adds up the parts of rows, and other programs
take the other rows, one each. Those need fewer registers, so tiles of many rows give them a launch of their own: a
step that shares nothing then costs no more. Other tiles save that launch.
Keys that every row sees come first, without masks. The diagonal follows, under masks with other=0.0: keys that no row
sees may be NaN. With a window every key block is masked. A packed mask (visible_keys.py) replaces the diagonal: key
blocks before the first key that has bits are read as in any step, and the bits of the others, from the window's first
key on, say which keys a row sees.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, KeyRange, KeyValues, Logits, PagePointers, TableLine
from rocm_attn.kernels.attention.coded import ScalePointers, coded_scales, row_scale, scaled_value_parts
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_merge import launch_extend_merge
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
from rocm_attn.kernels.attention.key_loop import Query, SeenKeys, attend_key_blocks, key_geometry, nothing_seen
from rocm_attn.kernels.attention.mask_bits import MAX_MASK_BLOCK
from rocm_attn.kernels.attention.query_block import (
    BlockGeometry,
    KeysOfStep,
    keys_of_block,
    load_queries,
    rows_again,
    rows_of_block,
    store_columns,
    store_results,
)
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.segments import attend_segments
from rocm_attn.kernels.attention.softmax import LOG2_E
from rocm_attn.kernels.attention.visible_keys import PackedMask, VisibleKeys, key_arguments
from rocm_attn.kernels.cache.codes import TOKEN_SCALES
from rocm_attn.kernels.early import early_options, wait_for_launch
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.tiles import ExtendTiles


class Operands(NamedTuple):
    """The pointers, strides and numbers of a launched kernel that rows read.

    k, v:           pages of the first KV head
    line:           the table's first line; table_row: stride between lines
    scale_values:   pointers of the scales of K and of V, see coded.py
    mask:           a KeysOfStep, of None in steps whose keys causality and the window determine
    logits:         qk_scale, tanh_scale, and the pointer of the slopes or None
    """

    schedule: Any
    q: HeadRows
    k: PagePointers
    v: PagePointers
    line: TableLine
    table_row: Any
    row_of_seq: Any
    kv_len: Any
    scale_values: ScalePointers
    mask: Any
    logits: Logits
    window_left: Any


class ExtendOutputs(NamedTuple):
    """The destinations of results: rows of out and LSE, sinks or None.

    workspace:    of shares for parts of rows, of num_programs programs; of whole rows that are cut into segments, for
                  everything left of a segment (segments.left_of_program), or None
    """

    out: HeadRows
    lse: HeadRows
    sinks: Any
    workspace: Any
    num_programs: Any


@triton.jit
def _attend_row(x, to, query_block, row, done, take, row_cost, G: tl.constexpr):
    """Attends over all keys of a row, or if G.SHARES over [done, done + take) of row_cost, and stores the results.

    row: KV head and block of its query heads
    """
    K: tl.constexpr = G.keys
    C: tl.constexpr = K.coding
    words = x.schedule + query_block * BLOCK_WORDS
    seq = tl.load(words + BLOCK_SEQ)
    first_token = tl.load(words + BLOCK_FIRST_TOKEN)
    num_tokens = tl.load(words + BLOCK_TOKENS)
    first_kv_index = tl.load(words + BLOCK_KV_INDEX)
    kv_head = (row // G.HEAD_BLOCKS * K.HEADS_PER_ROW).to(tl.int64)
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
    # Keys [first_key, end_key) are seen by some row. The padded tail belongs to no sequence and sees no key. This is no
    # branch, because accumulators that cross one cost registers.
    first_key = 0
    if K.CAUSAL:
        end_key = tl.where(seq >= 0, first_kv_index + num_tokens, 0)
        edge_block = (first_kv_index + 1) // K.KEY_BLOCK
        if G.SEGMENT_LEN == 0:  # the tail has no segments
            edge_block = tl.where(seq >= 0, edge_block, 0)
    else:
        end_key = tl.load(x.kv_len + seq, mask=seq >= 0, other=0)
        edge_block = end_key // K.KEY_BLOCK
    if K.WINDOWED:
        first_key = tl.maximum(first_kv_index - x.window_left, 0)
        edge_block = first_key // K.KEY_BLOCK
    rows = None
    counted_end = end_key  # which the schedule counts shares from
    if x.mask.end is not None:
        rows = keys_of_block(x.mask, seq, first_token, is_row, end_key, G)
        edge_block = rows.edge // K.KEY_BLOCK
        end_key = rows.end
        if K.WINDOWED:
            first_key = rows.first
    k_scale_value = row_scale(x.scale_values.k, kv_head, C)
    k_scaled, tanh_scaled = coded_scales(x.logits.qk_scale, x.logits.tanh_scale, k_scale_value, K.CAPPED, C)
    query = Query(queries, row_kv_index, Logits(k_scaled, tanh_scaled, slope))
    kv = KeyValues(
        k_side, v_side, TableLine(pages, x.line.width), ScalePointers(x.scale_values.k, x.scale_values.v, kv_head)
    )
    seen = SeenKeys(KeyRange(first_key, end_key), x.window_left, rows, x.mask.words)
    if G.SEGMENT_LEN > 0:
        attend_segments(x, to, query_block, row, done, take, query, kv, seen, edge_block, G)
    else:
        softmax = _attend_blocks(words, counted_end, done, take, query, kv, seen, edge_block, G)
        token, head, is_row = rows_again(x.schedule, query_block, row, G)
        if take == row_cost:
            store_results(softmax, token, head, is_row, to.sinks, to.out, to.lse, K)
        else:
            _store_part(softmax, to, done, head, is_row, G)


@triton.jit
def _attend_blocks(words, counted_end, done, take, query, kv, seen, edge_block, G: tl.constexpr):
    """Returns the softmax state of a row's keys: those at [done, done + take) of its cost in a share, else all."""
    K: tl.constexpr = G.keys
    C: tl.constexpr = K.coding
    end_key = seen.keys.end
    end_block = tl.cdiv(end_key, K.KEY_BLOCK)
    if G.SHARES:
        # The blocks that begin in the share; the last one of a row takes the rest.
        row_keys = tl.load(words + BLOCK_KEYS)
        row_key = counted_end - row_keys
        first_block = (row_key + tl.maximum(done - G.ROW_KEYS, 0)) // K.KEY_BLOCK
        if seen.rows is not None and K.WINDOWED:
            # A window that is counted from a draft's depth, or a span, begins before a row's counted keys: the first
            # share has it.
            first_seen = seen.keys.first // K.KEY_BLOCK
            first_block = tl.where(done == 0, first_seen, tl.maximum(first_block, first_seen))
        share_end = (row_key + tl.maximum(done + take - G.ROW_KEYS, 0)) // K.KEY_BLOCK
        end_block = tl.where(done + take == row_keys + G.ROW_KEYS, end_block, share_end)
        if seen.rows is not None:
            end_block = tl.minimum(end_block, tl.cdiv(end_key, K.KEY_BLOCK))
        open_blocks = KeyRange(first_block, tl.minimum(edge_block, end_block))
        edge_block = tl.maximum(edge_block, first_block)
    elif K.WINDOWED:
        open_blocks = KeyRange(seen.keys.first // K.KEY_BLOCK, edge_block)
    else:
        open_blocks = KeyRange(0, edge_block)
    # From here on in blocks of EDGE_BLOCK keys.
    PER_BLOCK: tl.constexpr = K.KEY_BLOCK // K.EDGE_BLOCK
    edge = KeyRange(edge_block * PER_BLOCK, tl.minimum(end_block * PER_BLOCK, tl.cdiv(end_key, K.EDGE_BLOCK)))
    softmax = nothing_seen(G.QUERY_ROWS, K)
    # With a window all blocks are masked: a loop of its own for the blocks between the edges spills.
    if not K.WINDOWED or (seen.rows is not None and seen.words is None):
        softmax = attend_key_blocks(softmax, query, kv, seen, open_blocks, K, False, G.STAGES)
    softmax = attend_key_blocks(softmax, query, kv, seen, edge, K, True, G.EDGE_STAGES)
    return scaled_value_parts(softmax, row_scale(kv.scale_values.v, kv.scale_values.head, C), C)


@triton.jit
def _store_part(softmax, to, done, head, is_row, G: tl.constexpr):
    """Stores part 2p of program p if an earlier program began the row, and part 2p + 1 if the row goes on."""
    K: tl.constexpr = G.keys
    acc, maximum, total = softmax
    part = 2 * tl.program_id(0) + (done == 0).to(tl.int32)
    line = part * G.QUERY_ROWS + tl.arange(0, G.QUERY_ROWS)
    store_columns(to.workspace + (line * K.V_HEAD_DIM)[:, None], acc, head, is_row, K)
    sums = to.workspace + to.num_programs * (2 * G.QUERY_ROWS * K.V_HEAD_DIM)
    tl.store(sums + line * 2, maximum)
    tl.store(sums + line * 2 + 1, total)


@triton.jit
def walk_rows(x, to, max_blocks, G: tl.constexpr):
    """Attends for the rows of a program: its shares of rows, or whole ones. max_blocks: query blocks of the schedule"""
    ROWS: tl.constexpr = G.KV_HEADS * G.HEAD_BLOCKS
    program = tl.program_id(0)
    # The launch before this one may write anything that is read here. The merge may start when every program is
    # past this point, and so finds the schedule.
    wait_for_launch(G.EARLY)
    shares = x.schedule + max_blocks * BLOCK_WORDS
    if G.SHARES:
        share = shares + (tl.minimum(program, to.num_programs - 1) if G.WHOLE_ROWS else program) * SHARE_WORDS
        query_block, row, done, work = work_of_share(share)
        if G.WHOLE_ROWS:
            # After the shares, or first if there are none: few rows then spread over all compute units.
            cut_blocks = tl.load(shares + SHARE_CUT)
            place = program - tl.where(cut_blocks > 0, to.num_programs, 0)
            if place >= 0:
                is_whole = (place // ROWS >= cut_blocks) & (place // ROWS < max_blocks)
                query_block = tl.where(is_whole, place // ROWS, 0)
                row = place % ROWS
                done = 0
                words = x.schedule + query_block * BLOCK_WORDS
                is_whole = is_whole & (tl.load(words + BLOCK_TOKENS) > 0)
                work = tl.where(is_whole, tl.load(words + BLOCK_KEYS) + G.ROW_KEYS, 0)
        while work > 0:
            row_cost = tl.load(x.schedule + query_block * BLOCK_WORDS + BLOCK_KEYS) + G.ROW_KEYS
            take = tl.minimum(work, row_cost - done)
            _attend_row(x, to, query_block, row, done, take, row_cost, G)
            work -= take
            done = 0
            query_block, row = row_after(query_block, row, ROWS)
    else:
        query_block = program // ROWS
        row = program % ROWS
        is_whole = tl.load(x.schedule + query_block * BLOCK_WORDS + BLOCK_TOKENS) > 0
        if G.ROW_KEYS > 0:
            is_whole = is_whole & (query_block >= tl.load(shares + SHARE_CUT))
        if is_whole:
            _attend_row(x, to, query_block, row, 0, 0, 0, G)


_UNSPECIALIZED = ["num_programs", "max_blocks", "width", "window_left"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _extend_kernel(
    q,
    k_pages,
    v_pages,
    table,
    row_of_seq,
    kv_len,
    schedule,
    partials,
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
    first_key,
    key_end,
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
    if G.STRIDE_UNIT > 1:
        q_token, q_head = q_token * G.STRIDE_UNIT, q_head * G.STRIDE_UNIT
        kp_page, kp_token, kp_head = kp_page * G.STRIDE_UNIT, kp_token * G.STRIDE_UNIT, kp_head * G.STRIDE_UNIT
        vp_page, vp_token, vp_head = vp_page * G.STRIDE_UNIT, vp_token * G.STRIDE_UNIT, vp_head * G.STRIDE_UNIT
        out_token, out_head = out_token * G.STRIDE_UNIT, out_head * G.STRIDE_UNIT
    mask = KeysOfStep(mask_words, mask_indptr, mask_start, first_key, key_end, q_indptr)
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
    to = ExtendOutputs(out_rows, lse_rows, sinks, partials, num_programs)
    walk_rows(x, to, max_blocks, G)


# Deterministic extend (segment_extend.py) is the same kernel, by a name that profiles show.
segment_extend_kernel = triton.jit(
    _extend_kernel.fn, do_not_specialize=_UNSPECIALIZED, repr=lambda _: "_segment_extend_kernel"
)


def launch_paged_extend(
    args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: ExtendTiles, mask: VisibleKeys | None = None
) -> None:
    """Attends for every new token of the sequences in the schedule.

    Tokens at or past q_indptr[S] receive 0 and LSE -inf; tokens of sequences below cut.min_q_len stay unchanged.

    args: with cut's schedule, and a workspace of cut.partials_words(...) or longer
    cut:  of these tiles
    mask: the keys that each token sees, instead of those of scores. With a PackedMask, the schedule is cut for rows
          that may see their whole sequence. A token that sees none receives 0 and LSE -inf

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("paged extend")

    def launch_rows(grid: int, geometry: BlockGeometry, options: Mapping[str, int]) -> None:
        """Launches the shares or the whole rows, as the geometry says."""
        given = row_arguments(args, args.workspace, scores, cut, mask, geometry.STRIDE_UNIT)
        launch(_extend_kernel, (grid,), *given, G=geometry, **options)

    geometry = _geometry(args, scores, cut, tiles, mask)
    programs, num_warps = cut.sharing.programs, {"num_warps": tiles.num_warps}
    options = {**num_warps, **tiles.options(), **early_options(tiles.early)}
    rows = cut.max_blocks(args.queries.num_tokens, args.queries.num_seqs) * geometry.KV_HEADS * geometry.HEAD_BLOCKS
    sharing = geometry._replace(SHARES=True, WHOLE_ROWS=tiles.one_launch, STAGES=tiles.share_stages)
    if programs and tiles.one_launch:
        launch_rows(programs + rows, sharing, options)
        launch_extend_merge(args, cut, geometry, tiles.merge_stages)
        return
    if programs:
        key_block = min(tiles.share_block or tiles.key_block, tiles.key_block)
        keys = geometry.keys._replace(KEY_BLOCK=key_block, EDGE_BLOCK=min(key_block, geometry.keys.EDGE_BLOCK))
        edge_stages = min(geometry.EDGE_STAGES, tiles.share_stages)
        shares = sharing._replace(keys=keys, EDGE_STAGES=edge_stages)
        launch_rows(programs, shares, num_warps)
        launch_extend_merge(args, cut, geometry, tiles.merge_stages)
    launch_rows(rows, geometry, options)


def row_arguments(
    args: AttendArgs, workspace: Tensor | None, scores: Scores, cut: ExtendCut, mask: VisibleKeys | None, unit: int
) -> tuple[Tensor | float | None, ...]:
    """Returns the arguments of kernels that walk rows of a schedule. unit: elements that strides are counted in"""
    queries, pages, table = args.queries, args.pages, args.table
    return (
        args.q,
        pages.raw_k,
        pages.raw_v,
        table,
        queries.row_of_seq,
        queries.kv_len,
        args.schedule,
        workspace,
        args.out,
        args.lse,
        args.sinks,
        args.slopes,
        pages.k_scale,
        pages.v_scale,
        None if mask is None else queries.q_indptr,
        *key_arguments(mask),
        scores.base_2_scale,
        scores.tanh_scale,
        scores.visibility.window_left,
        cut.sharing.programs,
        cut.max_blocks(queries.num_tokens, queries.num_seqs),
        table.shape[1],
        *args.strides_in(unit),
    )


def _geometry(
    args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: ExtendTiles, mask: VisibleKeys | None
) -> BlockGeometry:
    """Checks schedule, mask and workspace, and returns the values that the launch is compiled for."""
    if cut.sharing.programs:
        args.check_workspace(cut.partials_words(query_rows=tiles.query_rows, v_head_dim=args.out.shape[2]))
    geometry = block_geometry(args, scores, cut, tiles, mask, exact=False)
    if isinstance(mask, PackedMask):
        edge_block = min(geometry.keys.EDGE_BLOCK, MAX_MASK_BLOCK)
        geometry = geometry._replace(keys=geometry.keys._replace(EDGE_BLOCK=edge_block), EDGE_STAGES=tiles.num_stages)
    return geometry._replace(EARLY=tiles.early, STRIDE_UNIT=args.stride_unit)


def block_geometry(
    args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: ExtendTiles, mask: VisibleKeys | None, *, exact: bool
) -> BlockGeometry:
    """Checks schedule and mask, and returns the geometry of whole rows that are not cut into segments.

    exact: see KeyGeometry
    """
    queries = args.queries
    num_kv_heads, gqa_ratio = args.heads
    cut.check(args.schedule, queries.num_tokens, queries.num_seqs)
    assert cut.query_tokens == tiles.tokens_per_block(gqa_ratio), "the schedule was cut for other tiles"
    if mask is not None:
        mask.check(queries.num_seqs, queries.num_tokens)
    block_heads, head_blocks = tiles.heads_per_block(gqa_ratio), tiles.head_blocks(gqa_ratio)
    at_once = tiles.heads_per_row
    assert num_kv_heads % at_once == 0
    assert at_once == 1 or (head_blocks == 1 and not tiles.dim_block and args.pages.k_scale is None)
    # In a masked step a token may see keys after its own, by cells or by a span.
    visibility, sharing = scores.visibility, cut.sharing
    causal = visibility.causal and not isinstance(mask, PackedMask)
    if sharing.programs:
        cut.check_layer(num_kv_heads // at_once * head_blocks, causal=causal, window_left=visibility.window_left)
    # With a window all blocks are masked; in a chunk, whose rows begin at one key, only the last ones. With scales of
    # tokens up to 80 SGPRs spill on AMD if loads of two blocks are in flight.
    by_token = args.pages.coding.SCALES == TOKEN_SCALES
    masks_all = visibility.windowed and not visibility.chunk and not by_token
    return BlockGeometry(
        keys=key_geometry(args, scores, tiles=tiles, causal=causal, exact=exact),
        KV_HEADS=num_kv_heads // at_once,
        GQA_RATIO=gqa_ratio * at_once,
        BLOCK_HEADS=block_heads,
        HEAD_BLOCKS=head_blocks,
        QUERY_ROWS=tiles.query_rows,
        ROW_KEYS=sharing.row_keys if sharing.programs else 0,
        SHARES=False,
        WHOLE_ROWS=True,
        SEGMENT_LEN=0,
        STAGES=tiles.num_stages,
        EDGE_STAGES=tiles.num_stages if masks_all else tiles.diagonal_stages,
    )
