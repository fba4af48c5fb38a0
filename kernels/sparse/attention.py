"""Attention of each token over the units that were selected for it, split over the selection.

    out[token] = softmax(scale * q[token] . K^T) V      K, V: of the listed units, the tokens up to the token's own

A row is the query heads that share a KV head, or a block of them. Its selection is cut into a fixed number of parts
with equally many keys, so that one grid serves all lengths. A row of one part is written to out; for the others each
part leaves a partial result, which merge_parts.py adds up from left to right. Key n of a selection is token n %
unit_tokens of the unit that is listed at n // unit_tokens. A row of latent pages is loaded once, and is K and V.
Without a selection every token sees the last tokens up to its own, as many as its listing is wide.

Deterministic attention has segments as parts (attention/segments.py): if a selection holds all that a token sees, in
order, it gives the bits of deterministic decode and extend.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rocm_attn.kernels.attention.bundles import HeadRows, HeadsOfToken, PagePointers, Softmax
from rocm_attn.kernels.attention.coded import (
    ScalePointers,
    add_values,
    coded_scales,
    row_scale,
    scaled_values,
    token_scale,
)
from rocm_attn.kernels.attention.scores import LOG2_E
from rocm_attn.kernels.attention.segments import UNFUSED
from rocm_attn.kernels.attention.softmax import exact_maximum, in_range, rounded, store_rows, sum_by_pairs
from rocm_attn.kernels.cache.codes import TOKEN_SCALES, decoded, group_of, group_scales, is_record, scales_of
from rocm_attn.kernels.cache.page_format import PoolKind
from rocm_attn.kernels.cache.records import RecordParts
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.sparse.arguments import SelectedArgs
from rocm_attn.kernels.sparse.cuts import SelectedCut, segment_cut, selected_cut
from rocm_attn.kernels.sparse.merge_parts import launch_merge_parts
from rocm_attn.kernels.sparse.places import visible_tokens
from rocm_attn.kernels.sparse.rows import SelectedGeometry, heads_of_row, listed_keys
from rocm_attn.kernels.tuning.latent_tiles import SelectedTiles
from rocm_attn.kernels.tuning.segment_tiles import SegmentTiles
from rocm_attn.kernels.tuning.tiles import next_power_of_2


class Listing(NamedTuple):
    """One token's selection: its units, None if it has the last tokens that it sees, after `hidden` others; its keys,
    [first, end) of them here; the tokens that it sees; its line of the table, and that line's width."""

    units: Any
    hidden: Any
    first: Any
    end: Any
    visible: Any
    pages: Any
    width: Any


class SparseQuery(NamedTuple):
    """Rows of q: block [QUERY_ROWS, K_COLUMNS], rest [QUERY_ROWS, REST] or None, and scale in base 2."""

    block: Any
    rest: Any
    qk_scale: Any


@triton.jit
def _load_units(listing, key, G: tl.constexpr):
    """The unit that each key belongs to; entries past the selection get its last one."""
    unit = key // G.UNIT_TOKENS
    if listing.units is None:
        unit += listing.hidden
    else:
        unit = tl.load(listing.units + tl.minimum(unit, G.WIDTH - 1))
    return unit


@triton.jit
def _position(listing, key, unit, G: tl.constexpr):
    """The place of each key in the sequence's KV; -1 if the token sees no such key."""
    if G.UNIT_TOKENS == 1:
        position = unit
        is_seen = in_range(unit, 0, listing.visible)
    else:
        position = unit * G.UNIT_TOKENS + key % G.UNIT_TOKENS
        # Units are tested first: a number far outside would come back into the KV when it is multiplied.
        is_seen = in_range(unit, 0, tl.cdiv(listing.visible, G.UNIT_TOKENS)) & (position < listing.visible)
    return tl.where(is_seen & (key < listing.end), position, -1)


@triton.jit
def _load_page(listing, position, G: tl.constexpr):
    """The page of each place; for no place that of the first."""
    return tl.load(listing.pages + tl.minimum(tl.maximum(position, 0) // G.PAGE_SIZE, listing.width - 1))


@triton.jit
def _load_rows(rows, live, FIRST: tl.constexpr, COLUMNS: tl.constexpr, END: tl.constexpr):
    """Columns [FIRST, FIRST + COLUMNS) of rows, 0 from END on and for rows that are not live. rows: pointers [n]"""
    column = FIRST + tl.arange(0, COLUMNS)
    mask = live[:, None]
    if FIRST + COLUMNS > END:
        mask = mask & (column < END)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0)


@triton.jit
def _load_latents(record, offset, k_at, live, DTYPE: tl.constexpr, G: tl.constexpr):
    """V of records, DTYPE [n, K_COLUMNS]: codes times scales, and the part of the rest that is V.

    offset: places in pages; k_at: bytes from the first record to each; int64 [n]
    """
    GROUP: tl.constexpr = group_of(G.coding.SCALES)
    GROUPS: tl.constexpr = G.K_COLUMNS // GROUP
    codes = _load_rows(record.codes + k_at, live, 0, G.K_COLUMNS, G.CODED)
    scales = scales_of(record.scales, k_at, offset, G.NEARER)
    scale = group_scales(_load_rows(scales, live, 0, GROUPS, G.CODED // GROUP))
    groups = tl.reshape(decoded(codes, G.coding.ENCODING, tl.float32), [G.KEY_BLOCK, GROUPS, GROUP])
    values = tl.reshape(groups * scale[:, :, None], [G.KEY_BLOCK, G.K_COLUMNS])
    if G.CODED < G.K_DIM:
        column = tl.arange(0, G.K_COLUMNS)
        is_rest = (column >= G.CODED) & (column < G.K_DIM)
        rest = record.rest + k_at // 2 - G.CODED
        plain = tl.load(rest[:, None] + column[None, :], mask=live[:, None] & is_rest[None, :], other=0.0)
        values = tl.where(is_rest[None, :], plain.to(tl.float32), values)
    return rounded(values, DTYPE)


@triton.jit
def _attend(query, k_side, v_side, record, scale_values, listing, G: tl.constexpr):
    """Returns the softmax state of the keys [listing.first, listing.end) of a selection for each row."""
    KEY_BLOCK: tl.constexpr = G.KEY_BLOCK
    QUERY_ROWS: tl.constexpr = G.QUERY_ROWS
    V_COLUMNS: tl.constexpr = G.V_COLUMNS
    C: tl.constexpr = G.coding
    DTYPE: tl.constexpr = query.block.dtype
    lane = tl.arange(0, KEY_BLOCK)
    acc = tl.zeros([QUERY_ROWS, V_COLUMNS], tl.float32)
    maximum = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([QUERY_ROWS], tl.float32)
    # A row needs its page, which needs its unit: pages travel one block ahead of rows and units two, so that no load
    # in the loop waits for another one of the same round.
    next_position = _position(listing, listing.first + lane, _load_units(listing, listing.first + lane, G), G)
    next_page = _load_page(listing, next_position, G)
    next_unit = _load_units(listing, listing.first + KEY_BLOCK + lane, G)
    for first in tl.range(listing.first, listing.end, KEY_BLOCK, num_stages=G.STAGES):
        # position, live, page, offset: [KEY_BLOCK]
        position = next_position
        page = next_page.to(tl.int64)
        next_position = _position(listing, first + KEY_BLOCK + lane, next_unit, G)
        next_page = _load_page(listing, next_position, G)
        next_unit = _load_units(listing, first + 2 * KEY_BLOCK + lane, G)
        live = position >= 0
        offset = (tl.maximum(position, 0) % G.PAGE_SIZE).to(tl.int64)
        # scores, weights: [QUERY_ROWS, KEY_BLOCK]; k: [KEY_BLOCK, K_COLUMNS]; v: [KEY_BLOCK, V_COLUMNS]
        k_at = page * k_side.page + offset * k_side.token
        k_rows = k_side.at + k_at
        if is_record(C.SCALES):
            k = _load_latents(record, offset, k_at, live, DTYPE, G)
            k_block = k
        else:
            k = _load_rows(k_rows, live, 0, G.K_COLUMNS, G.K_DIM)
            k_block = decoded(k, C.ENCODING, DTYPE)
        scores = tl.dot(query.block, tl.trans(k_block), input_precision="ieee")
        if G.REST > 0:
            if is_record(C.SCALES):
                k_rest = _load_rows(record.rest + k_at // 2, live, 0, G.REST, G.HEAD_DIM - G.V_HEAD_DIM).to(DTYPE)
            else:
                k_rest = decoded(_load_rows(k_rows, live, G.V_HEAD_DIM, G.REST, G.HEAD_DIM), C.ENCODING, DTYPE)
            scores = tl.dot(query.rest, tl.trans(k_rest), scores, input_precision="ieee")
        v_scale_value = None
        if C.SCALES == TOKEN_SCALES:
            scores = scores * token_scale(scale_values.k, page, offset, scale_values.head, live, True, C)[None, :]
            v_scale_value = token_scale(scale_values.v, page, offset, scale_values.head, live, True, C)
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * query.qk_scale)
        if G.EXACT and not G.LATENT:
            new_maximum = exact_maximum(maximum, new_maximum)
        # There may have been no key yet; the subtractions below must not be inf - inf.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - base)
        if G.EXACT:
            weights = tl.exp2(tl.fma(scores, query.qk_scale, -base[:, None]))
            total = tl.fma(total, decay, sum_by_pairs(weights) if G.BY_PAIRS else tl.sum(weights, 1))
        else:
            weights = tl.exp2(scores * query.qk_scale - base[:, None])
            total = total * decay + tl.sum(weights, 1)
        if G.LATENT:
            v = k
        else:
            v_at = k_at if G.SAME_OFFSETS else page * v_side.page + offset * v_side.token
            v = _load_rows(v_side.at + v_at, live, 0, G.V_COLUMNS, G.V_HEAD_DIM)
        if is_record(C.SCALES):
            acc = tl.dot(rounded(weights, DTYPE), v, acc * decay[:, None], input_precision="ieee")
        else:
            acc = add_values(acc, decay[:, None], weights, v, v_scale_value, DTYPE, False, C)
        maximum = new_maximum
    return Softmax(acc, maximum, total)


@triton.jit(do_not_specialize=["num_parts", "part_keys", "width"])
def _selected_attention_kernel(
    q,
    k_pages,
    v_pages,
    record_scales,
    record_rest,
    table,
    row_of_token,
    position_of_token,
    num_tokens,
    units,
    counts,
    out,
    lse,
    sinks,
    parts,
    sums,
    k_scale,
    v_scale,
    qk_scale,
    num_parts,
    part_keys,
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
    E: tl.constexpr = G.coding
    if G.PARTS > 0:
        num_parts, part_keys = G.PARTS, G.PART_KEYS
    row = tl.program_id(0) % G.ROWS
    part = tl.program_id(0) // G.ROWS % num_parts if G.IS_CUT else 0
    token = (tl.program_id(0) // (G.ROWS * num_parts if G.IS_CUT else G.ROWS)).to(tl.int64)
    kv_head, first_head, num_q_rows = heads_of_row(row, G)
    listed = None
    hidden = 0
    if units is None:
        visible = visible_tokens(position_of_token, num_tokens, token.to(tl.int32), True)
        num_keys = tl.minimum(visible, G.WIDTH)
        hidden = visible - num_keys
    else:
        num_keys, selection = listed_keys(counts, token, kv_head, G)
        listed = units + selection * G.WIDTH
    first = part * part_keys
    # If a row has several parts, the merge knows which ones have keys.
    if (not G.IS_CUT) | (first < num_keys):
        q_row = tl.arange(0, G.QUERY_ROWS)
        is_row = q_row < num_q_rows
        head = first_head + q_row
        q_rows = q + (token * q_token + head * q_head)
        q_rest = None
        if G.REST > 0:
            q_rest = _load_rows(q_rows, is_row, G.V_HEAD_DIM, G.REST, G.HEAD_DIM)
        q_block = _load_rows(q_rows, is_row, 0, G.K_COLUMNS, G.K_DIM)
        line = table + tl.load(row_of_token + token).to(tl.int64) * table_row
        if units is not None:
            visible = visible_tokens(position_of_token, num_tokens, token.to(tl.int32), True)
        end = tl.minimum(first + part_keys, num_keys) if G.IS_CUT else num_keys
        kv_head = kv_head.to(tl.int64)
        k_scaled, _ = coded_scales(qk_scale, 0.0, row_scale(k_scale, kv_head, E), False, E)
        softmax = _attend(
            SparseQuery(q_block, q_rest, k_scaled),
            PagePointers(k_pages + kv_head * kp_head, kp_page, kp_token, kp_head),
            PagePointers(v_pages + kv_head * vp_head, vp_page, vp_token, vp_head),
            RecordParts(k_pages, record_scales, record_rest),
            ScalePointers(k_scale, v_scale, kv_head),
            Listing(listed, hidden, first, end, visible, line, width),
            G,
        )
        softmax = scaled_values(softmax, row_scale(v_scale, kv_head, E), E)
        v_column = tl.arange(0, G.V_COLUMNS)
        if not G.IS_CUT:
            out_rows, lse_rows = HeadRows(out, out_token, out_head), HeadRows(lse, lse_token, lse_head)
            store_rows(softmax, HeadsOfToken(token, head, is_row), sinks, out_rows, lse_rows, v_column, G.V_HEAD_DIM)
        else:
            at = ((token * G.ROWS + row) * num_parts + part) * G.ROW_HEADS + q_row
            is_v = is_row[:, None] & (v_column < G.V_HEAD_DIM)[None, :]
            tl.store(parts + at[:, None] * G.V_HEAD_DIM + v_column[None, :], softmax.acc, mask=is_v)
            tl.store(sums + at * 2, softmax.maximum, mask=is_row)
            tl.store(sums + at * 2 + 1, softmax.total, mask=is_row)


def launch_selected_attention(args: SelectedArgs, *, scale: float, tiles: SelectedTiles, programs: int) -> None:
    """Attends for every token over its selection; tokens that see no key get 0 and LSE -inf.

    args:     with a workspace of selected_words(...) or longer
    scale:    factor on q . k
    programs: that the device is to have; a selection is cut in no more parts than that takes

    Raises ValueError for pages that the kernel does not read.
    """
    selection = args.selection
    cut = selected_cut(
        len(args.q), selection.width * selection.unit_tokens, heads=args.heads, tiles=tiles, programs=programs
    )
    query_rows = max(next_power_of_2(cut.row_heads), 16)
    geometry = selected_geometry(args, cut, query_rows, tiles.key_block, tiles.num_stages)
    _launch(args, cut, geometry, scale, num_warps=tiles.num_warps)


def launch_selected_segments(args: SelectedArgs, *, scale: float, tiles: SegmentTiles, by_pairs: bool) -> None:
    """Does the same as `launch_selected_attention`, with bits that depend on nothing but a token and its selection.

    A token that selects all that it sees gets the bits of launch_segment_decode and launch_segment_extend.

    args:     with a workspace of segment_cut(...).words(...) or longer
    by_pairs: whether weights are added up pair by pair, as deterministic attention to all latents may do

    Raises ValueError for pages that the kernel does not read.
    """
    selection = args.selection
    cut = segment_cut(selection.width * selection.unit_tokens, heads=args.heads, tiles=tiles)
    # With two blocks in flight gfx942 spills scalar registers.
    stages = 1 if tiles.matrix_dim else tiles.decode_stages
    geometry = selected_geometry(args, cut, tiles.decode_rows, tiles.key_block, stages)._replace(
        EXACT=True, BY_PAIRS=by_pairs, PARTS=cut.parts, PART_KEYS=cut.part_keys
    )
    _launch(args, cut, geometry, scale, num_warps=tiles.decode_warps, **tiles.options(), **UNFUSED)


def parts_and_sums(args: SelectedArgs, cut: SelectedCut) -> tuple[torch.Tensor, torch.Tensor]:
    """The workspace's partial results, and their maxima and sums, as launch_merge_parts reads them."""
    words, v_head_dim, workspace = cut.words(len(args.q), args.out.shape[2]), args.out.shape[2], args.workspace
    assert workspace.dtype == torch.float32
    assert workspace.is_contiguous()
    assert workspace.numel() >= words
    sums = workspace[: words // (v_head_dim + 2) * 2]
    return workspace[sums.numel() : words], sums


def _launch(args: SelectedArgs, cut: SelectedCut, geometry: SelectedGeometry, scale: float, **options: object) -> None:
    pages, tokens, selection = args.pages, args.tokens, args.selection
    parts, sums = parts_and_sums(args, cut)
    launch(
        _selected_attention_kernel,
        (len(args.q) * cut.rows * cut.parts,),
        args.q,
        pages.raw_k,
        pages.raw_v,
        *((None, None) if pages.record is None else pages.record[1:]),
        args.table,
        tokens.row_of_token,
        tokens.position_of_token,
        tokens.num_tokens,
        selection.units,
        selection.counts,
        args.out,
        args.lse,
        args.sinks,
        parts,
        sums,
        pages.k_scale,
        pages.v_scale,
        scale * LOG2_E,
        cut.parts,
        cut.part_keys,
        args.table.shape[1],
        args.q.stride(0),
        args.q.stride(1),
        *pages.k.stride()[:3],
        *pages.v.stride()[:3],
        args.table.stride(0),
        *args.written_strides,
        G=geometry,
        **options,
    )
    if cut.parts > 1:
        launch_merge_parts(args, cut, parts, sums, geometry)


def selected_geometry(
    args: SelectedArgs, cut: SelectedCut, query_rows: int, key_block: int, stages: int
) -> SelectedGeometry:
    """Checks the arguments and returns the values that the launch is compiled for."""
    args.check()
    form = args.pages.format
    if form.kind is PoolKind.VECTORIZED:
        raise ValueError(f"attention over a selection needs linear pages, not {form}")
    num_kv_heads, ratio = args.heads
    head_dim, v_head_dim = args.q.shape[2], args.out.shape[2]
    is_latent = form.kind is PoolKind.LATENT
    rest = head_dim - v_head_dim if is_latent else 0
    return SelectedGeometry(
        ROWS=cut.rows,
        ROW_HEADS=cut.row_heads,
        IS_CUT=cut.parts > 1,
        PARTS=0,
        PART_KEYS=0,
        GQA_RATIO=ratio,
        HEAD_BLOCKS=cut.rows // num_kv_heads,
        SHARED=args.selection.sets == 1,
        WIDTH=args.selection.width,
        UNIT_TOKENS=args.selection.unit_tokens,
        HEAD_DIM=head_dim,
        V_HEAD_DIM=v_head_dim,
        K_DIM=v_head_dim if is_latent else head_dim,
        CODED=form.coded,
        NEARER=form.scales_nearer,
        K_COLUMNS=max(16, next_power_of_2(v_head_dim if is_latent else head_dim)),
        V_COLUMNS=max(16, next_power_of_2(v_head_dim)),
        REST=max(16, next_power_of_2(rest)) if rest else 0,
        LATENT=is_latent,
        SAME_OFFSETS=head_dim == v_head_dim and args.pages.k.stride() == args.pages.v.stride(),
        PAGE_SIZE=form.page_size,
        QUERY_ROWS=query_rows,
        KEY_BLOCK=key_block,
        EXACT=False,
        BY_PAIRS=False,
        STAGES=stages,
        coding=args.pages.coding,
    )
