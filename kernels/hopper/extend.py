"""Paged extend for Hopper, in Gluon: extend.py's results by warp groups that each have one task.

    out[token] = softmax(scores of q[token] . K^T) V        K, V: the keys that the token sees (scores.py)

A program is consumers, groups of four warps, 64 rows of a query block each, and warps that load for them: two that load
K and V by TMA; one that loads codes, and four that decode them (codes.py); or four that gather keys if pages hold no
box for it (gather.py). Tiles of K and of V pass through two rings in shared memory, which run on from row to row. Each
warp, or group of warps, walks the program's rows alone; they meet only at the barriers of the rings.

Rows, and how the longest are shared out, are those of extend_schedule.py; extend_merge.py adds up the parts that
several programs hold of a row. There are as many programs as run at a time. Each takes its share, and then whole rows:
the keys and the queries of the next row arrive while results are written.

Keys that no row sees may be NaN. A box of keys of which no row sees one is loaded from beyond the pages: TMA fills it
with zeros. In a box that lies across the edge V is zeroed in shared memory. If keys are gathered, zeros are written
instead of those that no row sees.
"""

import math
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import HeadRows, KeyRange
from rocm_attn.kernels.attention.coded import LEAST_SCALE, scaled_value_parts
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_merge import launch_extend_merge
from rocm_attn.kernels.attention.extend_schedule import (
    BLOCK_WORDS,
    SHARE_CUT,
)
from rocm_attn.kernels.attention.query_block import BlockGeometry
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.attention.segment_parts import launch_merge_of_segments
from rocm_attn.kernels.attention.segments import UNFUSED
from rocm_attn.kernels.attention.softmax import LN_2
from rocm_attn.kernels.attention.visible_keys import PackedMask, VisibleKeys
from rocm_attn.kernels.cache.codes import TOKEN_SCALES
from rocm_attn.kernels.early import early_options, wait_for_launch
from rocm_attn.kernels.hopper.codes import ProductScales, decode, new_codes, produce_codes, row_scale
from rocm_attn.kernels.hopper.gather import gather
from rocm_attn.kernels.hopper.key_steps import (
    ConsumerQuery,
    Progress,
    attend_steps,
    ended,
    nothing_seen,
    pass_steps,
    rows_of_scores,
    with_bound,
)
from rocm_attn.kernels.hopper.query_rows import (
    QueryOutputs,
    fetch_queries,
    lines_of_group,
    put_queries,
    store_part,
    store_results,
)
from rocm_attn.kernels.hopper.rings import Cache, new_rings, produce_keys, produce_values
from rocm_attn.kernels.hopper.rows import (
    BOX_COLUMNS,
    GROUP_ROWS,
    HopperGeometry,
    HopperSchedule,
    RowColumns,
    TokenRanges,
    block_of,
    keys_of_rows,
    next_row,
    seen_by_block,
    steps_of,
    work_of_program,
)
from rocm_attn.kernels.hopper.segment_steps import attend_segment_steps
from rocm_attn.kernels.hopper.segments import left_of_group, merge_segment, new_left, nothing_left
from rocm_attn.kernels.hopper.warp_groups import leave
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles, is_gathered, padded_dim
from rocm_attn.kernels.tuning.tiles import equal_columns, next_power_of_2


class ConsumerMemory(NamedTuple):
    """Shared memory of a consumer: tiles of q, room for everything left of a segment, scales of keys."""

    tiles: Any
    left: Any
    scales: Any


class ProgramRow(NamedTuple):
    """A row, as far as the program has it: its query block, cost that earlier programs take of it, the steps
    that are this one's, the first step that not every line sees whole, and the keys that they see.
    """

    block: Any
    done: Any
    steps: Any
    edge_step: Any
    seen: Any


@gluon.jit
def _attend_span(n, query, rings, span, edge_step, seen, G: gl.constexpr):
    """Returns the softmax state of the keys of some steps, and n, the steps that have passed through the rings."""
    progress = Progress(nothing_seen(G), n)
    first = span.first
    if G.OPEN_MIDDLE:
        # With a window every row sees the steps between the last row's first key and the first row's own key.
        first = gl.minimum(gl.maximum(gl.cdiv(seen.inner_first, G.KEY_BLOCK), span.first), span.end)
        progress = _attend_steps(progress, query, rings, KeyRange(span.first, first), seen, G, True)
    if G.OPEN_MIDDLE or not G.WINDOWED:
        # Every row sees the steps before it whole.
        open_steps = KeyRange(first, gl.minimum(edge_step, span.end))
        progress = _attend_steps(progress, query, rings, open_steps, seen, G, False)
    edge = KeyRange(gl.maximum(edge_step, first), span.end)
    return _attend_steps(progress, query, rings, edge, seen, G, True)


@gluon.jit
def _attend_steps(progress, query, rings, span, seen, G: gl.constexpr, MASKED: gl.constexpr):
    """Adds steps of a span to a softmax state."""
    if G.SEGMENT_STEPS > 0:
        progress = attend_segment_steps(progress, query, rings, span, seen, G, MASKED)
    else:
        progress = attend_steps(progress, query, rings, span, seen, G, MASKED)
    return progress


@gluon.jit
def _attend_segments(GROUP: gl.constexpr, n, query, rings, row, v_scale_value, to, G: gl.constexpr):
    """Returns the softmax state of a row's steps, segment by segment, and n. v_scale_value: scale of V's codes

    Segments are merged from left to right. If an earlier program began the row, they are stored as parts, which are
    merged when all programs have ended; so is the merged part of a row that goes on.
    """
    STEPS: gl.constexpr = G.SEGMENT_STEPS
    steps = row.steps
    softmax = nothing_seen(G)
    left = nothing_left(softmax)
    first_segment = steps.first // STEPS
    # A program that begins a row keeps a part of it, even of no key.
    end_segment = gl.maximum(gl.cdiv(steps.end, STEPS), first_segment + 1)
    for segment in range(first_segment, end_segment):
        span = KeyRange(gl.maximum(steps.first, segment * STEPS), gl.minimum(steps.end, (segment + 1) * STEPS))
        softmax, n = _attend_span(n, query, rings, span, row.edge_step, row.seen, G)
        softmax = with_bound(scaled_value_parts(softmax, v_scale_value, G), G)
        part = segment - first_segment + 1
        is_last = segment == end_segment - 1
        if row.done == 0:
            left, softmax = merge_segment(query.left, left, softmax, (segment == first_segment, is_last), G)
            part = 0
        if (row.done > 0) | (is_last & (steps.ends == 0)):
            store_part(GROUP, softmax, to, row.block, _first_part(G) + part, G)
    return softmax, n


@gluon.jit
def _first_part(G: gl.constexpr):
    """The first of the program's parts: in deterministic attention one of a row that goes on, and segments of a row
    begun earlier; in other attention one of a row begun earlier, and one of a row that goes on.
    """
    return gl.program_id(0) * (G.SEGMENT_SLOTS if G.SEGMENT_STEPS > 0 else 2)


@gluon.jit
def _consume(GROUP: gl.constexpr, x, own, rings, to, scale_values, todo, G: gl.constexpr):
    """Computes 64 rows of each of the program's query blocks."""
    n = 0
    S_ROW: gl.constexpr = rows_of_scores(G)
    block = block_of(x, todo)
    queries = fetch_queries(GROUP, to.q, block, todo, G)
    while todo.keys > 0:
        seen = seen_by_block(x, block, 4, G)
        steps = steps_of(block, seen, todo, G)
        # These loads depend on each other, and nothing here waits for them.
        after = next_row(x, todo, steps.take, G)
        next_block = block_of(x, after)
        product_scale = scale_values.products * row_scale(scale_values.k, todo.row // G.HEAD_BLOCKS, G)
        if G.CAPPED:
            product_scale = product_scale * (0.5 * LN_2)
        # Not 0: see coded.coded_scales.
        product_scale = gl.maximum(put_queries(queries, own.tiles, product_scale, S_ROW, G), LEAST_SCALE)
        v_scale_value = row_scale(scale_values.v, todo.row // G.HEAD_BLOCKS, G)
        last_key, keys_before = keys_of_rows(x, lines_of_group(GROUP, S_ROW), block, G)
        query = ConsumerQuery(own.tiles, last_key, keys_before, product_scale, scale_values.cap, own.scales, own.left)
        edge_step = steps.first
        if G.OPEN_MIDDLE or not G.WINDOWED:
            edge_step = seen.inner_end // G.KEY_BLOCK
        row = ProgramRow(block, todo.done, steps, edge_step, seen)
        if G.SEGMENT_STEPS > 0:
            softmax, n = _attend_segments(GROUP, n, query, rings, row, v_scale_value, to, G)
        else:
            # A group of rows without a token sees no key. 32 x 32 heads of 96, 12 chunks of 17 to 600: 267 us, and 282.
            has_rows = block.tokens * G.GQA_RATIO > GROUP * GROUP_ROWS
            end = gl.where(has_rows, steps.end, steps.first)
            softmax, n = _attend_span(n, query, rings, KeyRange(steps.first, end), edge_step, seen, G)
            n = pass_steps(n, rings, KeyRange(end, steps.end), G)
            softmax = ended(softmax, v_scale_value, G)
        # The queries arrive while results are written.
        queries = fetch_queries(GROUP, to.q, next_block, after, G)
        if steps.ends & (todo.done == 0):
            store_results(GROUP, softmax, to, own.tiles, block, todo.row, G)
        elif G.SEGMENT_STEPS == 0:
            store_part(GROUP, softmax, to, block, _first_part(G) + (todo.done == 0).to(gl.int32), G)
        todo = after
        block = next_block
    leave()


@gluon.jit(do_not_specialize=["num_programs", "max_blocks", "width", "num_slots", "window_left"])
def _hopper_extend_kernel(
    q,
    k_desc,
    v_desc,
    table,
    row_of_seq,
    kv_len,
    schedule,
    partials,
    out,
    lse,
    sinks,
    k_scale,
    v_scale,
    first_key,
    end_key,
    product_scale,
    cap_scale,
    window_left,
    num_programs,
    max_blocks,
    width,
    num_slots,
    q_token,
    q_head,
    table_row,
    out_token,
    out_head,
    lse_token,
    lse_head,
    G: gl.constexpr,
):
    # Like in decode.py: the launch before this one may write what is read.
    wait_for_launch(G.EARLY)
    cut = gl.load(schedule + max_blocks * BLOCK_WORDS + SHARE_CUT)
    ranges = TokenRanges(first_key, end_key)
    x = HopperSchedule(schedule, max_blocks, num_programs, cut, kv_len, window_left, ranges)
    todo = work_of_program(x, G)
    if todo.keys > 0:
        DTYPE: gl.constexpr = q.dtype.element_ty
        # A row's results take the place of its queries.
        COLUMNS: gl.constexpr = G.K.TILE
        PARTS: gl.constexpr = (max(G.K.DIM, G.V.DIM) + COLUMNS - 1) // COLUMNS
        K_DTYPE: gl.constexpr = gl.float16 if G.MOVES_Q else DTYPE
        # A row of V times its token's scale may exceed float16.
        V_DTYPE: gl.constexpr = DTYPE if G.SCALES == TOKEN_SCALES else K_DTYPE
        rings = new_rings(K_DTYPE, V_DTYPE, G)
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        first_q = gl.allocate_shared_memory(K_DTYPE, [PARTS, GROUP_ROWS, COLUMNS], layout)
        second_q = gl.allocate_shared_memory(K_DTYPE, [PARTS, GROUP_ROWS, COLUMNS], layout)
        scale_values = ProductScales(product_scale, cap_scale, k_scale, v_scale)
        # Gluon passes no None to warp groups: if there is nothing left of a segment, and keys have no scales, these are
        # not read.
        first_left, second_left, token_scales = first_q, second_q, rings.free
        PARTS_OF_PROGRAM: gl.constexpr = G.SEGMENT_SLOTS if G.SEGMENT_STEPS > 0 else 2
        lines = num_programs * (PARTS_OF_PROGRAM * G.GROUPS * GROUP_ROWS)
        sums = partials + lines * G.V.HEAD_DIM
        if G.LEFT_IN_WORKSPACE:
            room = sums + lines * 2
            first_left, second_left = left_of_group(0, room, G), left_of_group(1, room, G)
        elif G.SEGMENT_STEPS > 0:
            first_left, second_left = new_left(G), new_left(G)
        if G.CODE_TILES > 0:
            codes = new_codes(G)
            token_scales = codes.scales
        first, second = (
            ConsumerMemory(first_q, first_left, token_scales),
            ConsumerMemory(second_q, second_left, token_scales),
        )
        fence_async_shared()
        gl.thread_barrier()
        cache = Cache(k_desc, v_desc, num_slots, table, table_row, width, row_of_seq)
        UNIT: gl.constexpr = G.STRIDE_UNIT
        q_rows, out_rows = HeadRows(q, q_token * UNIT, q_head * UNIT), HeadRows(out, out_token * UNIT, out_head * UNIT)
        to = QueryOutputs(q_rows, out_rows, HeadRows(lse, lse_token, lse_head), sinks, partials, sums)
        CONSUMER: gl.constexpr = G.CONSUMER_REGISTERS
        PRODUCER: gl.constexpr = G.PRODUCER_REGISTERS
        # Triton requests registers by warp groups: those of the groups that leave are the rest of the producer's.
        if G.CODE_TILES > 0:
            DECODER: gl.constexpr = G.DECODER_REGISTERS
            gl.warp_specialize(
                [
                    (_consume, (0, x, first, rings, to, scale_values, todo, G)),
                    (_consume, (1, x, second, rings, to, scale_values, todo, G)),
                    (decode, (x, cache, scale_values, codes, rings, todo, G)),
                    (produce_codes, (x, cache, codes, todo, G)),
                    (leave, ()),
                    (leave, ()),
                ],
                [4, 4, 1, 1, 2],
                [CONSUMER, DECODER, PRODUCER, PRODUCER, PRODUCER],
            )
        elif G.GATHERED:
            gl.warp_specialize(
                [
                    (_consume, (0, x, first, rings, to, scale_values, todo, G)),
                    (_consume, (1, x, second, rings, to, scale_values, todo, G)),
                    (gather, (x, cache, rings, todo, G)),
                ],
                [4, 4],
                [CONSUMER, PRODUCER],
            )
        else:
            gl.warp_specialize(
                [
                    (_consume, (0, x, first, rings, to, scale_values, todo, G)),
                    (_consume, (1, x, second, rings, to, scale_values, todo, G)),
                    (produce_keys, (x, cache, rings, todo, G)),
                    (produce_values, (x, cache, rings, todo, G)),
                    (leave, ()),
                ],
                [4, 1, 1, 2],
                [CONSUMER, PRODUCER, PRODUCER, PRODUCER],
            )


def launch_hopper_extend(
    args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: HopperTiles, mask: VisibleKeys | None = None
) -> None:
    """Does the same as `launch_paged_extend`, without slopes and cells of masks, over pages of even slots.

    mask: ranges of keys

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("extend on Hopper")
    assert args.pages.has_aligned_sides, "the limits refuse pages that begin elsewhere"
    assert args.pages.page_slots, "the limits refuse slots at other distances"
    _check_cut(args, scores, cut, tiles)
    queries, pages, table = args.queries, args.pages, args.table
    geometry = _geometry(args, scores, cut, tiles, mask)
    if mask is not None:
        mask.check(queries.num_seqs, queries.num_tokens)
        assert not isinstance(mask, PackedMask), "no cells are read"
    # Without ranges any memory: Gluon passes no None to warp groups.
    first_key, end_key = (queries.kv_len, queries.kv_len) if mask is None else (mask.first, mask.end)
    programs, max_blocks = cut.sharing.programs, cut.max_blocks(queries.num_tokens, queries.num_seqs)
    # From the first slot of a page to the last one, with those that lie between pages.
    num_slots = (len(pages.raw_k) - 1) * geometry.PAGE_SLOTS + geometry.PAGE_SIZE
    k = _as_loaded(pages.raw_k, num_slots, geometry.K, geometry)
    v = _as_loaded(pages.raw_v, num_slots, geometry.V, geometry)
    strides = args.strides_in(geometry.STRIDE_UNIT)
    q_strides, written_strides = strides[:2], strides[len(args.read_strides) :]
    launch(
        _hopper_extend_kernel,
        (programs,),
        args.q,
        k,
        v,
        table,
        queries.row_of_seq,
        queries.kv_len,
        args.schedule,
        args.workspace,
        args.out,
        args.lse,
        args.sinks,
        pages.k_scale,
        pages.v_scale,
        first_key,
        end_key,
        *scores.scales_at_once,
        scores.visibility.window_left,
        programs,
        max_blocks,
        table.shape[1],
        num_slots,
        *q_strides,
        table.stride(0),
        *written_strides,
        G=geometry,
        num_warps=4,
        **early_options(geometry.EARLY),
        **(UNFUSED if tiles.segment_len else {}),
    )
    if tiles.segment_len:
        launch_merge_of_segments(
            args, cut, extend=tiles.extend, segment_len=tiles.segment_len, slots=tiles.segment_slots
        )
    else:
        launch_extend_merge(args, cut, _merged_geometry(geometry), tiles.extend.merge_stages)


def _check_cut(args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: HopperTiles) -> None:
    """Asserts that the schedule and the workspace fit the launch."""
    num_kv_heads, gqa_ratio = args.heads
    queries, sharing = args.queries, cut.sharing
    cut.check(args.schedule, queries.num_tokens, queries.num_seqs)
    rows = num_kv_heads * tiles.extend.head_blocks(gqa_ratio)
    cut.check_layer(rows, causal=scores.visibility.causal, window_left=scores.visibility.window_left)
    assert cut.query_tokens == tiles.extend.tokens_per_block(gqa_ratio), "the schedule was cut for other tiles"
    if tiles.segment_len:
        assert sharing.most_keys <= tiles.most_keys, "there is no room for all segments of a program"
        words = tiles.segment_words(programs=sharing.programs, v_head_dim=args.out.shape[2])
    else:
        words = cut.partials_words(query_rows=tiles.extend.query_rows, v_head_dim=args.out.shape[2])
    args.check_workspace(words)


def _geometry(
    args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: HopperTiles, mask: VisibleKeys | None
) -> HopperGeometry:
    """Returns the values that the launch is compiled for."""
    num_kv_heads, gqa_ratio = args.heads
    sharing, page_size = cut.sharing, args.pages.format.page_size
    coding, is_fp8 = args.pages.coding, args.pages.format.encoding.is_fp8
    box = math.gcd(page_size, tiles.value_block)
    gathers = is_gathered(page_size) and not is_fp8
    blocks = tiles.extend.head_blocks(gqa_ratio)
    assert tiles.extend.has_equal_blocks(gqa_ratio), "blocks of query heads are equal"
    assert is_fp8 == (tiles.code_tiles > 0), "the tiles are of other pages"
    return HopperGeometry(
        KV_HEADS=num_kv_heads * blocks,
        HEADS_AT_ONCE=_heads_at_once(num_kv_heads) * blocks,
        GQA_RATIO=tiles.extend.heads_per_block(gqa_ratio),
        HEAD_BLOCKS=blocks,
        TOKENS=cut.query_tokens,
        K=_columns(args.pages.raw_k, tiles.extend.dim_block),
        V=_columns(args.pages.raw_v, tiles.v_dim_block or tiles.extend.dim_block),
        PAGE_SIZE=page_size,
        PAGE_SLOTS=args.pages.page_slots,
        GATHERED=gathers,
        BOX=tiles.value_block if gathers else box,
        KEY_BLOCK=tiles.extend.key_block,
        VALUE_BLOCK=tiles.value_block,
        SOFTMAX_BLOCK=tiles.value_block if tiles.segment_len else tiles.extend.key_block,
        STAGES=tiles.extend.num_stages,
        VALUE_STAGES=tiles.value_stages,
        GROUPS=tiles.extend.query_rows // GROUP_ROWS.value,
        ROW_KEYS=sharing.row_keys,
        SEGMENT_STEPS=tiles.segment_len // tiles.extend.key_block,
        SEGMENT_SLOTS=tiles.segment_slots,
        LEFT_IN_WORKSPACE=tiles.left_in_workspace,
        STRIDE_UNIT=args.stride_unit,
        CAUSAL=scores.visibility.causal,
        WINDOWED=scores.visibility.windowed,
        RANGED=mask is not None,
        OPEN_MIDDLE=scores.visibility.windowed and 0 < tiles.open_middle <= scores.visibility.window_left + 1,
        CAPPED=scores.soft_cap > 0,
        BOUNDED=scores.is_bounded and not is_fp8 and args.q.dtype == torch.bfloat16,
        OVERLAPS=tiles.overlaps,
        POWERS_BY_PRODUCTS=tiles.powers_by_products,
        SCALES_SELDOM=tiles.scales_seldom,
        EARLY=tiles.extend.early,
        ENCODING=coding.ENCODING,
        SCALES=coding.SCALES,
        CODE_TILES=tiles.code_tiles,
        # Deterministic attention multiplies in q's dtype, like its decode.
        MOVES_Q=is_fp8 and args.q.dtype == torch.bfloat16 and not tiles.segment_len,
        SCALES_WEIGHTS=TOKEN_SCALES.value == coding.SCALES and args.q.dtype == torch.bfloat16,
        CONSUMER_REGISTERS=tiles.registers,
        DECODER_REGISTERS=tiles.decoder_registers,
        PRODUCER_REGISTERS=tiles.producer_registers,
    )


def _heads_at_once(num_kv_heads: int) -> int:
    """Returns how many KV heads have whole rows at a time: as many of 16 to 8 as divide all, or all.

    The keys of all would not stay in the L2. H200, 128 heads of 192/128: 1 x 4k 1386 us with all, 1044 with 16, 1022
    with 8; 1 x 2048 + 6144 2247, 1730, 1858. 32 of 128: 1 x 4k 234, 228, 223; 1 x 2048 + 6144 380, 366, 391.
    """
    return next((heads for heads in range(16, 7, -1) if num_kv_heads % heads == 0), num_kv_heads)


def _columns(pages: torch.Tensor, dim_block: int) -> RowColumns:
    """Returns the columns of rows of pages, cut into tiles of dim_block columns at most. 0: of all that a power of two
    has
    """
    head_dim = pages.shape[3]
    dim = padded_dim(head_dim)
    tile = math.gcd(dim, equal_columns(dim, dim_block))
    rest = head_dim % tile
    # Products are made with a power of two of columns, at least 16. Those beyond the head must be zeros, and not the
    # next head's.
    last = max(16, next_power_of_2((head_dim - 1) % tile + 1))
    slot, head = pages.stride()[1:3]
    return RowColumns(
        HEAD_DIM=head_dim,
        DIM=dim,
        TILE=tile,
        LAST=last,
        ZEROED=0 < rest < last,
        SLOT_STRIDE=slot,
        HEAD_STRIDE=head,
    )


def _as_loaded(
    pages: torch.Tensor, num_slots: int, columns: RowColumns, geometry: HopperGeometry
) -> TensorDescriptor | torch.Tensor:
    """Returns pages as rows of slots, of which TMA loads boxes; or unchanged, if keys are gathered."""
    num_heads, dim = pages.shape[2:]
    bits = 8 * pages.element_size()
    if geometry.GATHERED:
        return pages
    slot, head = columns.SLOT_STRIDE, columns.HEAD_STRIDE
    box = [geometry.BOX, BOX_COLUMNS.value]
    # With boxes of three dimensions llama8b 1 x 2048 + 6144 takes 425 us instead of 384 (H200).
    shape, strides = [num_slots, (num_heads - 1) * head + dim], [slot, 1]
    if columns.ZEROED:
        shape, strides, box = [num_heads, num_slots, dim], [head, slot, 1], [1, *box]
    layout = gl.NVMMASharedLayout(BOX_COLUMNS.value * bits // 8, bits, rank=len(shape))
    return TensorDescriptor(pages, shape, strides, box, layout)


def _merged_geometry(geometry: HopperGeometry) -> BlockGeometry:
    """The geometry of query blocks as the merge reads it."""
    return BlockGeometry(
        keys=None,
        KV_HEADS=geometry.KV_HEADS,
        GQA_RATIO=geometry.GQA_RATIO,
        BLOCK_HEADS=geometry.GQA_RATIO,
        HEAD_BLOCKS=1,
        QUERY_ROWS=geometry.query_rows,
        ROW_KEYS=geometry.ROW_KEYS,
        SHARES=True,
        WHOLE_ROWS=True,
        SEGMENT_LEN=0,
        STAGES=geometry.STAGES,
        EDGE_STAGES=geometry.STAGES,
        EARLY=geometry.EARLY,
    )
