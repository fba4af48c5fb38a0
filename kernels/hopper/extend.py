"""Paged extend for Hopper, in Gluon: extend.py's results by warp groups of which each has one task.

    out[token] = softmax(scores of q[token] . K^T) V        K, V: the keys that the token sees (scores.py)

A program is one warp that loads pages by TMA, and consumers: groups of four warps, 64 rows of a query block each. Tiles
of K and of V pass through two rings in shared memory, which run on from row to row. Each warp group walks the program's
rows by itself; they meet at the rings' barriers alone.

Rows, and how the longest are shared out, are those of extend_schedule.py; extend_merge.py adds up what several programs
hold of a row. There are as many programs as run at a time. Each takes its share, and then whole rows: the keys and the
queries of the next row arrive while results are written.

What no row sees may be NaN. A box of keys of which no row sees one is loaded from beyond the pages: TMA fills it with
zeros. In a box that lies across the edge V is zeroed in shared memory.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rocm_attn.kernels.attention.arguments import AttendArgs
from rocm_attn.kernels.attention.bundles import Rows, Span
from rocm_attn.kernels.attention.cuts import ExtendCut
from rocm_attn.kernels.attention.extend_merge import launch_extend_merge
from rocm_attn.kernels.attention.extend_schedule import BLOCK_KV_INDEX, BLOCK_WORDS, SHARE_CUT
from rocm_attn.kernels.attention.query_block import BlockGeometry
from rocm_attn.kernels.attention.scores import Scores
from rocm_attn.kernels.hopper.key_steps import Query, attend_steps, ended, nothing_seen
from rocm_attn.kernels.hopper.query_rows import (
    Results,
    fetch_queries,
    lines_of_group,
    put_queries,
    store_part,
    store_results,
)
from rocm_attn.kernels.hopper.rings import Cache, new_rings, produce
from rocm_attn.kernels.hopper.rows import (
    BOX_COLUMNS,
    GROUP_ROWS,
    HopperGeometry,
    Schedule,
    next_row,
    seen_by_block,
    steps_of,
    work_of_program,
)
from rocm_attn.kernels.hopper.warp_groups import leave
from rocm_attn.kernels.launch import launch
from rocm_attn.kernels.tuning.hopper_tiles import HopperTiles

# Of a thread of each of three warp groups together: what an SM has, in units of eight.
_REGISTERS = 504


@gluon.jit
def _consume(GROUP: gl.constexpr, x, tiles, rings, to, qk_scale, todo, G: gl.constexpr):
    """64 rows of each of the program's query blocks."""
    n = 0
    queries = fetch_queries(GROUP, to.q, x.words, todo, G)
    while todo.keys > 0:
        words = x.words + todo.block * BLOCK_WORDS
        _, seen = seen_by_block(x, words, G)
        steps = steps_of(words, seen, todo, G)
        put_queries(queries, tiles, G)
        softmax = nothing_seen(G)
        first_kv_index = gl.load(words + BLOCK_KV_INDEX)
        S_ROW: gl.constexpr = softmax.maximum.type.layout
        line = lines_of_group(GROUP, S_ROW)
        query = Query(tiles, first_kv_index + line // G.GQA_RATIO, qk_scale)
        edge_step = steps.first
        if not G.WINDOWED:
            # Steps before it are seen whole by every row. With a window a loop of its own for them does not pay.
            edge_step = (first_kv_index + 1 if G.CAUSAL else seen.end) // G.KEY_BLOCK
            open_steps = Span(steps.first, gl.minimum(edge_step, steps.end))
            softmax, n = attend_steps(softmax, n, query, rings, open_steps, seen, G, False)
        edge = Span(gl.maximum(edge_step, steps.first), steps.end)
        softmax, n = attend_steps(softmax, n, query, rings, edge, seen, G, True)
        after = next_row(x, todo, steps.take, G)
        # They arrive while results are written.
        queries = fetch_queries(GROUP, to.q, x.words, after, G)
        if steps.ends & (todo.done == 0):
            store_results(GROUP, ended(softmax), to, words, todo.row, G)
        else:
            store_part(GROUP, ended(softmax), to, words, todo.done, G)
        todo = after
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
    qk_scale,
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
    cut = gl.load(schedule + max_blocks * BLOCK_WORDS + SHARE_CUT)
    x = Schedule(schedule, max_blocks, num_programs, cut, kv_len, window_left)
    todo = work_of_program(x, G)
    if todo.keys > 0:
        DTYPE: gl.constexpr = q.dtype.element_ty
        PARTS: gl.constexpr = G.DIM // G.COLUMNS
        COLUMNS: gl.constexpr = G.COLUMNS
        rings = new_rings(DTYPE, G)
        layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        first_q = gl.allocate_shared_memory(DTYPE, [PARTS, GROUP_ROWS, COLUMNS], layout)
        second_q = gl.allocate_shared_memory(DTYPE, [PARTS, GROUP_ROWS, COLUMNS], layout)
        fence_async_shared()
        gl.thread_barrier()
        cache = Cache(k_desc, v_desc, num_slots, table, table_row, width, row_of_seq)
        sums = partials + num_programs * (2 * G.GROUPS * GROUP_ROWS * G.DIM)
        q_rows, out_rows = Rows(q, q_token, q_head), Rows(out, out_token, out_head)
        to = Results(q_rows, out_rows, Rows(lse, lse_token, lse_head), sinks, partials, sums)
        CONSUMER: gl.constexpr = G.CONSUMER_REGISTERS
        OTHER: gl.constexpr = G.OTHER_REGISTERS
        gl.warp_specialize(
            [
                (_consume, (0, x, first_q, rings, to, qk_scale, todo, G)),
                (_consume, (1, x, second_q, rings, to, qk_scale, todo, G)),
                (produce, (x, cache, rings, todo, G)),
                # Triton asks for registers by warp groups: these are the rest of the producer's.
                (leave, ()),
                (leave, ()),
            ],
            [4, 1, 1, 2],
            [CONSUMER, OTHER, OTHER, OTHER],
        )


def launch_hopper_extend(args: AttendArgs, *, scores: Scores, cut: ExtendCut, tiles: HopperTiles) -> None:
    """As launch_paged_extend, without masks, caps and slopes, over contiguous pages.

    Raises ValueError for heads, dims, pages or dtypes that the kernels do not serve.
    """
    args.check("extend on Hopper")
    queries, pages, table = args.queries, args.pages, args.table
    geometry = _geometry(args, scores, cut, tiles)
    programs, max_blocks = cut.sharing.programs, cut.max_blocks(queries.num_tokens, queries.num_seqs)
    k, v = _described(pages.k, geometry), _described(pages.v, geometry)
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
        scores.base_2_scale,
        scores.window_left,
        programs,
        max_blocks,
        table.shape[1],
        k.shape[0],
        args.q.stride(0),
        args.q.stride(1),
        table.stride(0),
        *args.written_strides,
        G=geometry,
        num_warps=4,
    )
    launch_extend_merge(args, cut, _merged_geometry(geometry), tiles.extend.merge_stages)


def _geometry(args: AttendArgs, scores: Scores, cut: ExtendCut, tiles: HopperTiles) -> HopperGeometry:
    """What the launch is compiled for; the schedule is checked."""
    num_kv_heads, gqa_ratio = args.heads
    queries, sharing, page_size = args.queries, cut.sharing, args.pages.format.page_size
    cut.check(args.schedule, queries.num_tokens, queries.num_seqs)
    of_layer = (num_kv_heads, scores.causal, scores.window_left)
    assert (sharing.rows, sharing.causal, sharing.window_left) == of_layer, "the schedule was cut for another launch"
    assert cut.query_tokens == tiles.extend.tokens_per_block(gqa_ratio), "the schedule was cut for other tiles"
    assert args.workspace.numel() >= cut.partials_words(
        query_rows=tiles.extend.query_rows, v_head_dim=args.out.shape[2]
    )
    return HopperGeometry(
        KV_HEADS=num_kv_heads,
        GQA_RATIO=gqa_ratio,
        TOKENS=cut.query_tokens,
        DIM=args.q.shape[2],
        COLUMNS=tiles.extend.columns(args.q.shape[2]),
        PAGE_SIZE=page_size,
        BOX=min(page_size, tiles.extend.key_block),
        KEY_BLOCK=tiles.extend.key_block,
        STAGES=tiles.extend.num_stages,
        GROUPS=tiles.extend.query_rows // GROUP_ROWS.value,
        ROW_KEYS=sharing.row_keys,
        CAUSAL=scores.causal,
        WINDOWED=scores.windowed,
        OVERLAPS=tiles.overlaps,
        CONSUMER_REGISTERS=tiles.registers,
        OTHER_REGISTERS=_REGISTERS - 2 * tiles.registers,
    )


def _described(pages: torch.Tensor, geometry: HopperGeometry) -> TensorDescriptor:
    """Contiguous pages as rows of slots, of which TMA loads boxes."""
    num_pages, page_size, num_heads, dim = pages.shape
    assert pages.is_contiguous()
    return TensorDescriptor(
        pages,
        [num_pages * page_size, num_heads * dim],
        [num_heads * dim, 1],
        [geometry.BOX, BOX_COLUMNS.value],
        gl.NVMMASharedLayout(128, 16, rank=2),
    )


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
    )
